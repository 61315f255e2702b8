"""What all feature columns have."""

from __future__ import annotations

import operator
import re
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from torchstrategy.estimator.feature_column.features import Features, Ids

__all__ = [
    "CategoricalColumn",
    "DenseColumn",
    "FeatureColumn",
    "as_count",
    "check_dtype",
    "check_key",
    "variable_scope",
]

_Self = TypeVar("_Self", bound="FeatureColumn")


class FeatureColumn(ABC):
    """Base class of feature columns: descriptions of how a model reads features. They never change.

    A column has a name, which is unique among the columns of a layer, and holds no variables; layers make those.
    """

    @property
    @abstractmethod
    def name(self) -> str:
        """The column's name, made of the keys of its features."""

    @property
    def variable_names(self) -> tuple[str, ...]:
        """Names of the variables that the column itself has in a layer."""
        return ()

    def make_variables(self) -> dict[str, nn.Parameter]:
        """Make the variables of ``variable_names``, by name."""
        return {}

    def __deepcopy__(self: _Self, memo: dict[int, Any]) -> _Self:
        return self  # it never changes, and a vocabulary need not be there once for each replica


class DenseColumn(FeatureColumn):
    """Base class of columns that give a fixed number of floating point numbers for each example."""

    @property
    @abstractmethod
    def variable_shape(self) -> tuple[int, ...]:
        """Shape of an example's numbers."""

    @abstractmethod
    def dense(self, features: Features, variables: Mapping[str, Tensor]) -> Tensor:
        """Return the numbers, ``[batch, *variable_shape]``.

        Args:
            features: the batch.
            variables: the column's own, by name.
        """


class CategoricalColumn(FeatureColumn):
    """Base class of columns that give any number of categories for each example."""

    @property
    @abstractmethod
    def num_buckets(self) -> int:
        """Number of categories."""

    @abstractmethod
    def make_ids(self, features: Features) -> Ids:
        """Return the categories of each example."""

    def ids(self, features: Features) -> Ids:
        """Return the categories of each example, which are made once for each batch."""
        return features.once((CategoricalColumn, id(self)), lambda: self.make_ids(features))


def variable_scope(name: str) -> str:
    """Return a column's name as it stands in the names of its variables, where torch allows no dots."""
    return re.sub(r"[^\w\-]", "_", name)


def check_key(key: Any) -> None:
    """Check that the key of a feature is a string.

    Raises:
        ValueError: it is something else.
    """
    if not isinstance(key, str):
        raise ValueError(f"key must be a string. Received: key={key!r} of type {type(key).__name__}")


def as_count(name: str, value: Any) -> int:
    """Return a number of things as an ``int``.

    Raises:
        TypeError: it is no integer.
    """
    try:
        return operator.index(value)
    except TypeError:
        raise TypeError(f"{name} must be an integer. Received: {value!r} of type {type(value).__name__}") from None


def check_dtype(dtype: Any, name: str) -> None:
    """Check that a categorical feature's dtype is ``str`` or an integer dtype of torch.

    Raises:
        ValueError: it is something else.
    """
    if dtype is str:
        return
    if not isinstance(dtype, torch.dtype) or dtype is torch.bool or dtype.is_floating_point or dtype.is_complex:
        raise ValueError(
            f"dtype must be string or integer: `str` or an integer dtype of torch. dtype: {dtype}, column: {name}"
        )
