"""What replicas of one program return: values that stay on their devices until somebody looks at them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor
from typing_extensions import override

from torchstrategy.base.values import BatchShares, PerReplica
from torchstrategy.xla.runtime import TpuRuntime

__all__ = ["SplitValues"]


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
