"""Numbers of many tensors, as if they lay one after the other, in chunks that pass through shared memory."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

__all__ = ["Chunk", "copy_in", "copy_out", "divide"]

#: A tensor's position, a start and a stop in it.
_Piece = tuple[int, int, int]


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
