"""Sums of gradients over processes as products of thin matrices: PowerSGD, algorithms 1 and 2 of Vogels et al. (2019).

With matrices ``M`` of all processes, each its gradient plus what earlier sums left behind, one step of the power
method is ``P = sum(M) Q``, ``P`` made orthonormal, ``R = sum(M)^T P``. ``P R^T`` stands for the sum, and the next step
begins with ``Q = R``. ``P`` and ``R`` are sums of what each process computes by itself, so only they travel, and the
result is that of one process with the sum of the matrices. Each process keeps ``M - P (M^T P)^T`` for its next sum.

Each process computes the orthonormal ``P`` and the product ``P R^T`` by itself, from the same bits. Processors of
several kinds may round them differently, and replicas drift apart in their last bits; sending rank 0's ``P`` would not
help, because of the product. It does not get worse from sum to sum: the next one begins with ``R``, which is a sum.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, MutableMapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from torchstrategy.base.log import info_once
from torchstrategy.base.options import PowerSGD

__all__ = ["LowRankSums"]

SumBetween = Callable[[Sequence[Tensor]], tuple[list[Tensor], int]]


@dataclass
class _Memory:
    """What is kept of one parameter.

    Args:
        like: shape, dtype and device of the gradient.
        in_full: number of sums before the first compressed one.
        compressed: number of compressed sums.
        right: what the next power step begins with, ``[m, rank]``.
        rest: what sums have left out of this process's gradients, ``[n, m]``.
    """

    like: tuple[torch.Size, torch.dtype, torch.device]
    in_full: int = 0
    compressed: int = 0
    right: Tensor | None = None
    rest: Tensor | None = None


class LowRankSums:
    """Sums gradients over processes, and remembers for each parameter what it needs for the next sum.

    Args:
        options: rank, and what is compressed when.
        sum_between: returns sums of tensors over processes, and in how many buckets they have travelled.
    """

    def __init__(self, options: PowerSGD, sum_between: SumBetween) -> None:
        self._options = options
        self._sum_between = sum_between
        self._memories: MutableMapping[Tensor, _Memory] = WeakTensorKeyDictionary()

    def state(self, parameters: Sequence[Tensor]) -> int:
        """Return a number that is equal on all ranks if they have made the same sums of these parameters."""
        memories = [self._memories.get(parameter) for parameter in parameters]
        counts = [(0, 0) if memory is None else (memory.in_full, memory.compressed) for memory in memories]
        return zlib.crc32(repr(counts).encode())

    def forget(self, parameters: Sequence[Tensor]) -> None:
        """Begin anew with these parameters: all ranks do so when their states differ."""
        info_once("The ranks have not made the same sums before, so PowerSGD begins anew: first sums are made in full.")
        for parameter in parameters:
            self._memories.pop(parameter, None)

    def __call__(
        self, indices: Sequence[int], parameters: Sequence[Tensor], gradients: Sequence[Tensor]
    ) -> tuple[list[Tensor], int]:
        """Return the sums over processes of some parameters' gradients, and the number of buckets.

        A sum with infinite numbers or NaN leaves no trace, because the step that would use it is skipped.

        Args:
            indices: the parameters' positions in their optimizer; equal on all ranks.
            parameters: whose gradients they are.
            gradients: of this process, each ``[n, ...]``.
        """
        memories = [self._memory_of(p, grad) for p, grad in zip(parameters, gradients, strict=True)]
        is_low = [self._is_compressed(memory) for memory in memories]
        low = [k for k, chosen in enumerate(is_low) if chosen]
        full = [k for k, chosen in enumerate(is_low) if not chosen]
        results = list(gradients)
        with torch.autocast(gradients[0].device.type, enabled=False):  # a step may be inside of one
            matrices = [gradients[k].reshape(len(gradients[k]), -1) for k in low]
            rests = [memories[k].rest for k in low]
            rights = [self._first(memories[k], indices[k]) for k in low]
            lefts = list(map(_product, matrices, rests, rights))
            sums, num_buckets = self._sum_between([*lefts, *(gradients[k] for k in full)])
            bases = [_orthonormal(left) for left in sums[: len(low)]]
            own = list(map(_product_of_transposed, matrices, rests, bases))
            totals, num_more = self._sum_between(own) if low else ([], 0)
            for k, total in zip(full, sums[len(low) :], strict=True):
                results[k] = total
            for k, base, total in zip(low, bases, totals, strict=True):
                results[k] = (base @ total.t()).view(gradients[k].shape)
            if _are_finite([*sums, *totals]):
                for k in full:
                    memories[k].in_full += 1
                for k, matrix, base, part, total in zip(low, matrices, bases, own, totals, strict=True):
                    memory = memories[k]
                    memory.rest = matrix.clone() if memory.rest is None else memory.rest.add_(matrix)
                    memory.rest.addmm_(base, part.t(), alpha=-1)
                    memory.right = self._next(memory, indices[k], total)
                    memory.compressed += 1
        return results, num_buckets + num_more

    def _memory_of(self, parameter: Tensor, gradient: Tensor) -> _Memory:
        like = (gradient.shape, gradient.dtype, gradient.device)
        memory = self._memories.get(parameter)
        if memory is None or memory.like != like:
            memory = self._memories[parameter] = _Memory(like)
        return memory

    def _is_compressed(self, memory: _Memory) -> bool:
        shape, dtype, _ = memory.like
        if len(shape) < 2 or dtype not in (torch.float32, torch.float64) or memory.in_full < self._options.start_after:
            return False
        rows, columns = shape[0], shape[1:].numel()
        return self._options.min_compression * self._options.rank * (rows + columns) <= rows * columns

    def _first(self, memory: _Memory, index: int) -> Tensor:
        """Return what the power step begins with, the same on all ranks."""
        return self._random(memory, index) if memory.right is None else memory.right

    def _random(self, memory: _Memory, index: int) -> Tensor:
        shape, dtype, device = memory.like
        generator = torch.Generator("cpu").manual_seed(index)  # the program's own stream stays as it is
        size = (shape[1:].numel(), self._options.rank)
        return torch.randn(size, generator=generator, dtype=torch.float64, device="cpu").to(device, dtype)

    def _next(self, memory: _Memory, index: int, total: Tensor) -> Tensor:
        """Return what the next power step begins with: columns of length 1, so that small numbers don't vanish."""
        lengths: Tensor = torch.linalg.vector_norm(total, dim=0)
        if bool((lengths > 0).all()):
            return total / lengths
        # A column of zeros would stay one for good.
        return torch.where(lengths > 0, total / lengths, self._random(memory, index))


def _product(matrix: Tensor, rest: Tensor | None, thin: Tensor) -> Tensor:
    """Return ``(matrix + rest) @ thin``."""
    product = matrix @ thin
    return product if rest is None else product.addmm_(rest, thin)


def _product_of_transposed(matrix: Tensor, rest: Tensor | None, thin: Tensor) -> Tensor:
    return _product(matrix.t(), None if rest is None else rest.t(), thin)


def _orthonormal(left: Tensor) -> Tensor:
    """Return orthonormal columns that span those of ``left``; in ``float64``, so that ranks round alike."""
    basis: Tensor = torch.linalg.qr(left.double())[0]
    return basis.to(left.dtype)


def _are_finite(tensors: Sequence[Tensor]) -> bool:
    numbers = [tensor for tensor in tensors if tensor.is_floating_point() and tensor.numel()]
    return not numbers or math.isfinite(float(torch.nn.utils.get_total_norm(numbers, math.inf)))
