"""Columns of combinations of features."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from torchstrategy.estimator.feature_column.categorical import HashedCategoricalColumn
from torchstrategy.estimator.feature_column.column import CategoricalColumn, as_count
from torchstrategy.estimator.feature_column.features import Features, Ids
from torchstrategy.estimator.feature_column.fingerprint import (
    combine_fingerprints,
    fingerprint_of,
    to_buckets,
    to_signed,
)

__all__ = ["CrossedColumn", "crossed_column"]

_DEFAULT_HASH_KEY = 0xDECAFCAFFE  # tf's


@dataclass(frozen=True)
class CrossedColumn(CategoricalColumn):
    """What ``crossed_column`` makes; its arguments are the attributes."""

    keys: tuple[str | CategoricalColumn, ...]
    hash_bucket_size: int
    hash_key: int | None

    @property
    def name(self) -> str:  # noqa: D102 - the base class's
        return "_X_".join(sorted(key if isinstance(key, str) else key.name for key in self._leaves()))

    @property
    def num_buckets(self) -> int:  # noqa: D102 - the base class's
        return self.hash_bucket_size

    def make_ids(self, features: Features) -> Ids:  # noqa: D102 - the base class's
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
