"""Columns whose categories are numbers, hashes of values, or crosses of other columns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from torchstrategy.estimator.feature_column.features import (
    CategoricalColumn,
    Features,
    Ids,
    Strings,
    as_count,
    check_dtype,
    check_key,
)
from torchstrategy.estimator.feature_column.fingerprint import (
    bucket_of,
    combine_fingerprints,
    fingerprint_of,
    to_buckets,
    to_signed,
)

__all__ = [
    "categorical_column_with_hash_bucket",
    "categorical_column_with_identity",
    "crossed_column",
    "weighted_categorical_column",
]


@dataclass(frozen=True)
class WeightedCategoricalColumn(CategoricalColumn):
    """What ``weighted_categorical_column`` makes; its arguments are the attributes."""

    categorical_column: CategoricalColumn
    weight_feature_key: str
    dtype: torch.dtype

    @property
    def name(self) -> str:
        return f"{self.categorical_column.name}_weighted_by_{self.weight_feature_key}"

    @property
    def num_buckets(self) -> int:
        return self.categorical_column.num_buckets

    def make_ids(self, features: Features) -> Ids:
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
    def name(self) -> str:
        return self.key

    @property
    def num_buckets(self) -> int:
        return self.number_buckets

    def make_ids(self, features: Features) -> Ids:
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
    def name(self) -> str:
        return self.key

    @property
    def num_buckets(self) -> int:
        return self.hash_bucket_size

    def make_ids(self, features: Features) -> Ids:
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


_DEFAULT_HASH_KEY = 0xDECAFCAFFE  # tf's


@dataclass(frozen=True)
class CrossedColumn(CategoricalColumn):
    """What ``crossed_column`` makes; its arguments are the attributes."""

    keys: tuple[str | CategoricalColumn, ...]
    hash_bucket_size: int
    hash_key: int | None

    @property
    def name(self) -> str:
        return "_X_".join(sorted(key if isinstance(key, str) else key.name for key in self._leaves()))

    @property
    def num_buckets(self) -> int:
        return self.hash_bucket_size

    def make_ids(self, features: Features) -> Ids:
        inputs = [(_fingerprints(leaf, features), _is_sparse(leaf, features)) for leaf in self._leaves()]
        # tf's operation takes its dense inputs, features that are no columns, after the sparse ones
        ordered = [ids for ids, is_sparse in inputs if is_sparse] + [ids for ids, is_sparse in inputs if not is_sparse]
        crossed = torch.tensor(to_signed(self.hash_key or _DEFAULT_HASH_KEY), device=features.device).reshape(1, 1)
        present = torch.ones((1, 1), dtype=torch.bool, device=features.device)
        for values, is_there in ordered:
            crossed = combine_fingerprints(crossed.unsqueeze(-1), values.unsqueeze(1)).flatten(1)
            present = (present.unsqueeze(-1) & is_there.unsqueeze(1)).flatten(1)
        return Ids(to_buckets(crossed, self.hash_bucket_size), present)

    def _leaves(self) -> list[str | CategoricalColumn]:
        leaves: list[str | CategoricalColumn] = []
        for key in self.keys:
            leaves.extend(key._leaves() if isinstance(key, CrossedColumn) else [key])
        return leaves


def crossed_column(
    keys: Sequence[str | CategoricalColumn], hash_bucket_size: int, hash_key: int | None = None
) -> CrossedColumn:
    """Make a column whose categories are combinations of values, hashed.

    An example has one category for each combination of its features' values. Hashes are tf's.

    Args:
        keys: keys of features (strings or integers), or categorical columns other than hashed ones. Crossed columns
            stand for what they cross.
        hash_bucket_size: number of categories. Different combinations may share one.
        hash_key: starts the hash, so that crosses of the same features may differ. ``None`` and 0 mean tf's.

    Returns:
        A categorical column.

    Raises:
        ValueError: there are fewer than two keys, one is of another kind, or ``hash_bucket_size`` is not positive.

    Example:
        >>> place = ts.feature_column.crossed_column(["city", "street"], hash_bucket_size=5)
        >>> layer = ts.feature_column.DenseFeatures([ts.feature_column.indicator_column(place)])
        >>> layer({"city": ["Ulm", "Ulm"], "street": ["Main", "Side"]}).sum(dim=1)
        tensor([1., 1.])
    """
    if hash_bucket_size is None or as_count("hash_bucket_size", hash_bucket_size) < 1:
        raise ValueError(f"hash_bucket_size must be > 1. hash_bucket_size: {hash_bucket_size}")
    if isinstance(keys, str) or not keys or len(keys) < 2:
        raise ValueError(f"keys must be a list with length > 1. Given: {keys}")
    for key in keys:
        if isinstance(key, HashedCategoricalColumn):
            raise ValueError(
                "categorical_column_with_hash_bucket is not supported for crossing. Hashing before crossing will "
                f"increase probability of collision. Instead, use the feature name as a string. Given: {key}"
            )
        if not isinstance(key, (str, CategoricalColumn)):
            raise ValueError(
                "Unsupported key type. All keys must be either string, or categorical column except "
                f"HashedCategoricalColumn. Given: {key}"
            )
    return CrossedColumn(tuple(keys), hash_bucket_size, hash_key)


def _is_sparse(leaf: str | CategoricalColumn, features: Features) -> bool:
    return not isinstance(leaf, str) or features.raw(leaf).is_ragged


def _fingerprints(leaf: str | CategoricalColumn, features: Features) -> tuple[Tensor, Tensor]:
    """Return what is crossed, int64 ``[batch, n]``, and the mask of what is there."""
    if not isinstance(leaf, str):
        ids = leaf.ids(features)
        if ids.weights is not None:
            raise ValueError(
                f"crossed_column does not support weight_tensor, but the given column populates it: {leaf.name}"
            )
        return ids.values, ids.present
    raw = features.raw(leaf)
    values = raw.values
    if isinstance(values, Tensor):
        values, present = features.integers(leaf)
    else:
        texts, present = features.strings(leaf)
        prints = [to_signed(fingerprint_of(text)) for text in texts.ravel().tolist()]
        values = torch.tensor(prints, dtype=torch.int64).reshape(texts.shape).to(features.device)
    if not raw.is_ragged:  # in a cross an empty string, or -1, of a dense feature is a value, as in tf
        present = torch.ones_like(present) if raw.present is None else raw.present.reshape(present.shape)
    return values, present
