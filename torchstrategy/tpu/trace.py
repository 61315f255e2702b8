"""One call of ``run``: what is traced in it, and which of it differs between replicas."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from torchstrategy.tpu.empty_shares import make_region
from torchstrategy.tpu.groups import Groups
from torchstrategy.tpu.region import Region
from torchstrategy.xla.runtime import TpuRuntime

__all__ = ["Trace"]


class Trace:
    """What belongs to one call of ``run``.

    Args:
        runtime: the devices.
        groups: which replicas are traced together.
        had_examples: for each replica, whether its share of the batch is not empty.
    """

    def __init__(self, runtime: TpuRuntime, groups: Groups, had_examples: Sequence[bool]) -> None:
        self.groups = groups
        self.had_examples = list(had_examples)
        self.regions = [
            make_region(runtime, len(groups.group_of), is_empty=not self.had_examples[groups.first_member(group)])
            for group in range(groups.count)
        ]
        self.runtime = runtime

    @property
    def region(self) -> Region:
        """The first group's region; all know the same local values."""
        return self.regions[0]

    def enter(self, rows: Tensor) -> Tensor:
        """Return what each replica has of ``[num_replicas, ...]``."""
        with self.region.paused():
            value = self.runtime.enter(rows, split=True).reshape(rows.shape[1:]).clone()  # no view, see ReplicaState
        return self.region.mark_local(value)

    def stack(self, values: Sequence[Tensor]) -> Tensor:
        """Return the replicas' values ``[num_replicas, ...]``, given each group's, of equal shape."""
        with self.region.paused():
            return self.rows(values[0]) if len(values) == 1 else self.runtime.stack(self.select(values))

    def rows(self, value: Tensor) -> Tensor:
        """Return what a group has as if all replicas had it, ``[num_replicas, ...]``. To be called in ``paused``."""
        if self.is_local(value):
            return self.runtime.stack(value.detach())
        num = len(self.groups.group_of)
        rows = value.detach().unsqueeze(0).expand(num, *value.shape).clone()
        return self.runtime.split(rows, [num, *[1] * value.dim()])  # else the compiler might divide it otherwise

    def select(self, values: Sequence[Tensor]) -> Tensor:
        """Return each replica's own value, given each group's, of equal shape. To be called in ``paused``."""
        own = [
            value.detach() if self.is_local(value) else self.runtime.enter(value.detach(), split=False)
            for value in values
        ]
        return own[0] if len(own) == 1 else self.groups.select(own)

    def is_local(self, value: Tensor) -> bool:
        """Say whether a tensor differs between replicas."""
        return self.region.is_local(value)

    def forget(self) -> None:
        """Let go of what was entered: tensors that live when a graph is cut are computed by it and kept."""
        for region in self.regions:
            region.forget()

    def has_local_values(self) -> bool:
        """Say whether any tensor that differs between replicas is alive, if only in a graph of autograd; fast."""
        return any(region.has_living_local_values() for region in self.regions)

    def local_values(self) -> list[Tensor]:
        """Return the living tensors that differ between replicas."""
        found = {id(value): value for region in self.regions for value in region.local_values()}
        return list(found.values())
