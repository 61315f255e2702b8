"""Sums of the ranks' tensors, always in the order of ranks, so that every rank computes the same bits."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from torchstrategy.collectives.packing import unpack_copies
from torchstrategy.errors import InvalidArgumentError

__all__ = ["as_addable", "is_addable", "sum_columns", "sum_in_order"]

_NARROW = (torch.float16, torch.bfloat16)
_ADDABLE = {
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8),
}


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
        summed = torch.empty(like[0].shape, dtype=like[0].dtype)
        sum_in_order(columns, summed.view(-1))
        return [summed]
    flat = torch.empty_like(columns[0])
    sum_in_order(columns, flat)
    return unpack_copies(flat, like)
