"""What a parameter server holds, and its own checkpoints of that: a process that takes its place goes on from them.

It holds the parts of variables, the optimizers, and the replies by which a request that comes again is known. In a
checkpoint each part is as it was at one moment, with its optimizers' state of it. As all checkpoints they are checked,
complete or not there, and written by one process: one that another has replaced is refused, and ends.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import secrets
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch
from torch import Tensor

from torchstrategy.base.log import logger, warning_once
from torchstrategy.base.names import dtype_name, set_default_dtype
from torchstrategy.checkpoint.archive import checkpoint_file, read_checkpoint, write_checkpoint
from torchstrategy.checkpoint.directory import Index, read_index
from torchstrategy.checkpoint.fencing import Fence, publish
from torchstrategy.checkpoint.manager import restore_newest
from torchstrategy.checkpoint.storage import absolute, delete_file, delete_leftovers, spilled_to, write_file
from torchstrategy.checkpoint.tracked import to_plain
from torchstrategy.errors import FailedPreconditionError
from torchstrategy.ps.optimizer_updates import Definition, ServedOptimizer
from torchstrategy.ps.store import Key, ParameterStore
from torchstrategy.ps.transport.client_session import Session
from torchstrategy.ps.transport.messages import Message
from torchstrategy.ps.transport.secret import Secret
from torchstrategy.ps.user_modules import dumps

__all__ = ["Held", "Shard"]

_NAME = "shard"
_PROBE = "shard.writable"
_NUM_KEPT = 2
#: How long after a new variable or optimizer a server is saved: others come with it.
_SOON_S = 1.0
#: Versions begin at a random number of so many bits, times as much: none is one that a client knows, of another value.
_VERSION_BITS = 31


#: Longer than any grace time.
_REMEMBERED_S = 3600.0


class Held:
    """All that one coordinator has put on this server."""

    def __init__(self, coordinator: int | None = None, restored: dict[str, float | None] | None = None) -> None:
        #: Incarnation of the coordinator.
        self.coordinator = coordinator
        #: If the server was started again: incarnations of the processes that had the variables before, and since when
        #: what each of them changed is lost, in seconds since 1970; ``None`` if nothing is. One may have ended
        #: well, and its successor not.
        self.restored = restored or {}
        #: Requests that may have changed something, and how many of them were saved.
        self.num_changes = self.num_saved = 0
        self.store = ParameterStore()
        self.optimizers: dict[int, ServedOptimizer] = {}
        #: Of each optimizer what it was made of: pickled, and ids of its variables that are cut.
        self.definitions: dict[int, tuple[bytes, list[int]]] = {}
        self.snapshots: dict[tuple[str, Key], Tensor] = {}
        self.defining = threading.Lock()
        #: By client and kind the number and the reply of the last request that had one, and who answers one now.
        self._replies: dict[tuple[str, str], tuple[int, Message]] = {}
        self._answering: dict[tuple[str, str], threading.Lock] = {}
        #: When clients were lost whose replies are remembered.
        self._lost: dict[str, float] = {}

    def once(self, answer: Callable[[], Message], session: Session, message: Message) -> Message:
        """Answer a request, unless that was done; while it is being done, wait for the reply.

        Raises:
            ValueError: a later one was answered: nobody waits for this.
        """
        number = message.fields.get("once")
        if number is None:
            return answer()
        key = str(session.hello["client"]), message.kind
        with self._answering.setdefault(key, threading.Lock()):
            known, reply = self._replies.get(key, (0, None))
            if number < known:
                raise ValueError(f"Request {message.kind!r} {number} comes after {known}.")
            if reply is None or known != number:
                reply = answer()
                self._replies[key] = (number, reply)
        return reply

    def replies(self) -> list[tuple[tuple[str, str], tuple[int, Message]]]:
        """Return the replies that are remembered, by client and kind, with their requests' numbers.

        Requests that are being answered are waited for, so what parts have of a change already has a reply.
        """
        remembered = []
        for key, answering in self._answering.copy().items():
            with answering:
                if key in self._replies:
                    remembered.append((key, self._replies[key]))
        return remembered

    def remember(self, key: tuple[str, str], number: int, reply: Message) -> None:
        """Remember a reply that a server gave whose place this one takes."""
        self._replies[key] = (number, reply)
        self._answering[key] = threading.Lock()
        self._lost.setdefault(key[0], time.monotonic())

    def note_back(self, client: str) -> None:
        """Remember the replies to a client that is here as long as it is."""
        self._lost.pop(client, None)

    def note_lost(self, client: str) -> None:
        """Remember the replies to a client that was lost for a while, in which it may come back."""
        now = time.monotonic()
        self._lost[client] = now
        old = {client for client, since in self._lost.copy().items() if now - since > _REMEMBERED_S}
        for client in old:
            self._lost.pop(client, None)
        for key in [key for key in list(self._replies) if key[0] in old]:
            self._replies.pop(key, None)
            self._answering.pop(key, None)


class Saved(Protocol):
    """What a shard needs of the parameter server."""

    held: Held
    is_saved: bool
    is_shared: bool
    made: Callable[[], object]


class Shard:
    """Saves a parameter server every few seconds, on a thread of its own.

    Args:
        service: the parameter server.
        directory: where to; of this task alone.
        task: its name.
        incarnation: of this process.
        secret: the cluster's. Optimizers are unpickled, so they are signed with it.
        every_s: seconds between two saves; nothing is written where nothing has changed.
        replaced: called when another process has saved there; the error is in ``failure``.
    """

    def __init__(
        self,
        service: Saved,
        directory: str,
        *,
        task: str,
        incarnation: str,
        secret: Secret,
        every_s: float,
        replaced: Callable[[], object],
    ) -> None:
        self.failure: FailedPreconditionError | None = None
        self._service = service
        self._directory = absolute(directory)
        self._task = task
        self._incarnation = incarnation
        self._secret = secret
        self._every_s = every_s
        self._replaced = replaced
        self._written: dict[str, float] = {}
        self._wake = threading.Event()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._work, name="torchstrategy-shard", daemon=True)

    def start(self) -> None:
        """Restore the newest checkpoint that is whole, if there is one, and begin to save.

        What was restored is saved before anyone is served: the process whose place is taken can save no more, and who
        takes this one's place is known to its clients.

        Raises:
            DataLossError: there are checkpoints, but none is whole.
            OSError: the directory can't be written.
            ValueError: they are another task's, or were made with another secret.
        """
        probe = os.path.join(self._directory, _PROBE)
        write_file(probe, lambda _: None)  # who finds out only when it is to be saved has nothing when it is killed
        with contextlib.suppress(FileNotFoundError):  # another process's start has deleted it
            delete_file(probe)
        index = read_index(self._directory) or Index({})
        delete_leftovers(self._directory)
        paths = [os.path.join(self._directory, name) for name in (*index.unlisted, *index.written)]
        self._written = dict(index.written)
        restored = restore_newest(paths, self._restore)
        self._fence = Fence(self._directory)
        if restored is not None:
            self._save(self._service.held)
        self._service.is_saved = True
        self._service.made = self._wake.set
        self._thread.start()

    def close(self) -> None:
        """Save for the last time, when no request comes any more; nothing happens if it has not started, or failed."""
        if self._ended.is_set() or self._thread.ident is None:
            return
        self._ended.set()
        self._wake.set()
        self._thread.join()
        if self.failure is None:
            self._service.held.replies()  # one that the listener has not waited for is done, or would be in part
            self._try(is_last=True)

    def _work(self) -> None:
        while not self._ended.is_set():
            if self._wake.wait(self._every_s):
                latest = time.monotonic() + self._every_s
                while self._wake.is_set() and time.monotonic() < latest:  # until nothing more has come for a moment
                    self._wake.clear()
                    self._ended.wait(_SOON_S)
            if not self._ended.is_set():
                self._try()

    def _try(self, *, is_last: bool = False) -> None:
        held = self._service.held
        num_changes = held.num_changes
        if self._service.is_shared:
            warning_once(
                f"{self._task} saves nothing to {self._directory}: tasks share its variables without a coordinator, "
                "and their chief saves them."
            )
            return
        try:
            if held.coordinator is None or (num_changes == held.num_saved and not is_last):
                self._fence.check()  # who only reads here must not have old values for ever
                return
            self._save(held, is_last=is_last)
        except FailedPreconditionError as error:
            logger.error("%s has been replaced, and serves no one any more. %s", self._task, error)
            self.failure = error
            self._ended.set()
            self._replaced()
        except Exception as error:  # noqa: BLE001 - training goes on; whatever it is, the next try may do
            again = "" if is_last else f" It tries again in {self._every_s:g} seconds."
            logger.warning("%s could not be saved to %s: %s.%s", self._task, self._directory, error, again)
        else:
            held.num_saved = num_changes

    def _save(self, held: Held, *, is_last: bool = False) -> None:
        with spilled_to(self._directory):
            state = _capture(held)
        state |= {
            "task": self._task,
            "coordinator": held.coordinator,
            "servers": {**held.restored, self._incarnation: None},
            "is_last": is_last,
            "signature": self._signature(state["optimizers"]),
        }
        content = {"save_counter": None, "objects": {_NAME: {"kind": "server", "state": to_plain(state, self._task)}}}
        last = max((int(name.rpartition("-")[2]) for name in self._written), default=0)
        name = f"{_NAME}-{last + 1}"
        written = dict([*self._written.items(), (name, time.time())][-_NUM_KEPT:])
        index = Index(written, superfluous=tuple(self._written.keys() - written.keys()))
        publish(self._fence, name, lambda file, about, check: write_checkpoint(file, content, about, check), index)
        self._written = written

    def _restore(self, path: str) -> None:
        state = read_checkpoint(checkpoint_file(path), mapped=True)["objects"][_NAME]["state"]
        if state["task"] != self._task:
            raise ValueError(f"{path} is a checkpoint of {state['task']}, and this is {self._task}.")
        if state["signature"] != self._signature(state["optimizers"]):
            raise ValueError(
                f"{path} was written with another secret than that of {self._secret.source}. Give this server the "
                "secret of the one that it replaces, or another directory."
            )
        set_default_dtype(state["dtype"])
        saved_at = self._written.get(os.path.basename(path), 0.0)
        lost_since = None if state["is_last"] else saved_at
        servers = {server: lost_since if since is None else since for server, since in state["servers"].items()}
        try:
            self._service.held = _held(state, servers)
        except ImportError as error:
            raise ImportError(
                f"{path} has an optimizer that can't be made here: {error}. Install what it needs. If that training "
                f"has ended, delete {self._directory}."
            ) from error
        logger.info("%s goes on from %s, with %d parts of variables.", self._task, path, len(state["parts"]))

    def _signature(self, optimizers: Mapping[int, Mapping[str, Any]]) -> bytes:
        pickled = [optimizer[name] for optimizer in optimizers.values() for name in ("definition", "settings")]
        return self._secret.signature(*pickled)


def _capture(held: Held) -> dict[str, Any]:
    """Return what a server holds, as plain data and tensors that nobody changes."""
    optimizers, definitions = dict(held.optimizers), dict(held.definitions)
    parts, values = [], []
    states: dict[int, list[Any]] = {number: [] for number in optimizers}
    with contextlib.ExitStack() as stack:
        for number in sorted(optimizers):
            stack.enter_context(optimizers[number].between_steps())
        for key, part in held.store.all_parts():
            with part.lock:
                parts.append([*key, part.name, part.parameter.requires_grad])
                values.append(part.lend())
                for number, optimizer in optimizers.items():
                    state = optimizer.copy_state(key)
                    if state:
                        states[number].append([*key, state])
        settings = {number: dumps(optimizer.settings()) for number, optimizer in optimizers.items()}
    return {
        "dtype": dtype_name(torch.get_default_dtype()),
        "parts": parts,
        "values": values,
        "optimizers": {
            number: {
                "definition": definitions[number][0],
                "sharded": definitions[number][1],
                "settings": settings[number],
                "states": states[number],
            }
            for number in optimizers
        },
        # After the parts: what came in between is lost, as all that comes later, and not done twice.
        "replies": [[*key, number, reply.kind, reply.fields] for key, (number, reply) in held.replies()],
    }


def _held(state: Mapping[str, Any], restored: dict[str, float | None]) -> Held:
    held = Held(state["coordinator"], restored)
    first_version = secrets.randbits(_VERSION_BITS) << _VERSION_BITS
    for (variable, part, name, trainable), value in zip(state["parts"], state["values"], strict=True):
        held.store.create(Key(variable, part), name, value, trainable=trainable, version=first_version)
    for number, saved in state["optimizers"].items():
        optimizer = ServedOptimizer(Definition.load(saved["definition"], saved["sharded"]), held.store)
        optimizer.load_settings(*pickle.loads(saved["settings"]))
        for variable, part, own in saved["states"]:
            optimizer.load_state(Key(variable, part), own)
        held.optimizers[number] = optimizer
        held.definitions[number] = (saved["definition"], saved["sharded"])
    for client, kind, number, reply_kind, fields in state["replies"]:
        held.remember((client, kind), number, Message(reply_kind, fields))
    return held
