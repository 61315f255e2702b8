"""Columns of numbers."""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from torchstrategy.estimator.feature_column.features import CategoricalColumn, DenseColumn, Features, Ids, check_key

__all__ = ["NumericColumn", "bucketized_column", "numeric_column"]

Normalizer = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class NumericColumn(DenseColumn):
    """What ``numeric_column`` makes; its arguments are the attributes."""

    key: str
    shape: tuple[int, ...]
    default_value: tuple[float, ...] | None
    dtype: torch.dtype
    normalizer_fn: Normalizer | None

    @property
    def name(self) -> str:  # noqa: D102 - the base class's
        return self.key

    @property
    def variable_shape(self) -> tuple[int, ...]:  # noqa: D102 - the base class's
        return self.shape

    def get_dense(self, features: Mapping[str, Any]) -> Tensor:
        """Return the numbers of a batch of features, float32 ``[batch, *shape]``."""
        return self.dense(Features(features), {})

    def dense(self, features: Features, variables: Mapping[str, Tensor]) -> Tensor:  # noqa: ARG002, D102 - the base's
        return features.once((NumericColumn, id(self)), lambda: self._make(features))

    def _make(self, features: Features) -> Tensor:
        raw = features.raw(self.key)
        values = raw.values
        if raw.is_padded:
            raise ValueError(
                f"A numeric column needs as many values for each example. Sparse and ragged values are not supported. "
                f"key: {self.key}"
            )
        if raw.is_empty:
            values = torch.zeros(raw.values.shape if raw.values.shape[0] else (0, *self.shape), device=features.device)
        if not isinstance(values, Tensor):
            raise ValueError(f"Feature {self.key} holds strings, but its column is numeric. Pass numbers.")
        if values.shape[1:].numel() != math.prod(self.shape):
            raise ValueError(
                f"Feature {self.key} has values of shape {list(values.shape[1:])} for each example, but its column has "
                f"shape={self.shape}. Give numeric_column the shape of the values."
            )
        values = values.reshape(-1, *self.shape)
        if raw.present is not None:
            values = self._fill(values, raw.present.reshape(values.shape))
        if self.normalizer_fn is not None:
            values = self._normalize(self.normalizer_fn, values)
        return values.to(torch.float32)

    def _normalize(self, normalizer_fn: Normalizer, values: Tensor) -> Tensor:
        normalized = normalizer_fn(values)
        if not isinstance(normalized, Tensor) or normalized.numel() != values.numel():
            returned = list(normalized.shape) if isinstance(normalized, Tensor) else type(normalized).__name__
            raise ValueError(
                f"normalizer_fn of {self.key} must return a tensor of the shape that it gets, {list(values.shape)}. It "
                f"returned: {returned}"
            )
        return normalized.reshape(values.shape)

    def _fill(self, values: Tensor, present: Tensor) -> Tensor:
        if self.default_value is None:
            raise ValueError(
                f"Feature {self.key} has no value in {int((~present).sum())} places. Fill them, or give numeric_column "
                "a default_value."
            )
        default = torch.tensor(self.default_value, device=values.device).reshape(self.shape)
        return torch.where(present, values, default)


@dataclass(frozen=True)
class BucketizedColumn(DenseColumn, CategoricalColumn):
    """What ``bucketized_column`` makes; its arguments are the attributes."""

    source_column: NumericColumn
    boundaries: tuple[float, ...]

    @property
    def name(self) -> str:
        return f"{self.source_column.name}_bucketized"

    @property
    def num_buckets(self) -> int:
        return (len(self.boundaries) + 1) * self.source_column.shape[0]

    @property
    def variable_shape(self) -> tuple[int, ...]:
        return (*self.source_column.shape, len(self.boundaries) + 1)

    def dense(self, features: Features, variables: Mapping[str, Tensor]) -> Tensor:  # noqa: ARG002 - the base's
        return F.one_hot(self._buckets(features), len(self.boundaries) + 1).to(torch.float32)

    def make_ids(self, features: Features) -> Ids:
        buckets = self._buckets(features)
        first = torch.arange(self.source_column.shape[0], device=buckets.device) * (len(self.boundaries) + 1)
        return Ids(buckets + first, torch.ones_like(buckets, dtype=torch.bool))

    def _buckets(self, features: Features) -> Tensor:
        values = self.source_column.dense(features, {})
        return torch.bucketize(
            values, torch.tensor(self.boundaries, dtype=values.dtype, device=values.device), right=True
        )


def numeric_column(
    key: str,
    shape: int | Sequence[int] = (1,),
    default_value: Any = None,
    dtype: torch.dtype = torch.float32,
    normalizer_fn: Normalizer | None = None,
) -> NumericColumn:
    """Make a column of real numbers.

    Args:
        key: the feature's key; also the column's name.
        shape: shape of an example's values.
        default_value: what stands for values that are ``None`` in a list or an array of objects: a number, or a nested
            list of ``shape``. ``None`` means that every value must be there. A key that is missing is an error.
        dtype: an integer or floating point dtype, that of ``default_value``. Models always read float32.
        normalizer_fn: takes the values ``[batch, *shape]`` and returns as many, such as ``lambda x: (x - 3.0) / 4.2``.

    Returns:
        A dense column.

    Raises:
        TypeError: ``normalizer_fn`` is not callable, ``shape`` holds no integers, or ``default_value`` does not fit
            ``dtype``.
        ValueError: ``key`` is no string, a size is not positive, ``dtype`` is no dtype of numbers, or
            ``default_value`` does not have ``shape``.

    Example:
        >>> price = ts.feature_column.numeric_column("price", normalizer_fn=lambda x: x / 10)
        >>> ts.feature_column.DenseFeatures([price])({"price": torch.tensor([5, 20])})
        tensor([[0.5000],
                [2.0000]])
    """
    check_key(key)
    sizes = _check_shape(shape, key)
    if not isinstance(dtype, torch.dtype) or dtype is torch.bool or dtype.is_complex:
        raise ValueError(f"dtype must be convertible to float. dtype: {dtype}, key: {key}")
    if normalizer_fn is not None and not callable(normalizer_fn):
        raise TypeError(f"normalizer_fn must be a callable. Given: {normalizer_fn}")
    return NumericColumn(key, sizes, _check_default(default_value, sizes, dtype, key), dtype, normalizer_fn)


def bucketized_column(source_column: NumericColumn, boundaries: Sequence[float]) -> BucketizedColumn:
    """Make a column of the ranges into which numbers fall.

    Boundaries ``[0, 1]`` make three buckets: below 0, from 0 to below 1, and from 1 on. With ``shape=[n]`` each of the
    ``n`` numbers has buckets of its own.

    Args:
        source_column: a one-dimensional numeric column.
        boundaries: numbers in ascending order.

    Returns:
        A column that is dense (one-hot) as well as categorical. Linear models take it as categorical.

    Raises:
        ValueError: ``source_column`` is no numeric column or has several dimensions, or ``boundaries`` is empty or not
            in order.

    Example:
        >>> year = ts.feature_column.bucketized_column(ts.feature_column.numeric_column("year"), [1950, 2000])
        >>> ts.feature_column.DenseFeatures([year])({"year": torch.tensor([1949, 1950, 2020])})
        tensor([[1., 0., 0.],
                [0., 1., 0.],
                [0., 0., 1.]])
    """
    if not isinstance(source_column, NumericColumn):
        raise ValueError(f"source_column must be a column generated with numeric_column(). Given: {source_column}")
    if len(source_column.shape) > 1:
        raise ValueError(f"source_column must be one-dimensional column. Given: {source_column}")
    if not isinstance(boundaries, (list, tuple)) or not boundaries:
        raise ValueError(f"boundaries must not be empty: a list of numbers in ascending order. Given: {boundaries!r}")
    if any(low >= high for low, high in itertools.pairwise(boundaries)):
        raise ValueError(f"boundaries must be a sorted list. Given: {boundaries!r}")
    return BucketizedColumn(source_column, tuple(float(value) for value in boundaries))


def _check_shape(shape: Any, key: str) -> tuple[int, ...]:
    sizes = []
    for size in shape if isinstance(shape, Sequence) else (shape,):
        try:
            sizes.append(operator.index(size))
        except TypeError:
            raise TypeError(f"shape dimensions must be integer. shape: {shape}, key: {key}") from None
        if sizes[-1] < 1:
            raise ValueError(f"shape dimensions must be greater than 0. shape: {shape}, key: {key}")
    return tuple(sizes)


def _check_default(value: Any, shape: tuple[int, ...], dtype: torch.dtype, key: str) -> tuple[float, ...] | None:
    if value is None:
        return None
    array = np.asarray(value)
    if array.dtype.kind not in "iuf" or (array.dtype.kind == "f" and not dtype.is_floating_point):
        raise TypeError(
            f"default_value must be compatible with dtype. default_value: {value}, dtype: {dtype}, key: {key}"
        )
    if array.ndim and array.shape != shape:
        raise ValueError(
            f"The shape of default_value must be equal to given shape. default_value: {value}, shape: {shape}, key: "
            f"{key}"
        )
    return tuple(np.broadcast_to(array, shape).ravel().tolist())
