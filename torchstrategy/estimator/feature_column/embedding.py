"""Dense columns of categories."""

from __future__ import annotations

import math
import operator
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from torchstrategy.checkpoint.reader import load_variable
from torchstrategy.estimator.feature_column.features import CategoricalColumn, DenseColumn, Features, Ids, as_count

__all__ = ["check_combiner", "combine_rows", "embedding_column", "indicator_column"]

COMBINERS = ("mean", "sqrtn", "sum")


def check_combiner(name: str, combiner: str) -> None:
    """Check the name of a way to combine rows.

    Raises:
        ValueError: there is none of this name.
    """
    if combiner not in COMBINERS:
        raise ValueError(f"{name} must be one of {', '.join(map(repr, COMBINERS))}. Received: {combiner!r}")


def combine_rows(table: Tensor, ids: Ids, combiner: str, max_norm: float | None = None) -> Tensor:
    """Combine the rows of each example's categories.

    Args:
        table: ``[num_buckets, columns]``.
        ids: the categories. Negative ones are left out, and so are those without a positive weight unless rows are
            added up.
        combiner: ``"sum"``; ``"mean"``, weighted; ``"sqrtn"``, the sum divided by the root of the sum of squared
            weights.
        max_norm: longer rows are scaled to this l2 norm first; ``None`` means that they are not.

    Returns:
        ``[batch, columns]``, with zeros for examples without categories.
    """
    factors = category_weights(ids, keeps_all=combiner == "sum").to(table.dtype)
    rows = F.embedding(ids.values.clamp(min=0), table)
    if max_norm is not None:
        norms = torch.linalg.vector_norm(rows, dim=-1, keepdim=True)
        rows = rows * (max_norm / norms.clamp(min=max_norm))
    total = (rows * factors.unsqueeze(-1)).sum(dim=1)
    if combiner == "sum":
        return total
    divisor = factors.sum(dim=1, keepdim=True) if combiner == "mean" else factors.square().sum(1, keepdim=True).sqrt()
    return total / torch.where(divisor == 0, torch.ones_like(divisor), divisor)


def category_weights(ids: Ids, *, keeps_all: bool = True) -> Tensor:
    """Return what each category counts, ``[batch, n]``; 0 where there is none, or its weight may not be kept."""
    is_valid = ids.present & (ids.values >= 0)
    if ids.weights is None:
        return is_valid.to(torch.float32)
    if not keeps_all:
        is_valid = is_valid & (ids.weights > 0)
    return torch.where(is_valid, ids.weights, torch.zeros_like(ids.weights))


Initializer = Callable[[Tensor], Any]


@dataclass(frozen=True)
class IndicatorColumn(DenseColumn):
    """What ``indicator_column`` makes; its argument is the attribute."""

    categorical_column: CategoricalColumn

    @property
    def name(self) -> str:
        return f"{self.categorical_column.name}_indicator"

    @property
    def variable_shape(self) -> tuple[int, ...]:
        return (self.categorical_column.num_buckets,)

    def dense(self, features: Features, variables: Mapping[str, Tensor]) -> Tensor:  # noqa: ARG002 - the base's
        ids = self.categorical_column.ids(features)
        counts = torch.zeros((ids.values.shape[0], *self.variable_shape), dtype=torch.float32, device=ids.values.device)
        return counts.scatter_add(1, ids.values.clamp(min=0), category_weights(ids))


@dataclass(frozen=True)
class EmbeddingColumn(DenseColumn):
    """What ``embedding_column`` makes; its arguments are the attributes."""

    categorical_column: CategoricalColumn
    dimension: int
    combiner: str
    initializer: Initializer
    ckpt_to_load_from: str | None
    tensor_name_in_ckpt: str | None
    max_norm: float | None
    trainable: bool

    @property
    def name(self) -> str:
        return f"{self.categorical_column.name}_embedding"

    @property
    def variable_shape(self) -> tuple[int, ...]:
        return (self.dimension,)

    @property
    def variable_names(self) -> tuple[str, ...]:
        return ("embedding_weights",)

    def make_variables(self) -> dict[str, nn.Parameter]:
        shape = (self.categorical_column.num_buckets, self.dimension)
        if self.ckpt_to_load_from is None or self.tensor_name_in_ckpt is None:
            weights = torch.empty(shape)
            with torch.no_grad():
                self.initializer(weights)
        else:
            loaded = load_variable(self.ckpt_to_load_from, self.tensor_name_in_ckpt)
            if tuple(loaded.shape) != shape:
                raise ValueError(
                    f"{self.tensor_name_in_ckpt} in {self.ckpt_to_load_from} has shape {list(loaded.shape)}, but "
                    f"{self.name} needs {list(shape)}."
                )
            weights = torch.empty(shape).copy_(loaded)
        return {"embedding_weights": nn.Parameter(weights, requires_grad=self.trainable)}

    def dense(self, features: Features, variables: Mapping[str, Tensor]) -> Tensor:
        ids = self.categorical_column.ids(features)
        return combine_rows(variables["embedding_weights"], ids, self.combiner, self.max_norm)


def indicator_column(categorical_column: CategoricalColumn) -> IndicatorColumn:
    """Make a dense column of how often an example has each category; with one value this is one-hot.

    Args:
        categorical_column: a categorical column. The weights of a weighted one are added up.

    Returns:
        A dense column of ``num_buckets`` numbers.

    Raises:
        ValueError: it is no categorical column.

    Example:
        >>> tag = ts.feature_column.categorical_column_with_vocabulary_list("tag", ["new", "hot"])
        >>> layer = ts.feature_column.DenseFeatures([ts.feature_column.indicator_column(tag)])
        >>> layer({"tag": [["hot", "hot", "new"], ["old"]]})
        tensor([[1., 2.],
                [0., 0.]])
    """
    _check_categorical(categorical_column)
    return IndicatorColumn(categorical_column)


def embedding_column(  # noqa: PLR0913 - tf's signature
    categorical_column: CategoricalColumn,
    dimension: int,
    combiner: str = "mean",
    initializer: Initializer | None = None,
    ckpt_to_load_from: str | os.PathLike[str] | None = None,
    tensor_name_in_ckpt: str | None = None,
    max_norm: float | None = None,
    trainable: bool = True,  # noqa: FBT001, FBT002 - tf's
    use_safe_embedding_lookup: bool = True,  # noqa: ARG001, FBT001, FBT002 - tf's
) -> EmbeddingColumn:
    """Make a dense column of vectors that are trained, one for each category.

    Args:
        categorical_column: a categorical column.
        dimension: length of the vectors.
        combiner: how the vectors of an example with several values become one: ``"mean"``, ``"sqrtn"`` or ``"sum"``. An
            example without a value has zeros.
        initializer: fills a tensor ``[num_buckets, dimension]`` in place, as the functions of ``torch.nn.init`` do.
            ``None`` means a truncated normal distribution of mean 0 and standard deviation ``1 / sqrt(dimension)``.
        ckpt_to_load_from: a checkpoint, or a directory of checkpoints, to take the first values from.
        tensor_name_in_ckpt: the tensor's name there.
        max_norm: longer vectors are scaled to this l2 norm.
        trainable: whether the vectors are trained.
        use_safe_embedding_lookup: accepted as in tf; has no effect.

    Returns:
        A dense column of ``dimension`` numbers, with the variable ``embedding_weights``.

    Raises:
        ValueError: it is no categorical column, ``dimension`` is not positive, there is no such ``combiner``,
            ``initializer`` is not callable, or only one of the arguments for a checkpoint is there.

    Example:
        >>> color = ts.feature_column.categorical_column_with_vocabulary_list("color", ["red", "green"])
        >>> embedded = ts.feature_column.embedding_column(color, 3, initializer=torch.nn.init.ones_)
        >>> ts.feature_column.DenseFeatures([embedded])({"color": ["green", "blue"]})
        tensor([[1., 1., 1.],
                [0., 0., 0.]], grad_fn=<CatBackward0>)
    """
    _check_categorical(categorical_column)
    if dimension is None or as_count("dimension", dimension) < 1:
        raise ValueError(f"Invalid dimension {dimension}.")
    if (ckpt_to_load_from is None) != (tensor_name_in_ckpt is None):
        raise ValueError("Must specify both `ckpt_to_load_from` and `tensor_name_in_ckpt` or none of them.")
    if initializer is not None and not callable(initializer):
        raise ValueError(
            f"initializer must be callable if specified. Embedding of column_name: {categorical_column.name}"
        )
    check_combiner("combiner", combiner)
    return EmbeddingColumn(
        categorical_column,
        operator.index(dimension),
        combiner,
        initializer or _TruncatedNormal(1 / math.sqrt(dimension)),
        None if ckpt_to_load_from is None else os.fspath(ckpt_to_load_from),
        tensor_name_in_ckpt,
        max_norm,
        trainable,
    )


@dataclass(frozen=True)
class _TruncatedNormal:
    """The default initializer; a class, so that columns can be pickled and compared."""

    std: float

    def __call__(self, tensor: Tensor) -> None:
        nn.init.trunc_normal_(tensor, std=self.std, a=-2 * self.std, b=2 * self.std)


def _check_categorical(column: Any) -> None:
    if not isinstance(column, CategoricalColumn):
        raise ValueError(f"categorical_column must be a categorical column. Given: {column}")
