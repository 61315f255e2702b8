"""Whole variables for the coordinator and the workers: cutting into parts and talking to several servers is done here.

Every operation sends one message to each parameter server concerned, to all of them before it waits for answers.
"""

from __future__ import annotations

import pickle
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import Tensor

from torchstrategy.base.labels import label
from torchstrategy.errors import NotFoundError, UnavailableError
from torchstrategy.ps.layout import Place, Requests, VariableSpec, add_sparse, by_part
from torchstrategy.ps.links import ServerLink
from torchstrategy.ps.optimizer_states import JoinedState, cut_state, pack_state, unpack_state
from torchstrategy.ps.store import check_divisor, check_rows, check_value, copy_bytes
from torchstrategy.ps.transport.messages import BufferPool, Header, Message

if TYPE_CHECKING:
    from torchstrategy.ps.transport.channel import TensorChannel

__all__ = ["ParameterClient"]

_CHUNK_BYTES = 64 << 20
_Into = Callable[[int, Header], Sequence["Tensor | None"]]


class ParameterClient:
    """Reads and changes the variables of all parameter servers, for one process; any thread may call it.

    Changes are atomic for each part of a variable, not over the parts. An error leaves the variables of the server
    that raises it as they were.

    Args:
        channels: one to each parameter server, in the order of their task numbers.

    Raises:
        UnavailableError: by every method: a parameter server is gone; the message names it.
        InvalidArgumentError: by every method that takes tensors: one does not fit its variable, which is named.
    """

    def __init__(self, channels: Sequence[TensorChannel | ServerLink]) -> None:
        self._channels = list(channels)
        self._lock = threading.Lock()
        self._unanswered: set[int] = set()
        self._specs: dict[int, VariableSpec] = {}
        self._pool = BufferPool()

    def know(self, specs: Iterable[VariableSpec]) -> None:
        """Learn of variables that gradients may be pushed for; making, defining and pulling them does it, too."""
        self._specs.update((spec.id, spec) for spec in specs)

    def create(self, spec: VariableSpec, value: Tensor) -> None:
        """Make a variable.

        Args:
            spec: what it is and where it goes.
            value: its initial value.
        """
        check_value(spec.name, spec.shape, spec.dtype, value)
        self.know([spec])
        requests = Requests()
        for index, part in enumerate(spec.parts):
            requests.add(part.ps, (spec.id, index), part.name, spec.trainable, tensors=[spec.cut(value, index)])
        self._ask("create", requests)

    def pull(
        self, specs: Sequence[VariableSpec], known: Mapping[int, tuple[int, ...]]
    ) -> dict[int, tuple[tuple[int, ...], Tensor]]:
        """Return those variables that have changed.

        Args:
            specs: which to look at.
            known: versions of the parts of those variables, by id, that the caller has; others count as changed.

        Returns:
            Versions of the parts and the whole value by id. The tensors are the caller's own.
        """
        self.know(specs)
        joined: dict[int, Tensor] = {}
        versions, parts = self._pull_parts(
            [(spec, index) for spec in specs for index in range(len(spec.parts))],
            {(number, index): version for number, own in known.items() for index, version in enumerate(own)},
            joined,
        )
        changed = [spec for spec in specs if any((spec.id, index) in parts for index in range(len(spec.parts)))]
        # Of a variable that has changed in part, the servers have kept back the rest.
        kept = [(spec, i) for spec in changed for i in range(len(spec.parts)) if (spec.id, i) not in parts]
        if kept:
            later_versions, later = self._pull_parts(kept, {}, joined)
            versions.update(later_versions)
            parts.update(later)
        pulled = {}
        for spec in changed:
            numbers = tuple(versions[spec.id, index] for index in range(len(spec.parts)))
            pulled[spec.id] = numbers, joined[spec.id] if spec.is_sharded else parts[spec.id, 0]
        return pulled

    def pull_rows(self, spec: VariableSpec, indices: Tensor) -> Tensor:
        """Return some rows of a variable.

        Args:
            spec: which variable.
            indices: ``[k]`` of ``int64``, in any order and more than once.

        Returns:
            ``[k, ...]``.

        Raises:
            IndexError: an index is out of range.
        """
        indices = indices.cpu()
        check_rows(spec.name, spec.shape, indices)
        self.know([spec])
        requests = Requests()
        order, owners = by_part(spec, indices)
        for index, own in owners:
            part = spec.parts[index]
            requests.add(part.ps, (spec.id, index), tensors=[indices[own] - part.start])
        found: dict[Place, Tensor] = {}
        for ps, reply in self._ask("rows", requests).items():
            found.update(requests.pair(ps, reply.tensors))
        if not owners:
            return torch.empty((0, *spec.shape[1:]), dtype=spec.dtype)
        rows = torch.cat([found[spec.id, index] for index, _ in owners]) if len(owners) > 1 else found.popitem()[1]
        return rows if order is None else rows.index_select(0, order.argsort())

    def update(self, spec: VariableSpec, method: str, value: Tensor) -> tuple[int, ...]:
        """Change a variable, and return the new versions of its parts.

        Args:
            spec: which variable.
            method: ``"assign"``, ``"assign_add"`` or ``"assign_sub"``.
            value: of the variable's shape and dtype.
        """
        return self.update_many([(spec, method, value)])[0]

    def update_many(self, updates: Sequence[tuple[VariableSpec, str, Tensor]]) -> list[tuple[int, ...]]:
        """Change several variables as ``update`` does, and return the new versions of each."""
        requests = Requests()
        for spec, method, value in updates:
            check_value(spec.name, spec.shape, spec.dtype, value)
            for index, part in enumerate(spec.parts):
                requests.add(part.ps, (spec.id, index), method, tensors=[spec.cut(value, index)])
        versions = self._versions("update", requests)
        return [tuple(versions[spec.id, index] for index in range(len(spec.parts))) for spec, _, _ in updates]

    def scatter(self, spec: VariableSpec, method: str, indices: Tensor, values: Tensor) -> None:
        """Change some rows of a variable. A row named several times takes all values, ``scatter_update`` the last.

        Args:
            spec: which variable.
            method: ``"scatter_add"``, ``"scatter_sub"``, ``"scatter_update"``, ``"scatter_min"``, ``"scatter_max"``,
                ``"scatter_mul"`` or ``"scatter_div"``.
            indices: ``[k]`` of ``int64``.
            values: ``[k, ...]``.

        Raises:
            IndexError: an index is out of range.
        """
        indices, values = indices.cpu(), values.cpu()
        check_rows(spec.name, spec.shape, indices)
        check_value(spec.name, (len(indices), *spec.shape[1:]), spec.dtype, values)
        check_divisor(spec.name, method, values)  # before any part is changed
        requests = Requests()
        for index, own in by_part(spec, indices)[1]:
            part = spec.parts[index]
            requests.add(part.ps, (spec.id, index), tensors=[indices[own] - part.start, values[own]])
        self._ask("scatter", requests, method=method)

    def define_optimizer(self, optimizer_id: int, definition: bytes, specs: Iterable[VariableSpec]) -> None:
        """Make an optimizer on every parameter server.

        Args:
            optimizer_id: its number, which no other optimizer of the coordinator has.
            definition: pickled; see ``Definition.load``.
            specs: its variables.

        Raises:
            UnimplementedError: it can't run on parameter servers.
        """
        specs = list(specs)
        self.know(specs)
        fields = {"optimizer": optimizer_id, "sharded": [spec.id for spec in specs if spec.is_sharded]}
        self._tell_all(Message("optimizer", fields, blobs=(definition,)))

    def set_hyper(self, optimizer_id: int, groups: Sequence[Mapping[str, Any]]) -> None:
        """Change hyper-parameters of an optimizer.

        Args:
            optimizer_id: which.
            groups: for each of its groups what has changed.
        """
        blob = pickle.dumps([dict(group) for group in groups])
        self._tell_all(Message("hyper", {"optimizer": optimizer_id}, blobs=(blob,)))

    def push(
        self,
        optimizer_id: int,
        gradients: Mapping[int, Tensor],
        hyper: Sequence[Mapping[str, Any]] | None = None,
    ) -> dict[int, tuple[int, ...]]:
        """Let an optimizer make a step with these gradients, and return the new versions of the variables' parts.

        Args:
            optimizer_id: which.
            gradients: by id of the variable: dense, or sparse COO tensors with one sparse dimension.
            hyper: hyper-parameters of each group for this step, plain values; ``None`` takes those of ``set_hyper``.

        Raises:
            KeyError: this client has neither made nor pulled the variable of a gradient.
            IndexError: a row is out of range.
        """
        requests = Requests()
        for ps in range(len(self._channels)):  # all of them: an optimizer may count its steps
            requests.tensors_of(ps)
        for number, gradient in gradients.items():
            spec = self._specs[number]
            if gradient.layout == torch.sparse_coo:
                add_sparse(requests, spec, gradient)
                continue
            check_value(f"{spec.name}.grad", spec.shape, spec.dtype, gradient)
            for index, part in enumerate(spec.parts):
                requests.add(part.ps, (number, index), False, tensors=[spec.cut(gradient, index)])  # noqa: FBT003
        groups = None if hyper is None else [dict(group) for group in hyper]
        versions = self._versions("push", requests, optimizer=optimizer_id, hyper=groups)
        return {
            number: tuple(versions[number, index] for index in range(len(self._specs[number].parts)))
            for number in gradients
        }

    def optimizer_state(self, optimizer_id: int, spec: VariableSpec) -> dict[str, Any]:
        """Return an optimizer's state of one variable, as the plain optimizer would have it of the whole parameter.

        What has a row for each row of the variable is put together, part by part; anything else, such as the number of
        steps, is the first part's. Empty before the first step.
        """
        joined = JoinedState(spec)
        for index, part in enumerate(spec.parts):
            requests = Requests()
            requests.add(part.ps, (spec.id, index))
            reply = self._ask("state", requests, optimizer=optimizer_id)[part.ps]
            joined.add(index, unpack_state(reply.fields["states"][0], reply.tensors))
            del reply  # before the next part comes
        return joined.state

    def load_optimizer_state(self, optimizer_id: int, spec: VariableSpec, state: Mapping[str, Any]) -> None:
        """Replace an optimizer's state of one variable.

        Args:
            optimizer_id: which optimizer.
            spec: which variable.
            state: of the whole parameter, from a plain optimizer, or from ``optimizer_state`` of any layout; empty
                begins anew.

        Raises:
            TypeError: a value is no tensor, number, text, bool or ``None``.
        """
        requests = Requests()
        # Such as SGD's momentum of sparse gradients, which servers have dense.
        state = {name: v.to_dense() if isinstance(v, Tensor) and v.is_sparse else v for name, v in state.items()}
        cut = [cut_state(spec, state, index) for index in range(len(spec.parts))]
        packed: dict[int, list[dict[str, Any]]] = {}
        for index, part in enumerate(spec.parts):
            tensors = requests.tensors_of(part.ps)
            packed.setdefault(part.ps, []).append(pack_state(cut[index], tensors))
            requests.add(part.ps, (spec.id, index))
        self._ask("load_state", requests, {ps: {"states": own} for ps, own in packed.items()}, optimizer=optimizer_id)

    def read_into(self, spec: VariableSpec, out: Tensor, chunk_bytes: int = _CHUNK_BYTES) -> None:
        """Read a variable into given memory piece by piece. Each part is as it was at one moment.

        Args:
            spec: which variable.
            out: a contiguous tensor of its shape and dtype.
            chunk_bytes: size of a piece.
        """
        check_value(spec.name, spec.shape, spec.dtype, out)
        for index, part in enumerate(spec.parts):
            flat = spec.cut(out, index).view(-1)
            while not self._read_part(spec, index, part.ps, flat, chunk_bytes):
                pass

    def _read_part(self, spec: VariableSpec, index: int, ps: int, flat: Tensor, chunk_bytes: int) -> bool:
        """Read a part piece by piece; ``False`` if the server, which was out of reach, has let go of the snapshot."""
        for first, stop in _pieces(flat, chunk_bytes):
            requests = Requests()
            requests.add(ps, (spec.id, index), first, stop)
            try:
                reply = self._ask("read", requests)[ps]
            except NotFoundError:
                if first == 0:
                    raise
                return False
            copy_bytes(flat[first:stop], reply.tensors[0])
        return True

    def write_from(self, spec: VariableSpec, value: Tensor, chunk_bytes: int = _CHUNK_BYTES) -> None:
        """Overwrite a variable piece by piece; it is mixed of old and new until all is written.

        Args:
            spec: which variable.
            value: of its shape and dtype.
            chunk_bytes: size of a piece.
        """
        check_value(spec.name, spec.shape, spec.dtype, value)
        for index, part in enumerate(spec.parts):
            flat = spec.cut(value, index).reshape(-1)
            while not self._write_part(spec, index, part.ps, flat, chunk_bytes):
                pass

    def _write_part(self, spec: VariableSpec, index: int, ps: int, flat: Tensor, chunk_bytes: int) -> bool:
        """Overwrite a part piece by piece; ``False`` if the server has lost pieces: it would stay mixed."""
        channel = self._channels[ps]
        num_losses = channel.num_losses if isinstance(channel, ServerLink) else 0
        for first, stop in _pieces(flat, chunk_bytes):
            requests = Requests()
            requests.add(ps, (spec.id, index), first, tensors=[flat[first:stop]])
            self._ask("write", requests)
        return not isinstance(channel, ServerLink) or channel.num_losses == num_losses

    def _pull_parts(
        self,
        wanted: Iterable[tuple[VariableSpec, int]],
        known: Mapping[Place, int],
        joined: dict[int, Tensor],
    ) -> tuple[dict[Place, int], dict[Place, Tensor]]:
        """Return the versions of all these parts, and the values of those whose version is not the known one.

        Parts of a variable that has several are received into one tensor, which is put into ``joined``.
        """
        requests = Requests()
        for spec, index in wanted:
            place = spec.id, index
            requests.add(spec.parts[index].ps, place, known.get(place, -1))

        def changed(ps: int, fields: Mapping[str, Any]) -> list[Place]:
            return [place for place, has_value in requests.pair(ps, fields["changed"]) if has_value]

        def into(ps: int, header: Header) -> list[Tensor | None]:
            return [self._place_of(place, joined) for place in changed(ps, header.fields)]

        versions: dict[Place, int] = {}
        parts: dict[Place, Tensor] = {}
        for ps, reply in self._ask("pull", requests, into=into).items():
            versions.update(requests.pair(ps, reply.fields["versions"]))
            parts.update(zip(changed(ps, reply.fields), reply.tensors, strict=True))
        return versions, parts

    def _place_of(self, place: Place, joined: dict[int, Tensor]) -> Tensor | None:
        """Return where a part belongs in the whole variable, or ``None`` if it is all of it."""
        number, index = place
        spec = self._specs[number]
        if not spec.is_sharded:
            return None
        if number not in joined:
            joined[number] = self._pool.empty(spec.num_bytes).view(spec.dtype).view(spec.shape)
        return spec.cut(joined[number], index)

    def _versions(self, kind: str, requests: Requests, **fields: Any) -> dict[Place, int]:
        versions: dict[Place, int] = {}
        for ps, reply in self._ask(kind, requests, **fields).items():
            versions.update(requests.pair(ps, reply.fields["versions"]))
        return versions

    def _ask(
        self,
        kind: str,
        requests: Requests,
        own: Mapping[int, dict[str, Any]] | None = None,
        into: _Into | None = None,
        **fields: Any,
    ) -> dict[int, Message]:
        """Send the requests, each with the common fields and its server's own, and return the replies by server.

        ``into`` says which memory takes a reply's tensors, see ``Wire.receive``.
        """
        messages = {
            ps: Message(kind, {**fields, **(own or {}).get(ps, {}), "parts": r}, t) for ps, r, t in requests.all()
        }
        replies: dict[int, Message] = {}
        with label("move", kind, "by the parameter servers"):
            self._collect(messages, replies, into)
        return replies

    def _collect(self, messages: Mapping[int, Message], replies: dict[int, Message], into: _Into | None) -> None:
        """Send messages to the servers whose replies are missing, and add these."""
        failures: list[tuple[int, Exception]] = []
        missing = {ps: message for ps, message in messages.items() if ps not in replies}
        with self._lock:
            self._discard_replies()
            for ps, message in missing.items():
                self._unanswered.add(ps)  # before, as Ctrl-C may come right after
                try:
                    self._channels[ps].send(message)
                except Exception as error:  # noqa: BLE001 - raised below, when the others have answered
                    self._unanswered.discard(ps)
                    failures.append((ps, error))
            for ps in missing:
                if ps in self._unanswered:
                    try:
                        replies[ps] = self._channels[ps].receive(None, into and _for_server(into, ps))
                    except Exception as error:  # noqa: BLE001 - the same
                        failures.append((ps, error))
                    self._unanswered.discard(ps)
        for ps, failure in failures:
            self._raise(ps, failure)

    def _discard_replies(self) -> None:
        """Take what an earlier request, left by Ctrl-C, did not wait for."""
        for ps in list(self._unanswered):
            self._channels[ps].discard()
            self._unanswered.discard(ps)

    def _tell_all(self, message: Message) -> None:
        for ps, channel in enumerate(self._channels):
            try:
                channel.call(message) if isinstance(channel, ServerLink) else channel.peer.call(message)
            except Exception as error:  # noqa: BLE001 - raised with the task's name
                self._raise(ps, error)

    def _raise(self, ps: int, error: Exception) -> NoReturn:
        task = f"/job:ps/task:{ps}"
        if not isinstance(error, UnavailableError) or task in str(error):
            raise error
        raise type(error)(f"{task} at {self._channels[ps].peer.address}: {error}") from error


def _for_server(into: _Into, ps: int) -> Callable[[Header], Sequence[Tensor | None]]:
    return lambda header: [] if header.kind == "error" else into(ps, header)


def _pieces(flat: Tensor, chunk_bytes: int) -> Iterable[tuple[int, int]]:
    size = max(1, chunk_bytes // flat.element_size())
    return ((first, min(first + size, len(flat))) for first in range(0, len(flat), size))
