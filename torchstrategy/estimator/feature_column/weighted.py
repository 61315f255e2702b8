"""Categories with weights."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from torchstrategy.estimator.feature_column.base import CategoricalColumn, check_key
from torchstrategy.estimator.feature_column.features import Features, Ids

__all__ = ["WeightedCategoricalColumn", "weighted_categorical_column"]


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
