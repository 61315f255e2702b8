"""What replicas of one program return: values that stay on their devices until looked at, and their sums."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from torchstrategy.base.options import ReduceOp
from torchstrategy.base.values import BatchShares, DistributedValues, PerReplica
from torchstrategy.collectives.reductions import (
    check_addable,
    check_gather_axis,
    check_joinable,
    dtype_of_sum,
    mean_of_total,
    reduction_axes,
)
from torchstrategy.errors import InvalidArgumentError
from torchstrategy.xla.runtime import TpuRuntime

__all__ = ["SplitValues", "as_split", "gather_split", "reduce_split"]


class SplitValues(PerReplica):
    """One value for each replica, held as tensors ``[num_replicas, ...]`` that are split over the devices.

    ``values`` are copies on the host: looking at them waits for the devices, but compiles nothing.

    Args:
        runtime: what the tensors belong to.
        stacks: tensors ``[num_replicas, *shape]``, one for each group of replicas whose values have one shape.
        group_of: for each replica of this process, the position of its group.
        shares: how the global batch that the values are part of was split, if they are part of one.
        is_traced: whether a run is being traced, so that ``values`` are on the devices and not known yet.
    """

    def __init__(
        self,
        runtime: TpuRuntime,
        stacks: Sequence[Tensor],
        group_of: Sequence[int],
        shares: BatchShares | None = None,
        *,
        is_traced: bool = False,
    ) -> None:
        super().__init__((), shares)
        self._is_traced = is_traced
        self.runtime = runtime
        self.stacks = tuple(stacks)
        self.group_of = tuple(group_of)

    @property
    @override
    def values(self) -> tuple[Any, ...]:
        if self._is_traced:
            return tuple(self.stacks[group][i] for i, group in enumerate(self.group_of))
        if not self._values:
            rows = [self.runtime.rows(stack) for stack in self.stacks]
            self._values = tuple(rows[group][i][0] for i, group in enumerate(self.group_of))
        return self._values

    @property
    def shapes(self) -> tuple[tuple[int, ...], ...]:
        """The shape of each local replica's value."""
        return tuple(tuple(self.stacks[group].shape[1:]) for group in self.group_of)

    def __repr__(self) -> str:
        rows = ",\n".join(f"  {i}: {value!r}" for i, value in enumerate(self.values))
        return f"PerReplica:{{\n{rows}\n}}"

    def __reduce__(self) -> Any:
        return PerReplica, (self.values, self.shares)


def reduce_split(op: ReduceOp, value: SplitValues, axis: Any) -> Tensor:
    """Combine a value over all replicas, and over axes as well if they are given.

    Raises:
        InvalidArgumentError: shapes or dtypes don't fit together.
        TypeError, ValueError: ``axis`` names no axes of the values.
    """
    for rows in value.stacks:
        check_addable(rows)
    if axis is None and len(value.stacks) > 1:
        raise InvalidArgumentError(
            f"The replicas' values have different shapes: {list(value.shapes)}. Give an axis to reduce over, too."
        )
    axes = () if axis is None else reduction_axes(axis, value.stacks[0].dim() - 1)
    totals, count = [], 0
    for group, rows in enumerate(value.stacks):
        members = [i for i, own in enumerate(value.group_of) if own == group]
        own = rows if len(value.stacks) == 1 else rows[members]
        count += own.shape[0] * torch.Size([own.shape[a + 1] for a in axes]).numel()
        totals.append(own.sum((0, *(a + 1 for a in axes)), dtype=dtype_of_sum(op, own)))
    shapes = {tuple(total.shape) for total in totals}
    if len(shapes) > 1:
        raise InvalidArgumentError(f"The replicas' values differ in other dimensions, too: {sorted(shapes)}.")
    total = totals[0]
    for other in totals[1:]:
        total = total + other
    return total if op is ReduceOp.SUM else mean_of_total(total, count)


def gather_split(value: SplitValues, axis: int) -> Tensor:
    """Concatenate a value of all replicas.

    Raises:
        ValueError: the values are scalars, or ``axis`` is none of theirs.
        InvalidArgumentError: they differ in other dimensions.
    """
    for rows in value.stacks:
        axis = check_gather_axis(axis, rows[0])
    for rows in value.stacks[1:]:
        check_joinable(value.stacks[0][0], rows[0], axis)
    if len(value.stacks) == 1:
        return value.stacks[0].movedim(0, axis).flatten(axis, axis + 1)
    return torch.cat([value.stacks[group][i] for i, group in enumerate(value.group_of)], axis)


def as_split(runtime: TpuRuntime, value: DistributedValues) -> SplitValues | None:
    """Return values as the devices hold them, sent there if need be; ``None`` for what is no tensor."""
    if isinstance(value, SplitValues):
        return value
    if not all(isinstance(own, Tensor) for own in value.values):
        return None
    kinds: dict[Any, int] = {}
    group_of = [kinds.setdefault((own.shape, own.dtype), len(kinds)) for own in value.values]
    stacks = []
    for group in range(len(kinds)):
        blank = torch.zeros_like(value.values[group_of.index(group)], device="cpu")
        rows = [
            own.detach().cpu() if kind == group else blank for own, kind in zip(value.values, group_of, strict=True)
        ]
        stacks.append(runtime.upload([row.unsqueeze(0) for row in rows]))
    return SplitValues(runtime, stacks, group_of)
