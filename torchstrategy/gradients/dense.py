"""Sums of dense gradients: first over the replicas of this process, then between processes in buckets."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

from torch import Tensor

from torchstrategy.base.devices import Placement
from torchstrategy.base.log import info_once
from torchstrategy.base.options import CommunicationOptions, PowerSGD
from torchstrategy.collectives.cross_device_ops import CrossDeviceOps, sum_gradients
from torchstrategy.collectives.packing import pack, plan_buckets, unpack
from torchstrategy.collectives.process_group import WorkerGroup
from torchstrategy.gradients.power_sgd import LowRankSums

__all__ = ["DenseSums", "sum_in_buckets"]

StartSum = Callable[[Tensor, str], Callable[[], None]]


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
    ) -> list[list[Tensor]]:
        """Return the sums of some parameters' gradients.

        Args:
            indices: the parameters' positions in their optimizer; equal on all ranks.
            parameters: the first local replica's.
            rows: of each parameter, one gradient for each local replica.
            may_overwrite: for each parameter, whether the sum may be written to the gradients' memory.

        Returns:
            For each parameter the sum, once for each local replica.
        """
        devices = self._placement.devices
        sums = [list(row) for row in rows]
        if len(devices) > 1:
            sums = sum_gradients(self._ops, rows, may_overwrite, devices, self._options)
        num_buckets = 0
        if self._workers is not None:
            firsts = [row[0] for row in sums]
            if self.low_rank is not None:
                totals, num_buckets = self.low_rank(indices, parameters, firsts)
            else:
                totals, num_buckets = self._sum_in_buckets(self._workers, firsts, parameters)
            sums = [[t] if len(devices) == 1 else list(self._ops.broadcast(t, devices).values) for t in totals]
        self._announce(len(rows), num_buckets)
        return sums

    def _sum_in_buckets(
        self, workers: WorkerGroup, tensors: Sequence[Tensor], parameters: Sequence[Tensor] | None = None
    ) -> tuple[list[Tensor], int]:
        return sum_in_buckets(workers.start_gradient_sum, tensors, self._options.bucket_bytes, parameters)

    def _announce(self, num_tensors: int, num_buckets: int) -> None:
        implementation = type(self._ops).__name__ if len(self._placement.devices) > 1 else ""
        packs = self._ops.num_packs or num_tensors if implementation else 0
        if self._workers is not None:
            implementation = " then ".join(filter(None, [implementation, self._workers.communication]))
            packs = num_buckets
        info_once(
            f"Gradient all_reduce: {num_tensors} tensors, num_replicas = {self._placement.num_replicas}, "
            f"implementation = {implementation}, num_packs = {packs}"
        )


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
    buckets = plan_buckets(tensors, bucket_bytes)
    packed = [
        pack([tensors[i] for i in bucket], None if parameters is None else [parameters[i] for i in bucket])
        for bucket in buckets
    ]
    waits = [start(flat, "the sum of gradients") for flat in packed]
    sums = list(tensors)
    for bucket, flat, wait in zip(buckets, packed, waits, strict=True):
        wait()
        like = tensors if parameters is None else parameters
        parts = unpack(flat, [like[i] for i in bucket], keep_formats=parameters is not None)
        if flat.device.type == "xla":
            # Each write to a view is traced as a write to the whole buffer, and to all other views of it.
            parts = [part.clone() for part in parts]
        for index, part in zip(bucket, parts, strict=True):
            sums[index] = part
    return sums, len(buckets)
