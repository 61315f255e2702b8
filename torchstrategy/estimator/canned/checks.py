"""What the canned estimators say of wrong features."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torchstrategy.estimator.feature_column.base import FeatureColumn
from torchstrategy.estimator.heads.base import Head

__all__ = ["as_columns", "check_features", "check_head"]


def as_columns(columns: Iterable[FeatureColumn] | FeatureColumn | None) -> tuple[FeatureColumn, ...]:
    """Return feature columns as a tuple; a single one will do."""
    return (columns,) if isinstance(columns, FeatureColumn) else tuple(columns or ())


def check_features(features: Any) -> None:
    """Check that features are a dictionary.

    Raises:
        ValueError: they are something else.
    """
    if not isinstance(features, Mapping):
        raise ValueError(
            "features should be a dictionary of tensors by the keys of the feature columns. Let input_fn return pairs "
            f"({{key: tensor, ...}}, labels). Received features of type {type(features).__name__}."
        )


def check_head(head: Any) -> None:
    """Check that something is a head.

    Raises:
        TypeError: it is something else.
    """
    if not isinstance(head, Head):
        raise TypeError(f"head must be a head, such as ts.estimator.RegressionHead(). Received: {head!r}")
