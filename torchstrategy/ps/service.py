"""What a parameter server answers: the requests of ``ParameterClient``, on the store and the optimizers.

Fields are tables whose rows name a part by variable and part number; tensors stand in the order of the rows. All of it
is checked, so that a wrong request is an error for who sent it and nothing else. On tensor connections:

- ``create`` ``parts [[variable, part, name, trainable]]``, a tensor each
- ``pull`` ``parts [[variable, part, known version]]``: ``versions``, ``changed [bool]``, a tensor for each changed one
- ``rows`` ``parts [[variable, part]]``, indices each: a tensor each
- ``update`` ``parts [[variable, part, method]]``, a tensor each: ``versions``
- ``scatter`` ``method``, ``parts [[variable, part]]``, indices and values each: ``versions``
- ``read`` ``parts [[variable, part, first, stop]]`` of one flattened part: a tensor; see ``_read``
- ``write`` ``parts [[variable, part, first]]``, a flat tensor: ``versions``
- ``push`` ``optimizer``, ``hyper`` of this step or ``None``, ``parts [[variable, part, sparse]]``, a gradient each, or
  indices and values: ``versions``
- ``state`` ``optimizer``, ``parts [[variable, part]]``: ``states`` and their tensors
- ``load_state`` ``optimizer``, ``parts [[variable, part]]``, ``states`` and their tensors

What changes something may have a field ``once``, a number: a request of the same client and kind with the number of its
last one is that one again, whose reply was lost, and gets the same reply.

On control connections, which are encrypted, because what they bring is unpickled:

- ``optimizer`` ``optimizer``, ``sharded [variable]``, blob: see ``Definition.load``
- ``hyper`` ``optimizer``, blob: a pickled list of dicts
- those of ``sharing_service``, of tasks that have no coordinator
"""

from __future__ import annotations

import pickle
import threading
from collections.abc import Callable
from typing import Any

from torch import Tensor

from torchstrategy.base.names import set_default_dtype
from torchstrategy.errors import NotFoundError
from torchstrategy.ps.optimizer_states import pack_state, unpack_state
from torchstrategy.ps.optimizer_updates import Definition, Gradient, ServedOptimizer
from torchstrategy.ps.shard import Held
from torchstrategy.ps.sharing_service import CHIEF, SHARING_ROLES, SharedTraining
from torchstrategy.ps.store import Key
from torchstrategy.ps.transport.client_session import Session
from torchstrategy.ps.transport.messages import Message, error_message

__all__ = ["ParameterService"]


_READS = ("pull", "rows", "read", "state")
_MAKES = ("create", "optimizer")


class ParameterService:
    """A parameter server behind a ``Listener``."""

    def __init__(self) -> None:
        self.held = Held()
        #: Whether the server is saved, and a process that takes its place has its variables.
        self.is_saved = False
        #: Whether tasks share the variables without a coordinator.
        self.is_shared = False
        #: Called when something new has been made.
        self.made: Callable[[], object] = lambda: None
        #: Of tasks that share variables without a coordinator.
        self.training = SharedTraining()
        self._answers: dict[str, Callable[[Held, Session, Message], Message]] = {
            "create": _create,
            "pull": _pull,
            "rows": _rows,
            "update": _update,
            "scatter": _scatter,
            "read": _read,
            "write": _write,
            "push": _push,
            "state": _state,
            "load_state": _load_state,
        }

    @property
    def coordinator(self) -> int | None:
        """Incarnation of the coordinator whose variables are here."""
        return self.held.coordinator

    def superseded(self, incarnation: int) -> None:  # noqa: ARG002
        """Begin anew for a newer coordinator."""
        self.held = Held()
        self.training = SharedTraining()
        self.is_shared = False

    def admit(self, hello: dict[str, Any]) -> dict[str, Any]:
        """Welcome any client that the listener has let through; the coordinator, or chief, brings the default dtype."""
        if hello.get("role") in ("coordinator", CHIEF):
            set_default_dtype(hello.get("dtype", "float32"))
            self.held.coordinator = hello.get("incarnation")
        if hello.get("role") in SHARING_ROLES:
            self.is_shared = True
            self.training.joined(hello)
        self.held.note_back(str(hello.get("client")))  # and not where it asks: that may be after its loss
        restored = {"restored": self.held.restored} if self.held.restored else {}
        return {"job": "ps", "is_saved": self.is_saved and not self.is_shared, **restored}

    def tensor(self, session: Session, message: Message) -> Message:
        """Answer a request of a tensor connection.

        Raises:
            ValueError: there is no such request, or its fields or tensors are not those of one.
        """
        answer = self._answers.get(message.kind)
        if answer is None:
            raise ValueError(f"A parameter server knows no request {message.kind!r}.")
        held = self.held  # before the check: a training may begin after it

        def checked() -> Message:
            if session.role in SHARING_ROLES:
                self.training.check(session)
            reply = answer(held, session, message)
            self._note_change(held, message.kind)
            return reply

        # What was made has its reply also where the client's new connection is not attached yet: it would ask anew.
        return held.once(checked, session, message)

    def control(self, session: Session, message: Message) -> Message | None:
        """Answer later, because unpickling a definition may import packages for seconds.

        Raises:
            ValueError: there is no such request.
        """
        if session.role in SHARING_ROLES:
            shared = self._control_shared(session, message)
            if shared is not None:
                return shared
        answer = {"optimizer": _define, "hyper": _set_hyper}.get(message.kind)
        if answer is None:
            raise ValueError(f"A parameter server knows no control request {message.kind!r}.")
        held = self.held

        def apply() -> Message:
            answer(held, message)
            self._note_change(held, message.kind)
            return Message("ok", {})

        def reply() -> None:
            try:
                with held.defining:  # the same again waits for its first time
                    answered = held.once(apply, session, message)
            except Exception as error:  # noqa: BLE001 - it is the client's
                session.reply(message.number, error_message(error))
            else:
                session.reply(message.number, answered)

        threading.Thread(target=reply, name=f"ps-{message.kind}", daemon=True).start()
        return None

    def _note_change(self, held: Held, kind: str) -> None:
        if kind not in _READS:
            held.num_changes += 1  # no count that must be right: it tells whether there was any
        if kind in _MAKES:
            self.made()

    def _control_shared(self, session: Session, message: Message) -> Message | None:
        if message.kind == "begin":
            self.training.begin(session, message.fields.get("number"))
            self.held = Held()
            return Message("ok", {})
        answer = self.training.control(session, message)
        if answer is None:
            self.training.check(session)
        return answer

    def lost(self, session: Session) -> None:
        """Let go of what a client was reading."""
        if session.role in SHARING_ROLES:
            self.training.left(session)
        self.held.note_lost(str(session.hello["client"]))
        snapshots = self.held.snapshots
        for owner, key in list(snapshots):
            if owner == session.id:
                snapshots.pop((owner, key), None)


def _create(held: Held, _: Session, message: Message) -> Message:
    rows = _table(message, int, int, str, bool)
    for (variable, part, name, trainable), value in zip(rows, _tensors(message, len(rows)), strict=True):
        held.store.create(Key(variable, part), name, value, trainable=trainable)
    return Message("ok", {})


def _pull(held: Held, _: Session, message: Message) -> Message:
    rows = _table(message, int, int, int)
    pulled = held.store.pull([Key(*row[:2]) for row in rows], [row[2] for row in rows])
    tensors = tuple(value for _, value in pulled if value is not None)
    fields = {"versions": [version for version, _ in pulled], "changed": [value is not None for _, value in pulled]}
    return Message("parts", fields, tensors)


def _rows(held: Held, _: Session, message: Message) -> Message:
    rows = _table(message, int, int)
    indices = _tensors(message, len(rows))
    wanted = [(Key(*row), own) for row, own in zip(rows, indices, strict=True)]
    return Message("rows", {}, tuple(held.store.rows(wanted)))


def _update(held: Held, _: Session, message: Message) -> Message:
    rows = _table(message, int, int, str)
    values = _tensors(message, len(rows))
    return _versions(
        held.store.update([(Key(v, p), how, value) for (v, p, how), value in zip(rows, values, strict=True)])
    )


def _scatter(held: Held, _: Session, message: Message) -> Message:
    rows = _table(message, int, int)
    tensors = iter(_tensors(message, 2 * len(rows)))
    changes = [(Key(*row), next(tensors), next(tensors)) for row in rows]
    return _versions(held.store.scatter(_field(message, "method", str), changes))


def _read(held: Held, session: Session, message: Message) -> Message:
    """Return some elements of a flattened part.

    The first piece makes a snapshot for the client, of which the others are; the last one lets go of it.
    """
    ((variable, part, first, stop),) = _table(message, int, int, int, int, num_rows=1)
    name = session.id, Key(variable, part)
    if first == 0:
        held.snapshots[name] = held.store.snapshot(name[1])
        if not session.is_valid:  # `lost` may have looked before: a session is invalid by then
            held.snapshots.pop(name, None)
    snapshot = held.snapshots.get(name)
    if snapshot is None:
        raise NotFoundError(f"Part {part} of variable {variable} is read from its beginning.")
    if not 0 <= first <= stop <= len(snapshot):
        raise ValueError(f"A part of {len(snapshot)} elements has none from {first} to {stop}.")
    if stop == len(snapshot):
        held.snapshots.pop(name, None)
    return Message("piece", {}, (snapshot[first:stop],))


def _write(held: Held, _: Session, message: Message) -> Message:
    ((variable, part, first),) = _table(message, int, int, int, num_rows=1)
    return _versions([held.store.write(Key(variable, part), first, _tensors(message, 1)[0])])


def _push(held: Held, _: Session, message: Message) -> Message:
    rows = _table(message, int, int, bool)
    tensors = iter(_tensors(message, sum(1 + is_sparse for _, _, is_sparse in rows)))
    gradients = []
    for variable, part, is_sparse in rows:
        indices = next(tensors) if is_sparse else None
        gradients.append(Gradient(Key(variable, part), next(tensors), indices))
    hyper = None if message.fields.get("hyper") is None else _field(message, "hyper", list)
    return _versions(_optimizer(held, message).push(gradients, hyper))


def _state(held: Held, _: Session, message: Message) -> Message:
    optimizer = _optimizer(held, message)
    tensors: list[Tensor] = []
    states = [pack_state(optimizer.state(Key(*row)), tensors) for row in _table(message, int, int)]
    return Message("states", {"states": states}, tuple(tensors))


def _load_state(held: Held, _: Session, message: Message) -> Message:
    rows, states = _table(message, int, int), _field(message, "states", list)
    unpacked = [unpack_state(state, message.tensors) for state in states]
    optimizer = _optimizer(held, message)
    for row, state in zip(rows, unpacked, strict=True):
        optimizer.load_state(Key(*row), state)
    return Message("ok", {})


def _define(held: Held, message: Message) -> None:
    number = _field(message, "optimizer", int)
    sharded = _field(message, "sharded", list)
    if number in held.optimizers:
        raise ValueError(f"There is an optimizer {number} already.")
    held.definitions[number] = (_blob(message), sharded)
    held.optimizers[number] = ServedOptimizer(Definition.load(_blob(message), sharded), held.store)


def _set_hyper(held: Held, message: Message) -> None:
    _optimizer(held, message).set_hyper(pickle.loads(_blob(message)))


def _optimizer(held: Held, message: Message) -> ServedOptimizer:
    number = _field(message, "optimizer", int)
    found = held.optimizers.get(number)
    if found is None:
        raise NotFoundError(f"This parameter server has no optimizer {number}.")
    return found


def _versions(versions: list[int]) -> Message:
    return Message("versions", {"versions": versions})


def _field(message: Message, name: str, kind: type) -> Any:
    value = message.fields.get(name)
    if type(value) is not kind:
        raise ValueError(f"Request {message.kind!r} needs a {kind.__name__} {name!r}. Received: {_short(value)}")
    return value


def _table(message: Message, *kinds: type, num_rows: int | None = None) -> list[list[Any]]:
    rows = _field(message, "parts", list)
    for row in rows:
        if not isinstance(row, list) or [type(value) for value in row] != list(kinds):
            wanted = ", ".join(kind.__name__ for kind in kinds)
            raise ValueError(f"Request {message.kind!r} needs parts of {wanted}. Received: {_short(row)}")
    if num_rows not in (None, len(rows)):
        raise ValueError(f"Request {message.kind!r} needs {num_rows} parts. Received: {len(rows)}")
    return rows  # type: ignore[no-any-return]


def _tensors(message: Message, num_tensors: int) -> tuple[Tensor, ...]:
    if len(message.tensors) != num_tensors:
        raise ValueError(f"This {message.kind!r} needs {num_tensors} tensors. Received: {len(message.tensors)}")
    return message.tensors


def _blob(message: Message) -> bytes:
    if len(message.blobs) != 1:
        raise ValueError(f"Request {message.kind!r} needs one blob. Received: {len(message.blobs)}")
    return message.blobs[0]


def _short(value: object) -> str:
    return repr(value)[:100]
