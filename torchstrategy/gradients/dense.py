"""Sums of dense gradients: first over the replicas of this process, then between processes.

A bucket is filled, started and waited for. What is summed, when, and whether the sum is taken, is the caller's to say:
the sum at the step (``dense.py``, also of what PowerSGD has made of gradients), the average of buffers, and sums that
begin early (``early.py``). Rounding to 16 bits is left to what carries a bucket (``collectives/compression.py``).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from torchstrategy.base.devices import Placement, accelerator_module, kind_of
from torchstrategy.base.log import info_once
from torchstrategy.base.options import CommunicationOptions, PowerSGD
from torchstrategy.collectives.cross_device_ops import CrossDeviceOps, sum_gradients
from torchstrategy.collectives.process_group import WorkerGroup
from torchstrategy.collectives.summing import group_by_layout, have_own_memory, memory_order, pack, plan_buckets, unpack
from torchstrategy.gradients.power_sgd import LowRankSums

__all__ = ["OPERATION", "Bucket", "DenseSums", "sum_in_buckets"]

#: What sums of gradients are called in messages of several ranks.
OPERATION = "the sum of gradients"
#: Starts to sum a contiguous tensor in place and returns what waits for the sum.
StartSum = Callable[[Tensor, str], Callable[[], None]]


class Bucket:
    """Tensors of one dtype and device that travel together.

    Args:
        indices: their positions among all that are summed.
        like: tensors of their shapes and dtype.
        keep_formats: whether elements lie in the bucket as they do in the memory of ``like``, and not in the order of
            their indices: gradients as in their parameters.
    """

    def __init__(self, indices: Sequence[int], like: Sequence[Tensor], *, keep_formats: bool = True) -> None:
        self.indices = indices
        self.like = like
        self._keeps_formats = keep_formats
        #: What travels, once the bucket is filled.
        self.flat: Tensor | None = None
        self._wait: Callable[[], None] | None = None

    def fill(self, tensors: Sequence[Tensor]) -> None:
        """Copy what is to be summed."""
        self.flat = pack(tensors, self.like if self._keeps_formats else None)

    def start(self, start_sum: StartSum) -> None:
        """Start the sum of what the bucket was filled with."""
        self._wait = start_sum(self._contents(), OPERATION)

    def finish(self) -> None:
        """Wait for the sum."""
        if self._wait is None:
            raise RuntimeError(f"The bucket of the tensors {list(self.indices)} was not started.")
        self._wait()
        flat = self._contents()
        if module := accelerator_module(flat.device):  # a thread of autograd may have allocated it, on another stream
            flat.record_stream(module.current_stream(flat.device))

    def sums(self) -> list[Tensor]:
        """Return the sums, parts of the bucket in the tensors' shapes."""
        flat = self._contents()
        parts = unpack(flat, self.like, keep_formats=self._keeps_formats)
        # On XLA each write to a view is traced as a write to the whole bucket, and to all other views of it.
        return parts if kind_of(flat.device).has_views else [part.clone() for part in parts]

    def _contents(self) -> Tensor:
        if self.flat is None:
            raise RuntimeError(f"The bucket of the tensors {list(self.indices)} was not filled.")
        return self.flat


def sum_in_buckets(
    start: StartSum, tensors: Sequence[Tensor], bucket_bytes: int, parameters: Sequence[Tensor] | None = None
) -> tuple[list[Tensor], int]:
    """Sum tensors over processes; the ranks have agreed on shapes and dtypes.

    Args:
        start: ``start_sum`` or ``start_gradient_sum`` of the processes.
        tensors: dense tensors.
        bucket_bytes: size in bytes at which a bucket is closed.
        parameters: whose gradients these are, if they are gradients; the ranks have agreed on their memory formats.

    Returns:
        The sums, parts of buckets in the tensors' shapes, and the number of buckets.
    """
    like = tensors if parameters is None else parameters
    buckets = [
        Bucket(indices, [like[i] for i in indices], keep_formats=parameters is not None)
        for indices in plan_buckets(tensors, bucket_bytes)
    ]
    for bucket in buckets:
        bucket.fill([tensors[i] for i in bucket.indices])
        bucket.start(start)  # it travels while the next one is filled
    sums = list(tensors)
    for bucket in buckets:
        bucket.finish()
        for index, total in zip(bucket.indices, bucket.sums(), strict=True):
            sums[index] = total
    return sums, len(buckets)


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
