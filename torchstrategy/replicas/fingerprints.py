"""Whether tensors have the same bits: a number for each, of many at once.

An accelerator would take longer to start a few kernels for each parameter than to read it.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from torchstrategy.base.devices import kind_of

__all__ = ["fingerprints", "have_equal_bits"]

#: Elements that are weighted together; and the rows of them that are at a time. On a CPU its caches hold these, an
#: accelerator is given what keeps it busy for longer than it takes to start a kernel.
_ROW = 1024
_ROWS, _ROWS_ON_CPU = 1 << 14, 1 << 6
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def fingerprints(tensors: Sequence[Tensor]) -> list[int]:
    """Return a number for each tensor that tells its bits, element by element; waits once for each device.

    It is the sum of the elements' bits times odd random weights, modulo 2**64: integers, so that neither the order of
    the sum nor the device matters, and weights, so that it depends on where each element stands.

    Args:
        tensors: of any shape, dtype and device, sparse ones included.

    Example:
        >>> from torchstrategy.replicas.fingerprints import fingerprints
        >>> vectors = [torch.tensor(numbers) for numbers in ([1.0, 2.0], [1.0, 2.0], [2.0, 1.0])]
        >>> first, same, other = fingerprints(vectors)
        >>> first == same, first == other
        (True, False)
    """
    numbers = [0] * len(tensors)
    with torch.no_grad():
        parts = [(k, *part) for k, tensor in enumerate(tensors) for part in _parts_of(tensor.detach())]
        parts.sort(key=lambda part: (str(part[2].device), part[2].itemsize))
        for _, group in itertools.groupby(parts, lambda part: part[2].device):
            own = list(group)
            for (k, factor, part), number in zip(own, _weighted([part for _, _, part in own]), strict=True):
                numbers[k] += factor * (number + part.numel())
    return numbers


def have_equal_bits(pairs: Sequence[tuple[Tensor, Tensor]]) -> list[bool]:
    """Say of which pairs of tensors it is known that their bits are equal; looks at those of accelerators only."""
    could_be = [
        not (a.is_cpu and b.is_cpu)
        and (a.shape, a.dtype) == (b.shape, b.dtype)
        and a.layout is b.layout is torch.strided
        for a, b in pairs
    ]
    tensors = {id(tensor): tensor for pair in itertools.compress(pairs, could_be) for tensor in pair}
    numbers = dict(zip(tensors, fingerprints(list(tensors.values())), strict=True))
    return [may and numbers[id(a)] == numbers[id(b)] for (a, b), may in zip(pairs, could_be, strict=True)]


def _parts_of(tensor: Tensor) -> list[tuple[int, Tensor]]:
    """Return what a tensor's bits are in, each with a factor; of a complex tensor that is real numbers."""
    if tensor.layout is not torch.strided:
        whole = tensor.to_sparse().coalesce()
        return [(31 * factor, part) for factor, part in _parts_of(whole.indices())] + _parts_of(whole.values())
    if not kind_of(tensor.device).has_views:  # of bits
        tensor = tensor.cpu()
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())
    return [(1, tensor.resolve_neg())]


def _weighted(parts: Sequence[Tensor]) -> list[int]:
    """Return the sum of each tensor's bits, each times its weight; the tensors of one itemsize follow each other."""
    by_itemsize = itertools.groupby(parts, lambda part: part.itemsize)
    sums = torch.cat([_sums_of_rows(list(group)) for _, group in by_itemsize])
    counts = [_num_rows(part.numel()) for part in parts]
    while max(counts) > 1:  # the sums of a tensor's rows are weighted in turn
        sums = _sums_of_rows(sums.split_with_sizes(counts))
        counts = list(map(_num_rows, counts))
    return sums.tolist()


def _num_rows(count: int) -> int:
    return max(1, -(-count // _ROW))


def _sums_of_rows(tensors: Sequence[Tensor]) -> Tensor:
    """Return the weighted sums of all rows of tensors of one itemsize, one tensor after the other."""
    device = tensors[0].device
    most = _ROW * (_ROWS_ON_CPU if device.type == "cpu" else _ROWS)
    weights, sums = _weights(device), []
    pieces: list[Tensor] = []
    missing = most
    for vector in _bits_of_rows(tensors, most):
        left = vector
        while len(left):
            pieces.append(left[:missing])
            left = left[missing:]
            missing -= len(pieces[-1])
            if missing == 0:
                sums.append((_joined(pieces).view(-1, _ROW) * weights).sum(1))
                pieces, missing = [], most
    if pieces:
        sums.append((_joined(pieces).view(-1, _ROW) * weights).sum(1))
    return _joined(sums)


def _joined(pieces: list[Tensor]) -> Tensor:
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces)


def _bits_of_rows(tensors: Sequence[Tensor], most: int) -> Iterator[Tensor]:
    """Yield the bits of tensors as vectors of integers, with zeros after each tensor that fill its last row."""
    zeros = torch.zeros(_ROW, dtype=_INTEGERS[tensors[0].itemsize], device=tensors[0].device)
    for tensor in tensors:
        count = tensor.numel()
        # Of a tensor that is not contiguous, `reshape` makes a copy: of a part of it at a time.
        is_whole = tensor.is_contiguous()
        for part in (tensor,) if is_whole else torch.split(tensor, max(1, most * len(tensor) // count)):
            yield part.reshape(-1).view(zeros.dtype)
        yield zeros[: _num_rows(count) * _ROW - count]


@functools.cache
def _weights(device: torch.device) -> Tensor:
    generator = torch.Generator("cpu").manual_seed(0)
    numbers = torch.randint(-(1 << 62), 1 << 62, (_ROW,), generator=generator, dtype=torch.int64, device="cpu")
    numbers = 2 * numbers + 1
    numbers[0] = 1  # so that a number is the same where it is weighted once more, beside those of larger tensors
    return numbers.to(device)
