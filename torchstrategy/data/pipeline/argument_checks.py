"""Checks of arguments, where a dataset is built."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

from torch import Tensor

from torchstrategy.errors import InvalidArgumentError

__all__ = ["AUTOTUNE", "check_callable", "check_int", "check_shard", "parallel_calls"]

AUTOTUNE = -1
_AUTOTUNED_CALLS = 4


def check_int(name: str, value: Any, minimum: int | None = None) -> int:
    """Return an argument as an integer.

    Raises:
        TypeError: it is none.
        InvalidArgumentError: it is below the minimum.
    """
    if isinstance(value, Tensor) and value.dim() == 0 and not (value.is_floating_point() or value.is_complex()):
        value = value.item()
    try:
        if isinstance(value, bool):
            raise TypeError
        number = operator.index(value)
    except TypeError:
        raise TypeError(f"{name} must be an integer. Received: {value!r} of type {type(value).__name__}") from None
    if minimum is not None and number < minimum:
        raise InvalidArgumentError(f"{name} must be at least {minimum}. Received: {number}")
    return number


def check_callable(name: str, value: Any) -> Callable[..., Any]:
    """Return an argument that must be a function.

    Raises:
        TypeError: it is none.
    """
    if not callable(value):
        raise TypeError(f"{name} must be a function. Received: {value!r} of type {type(value).__name__}")
    return value  # type: ignore[no-any-return]


def check_shard(num_shards: int, index: int) -> None:
    """Check the numbers of a shard.

    Raises:
        TypeError: one is no integer.
        InvalidArgumentError: one is out of range.
    """
    number = check_int("num_shards", num_shards, 1)
    if not 0 <= check_int("index", index) < number:
        raise InvalidArgumentError(f"index must be in [0, num_shards) = [0, {number}). Received: {index}")


def parallel_calls(value: Any) -> int:
    """Return the number of threads for ``num_parallel_calls``; 0 for none.

    Raises:
        TypeError: it is no integer.
        InvalidArgumentError: it is neither positive nor ``AUTOTUNE``.
    """
    if value is None:
        return 0
    number = check_int("num_parallel_calls", value, AUTOTUNE)
    if number == 0:
        raise InvalidArgumentError("num_parallel_calls must be at least 1, ts.data.AUTOTUNE or None. Received: 0")
    number = _AUTOTUNED_CALLS if number == AUTOTUNE else number
    return 0 if number == 1 else number
