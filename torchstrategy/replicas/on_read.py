"""Variables whose copies the replicas write by themselves, those of central storage, and making all kinds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor
from typing_extensions import override

from torchstrategy.base.context import current_replica_context
from torchstrategy.base.options import ReduceOp, VariableAggregation, VariableSynchronization
from torchstrategy.collectives.reductions import reduce
from torchstrategy.replicas.distributed_variables import (
    VALUE_PROPERTIES,
    DistributedVariable,
    MirroredVariable,
    distribute,
    single,
)
from torchstrategy.replicas.runner import MergeRequest
from torchstrategy.replicas.variables import Variable, VariableOptions, fitting, value_of_first_replica, write

__all__ = ["AggregatingVariable", "SyncOnReadVariable", "make_variable"]


class AggregatingVariable(MirroredVariable):
    """A variable with one value on the parameter device, which the replicas see. Made by ``ts.Variable``.

    When it is synchronised has no meaning: what replicas assign is aggregated at once.
    """

    @property
    @override
    def values(self) -> tuple[Tensor, ...]:  # type: ignore[override]
        """The one value, as a plain variable."""
        return super().values[:1]

    @override
    def _writes_locally(self) -> bool:
        return False

    @override
    def _update(self, method: str, value: Any) -> Any:
        context = current_replica_context()
        if (
            self.options.aggregation is VariableAggregation.NONE
            and context is not None
            and context.strategy is self.strategy
        ):
            self._refuse(method)
        return super()._update(method, value)

    def _refuse(self, method: str) -> NoReturn:
        raise ValueError(
            f"{method} in `run` needs an aggregation method for AggregatingVariable {self.name!r}, which has one value "
            "for all replicas. Make it with ts.Variable(..., aggregation=ts.VariableAggregation.SUM, MEAN or "
            "ONLY_FIRST_REPLICA), or assign outside `run`."
        )

    @override
    def note_separate_writes(self) -> None:
        first, *others = self.copies
        with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
            for copy in others:
                copy.copy_(first)
        self.note_in_step()

    @override
    def __repr__(self) -> str:  # type: ignore[override]
        return f"AggregatingVariable({Variable.__repr__(self.copies[0])}, aggregation={self.options.aggregation})"


class SyncOnReadVariable(DistributedVariable):
    """A variable whose copies each replica writes by itself, aggregated when they are read outside ``run``.

    Made by ``ts.Variable(..., synchronization=ts.VariableSynchronization.ON_READ)``. A sum of integers that is assigned
    in cross-replica context is shared out exactly: the first replicas get what the number of replicas does not divide.
    """

    def _writes_locally(self) -> bool:
        return True

    def _update_all(self, method: str, value: Any) -> None:
        if self.options.aggregation is VariableAggregation.NONE:
            raise ValueError(
                f"Variable {self.name!r} is ON_READ without aggregation, so it has no value in cross-replica context "
                "that could be assigned. Assign in `run`, or give it an aggregation."
            )
        if self.options.aggregation is VariableAggregation.SUM:
            if method != "assign":
                raise ValueError(
                    f"{method} of variable {self.name!r} is not defined in cross-replica context, because its copies "
                    "are summed when they are read. Call it in `run`, or write `v.assign(v.read_value() + delta)`."
                )
            self._share_out(fitting(self, single(self, value)))
            return
        super()._update_all(method, value)

    def _share_out(self, total: Tensor) -> None:
        """Give each copy its part of a sum; what is left of integers goes to the first replicas."""
        count = self.strategy.num_replicas_in_sync
        if total.is_floating_point() or total.is_complex():
            share, rest = total / count, torch.zeros((), dtype=torch.int64)
        else:
            share = total.div(count, rounding_mode="floor")
            rest = total - share * count
        ids = self.strategy.placement.local_replica_ids
        if self.serves_all:
            self.strategy.hosting.give(self, [share + (replica_id < rest) for replica_id in ids])
            self.diverges = True
            return
        for copy, replica_id in zip(self.copies, ids, strict=True):
            write(copy, "assign", share + (replica_id < rest))
        self.is_new = False  # no initial value of the chief may replace the shares

    def _here(self, *, reads: bool) -> Tensor:
        if self._in_replica_context() or not reads:
            return super()._here(reads=reads)
        return self._total()

    def _total(self) -> Tensor:
        strategy = self.strategy
        operation = f"reading variable {self.name!r}"
        with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
            own = strategy.hosting.values_of(self) if self.serves_all else [copy.detach() for copy in self.copies]
            if self.options.aggregation is VariableAggregation.ONLY_FIRST_REPLICA:
                return value_of_first_replica(strategy, own[0], operation).to(self.device)
            if self.options.aggregation is VariableAggregation.NONE:
                raise ValueError(
                    f"Variable {self.name!r} is ON_READ without aggregation, so it has no single value in "
                    "cross-replica context. Give it an aggregation, or read the copies: "
                    "`strategy.experimental_local_results(variable)`."
                )
            if self.serves_all:
                stacked = torch.stack(list(own))
                is_mean = self.options.aggregation is VariableAggregation.MEAN
                return (stacked.mean(0) if is_mean else stacked.sum(0, dtype=self.dtype)).to(self.device)
            return reduce(
                ReduceOp[self.options.aggregation.name],
                own,
                None,
                strategy.placement.devices,
                strategy.cross_device_ops,
                strategy.workers,
                strategy.num_replicas_in_sync,
                operation,
            )

    @override
    def follow_first(self) -> None:
        pass  # each replica's copy is its own

    def _note_change(self, name: str) -> None:
        self._refuse(name)  # only an aggregate of the copies was changed

    def _call_for_each_copy(self, func: Any, name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        if name == "copy_":  # load_state_dict
            return self.assign(args[1])
        if name == "__set__" and func.__self__.__name__ in VALUE_PROPERTIES:
            self._refuse(func.__self__.__name__)
        return super()._call_for_each_copy(func, name, args, kwargs)

    def _refuse(self, name: str) -> NoReturn:
        raise RuntimeError(
            f"{name} can't change ON_READ variable {self.name!r} in cross-replica context, where it reads as an "
            "aggregate of its copies. Write `variable.assign(...)`."
        )


def make_variable(
    strategy: Any,
    context: Any,
    value: Tensor,
    options: VariableOptions,
    cls: type[DistributedVariable] | None = None,
) -> Variable:
    """Make a variable with a copy on each of a strategy's replicas.

    Args:
        strategy: the strategy, which records the variable.
        context: the context of the replica that makes it; all replicas then get one variable, with replica 0's value.
            ``None`` in cross-replica context.
        value: its initial value.
        options: what it is made with.
        cls: its class; ``None`` means the one that ``options.synchronization`` asks for.

    Raises:
        ValueError: such a variable can't have several copies.
    """
    if options.synchronization is VariableSynchronization.AUTO:
        options = options._replace(synchronization=VariableSynchronization.ON_WRITE)
    if options.synchronization is VariableSynchronization.NONE:
        raise ValueError(
            f"A variable with synchronization NONE can't be made under {type(strategy).__name__}, which has a copy on "
            "each replica. Use ON_WRITE or ON_READ."
        )
    if options.aggregation is VariableAggregation.MEAN and not (value.is_floating_point() or value.is_complex()):
        raise ValueError(
            f"A variable of dtype {value.dtype} can't have aggregation MEAN: the mean of integers is no integer. Use "
            "a floating-point dtype, SUM or ONLY_FIRST_REPLICA."
        )
    is_on_read = options.synchronization is VariableSynchronization.ON_READ
    made_as = cls or (SyncOnReadVariable if is_on_read else MirroredVariable)
    operation = f"making variable {options.name!r}"
    if context is None:
        if strategy.workers is not None:  # the chief's value, for whoever reads it before the first run
            value = value_of_first_replica(strategy, value.detach(), operation)
        variable = distribute(made_as, strategy, value, options)
        variable.is_new = True  # what its layer writes into it until then is an initial value, too
        return variable

    def merge(values: list[Tensor]) -> list[Variable]:
        own = values[0] if strategy.placement.replicas_per_copy == 1 else strategy.hosting.first(values)
        first = value_of_first_replica(strategy, own, operation)
        return [distribute(made_as, strategy, first, options)] * len(values)

    made: Variable = context._meet(MergeRequest(operation, merge, value))
    return made
