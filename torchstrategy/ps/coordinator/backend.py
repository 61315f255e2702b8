"""What the cluster needs of a ``ParameterServerStrategy``."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from typing import Any, Protocol

import torch

from torchstrategy.base.names import dtype_name
from torchstrategy.cluster_resolver.cluster_spec import ClusterSpec
from torchstrategy.errors import UnavailableError
from torchstrategy.ps.links import ServerLink
from torchstrategy.ps.results import decode_side
from torchstrategy.ps.shipping import Shipper
from torchstrategy.ps.transport.control_loop import ControlLoop
from torchstrategy.ps.transport.messages import Message

__all__ = ["ClusterStrategy", "StrategyBackend"]


class ClusterStrategy(Protocol):
    """What a coordinator needs of its strategy, which is a ``ParameterServerStrategy`` on its coordinator."""

    cluster_spec: ClusterSpec
    incarnation: int
    loop: ControlLoop
    max_staleness: int | None
    resources: ExitStack
    secret: Any
    shipper: Shipper
    _closing: Any
    _ps_grace_s: float
    _servers: list[ServerLink]

    def _prepare_closures(self) -> None:
        """Bring the servers up to date before a function is scheduled."""


class StrategyBackend:
    """Answers the cluster's questions about a strategy.

    The control loop's thread holds it, so it must not keep a strategy alive that the program has dropped.

    Args:
        strategy: the strategy.
    """

    def __init__(self, strategy: ClusterStrategy) -> None:
        self._reference = weakref.ref(strategy)
        self._closing = strategy._closing
        self._loop = strategy.loop
        self._servers = strategy._servers
        self._ps_grace_s = strategy._ps_grace_s
        self._incarnation = strategy.incarnation
        self._spec = strategy.cluster_spec
        self._worker_ids = self._spec.task_indices("worker")

    @property
    def worker_addresses(self) -> list[str]:
        """The workers' addresses, in the order of their indices."""
        return [self._spec.task_address("worker", index) for index in self._worker_ids]

    @property
    def is_closed(self) -> bool:
        """Whether the program has closed the strategy, or ends."""
        return self._loop.is_closed or not self._closing.alive

    def connect(self, index: int, handler: Any) -> Any:
        """Connect to a worker, for as long as the strategy lives, and return the connection."""
        strategy = self._strategy()
        hello = {"role": "coordinator", "incarnation": self._incarnation}
        task = f"/job:worker/task:{self._worker_ids[index]}"
        return strategy.loop.connect(self.worker_addresses[index], hello, handler, secret=strategy.secret, name=task)

    def configuration(self, index: int) -> Message:
        """Return the first message to a worker: the cluster that it works in."""
        fields = {
            "cluster": self._spec.as_dict(),
            "task": ["worker", self._worker_ids[index]],
            "incarnation": self._incarnation,
            "ps": [self._spec.task_address("ps", ps) for ps in self._spec.task_indices("ps")],
            "ps_incarnations": [server.incarnation for server in self._servers],
            "ps_grace_s": self._ps_grace_s,
            "dtype": dtype_name(torch.get_default_dtype()),
        }
        return Message("configure", fields)

    def definitions(self, keys: Sequence[str]) -> list[Message]:
        """Return the messages with definitions, each once."""
        shipper = self._strategy().shipper
        return [shipper.definition(key) for key in dict.fromkeys(keys)]

    def absorb(self, reply: Message) -> None:
        """Take in what a closure gave beside its value, such as what metrics accumulated."""
        side = decode_side(reply)
        strategy = self._reference()
        if side is not None and strategy is not None:
            strategy.shipper.absorb(side)

    def unneeded(self, keys: Iterable[str]) -> list[str]:
        """Return those definitions that nothing in the program stands for any more."""
        strategy = self._reference()
        return [] if strategy is None else strategy.shipper.unneeded(keys)

    def lost_ps(self, index: int | None) -> UnavailableError | None:
        """Return why a parameter server is gone for good: the given one, or any; ``None`` if it is there."""
        for ps in range(len(self._servers)) if index is None else (index,):
            failure = self._servers[ps].failure
            if failure is not None:
                return failure
        return None

    def is_ps_away(self, index: int | None) -> bool:
        """Say whether a parameter server, the given one or any, is out of reach and may be back in time."""
        return any(self._servers[ps].is_away for ps in (range(len(self._servers)) if index is None else (index,)))

    def ask_ps(self, index: int) -> None:
        """Ask whether a parameter server is there that a worker could not reach; it is away until it has answered."""
        self._servers[index].ask()

    def _strategy(self) -> ClusterStrategy:
        strategy = self._reference()
        if strategy is None:
            raise UnavailableError("The program has dropped the strategy.")
        return strategy
