"""Sums of the ranks' tensors, always in the order of ranks, so that every rank computes the same bits.

The numbers of many tensors are taken as if they lay one after the other, in chunks that pass through shared memory.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from torchstrategy.collectives.packing import unpack, unpack_copies
from torchstrategy.errors import InvalidArgumentError

__all__ = [
    "Chunk",
    "Pack",
    "as_addable",
    "copy_in",
    "copy_out",
    "divide",
    "is_addable",
    "sum_columns",
    "sum_in_order",
]

_NARROW = (torch.float16, torch.bfloat16)
_ADDABLE = {
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8),
}


#: A tensor's position, a start and a stop in it.
_Piece = tuple[int, int, int]


def as_addable(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return the numbers of contiguous tensors of one dtype, in one dimension; complex ones as twice as many real ones.

    Raises:
        InvalidArgumentError: tensors of this dtype can't be added.
    """
    dtype = tensors[0].dtype
    if dtype.is_complex:
        tensors = [torch.view_as_real(tensor) for tensor in tensors]
    if not is_addable(tensors[0].dtype):
        raise InvalidArgumentError(f"Can't sum tensors of dtype {dtype}. Convert them, for example to float32.")
    return [tensor if tensor.dim() == 1 else tensor.view(-1) for tensor in tensors]


def is_addable(dtype: torch.dtype) -> bool:
    """Say whether tensors of a real dtype can be added."""
    return dtype in _ADDABLE


def sum_in_order(parts: Sequence[Tensor], out: Tensor) -> None:
    """Write the sum of equal-sized tensors to ``out``, which is none of them and has the same dtype.

    Three and more parts of 16-bit floating-point numbers are added in ``float32`` and rounded once.
    """
    if len(parts) == 1:
        out.copy_(parts[0])
        return
    if len(parts) > 2 and out.dtype in _NARROW:
        wide = parts[0].float()
        for part in parts[1:]:
            wide += part
        out.copy_(wide)
        return
    torch.add(parts[0], parts[1], out=out)
    for part in parts[2:]:
        out += part


def sum_columns(columns: Sequence[Tensor], like: Sequence[Tensor]) -> list[Tensor]:
    """Return the sums of what each rank has packed, in memory of their own.

    Args:
        columns: one flat buffer of each rank, of one dtype on the CPU.
        like: tensors of the packed ones' shapes and dtype.
    """
    if len(like) == 1:
        summed = torch.empty(like[0].shape, dtype=like[0].dtype, device="cpu")
        sum_in_order(columns, summed.view(-1))
        return [summed]
    flat = torch.empty_like(columns[0])
    sum_in_order(columns, flat)
    return unpack_copies(flat, like)


class Pack(NamedTuple):
    """Memory for tensors that are small together: views of it are made once, not in each step.

    Args:
        flat: the memory.
        views: parts of it, in the tensors' shapes.
    """

    flat: Tensor
    views: list[Tensor]

    @classmethod
    def of(cls, tensors: Sequence[Tensor]) -> Pack:
        """Return a pack for contiguous tensors of one dtype on the CPU."""
        with torch.inference_mode(mode=False):  # later steps may be outside of it
            flat = torch.empty(sum([tensor.numel() for tensor in tensors]), dtype=tensors[0].dtype, device="cpu")
            return cls(flat, unpack(flat, tensors))


class Chunk(NamedTuple):
    """Numbers that pass through the memory at once.

    Args:
        parts: one for each rank that adds up a part, or one in all; each as pieces of tensors.
        lengths: of the parts.
    """

    parts: list[list[Tensor]]
    lengths: tuple[int, ...]

    def places(self, area: Tensor) -> Sequence[Tensor]:
        """Return where the parts are in an area of the memory, as in those of all ranks."""
        first = next(pieces[0] for pieces in self.parts if pieces)
        return area[: sum(self.lengths) * first.element_size()].view(first.dtype).split_with_sizes(self.lengths)


def divide(numbers: Sequence[Tensor], sizes: tuple[int, ...], length: int, num_parts: int, unit: int) -> list[Chunk]:
    """Divide the numbers of tensors into chunks of some parts.

    Args:
        numbers: tensors of one dimension and dtype.
        sizes: their numbers of elements.
        length: of a chunk.
        num_parts: of a chunk, of equal lengths in whole units; the last ones of a short chunk are shorter or empty.
        unit: the elements that a processor's caches keep together.
    """
    return [
        Chunk(
            [[numbers[i] if b - a == sizes[i] else numbers[i][a:b] for i, a, b in pieces] for pieces in parts], lengths
        )
        for parts, lengths in _cut(sizes, length, num_parts, unit)
    ]


@functools.lru_cache(maxsize=64)
def _cut(
    sizes: tuple[int, ...], length: int, num_parts: int, unit: int
) -> list[tuple[list[list[_Piece]], tuple[int, ...]]]:
    """Return for each chunk its parts, each as pieces of tensors, and the parts' lengths; once for a list of sizes."""
    chunks = []
    tensor = done = 0  # elements before `done` of the tensor at that position are divided
    total = sum(sizes)
    for begin in range(0, total, length):
        left = min(length, total - begin)
        longest = left if num_parts == 1 else -(-left // (num_parts * unit)) * unit
        parts, lengths = [], []
        for _ in range(num_parts):
            lengths.append(missing := min(longest, left))
            left -= missing
            pieces = []
            while missing:
                stop = min(sizes[tensor], done + missing)
                if stop > done:
                    pieces.append((tensor, done, stop))
                missing -= stop - done
                done = stop
                if done == sizes[tensor]:
                    tensor, done = tensor + 1, 0
            parts.append(pieces)
        chunks.append((parts, tuple(lengths)))
    return chunks


def copy_in(place: Tensor, pieces: Sequence[Tensor]) -> None:
    """Copy pieces of tensors to a place in the memory, one after the other."""
    if len(pieces) == 1:
        place.copy_(pieces[0])
    elif pieces:
        torch.cat(pieces, out=place)  # type: ignore[arg-type]


def copy_out(place: Tensor, pieces: list[Tensor]) -> None:
    """Copy what lies at a place to pieces of tensors."""
    if len(pieces) == 1:
        pieces[0].copy_(place)
    elif pieces:
        torch._foreach_copy_(pieces, place.split_with_sizes([piece.numel() for piece in pieces]))
