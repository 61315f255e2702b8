"""What a worker's server answers: a coordinator's functions are run, in an assignment for each connection."""

from __future__ import annotations

import sys
import threading
import time
import traceback
from collections.abc import Callable
from typing import Any

from torchstrategy.base.log import logger
from torchstrategy.ps.server.assignment import KINDS, Assignment, Bench
from torchstrategy.ps.transport.client_session import Session
from torchstrategy.ps.transport.limits import Limits
from torchstrategy.ps.transport.messages import Message, RefusedError

__all__ = ["WorkerService"]

_MAX_CHARS = 100_000


def all_stacks() -> str:
    """Return the stack of every thread of this process, innermost call last; the calling thread is left out."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    parts = [
        f"Thread {names.get(ident, ident)}:\n{''.join(traceback.format_stack(frame))}"
        for ident, frame in sys._current_frames().items()
        if ident != threading.get_ident()
    ]
    text = "\n".join(sorted(parts))
    return text if len(text) <= _MAX_CHARS else f"{text[:_MAX_CHARS]}\n[...]"


_STOP_S = 1.0


class WorkerService:
    """Runs what the coordinator sends.

    Requests of kind ``configure``, ``define``, ``resource``, ``run`` and ``forget`` are done in order, those of kind
    ``cancel``, ``stacks`` and ``ping`` are answered at once, also while a function runs. What a lost connection had
    asked for is dropped, because its coordinator runs it elsewhere and sends all again when it is back.

    Args:
        name: the task's full name, for messages.
        index: the worker's index.
        make_bench: makes what a connection's functions run with.
        limits: how large an answer may be.
    """

    def __init__(self, name: str, index: int, make_bench: Callable[[], Bench], limits: Limits) -> None:
        self._name = name
        self._index = index
        self._make_bench = make_bench
        self._limits = limits
        self._lock = threading.Lock()
        self._assignments: dict[str, Assignment] = {}
        #: Those that were closed while a function of theirs ran.
        self._closed: list[Assignment] = []

    def superseded(self, incarnation: int) -> None:  # noqa: ARG002 - of the protocol
        """Drop what older coordinators have asked for: a newer one is here."""
        self._close_all()
        logger.info("%s now works for a newer coordinator.", self._name)

    def admit(self, hello: dict[str, Any]) -> dict[str, Any]:
        """Let a coordinator in.

        Raises:
            RefusedError: it is something else.
        """
        if hello["role"] != "coordinator":
            raise RefusedError(f"{self._name} works for coordinators only. Received: a {hello['role']}")
        return {"job": "worker", "task": ["worker", self._index]}

    def control(self, session: Session, message: Message) -> Message | None:
        """Answer a request, or have it answered later.

        Raises:
            ValueError: there is no such kind of request.
        """
        if message.kind == "ping":
            return Message("ok", {})
        if message.kind == "stacks":
            return Message("stacks", {"text": f"{self.describe()}\n\n{all_stacks()}"})
        if message.kind not in (*KINDS, "cancel"):
            raise ValueError(f"A worker knows no request {message.kind!r}.")
        assignment = self._assignment(session)
        if message.kind == "cancel":
            return Message("ok", {"cancelled": assignment.cancel(message.fields["closures"])})
        assignment.add(message)
        return None

    def tensor(self, session: Session, message: Message) -> Message:  # noqa: ARG002 - of the protocol
        """Refuse: what a worker gets comes over the control connection."""
        raise ValueError(f"A worker has no tensors. Received a message of kind {message.kind!r}")

    def lost(self, session: Session) -> None:
        """Drop what a connection had asked for."""
        with self._lock:
            assignment = self._assignments.pop(session.id, None)
            if assignment is None:
                return
            self._note_closed([assignment])
        assignment.close()

    def describe(self) -> str:
        """Say what the worker is doing."""
        with self._lock:
            return "\n".join(assignment.describe() for assignment in self._assignments.values())

    def close(self) -> bool:
        """Drop everything, and wait a moment for functions that run to end.

        Returns:
            Whether they have.
        """
        self._close_all()
        deadline = time.monotonic() + _STOP_S
        with self._lock:
            closed = self._closed
        has_ended = all(assignment.join(max(0.0, deadline - time.monotonic())) for assignment in closed)
        if not has_ended:
            logger.warning("%s stops while a function runs.", self._name)
        return has_ended

    def _assignment(self, session: Session) -> Assignment:
        with self._lock:
            if session.id not in self._assignments:
                self._assignments[session.id] = Assignment(session, self._index, self._make_bench, self._limits)
            return self._assignments[session.id]

    def _close_all(self) -> None:
        with self._lock:
            assignments, self._assignments = list(self._assignments.values()), {}
            self._note_closed(assignments)
        for assignment in assignments:
            assignment.close()

    def _note_closed(self, assignments: list[Assignment]) -> None:
        """Remember, in the same turn in which they are forgotten elsewhere, those whose function may still run."""
        self._closed = [old for old in self._closed if not old.join(0.0)] + assignments
