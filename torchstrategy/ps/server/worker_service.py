"""What a worker's server answers: a coordinator's functions are run, in an assignment for each connection.

They are run with connections to the parameter servers, and a workshop.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from torchstrategy.base.log import logger
from torchstrategy.base.names import set_default_dtype
from torchstrategy.base.stalls import stacks_of_others
from torchstrategy.cluster_resolver.cluster_spec import ClusterSpec
from torchstrategy.errors import UnavailableError
from torchstrategy.ps.client import ParameterClient
from torchstrategy.ps.links import ServerLink
from torchstrategy.ps.parameter_server_strategy import ParameterServerStrategy
from torchstrategy.ps.server.assignment import KINDS, Assignment, Bench
from torchstrategy.ps.states import PeerState
from torchstrategy.ps.transport.client_session import Session
from torchstrategy.ps.transport.control_loop import ControlLoop
from torchstrategy.ps.transport.limits import Limits
from torchstrategy.ps.transport.messages import Message, RefusedError
from torchstrategy.ps.workshop import Outcome, Workshop

__all__ = ["WorkerBench", "WorkerService"]

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

    coordinator: int | None = None  # a worker keeps nothing

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
            return Message("stacks", {"text": f"{self.describe()}\n\n{stacks_of_others()}"})
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


_CONNECT_S = 10.0
#: A worker waits no longer for a parameter server: the coordinator does, and has the function run again.
_MAX_RECONNECT_S = 5.0


class WorkerBench:
    """Made for each connection of a coordinator; ``configure`` comes first.

    Args:
        index: the worker's.
    """

    def __init__(self, index: int) -> None:
        self._index = index
        self._loop = ControlLoop()
        self._links: list[ServerLink] = []
        self._workshop: Workshop

    def configure(self, fields: Mapping[str, Any]) -> None:
        """Connect to the parameter servers that the coordinator has found.

        Args:
            fields: ``cluster``, ``incarnation`` (the coordinator's), ``ps`` (addresses), ``ps_incarnations``,
                ``ps_grace_s`` and the default ``dtype``.

        Raises:
            UnavailableError: a parameter server can't be reached, or is not the one that the coordinator has found.
        """
        hello = {"role": "worker", "incarnation": fields["incarnation"], "task": ["worker", self._index]}
        pairs = zip(fields["ps"], fields["ps_incarnations"], strict=True)
        reconnect_s = min(float(fields.get("ps_grace_s", 0.0)), _MAX_RECONNECT_S)
        self._links = [ServerLink(ps, *pair, reconnect_s=reconnect_s) for ps, pair in enumerate(pairs)]
        for link in self._links:
            link.connect(self._loop, hello)
        deadline = time.monotonic() + _CONNECT_S
        for link in self._links:
            link.wait(deadline - time.monotonic())
            failure = link.failure
            if failure is None and link.peer.state is not PeerState.READY:
                failure = link.peer.unavailable()
            if failure is not None:
                raise failure
        set_default_dtype(fields.get("dtype", "float32"))
        strategy = ParameterServerStrategy._on_worker(ClusterSpec(fields["cluster"]), self._index)
        self._workshop = Workshop(strategy, ParameterClient(self._links))

    def define(self, message: Message, resources: Mapping[int, Any]) -> None:
        """Load a definition."""
        self._workshop.define(message, resources)

    def load(self, blob: bytes, resources: Mapping[int, Any]) -> Any:
        """Return a pickled object."""
        return self._workshop.load(blob, resources)

    def run(self, key: str, arguments: bytes, resources: Mapping[int, Any]) -> Outcome:
        """Call a function."""
        return self._workshop.run(key, arguments, resources)

    def forget(self, keys: Iterable[str]) -> None:
        """Drop definitions."""
        self._workshop.forget(keys)

    def failed_ps(self, error: BaseException) -> int | None:
        """Return which parameter server an error, or what it was raised from, is about."""
        cause: BaseException | None = error
        while cause is not None:
            for ps, link in enumerate(self._links):
                if isinstance(cause, UnavailableError) and link.name in str(cause):
                    return ps
            cause = cause.__cause__ or cause.__context__
        return None

    def close(self) -> None:
        """Disconnect, from any thread."""
        self._loop.close()
        for link in self._links:
            link.give_up()
