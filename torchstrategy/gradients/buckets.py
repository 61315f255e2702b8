"""Buckets: tensors that travel together, whether their sum begins at the step or during ``backward``.

A bucket is filled, started and waited for. What is summed, when, and whether the sum is taken, is the caller's to say:
the sum at the step (``dense.py``, also of what PowerSGD has made of gradients), the average of buffers, and sums that
begin early (``early.py``). Rounding to 16 bits is left to what carries a bucket (``collectives/compression.py``).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from torchstrategy.collectives.packing import pack, plan_buckets, unpack

__all__ = ["OPERATION", "Bucket", "StartSum", "sum_in_buckets"]

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
        if flat.is_cuda:  # a thread of autograd may have allocated it, on another stream
            flat.record_stream(torch.cuda.current_stream(flat.device))

    def sums(self) -> list[Tensor]:
        """Return the sums, parts of the bucket in the tensors' shapes."""
        flat = self._contents()
        parts = unpack(flat, self.like, keep_formats=self._keeps_formats)
        # On XLA each write to a view is traced as a write to the whole bucket, and to all other views of it.
        return [part.clone() for part in parts] if flat.device.type == "xla" else parts

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
