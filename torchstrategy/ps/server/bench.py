"""What a worker runs one coordinator's functions with: connections to the parameter servers, and a workshop."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from typing import Any

from torchstrategy.cluster_resolver.cluster_spec import ClusterSpec
from torchstrategy.errors import UnavailableError
from torchstrategy.ps.client import ParameterClient
from torchstrategy.ps.links import ServerLink, set_default_dtype
from torchstrategy.ps.parameter_server_strategy import ParameterServerStrategy
from torchstrategy.ps.states import PeerState
from torchstrategy.ps.transport.control_loop import ControlLoop
from torchstrategy.ps.transport.messages import Message
from torchstrategy.ps.workshop import Outcome, Workshop

__all__ = ["WorkerBench"]

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
