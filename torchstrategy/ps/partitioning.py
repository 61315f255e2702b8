"""Into how many shards a variable is cut, as tf's partitioners decide it.

A partitioner only counts; which rows each shard holds and on which task it lives is decided in ``layout.py``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

__all__ = ["FixedShardsPartitioner", "MaxSizePartitioner", "MinSizePartitioner", "Partitioner"]


class Partitioner:
    """Base class of what says into how many shards to cut a variable.

    Derive from it (or pass any function with the signature of ``__call__``) for a rule of your own. A parameter
    server cuts along axis 0 only, and never asks for scalars.

    Example:
        >>> class OneShardPerMillion(ts.experimental.partitioners.Partitioner):
        ...     def __call__(self, shape, dtype, axis=0):
        ...         return [-(-shape[0] // 1_000_000), *[1] * (len(shape) - 1)]
        >>> OneShardPerMillion()([2_500_000, 16], torch.float32)
        [3, 1]
    """

    def __call__(self, shape: Sequence[int], dtype: torch.dtype | type[str], axis: int = 0) -> list[int]:
        """Return the number of shards along each axis.

        Args:
            shape: the variable's.
            dtype: the variable's; ``str`` is counted with ``bytes_per_string`` bytes each.
            axis: the one to cut.
        """
        raise NotImplementedError


class FixedShardsPartitioner(Partitioner):
    """Cut every variable into the same number of shards, at most one for each row.

    Args:
        num_shards: into how many.

    Example:
        >>> ts.experimental.partitioners.FixedShardsPartitioner(num_shards=2)([10, 3], torch.float32)
        [2, 1]
    """

    def __init__(self, num_shards: int) -> None:
        self._num_shards = num_shards

    def __call__(self, shape: Sequence[int], dtype: torch.dtype | type[str], axis: int = 0) -> list[int]:  # noqa: ARG002
        """Return the number of shards along each axis.

        Raises:
            IndexError: the shape has no such axis.
        """
        return _along(shape, axis, min(self._num_shards, shape[axis]))


class MinSizePartitioner(Partitioner):
    """Cut into as many shards as fit ``max_shards``, each of about ``min_shard_bytes`` or more.

    The number is ``min(max_shards, rows, ceil(bytes / min_shard_bytes))``, tf's rule: as it rounds up, shards may be
    somewhat smaller than ``min_shard_bytes``.

    Args:
        min_shard_bytes: smallest size of a shard.
        max_shards: most shards of one variable; the default of 1 never cuts.
        bytes_per_string: what to count for an element of dtype ``str``.

    Raises:
        ValueError: an argument is smaller than 1.

    Example:
        >>> ts.experimental.partitioners.MinSizePartitioner(min_shard_bytes=4, max_shards=2)([6, 1], torch.float32)
        [2, 1]
    """

    def __init__(self, min_shard_bytes: int = 256 << 10, max_shards: int = 1, bytes_per_string: int = 16) -> None:
        _check_positive(min_shard_bytes=min_shard_bytes, max_shards=max_shards, bytes_per_string=bytes_per_string)
        self._min_shard_bytes = min_shard_bytes
        self._max_shards = max_shards
        self._bytes_per_string = bytes_per_string

    def __call__(self, shape: Sequence[int], dtype: torch.dtype | type[str], axis: int = 0) -> list[int]:
        """Return the number of shards along each axis.

        Raises:
            ValueError: the shape has no such axis.
        """
        if not -len(shape) <= axis < len(shape):
            raise ValueError(f"There is no axis {axis} to cut. Received: shape={list(shape)}")
        num_bytes = math.prod(shape) * _element_size(dtype, self._bytes_per_string)
        num_shards = min(self._max_shards, shape[axis], -(-num_bytes // self._min_shard_bytes))
        return _along(shape, axis, max(1, num_shards))


class MaxSizePartitioner(Partitioner):
    """Cut into as few shards as keep each at ``max_shard_bytes`` or less.

    Args:
        max_shard_bytes: largest size of a shard; a single row may be larger.
        max_shards: most shards of one variable, which may make them larger; ``None`` (or 0) is no limit.
        bytes_per_string: what to count for an element of dtype ``str``.

    Raises:
        ValueError: ``max_shard_bytes`` or ``bytes_per_string`` is smaller than 1, or ``max_shards`` is negative.

    Example:
        >>> ts.experimental.partitioners.MaxSizePartitioner(max_shard_bytes=8)([6, 1], torch.float32)
        [3, 1]
    """

    def __init__(self, max_shard_bytes: int, max_shards: int | None = None, bytes_per_string: int = 16) -> None:
        _check_positive(max_shard_bytes=max_shard_bytes, bytes_per_string=bytes_per_string)
        if max_shards:
            _check_positive(max_shards=max_shards)
        self._max_shard_bytes = max_shard_bytes
        self._max_shards = max_shards
        self._bytes_per_string = bytes_per_string

    def __call__(self, shape: Sequence[int], dtype: torch.dtype | type[str], axis: int = 0) -> list[int]:
        """Return the number of shards along each axis.

        Raises:
            IndexError: the shape has no such axis.
        """
        rows = shape[axis]
        row_bytes = math.prod(shape) // max(1, rows) * _element_size(dtype, self._bytes_per_string)
        rows_per_shard = max(1, self._max_shard_bytes // row_bytes) if row_bytes else max(1, rows)
        num_shards = max(1, -(-rows // rows_per_shard))
        return _along(shape, axis, min(num_shards, self._max_shards) if self._max_shards else num_shards)


def _along(shape: Sequence[int], axis: int, num_shards: int) -> list[int]:
    counts = [1] * len(shape)
    counts[axis] = num_shards
    return counts


def _element_size(dtype: torch.dtype | type[str], bytes_per_string: int) -> int:
    return bytes_per_string if dtype is str else dtype.itemsize  # type: ignore[union-attr]


def _check_positive(**arguments: int) -> None:
    for name, value in arguments.items():
        if value < 1:
            raise ValueError(f"{name} must be at least 1. Received: {value}")
