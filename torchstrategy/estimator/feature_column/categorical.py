"""Columns whose categories are numbers or hashes of values."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from torchstrategy.estimator.feature_column.column import CategoricalColumn, as_count, check_dtype, check_key
from torchstrategy.estimator.feature_column.features import Features, Ids, Strings
from torchstrategy.estimator.feature_column.fingerprint import bucket_of

__all__ = [
    "HashedCategoricalColumn",
    "IdentityCategoricalColumn",
    "WeightedCategoricalColumn",
    "categorical_column_with_hash_bucket",
    "categorical_column_with_identity",
    "weighted_categorical_column",
]


@dataclass(frozen=True)
class WeightedCategoricalColumn(CategoricalColumn):
    """What ``weighted_categorical_column`` makes; its arguments are the attributes."""

    categorical_column: CategoricalColumn
    weight_feature_key: str
    dtype: torch.dtype

    @property
    def name(self) -> str:  # noqa: D102 - the base class's
        return f"{self.categorical_column.name}_weighted_by_{self.weight_feature_key}"

    @property
    def num_buckets(self) -> int:  # noqa: D102 - the base class's
        return self.categorical_column.num_buckets

    def make_ids(self, features: Features) -> Ids:  # noqa: D102 - the base class's
        ids = self.categorical_column.ids(features)
        raw = features.raw(self.weight_feature_key)
        values = torch.zeros(raw.values.shape, device=features.device) if raw.is_empty else raw.values
        if not isinstance(values, Tensor):
            raise ValueError(f"Bad dtype of weights, expected numbers. key: {self.weight_feature_key}")
        weights = values.flatten(1).to(torch.float32)
        if raw.present is not None:
            weights = torch.where(raw.present.reshape(weights.shape), weights, 0.0)
        if weights.shape != ids.values.shape:
            raise ValueError(
                f"Each value needs a weight: feature {self.weight_feature_key} has shape {list(weights.shape)}, but "
                f"the values of {self.categorical_column.name} have {list(ids.values.shape)}."
            )
        return replace(ids, weights=weights)


def weighted_categorical_column(
    categorical_column: CategoricalColumn, weight_feature_key: str, dtype: torch.dtype = torch.float32
) -> WeightedCategoricalColumn:
    """Make a categorical column whose values have weights, which are another feature.

    Linear models multiply the weights of the categories by them; embeddings and indicators count them.

    Args:
        categorical_column: a categorical column.
        weight_feature_key: key of a feature of numbers, as many as the column's feature has values. A weight of 0
            leaves its value out.
        dtype: an integer or floating point dtype. Models always read float32.

    Returns:
        A categorical column.

    Raises:
        ValueError: it is no categorical column, or ``dtype`` is no dtype of numbers.

    Example:
        >>> term = ts.feature_column.categorical_column_with_vocabulary_list("term", ["a", "b"])
        >>> weighted = ts.feature_column.weighted_categorical_column(term, "frequency")
        >>> layer = ts.feature_column.DenseFeatures([ts.feature_column.indicator_column(weighted)])
        >>> layer({"term": [["a", "b"]], "frequency": [[0.25, 3.0]]})
        tensor([[0.2500, 3.0000]])
    """
    if not isinstance(categorical_column, CategoricalColumn):
        raise ValueError(f"categorical_column must be a categorical column. Given: {categorical_column}")
    check_key(weight_feature_key)
    if not isinstance(dtype, torch.dtype) or dtype is torch.bool or dtype.is_complex:
        raise ValueError(f"dtype {dtype} is not convertible to float.")
    return WeightedCategoricalColumn(categorical_column, weight_feature_key, dtype)


@dataclass(frozen=True)
class IdentityCategoricalColumn(CategoricalColumn):
    """What ``categorical_column_with_identity`` makes; its arguments are the attributes."""

    key: str
    number_buckets: int
    default_value: int | None

    @property
    def name(self) -> str:  # noqa: D102 - the base class's
        return self.key

    @property
    def num_buckets(self) -> int:  # noqa: D102 - the base class's
        return self.number_buckets

    def make_ids(self, features: Features) -> Ids:  # noqa: D102 - the base class's
        values, present = features.integers(self.key)
        if self.default_value is not None:
            is_known = (values >= 0) & (values < self.number_buckets)
            return Ids(torch.where(is_known, values, self.default_value), present)
        # Elsewhere the look-up itself fails: asking a GPU would cost a wait in every step
        checks = values.device.type == "cpu" and not torch.compiler.is_compiling()
        if checks and bool((values >= self.num_buckets).any()):
            raise ValueError(
                f"Feature {self.key} holds {int(values.max())}, but its column has num_buckets={self.num_buckets} and "
                "no default_value. Use more buckets, or a default_value for what is out of range."
            )
        return Ids(values, present)


@dataclass(frozen=True)
class HashedCategoricalColumn(CategoricalColumn):
    """What ``categorical_column_with_hash_bucket`` makes; its arguments are the attributes."""

    key: str
    hash_bucket_size: int
    dtype: type[str] | torch.dtype

    @property
    def name(self) -> str:  # noqa: D102 - the base class's
        return self.key

    @property
    def num_buckets(self) -> int:  # noqa: D102 - the base class's
        return self.hash_bucket_size

    def make_ids(self, features: Features) -> Ids:  # noqa: D102 - the base class's
        values: Strings | torch.Tensor
        values, present = features.strings(self.key) if self.dtype is str else features.integers(self.key)
        texts = map(str, values.flatten().tolist())  # tf hashes integers in decimal
        buckets = [bucket_of(text, self.hash_bucket_size) for text in texts]
        ids = torch.tensor(buckets, dtype=torch.int64).reshape(tuple(values.shape))
        return Ids(ids.to(features.device), present)


def categorical_column_with_identity(
    key: str, num_buckets: int, default_value: int | None = None
) -> IdentityCategoricalColumn:
    """Make a column whose values are the categories: integers from 0 to ``num_buckets - 1``.

    Args:
        key: the feature's key; also the column's name. The values are integers; -1 means that there is none.
        num_buckets: number of categories.
        default_value: the category of values out of range. ``None`` means that negative values have no category, and
            values from ``num_buckets`` on are an error.

    Returns:
        A categorical column.

    Raises:
        ValueError: ``num_buckets`` is not positive, or ``default_value`` is no category.

    Example:
        >>> day = ts.feature_column.categorical_column_with_identity("day", num_buckets=3)
        >>> layer = ts.feature_column.DenseFeatures([ts.feature_column.indicator_column(day)])
        >>> layer({"day": torch.tensor([[0, 2], [1, -1]])})
        tensor([[1., 0., 1.],
                [0., 1., 0.]])
    """
    check_key(key)
    num_buckets = as_count("num_buckets", num_buckets)
    if num_buckets < 1:
        raise ValueError(f"num_buckets {num_buckets} < 1, column_name {key}")
    if default_value is not None and not 0 <= default_value < num_buckets:
        raise ValueError(f"default_value {default_value} not in range [0, {num_buckets}), column_name {key}")
    return IdentityCategoricalColumn(key, num_buckets, default_value)


def categorical_column_with_hash_bucket(key: str, hash_bucket_size: int, dtype: Any = str) -> HashedCategoricalColumn:
    """Make a column whose values are hashed into a number of categories.

    A value's category is FarmHash's ``Fingerprint64`` of it modulo ``hash_bucket_size``, which is also tf's: a model's
    weights mean the same in both.

    Args:
        key: the feature's key; also the column's name. An empty string, or -1, means that there is no value.
        hash_bucket_size: number of categories. Different values may share one.
        dtype: ``str``, or an integer dtype for integers, which are hashed in decimal.

    Returns:
        A categorical column.

    Raises:
        ValueError: ``hash_bucket_size`` is missing or not positive, or ``dtype`` is another one.

    Example:
        >>> name = ts.feature_column.categorical_column_with_hash_bucket("name", hash_bucket_size=4)
        >>> layer = ts.feature_column.DenseFeatures([ts.feature_column.indicator_column(name)])
        >>> layer({"name": ["omar", "stringer", ""]})
        tensor([[0., 0., 1., 0.],
                [1., 0., 0., 0.],
                [0., 0., 0., 0.]])
    """
    check_key(key)
    if hash_bucket_size is None:
        raise ValueError(f"hash_bucket_size must be set. key: {key}")
    hash_bucket_size = as_count("hash_bucket_size", hash_bucket_size)
    if hash_bucket_size < 1:
        raise ValueError(f"hash_bucket_size must be at least 1. hash_bucket_size: {hash_bucket_size}, key: {key}")
    check_dtype(dtype, key)
    return HashedCategoricalColumn(key, hash_bucket_size, dtype)
