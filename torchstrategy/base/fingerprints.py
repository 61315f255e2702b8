"""Fingerprints of tensors: equal if, but for one chance in billions, all bits are equal and in the same places."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from torch import Tensor

__all__ = ["fingerprints"]

#: So many elements are weighted at a time; each of them is widened to 64 bits, next to its product.
_ROW_NUMBERS = 1 << 16
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def fingerprints(tensors: Sequence[Tensor]) -> list[int]:
    """Return a number for each tensor that tells its bits, element by element; waits once for each device.

    It is the sum of the elements' bits times odd random weights, modulo 2**64: integers, so that neither the order of
    the sum nor the device matters, and weights, so that it depends on where each element stands.

    Args:
        tensors: of any shape, dtype and device, sparse ones included.

    Example:
        >>> from torchstrategy.base.fingerprints import fingerprints
        >>> vectors = [torch.tensor(numbers) for numbers in ([1.0, 2.0], [1.0, 2.0], [2.0, 1.0])]
        >>> first, same, other = fingerprints(vectors)
        >>> first == same, first == other
        (True, False)
    """
    by_device: dict[torch.device, list[int]] = {}
    for k, tensor in enumerate(tensors):
        by_device.setdefault(tensor.device, []).append(k)
    numbers = [0] * len(tensors)
    with torch.no_grad():
        for indices in by_device.values():
            found = torch.stack([_fingerprint(tensors[k].detach()) for k in indices]).tolist()
            for k, number in zip(indices, found, strict=True):
                numbers[k] = number
    return numbers


def _fingerprint(tensor: Tensor) -> Tensor:
    if tensor.layout is not torch.strided:
        whole = tensor.to_sparse().coalesce()
        return _fingerprint(whole.indices()) * 31 + _fingerprint(whole.values())
    if tensor.device.type == "xla":  # which has no views of bits
        tensor = tensor.cpu()
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())
    tensor = tensor.resolve_neg()
    # Of a tensor that is not contiguous, `reshape` makes a copy: of a part of it at a time.
    rows = max(1, _ROW_NUMBERS * len(tensor) // max(1, tensor.numel())) if tensor.dim() else 1
    parts = torch.split(tensor, rows) if tensor.dim() else (tensor,)
    sums = [_weighted(part.reshape(-1).view(_INTEGERS[tensor.itemsize])) for part in parts]
    total = sums[0] if len(sums) == 1 else _weighted(torch.stack(sums))
    return total + tensor.numel()


def _weighted(bits: Tensor) -> Tensor:
    """Return the sum of a vector's elements, each times its weight; rows of many are added up, weighted again."""
    weights = _weights(bits.device)
    sums = [(row.to(torch.int64) * weights[: len(row)]).sum() for row in torch.split(bits, _ROW_NUMBERS)]
    if len(sums) == 1:
        return sums[0]
    return _weighted(torch.stack(sums))


@functools.cache
def _weights(device: torch.device) -> Tensor:
    generator = torch.Generator("cpu").manual_seed(0)
    numbers = torch.randint(-(1 << 62), 1 << 62, (_ROW_NUMBERS,), generator=generator, dtype=torch.int64, device="cpu")
    return (2 * numbers + 1).to(device)
