"""``strategy.extended``: tf's names for what a program does with variables in cross-replica context."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from torchstrategy.base import tree
from torchstrategy.base.context import Frame, current_replica_context, pop_frame, push_frame
from torchstrategy.base.devices import Placement, canonical_device, full_device_name, tensor_device
from torchstrategy.base.later import explains_absent
from torchstrategy.base.options import ReduceOp
from torchstrategy.base.values import DistributedValues, Mirrored, regroup, select_replica
from torchstrategy.collectives.cross_device_ops import CrossDeviceOps
from torchstrategy.gradients.replica_gradients import ReplicaGradients
from torchstrategy.replicas.distributed_variables import DistributedVariable
from torchstrategy.replicas.hosting import Hosting
from torchstrategy.replicas.record import owner
from torchstrategy.replicas.variables import Variable

__all__ = ["StrategyExtended"]


class _Viewed(Protocol):
    """What the view needs of a strategy."""

    placement: Placement
    hosting: Hosting
    gradients: ReplicaGradients
    cross_device_ops: CrossDeviceOps
    _task: tuple[str, int]

    @property
    def is_chief(self) -> bool:
        """Whether this process writes for the job."""

    def reduce(self, reduce_op: ReduceOp | str, value: Any, axis: Any = None) -> Any:
        """Combine a value over all replicas."""

    def _require_cross_replica(self) -> None:
        """Raise inside ``run`` and inside another strategy's scope."""

    def _take_up_new(self) -> None:
        """Take up what scopes have recorded."""


@explains_absent("StrategyExtended")
class StrategyExtended:
    """A view of a strategy: what tf keeps in ``tf.distribute.StrategyExtended`` and programs use.

    Args:
        strategy: the strategy.

    Example:
        >>> strategy = ts.MirroredStrategy(["cpu:0", "cpu:1"])
        >>> with strategy.scope():
        ...     v = ts.Variable(2.0)
        >>> strategy.extended.update(v, lambda copy, delta: copy.assign_add(delta), args=(1.0,))
        Mirrored:{
          0: <ts.Variable 'Variable:0' shape=() dtype=float32, numpy=3.0>,
          1: <ts.Variable 'Variable/replica_1:0' shape=() dtype=float32, numpy=3.0>
        }
    """

    def __init__(self, strategy: _Viewed) -> None:
        self._strategy = strategy

    @property
    def worker_devices(self) -> tuple[str, ...]:
        """Full names of the devices of this process's replicas."""
        placement, task = self._strategy.placement, self._strategy._task
        if placement.replicas_per_copy == 1:
            return tuple(full_device_name(device, *task) for device in placement.devices)
        kind = placement.devices[0].type
        return tuple(full_device_name(torch.device(kind, i), *task) for i in range(placement.num_local))

    @property
    def parameter_devices(self) -> tuple[str, ...]:
        """Full names of the devices that hold variables, which are those of the replicas."""
        return self.worker_devices

    @property
    def should_checkpoint(self) -> bool:
        """Whether this process writes checkpoints for the job, as the chief does."""
        return self._strategy.is_chief

    @property
    def should_save_summary(self) -> bool:
        """Whether this process writes summaries for the job, as the chief does."""
        return self._strategy.is_chief

    @property
    def experimental_between_graph(self) -> bool:
        """Whether each process runs the program by itself, as workers do."""
        return False

    @property
    def experimental_should_init(self) -> bool:
        """Whether this process makes initial values; all do, and take the chief's."""
        return True

    def variable_created_in_scope(self, v: Any) -> bool:
        """Say whether a variable, or another recorded object, was made in the strategy's scope.

        Args:
            v: a ``ts.Variable``, or a parameter of a module.

        Returns:
            Whether it belongs to this strategy.
        """
        return bool(self._copies_of(v))

    def update(
        self,
        var: Any,
        fn: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        group: bool = True,  # noqa: FBT001, FBT002 - tf's
    ) -> Any:
        """Call a function once for each copy of a variable in this process. Cross-replica context only.

        Args:
            var: a variable or a module's parameter that was made in the scope.
            fn: called as ``fn(copy, *args, **kwargs)`` in cross-replica context; it may assign to the copy.
            args: further arguments; a ``PerReplica`` or ``Mirrored`` in them gives each copy its own value.
            kwargs: keyword arguments, likewise.
            group: ``True`` returns the results as one value for all replicas, ``False`` as a tuple.

        Returns:
            The results of ``fn``; with one replica and ``group``, the plain result.

        Raises:
            ValueError: the variable was not made in this strategy's scope.
            RuntimeError: called inside ``run``.
        """
        strategy = self._strategy
        strategy._require_cross_replica()
        copies = self._copies_of(var)
        if not copies:
            raise ValueError(
                f"The variable was not made in the scope of this {type(strategy).__name__}, so it has no copies to "
                f"update. Make it with `ts.Variable(...)` in `strategy.scope()`. Received: {var!r}"
            )
        results = []
        frame = Frame(strategy, None)
        push_frame(frame)
        try:
            for local_id, copy in enumerate(copies):
                own_args, own_kwargs = select_replica(local_id, (tuple(args), dict(kwargs or {})))
                results.append(fn(copy, *own_args, **own_kwargs))
        finally:
            pop_frame(frame)
        if isinstance(var, DistributedVariable):
            var.note_separate_writes()
        if not group:
            return tuple(results)
        return tree.map_leaves(_as_mirrored, regroup(results))

    def reduce_to(self, reduce_op: ReduceOp | str, value: Any, destinations: Any, options: Any = None) -> Any:  # noqa: ARG002
        """Combine a value over the replicas and put the result where a variable is. Cross-replica context only.

        Args:
            reduce_op: SUM or MEAN.
            value: a ``PerReplica`` of tensors; a plain value is what every replica has, so that only MEAN has a
                meaning for it with several replicas.
            destinations: a variable, a distributed value, or the name of a device.
            options: has no meaning here.

        Returns:
            ``Mirrored`` on the variable's devices, a plain tensor for a single device.

        Raises:
            ValueError: the value can't be reduced.
            RuntimeError: called inside ``run``.
        """
        strategy = self._strategy
        total = strategy.reduce(reduce_op, value, axis=None)
        on_several = isinstance(destinations, (Tensor, DistributedValues)) and len(strategy.placement.devices) > 1
        if not on_several or not isinstance(value, (DistributedValues, DistributedVariable)):
            return total if isinstance(destinations, (Tensor, DistributedValues)) else _moved(total, destinations)
        return strategy.cross_device_ops.broadcast(total, strategy.placement.devices)

    def batch_reduce_to(
        self, reduce_op: ReduceOp | str, value_destination_pairs: Sequence[tuple[Any, Any]], options: Any = None
    ) -> list[Any]:
        """Call ``reduce_to`` for several values.

        Args:
            reduce_op: SUM or MEAN.
            value_destination_pairs: values and where their results go.
            options: has no meaning here.

        Returns:
            The results in the order of the pairs.
        """
        return [self.reduce_to(reduce_op, value, to, options) for value, to in value_destination_pairs]

    def _copies_of(self, v: Any) -> tuple[Any, ...]:
        """Return this process's copies of a variable or parameter; none if it is not the strategy's."""
        strategy = self._strategy
        if isinstance(v, DistributedVariable):
            return v.values if v.strategy is strategy else ()
        if isinstance(v, Variable) or not isinstance(v, Tensor):
            return (v,) if owner(v) is strategy else ()
        if current_replica_context() is None:
            strategy._take_up_new()
        if not strategy.gradients.owns(0, v):
            return ()
        return tuple(strategy.hosting.counterpart(i, v) for i in range(len(strategy.placement.devices)))


def _as_mirrored(leaf: Any) -> Any:
    return Mirrored(leaf.values) if isinstance(leaf, DistributedValues) else leaf


def _moved(total: Any, destination: Any) -> Any:
    return total.to(tensor_device(canonical_device(destination)))
