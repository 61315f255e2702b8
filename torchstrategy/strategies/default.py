"""The default strategy (no distribution) and the functions that ask which strategy is current.

Lower layers ask ``base.context``, to which this module gives the default answer.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from torchstrategy.base import context
from torchstrategy.base.context import (
    Frame,
    current_frame,
    pop_frame,
    push_frame,
    raise_failures,
    set_base_frame,
)
from torchstrategy.base.devices import Placement
from torchstrategy.base.labels import label
from torchstrategy.base.options import AutoShardPolicy, InputOptions, InputReplicationMode, RunOptions
from torchstrategy.cluster_resolver.detect import trains_nothing, warn_of_independent_copies
from torchstrategy.data.own_streams import InputContext
from torchstrategy.errors import UnimplementedError
from torchstrategy.replicas.record import owner, start_recording, stop_recording
from torchstrategy.replicas.variables import Variable, VariableOptions
from torchstrategy.strategies.extended import StrategyExtended
from torchstrategy.strategies.replica_context import ReplicaContext
from torchstrategy.strategies.replica_values import Scope, explain_misfit, inputs_of
from torchstrategy.strategies.strategy import Strategy

__all__ = [
    "DefaultStrategy",
    "experimental_set_strategy",
    "get_replica_context",
    "get_strategy",
]


class _DefaultReplicaContext(ReplicaContext):
    """The context of the one replica; also active outside ``run``, but not in another strategy's."""

    #: Whether it was of a ``run`` that has returned.
    _has_ended = False

    @override
    def _check_active(self, operation: str) -> None:
        if self._has_ended or current_frame() is not None:
            super()._check_active(operation)


class _DefaultExtended(StrategyExtended):
    """There are no devices to name, and every variable that no other strategy made belongs here."""

    @property
    @override
    def worker_devices(self) -> tuple[str, ...]:
        raise RuntimeError("worker_devices is unsupported by the default strategy, which chooses no devices.")

    @property
    @override
    def parameter_devices(self) -> tuple[str, ...]:
        raise RuntimeError("parameter_devices is unsupported by the default strategy, which chooses no devices.")

    @override
    def _copies_of(self, v: Any) -> tuple[Any, ...]:
        return (v,) if isinstance(v, Tensor) and owner(v) is None else ()


class DefaultStrategy(Strategy):
    """Passes everything through: a program that uses it behaves like one that uses no strategy.

    There is one object, which ``ts.get_strategy()`` returns outside any scope.

    Example:
        >>> ts.get_strategy().reduce("SUM", 1.0)
        1.0
    """

    def __init__(self) -> None:
        super().__init__(Placement(1, 0, (torch.device("cpu", 0),)))
        self.context = _DefaultReplicaContext(self, 0, 0)
        self._has_looked = False

    @property
    @override
    def extended(self) -> StrategyExtended:
        return _DefaultExtended(self)

    @override
    def scope(self) -> Any:
        return Scope(self, None, None)

    @override
    def run(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        options: RunOptions | None = None,
    ) -> Any:
        raise_failures()
        frame = current_frame()
        if frame is not None:
            self._require_cross_replica()
        if not callable(fn):
            raise TypeError(f"fn must be callable. Received: {fn!r}")
        if not isinstance(args, (tuple, list)):
            raise ValueError(f"positional args must be a list or tuple, got {type(args).__name__}: {args!r}")
        # Not when it is made, which is with the library: programs set TF_CONFIG afterwards.
        if not self._has_looked and not trains_nothing():
            self._has_looked = True
            warn_of_independent_copies("The default strategy", os.environ)
        own_kwargs = kwargs or {}
        own_context = _DefaultReplicaContext(self, 0, 0, (args, own_kwargs))
        frame = Frame(self, own_context)
        push_frame(frame)
        try:
            with label("replica", 0):
                return fn(*inputs_of(self, 0, args), **inputs_of(self, 0, own_kwargs))
        except TypeError as error:
            explain_misfit(error, fn, args, own_kwargs)
            raise
        finally:
            pop_frame(frame)
            own_context._has_ended = True

    @override
    def experimental_distribute_dataset(
        self,
        dataset: Any,
        options: InputOptions | None = None,
        *,
        batch_size: int | None = None,
        auto_shard_policy: AutoShardPolicy | None = None,
    ) -> Any:
        _check_mode(options)
        if batch_size is None:
            return dataset
        return super().experimental_distribute_dataset(
            dataset, options, batch_size=batch_size, auto_shard_policy=auto_shard_policy
        )

    @override
    def distribute_datasets_from_function(
        self, dataset_fn: Callable[[InputContext], Any], options: InputOptions | None = None
    ) -> Any:
        return dataset_fn(InputContext())

    @override
    def experimental_distribute_values_from_function(self, value_fn: Callable[[Any], Any]) -> Any:
        values = super().experimental_distribute_values_from_function(value_fn)
        return inputs_of(self, 0, values)

    @override
    def _make_variable(self, context: Any, value: Tensor, options: VariableOptions) -> Variable | None:
        return None

    @override
    def _check_can_enter(self) -> None:
        frame = current_frame()
        if frame is None or frame.strategy is self:  # it changes nothing, so it may open in its own `run`
            return
        if frame.replica_context is not None:
            super()._check_can_enter()
        raise RuntimeError(
            "Must not nest Strategy scopes: the default strategy's scope can't open inside another strategy's."
        )


context.set_default(DefaultStrategy)


def get_strategy() -> Strategy:
    """Return the current strategy; outside any scope, the default one.

    Returns:
        The strategy.

    Example:
        >>> strategy = ts.MirroredStrategy(["cpu:0"])
        >>> with strategy.scope():
        ...     print(ts.get_strategy() is strategy)
        True
    """
    strategy: Strategy = context.get_strategy()
    return strategy


def get_replica_context() -> ReplicaContext | None:
    """Return the context of the replica whose function is running.

    Returns:
        The context; ``None`` in cross-replica context; outside any scope, the default strategy's.

    Example:
        >>> ts.get_replica_context().num_replicas_in_sync
        1
    """
    found: ReplicaContext | None = context.get_replica_context()
    return found


def experimental_set_strategy(strategy: Strategy | None) -> None:
    """Make a strategy current for the rest of this thread, like a scope that never closes.

    Args:
        strategy: the strategy; ``None`` ends it.

    Raises:
        TypeError: it is not a strategy.
        RuntimeError: called inside a scope or a replica function.

    Example:
        >>> ts.experimental_set_strategy(ts.MirroredStrategy(["cpu:0"]))
        >>> ts.has_strategy()
        True
        >>> ts.experimental_set_strategy(None)
    """
    if strategy is not None and not isinstance(strategy, Strategy):
        raise TypeError(f"Expected a strategy or None. Received: {strategy!r}")
    before = current_frame()
    plain = strategy is None or isinstance(strategy, DefaultStrategy)
    set_base_frame(None if plain else Frame(strategy, None))
    if before is not None:
        stop_recording()
    if not plain:
        start_recording(strategy)


def _check_mode(options: InputOptions | None) -> None:
    if options is not None and options.experimental_replication_mode is InputReplicationMode.PER_REPLICA:
        raise UnimplementedError("InputReplicationMode.PER_REPLICA needs `distribute_datasets_from_function`.")
