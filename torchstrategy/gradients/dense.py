"""Sums of dense gradients: first over the replicas of this process, then between processes."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from torch import Tensor

from torchstrategy.base.devices import Placement
from torchstrategy.base.log import info_once
from torchstrategy.base.options import CommunicationOptions, PowerSGD
from torchstrategy.collectives.cross_device_ops import CrossDeviceOps, sum_gradients
from torchstrategy.collectives.packing import group_by_layout, have_own_memory, memory_order
from torchstrategy.collectives.process_group import WorkerGroup
from torchstrategy.gradients.buckets import OPERATION, sum_in_buckets
from torchstrategy.gradients.power_sgd import LowRankSums

__all__ = ["DenseSums"]


class DenseSums:
    """Sums dense gradients over all replicas.

    Args:
        placement: where the replicas are.
        ops: combines the tensors of this process's replicas.
        workers: the processes; ``None`` if there is only this one.
        options: bucket size, and what is asked for in compression.
    """

    def __init__(
        self, placement: Placement, ops: CrossDeviceOps, workers: WorkerGroup | None, options: CommunicationOptions
    ) -> None:
        self._placement = placement
        self._ops = ops
        self._workers = workers
        self._options = options
        self._announced = (0, -1)
        #: What sums gradients between processes by PowerSGD, if that is asked for.
        self.low_rank: LowRankSums | None = None
        if workers is None and options.gradient_compression is not None:
            info_once("Gradients are not compressed: there is only one process.")
        if workers is not None and isinstance(workers.compression, PowerSGD):
            self.low_rank = LowRankSums(workers.compression, functools.partial(self._sum_in_buckets, workers))

    def __call__(
        self,
        indices: Sequence[int],
        parameters: Sequence[Tensor],
        rows: Sequence[Sequence[Tensor]],
        may_overwrite: Sequence[bool],
    ) -> Sequence[Sequence[Tensor]]:
        """Return the sums of some parameters' gradients.

        Args:
            indices: the parameters' positions in their optimizer; equal on all ranks.
            parameters: the first local replica's.
            rows: for each local replica, these parameters' gradients.
            may_overwrite: for each parameter, whether the sum may be written to the gradients' memory, which is laid
                out as the parameter's.

        Returns:
            For each local replica the sums.
        """
        devices = self._placement.devices
        sums = list(rows)
        if len(devices) > 1:
            sums = [*sum_gradients(self._ops, rows, may_overwrite, devices, self._options)]
        num_packs = 0
        if self._workers is not None:
            if self.low_rank is not None:
                totals, num_packs = self.low_rank(indices, parameters, sums[0])
            else:
                may = may_overwrite
                if len(devices) > 1:  # what is new, or allowed as well
                    are_own = have_own_memory(sums[0])
                    are_alike = [t.stride() == p.stride() for t, p in zip(sums[0], parameters, strict=True)]
                    may = [own and alike for own, alike in zip(are_own, are_alike, strict=True)]
                totals, num_packs = self._sum_between(self._workers, sums[0], parameters, may)
            sums = [totals]
            if len(devices) > 1:
                copies = [self._ops.broadcast(total, devices).values for total in totals]
                sums = [list(row) for row in zip(*copies, strict=True)]
        if (len(indices), num_packs) != self._announced:
            self._announced = len(indices), num_packs
            self._announce(len(indices), num_packs)
        return sums

    def _sum_between(
        self,
        workers: WorkerGroup,
        tensors: Sequence[Tensor],
        parameters: Sequence[Tensor],
        may_overwrite: Sequence[bool],
    ) -> tuple[list[Tensor], int]:
        """Return the sums over processes: made where the gradients lie if memory is shared, or else in buckets."""
        sums, rest, num_packs = list(tensors), [], 0
        for _, indices in group_by_layout(tensors):
            members = [tensors[i] for i in indices]
            if not workers.sums_in_place(members):
                rest += indices
                continue
            may = [may_overwrite[i] for i in indices]
            if False in may or {member.is_contiguous() for member in members} != {True}:
                members, rows = _in_own_memory(members, [parameters[i] for i in indices], may)
            else:
                rows = members
            workers.sum_in_place(rows, OPERATION)
            num_packs += 1
            for i, member in zip(indices, members, strict=True):
                sums[i] = member
        if rest:
            rest.sort()
            totals, num_buckets = self._sum_in_buckets(
                workers, [tensors[i] for i in rest], [parameters[i] for i in rest]
            )
            num_packs += num_buckets
            for i, total in zip(rest, totals, strict=True):
                sums[i] = total
        return sums, num_packs

    def _sum_in_buckets(
        self, workers: WorkerGroup, tensors: Sequence[Tensor], parameters: Sequence[Tensor] | None = None
    ) -> tuple[list[Tensor], int]:
        return sum_in_buckets(workers.start_gradient_sum, tensors, self._options.bucket_bytes, parameters)

    def _announce(self, num_tensors: int, num_packs: int) -> None:
        implementation = type(self._ops).__name__ if len(self._placement.devices) > 1 else ""
        if self._workers is None:
            num_packs = self._ops.num_packs or num_tensors if implementation else 0
        else:
            implementation = " then ".join(filter(None, [implementation, self._workers.communication]))
        info_once(
            f"Gradient all_reduce: {num_tensors} tensors, num_replicas = {self._placement.num_replicas}, "
            f"implementation = {implementation}, num_packs = {num_packs}"
        )


def _in_own_memory(
    tensors: Sequence[Tensor], parameters: Sequence[Tensor], may_overwrite: Sequence[bool]
) -> tuple[list[Tensor], list[Tensor]]:
    """Return gradients that may be written to, in their parameters' formats, and contiguous views of them."""
    own, views = list(tensors), list(tensors)
    for k, (tensor, parameter, may) in enumerate(zip(tensors, parameters, may_overwrite, strict=True)):
        if may and tensor.is_contiguous():
            continue
        order = memory_order(parameter)
        if not may:
            memory_format = torch.contiguous_format if order is None else torch.preserve_format
            own[k] = torch.empty_like(parameter, dtype=tensor.dtype, memory_format=memory_format).copy_(tensor)
        views[k] = own[k] if order is None else own[k].permute(order)
    return own, views
