"""Rows of a variable: which ones a program names, what it brings for them, and their gradient."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from torchstrategy.errors import InvalidArgumentError

__all__ = ["check_padding_index", "rows_of", "to_row_numbers", "to_row_values"]


class _Rows(torch.autograd.Function):
    """Gives rows that were pulled; their gradient is that of the variable, sparse."""

    @staticmethod
    def forward(ctx: Any, variable: Tensor, indices: Tensor, rows: Tensor) -> Tensor:
        ctx.save_for_backward(indices)
        ctx.shape = variable.shape
        return rows.view_as(rows)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        (indices,) = ctx.saved_tensors
        sparse = torch.sparse_coo_tensor(
            indices[None], gradient, ctx.shape, check_invariants=False, is_coalesced=not torch.is_grad_enabled()
        )
        return sparse, None, None


def rows_of(variable: Tensor, indices: Tensor, rows: Tensor) -> Tensor:
    """Return rows through which a backward pass reaches their variable.

    Args:
        variable: a leaf of autograd, whose values are not looked at.
        indices: numbers of the rows, ``[k]`` in int64, sorted, each once.
        rows: their values, ``[k, ...]``.
    """
    result: Tensor = _Rows.apply(variable, indices, rows)  # type: ignore[no-untyped-call]
    return result


def to_row_numbers(name: str, shape: Sequence[int], indices: Any) -> Tensor:
    """Return what names rows of a variable as int64, of any shape.

    Raises:
        InvalidArgumentError: these are no integers, or one is out of range; negative numbers are.
    """
    try:
        numbers = torch.as_tensor(indices)
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:
        raise InvalidArgumentError(f"Rows of {name!r} are named by integers. Received: {indices!r}") from error
    if not numbers.numel() and not isinstance(indices, Tensor):
        numbers = numbers.to(torch.int64)  # an empty list has torch's default dtype
    if numbers.dtype not in _INTEGERS or numbers.layout != torch.strided:
        raise InvalidArgumentError(f"Rows of {name!r} are named by integers. Received: indices of {numbers.dtype}")
    numbers = numbers.detach().to(torch.int64)
    if numbers.numel():
        first, last = map(int, torch.aminmax(numbers))
        if first < 0 or last >= shape[0]:
            wrong = first if first < 0 else last
            raise InvalidArgumentError(f"{name!r} has rows 0 to {shape[0] - 1}. Received: index {wrong}")
    return numbers


def to_row_values(name: str, shape: Sequence[int], dtype: torch.dtype, num_rows: int, values: Any) -> Tensor:
    """Return what is brought for rows of a variable as ``[num_rows, *shape[1:]]`` in its dtype.

    Raises:
        InvalidArgumentError: it has not this shape and does not broadcast to it, or another kind of dtype.
    """
    try:
        found = torch.as_tensor(values).detach()
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:
        raise InvalidArgumentError(f"Rows of {name!r} can't be changed by {values!r}: it is no tensor.") from error
    if found.numel() and not torch.can_cast(found.dtype, dtype):
        raise InvalidArgumentError(
            f"{name!r} has dtype {dtype}. Received: values of {found.dtype}. Convert them: `values.to({dtype})`"
        )
    try:
        return found.to(dtype).expand((num_rows, *shape[1:]))
    except RuntimeError as error:
        raise InvalidArgumentError(
            f"Values of shape {tuple(found.shape)} don't fit {num_rows} rows of {name!r}, whose shape is "
            f"{tuple(shape)}."
        ) from error


def check_padding_index(name: str, num_rows: int, padding: int) -> int:
    """Return the number of the row that pads; negative ones count from the end.

    Raises:
        InvalidArgumentError: there is no such row.
    """
    if not -num_rows <= padding < num_rows:
        raise InvalidArgumentError(
            f"padding_idx must be a row of {name!r}, {-num_rows} to {num_rows - 1}. Received: {padding}"
        )
    return padding % num_rows


_INTEGERS = frozenset({torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8})
