"""How often predictions are right.

A prediction that is ``nan`` is wrong; a label that is no class is never predicted. So nothing is skipped in silence.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from torchstrategy import errors
from torchstrategy.metrics.mean import MeanMetricWrapper
from torchstrategy.metrics.metric_inputs import as_pair, same_shape_pair

__all__ = [
    "Accuracy",
    "BinaryAccuracy",
    "CategoricalAccuracy",
    "SparseCategoricalAccuracy",
    "SparseTopKCategoricalAccuracy",
    "TopKCategoricalAccuracy",
    "equal_above",
    "in_top_k_dense",
    "in_top_k_sparse",
]


class Accuracy(MeanMetricWrapper):
    """How often predictions equal labels.

    Args:
        name: the metric's name, for logs.
        dtype: dtype of the result; ``None`` means torch's default dtype at construction. Sums are kept in ``float64``.

    ``update_state(y_true, y_pred, sample_weight)`` takes values of one shape ``[batch, ...]``. (tf counts a call with
    values of one dimension as one example, however many there are; here each value is an example.)

    Example:
        >>> metric = ts.metrics.Accuracy()
        >>> metric.update_state([1, 2, 3, 4], [0, 2, 3, 4])
        >>> metric.result()
        tensor(0.7500)
    """

    def __init__(self, name: str = "accuracy", dtype: torch.dtype | str | None = None) -> None:
        super().__init__(_equal, name, dtype)


class BinaryAccuracy(MeanMetricWrapper):
    """How often predictions above a threshold have the label 1 and others the label 0.

    Args:
        name: the metric's name, for logs.
        dtype: dtype of the result; ``None`` means torch's default dtype at construction. Sums are kept in ``float64``.
        threshold: predictions above it mean 1. For logits, use 0.

    ``update_state(y_true, y_pred, sample_weight)`` takes labels 0 and 1 and predictions of one shape, ``[batch, ...]``.

    Raises:
        ValueError: ``threshold`` is not a finite number.

    Example:
        >>> metric = ts.metrics.BinaryAccuracy()
        >>> metric.update_state([[1], [1], [0], [0]], [[0.98], [1.0], [0.0], [0.6]])
        >>> metric.result()
        tensor(0.7500)
    """

    def __init__(
        self, name: str = "binary_accuracy", dtype: torch.dtype | str | None = None, threshold: float = 0.5
    ) -> None:
        if not math.isfinite(threshold):
            raise ValueError(f"threshold must be a number: 0.5 for probabilities, 0 for logits. Received: {threshold}")
        super().__init__(equal_above, name, dtype, threshold=threshold)
        self.threshold = threshold


class CategoricalAccuracy(MeanMetricWrapper):
    """How often the most probable class is the one that a one-hot label says.

    Args:
        name: the metric's name, for logs.
        dtype: dtype of the result; ``None`` means torch's default dtype at construction. Sums are kept in ``float64``.

    ``update_state(y_true, y_pred, sample_weight)`` takes one-hot labels (or probabilities) and logits or probabilities,
    both ``[batch, ..., classes]``.

    Example:
        >>> metric = ts.metrics.CategoricalAccuracy()
        >>> metric.update_state([[0, 0, 1], [0, 1, 0]], [[0.1, 0.9, 0.8], [0.05, 0.95, 0.0]])
        >>> metric.result()
        tensor(0.5000)
    """

    def __init__(self, name: str = "categorical_accuracy", dtype: torch.dtype | str | None = None) -> None:
        super().__init__(in_top_k_dense, name, dtype, k=None)


class SparseCategoricalAccuracy(MeanMetricWrapper):
    """How often the most probable class is the integer label.

    Made in a strategy's scope, ``result()`` in cross-replica context is the accuracy over all examples of all
    replicas, however they were split.

    Args:
        name: the metric's name, for logs.
        dtype: dtype of the result; ``None`` means torch's default dtype at construction. Sums are kept in ``float64``.

    ``update_state(y_true, y_pred, sample_weight)`` takes integer labels, ``[batch, ...]`` or ``[batch, ..., 1]``, and
    logits or probabilities, ``[batch, ..., classes]``.

    Example:
        >>> metric = ts.metrics.SparseCategoricalAccuracy()
        >>> logits = torch.tensor([[2.0, 1.0], [0.1, 0.3], [0.9, 0.8]])
        >>> metric.update_state(torch.tensor([0, 1, 1]), logits)
        >>> metric.result()
        tensor(0.6667)
    """

    def __init__(self, name: str = "sparse_categorical_accuracy", dtype: torch.dtype | str | None = None) -> None:
        super().__init__(in_top_k_sparse, name, dtype, k=None)


class TopKCategoricalAccuracy(MeanMetricWrapper):
    """How often the class that a one-hot label says is among the ``k`` most probable ones.

    Args:
        k: how many classes count. Classes that tie for the last place all count, as in ``tf.math.in_top_k``.
        name: the metric's name, for logs.
        dtype: dtype of the result; ``None`` means torch's default dtype at construction. Sums are kept in ``float64``.

    ``update_state(y_true, y_pred, sample_weight)`` takes one-hot labels and logits or probabilities, both
    ``[batch, ..., classes]``.

    Raises:
        ValueError: ``k`` is less than 1.

    Example:
        >>> metric = ts.metrics.TopKCategoricalAccuracy(k=2)
        >>> metric.update_state([[0, 0, 1], [1, 0, 0]], [[0.1, 0.9, 0.8], [0.05, 0.9, 0.1]])
        >>> metric.result()
        tensor(0.5000)
    """

    def __init__(
        self, k: int = 5, name: str = "top_k_categorical_accuracy", dtype: torch.dtype | str | None = None
    ) -> None:
        super().__init__(in_top_k_dense, name, dtype, k=_checked_k(k))
        self.k = k


class SparseTopKCategoricalAccuracy(MeanMetricWrapper):
    """How often the integer label is among the ``k`` most probable classes.

    Args:
        k: how many classes count. Classes that tie for the last place all count, as in ``tf.math.in_top_k``.
        name: the metric's name, for logs.
        dtype: dtype of the result; ``None`` means torch's default dtype at construction. Sums are kept in ``float64``.

    ``update_state(y_true, y_pred, sample_weight)`` takes integer labels, ``[batch, ...]`` or ``[batch, ..., 1]``, and
    logits or probabilities, ``[batch, ..., classes]``.

    Raises:
        ValueError: ``k`` is less than 1.

    Example:
        >>> metric = ts.metrics.SparseTopKCategoricalAccuracy(k=2)
        >>> metric.update_state([2, 0], [[0.1, 0.9, 0.8], [0.05, 0.9, 0.1]])
        >>> metric.result()
        tensor(0.5000)
    """

    def __init__(
        self, k: int = 5, name: str = "sparse_top_k_categorical_accuracy", dtype: torch.dtype | str | None = None
    ) -> None:
        super().__init__(in_top_k_sparse, name, dtype, k=_checked_k(k))
        self.k = k


def _checked_k(k: int) -> int:
    if k < 1:
        raise ValueError(f"k must be at least 1. Received: {k}")
    return k


def _equal(y_true: Any, y_pred: Any) -> Tensor:
    labels, predictions = same_shape_pair(y_true, y_pred)
    return labels == predictions


def equal_above(y_true: Any, y_pred: Any, threshold: float) -> Tensor:
    """Say for each element whether it is above the threshold as its label 0 or 1 says."""
    labels, predictions = same_shape_pair(y_true, y_pred)
    return (labels == (predictions > threshold)) & ~predictions.isnan()


def in_top_k_dense(y_true: Any, y_pred: Any, k: int | None) -> Tensor:
    """Say for each example whether the class of its one-hot label is among the ``k`` best; ``None`` means the best."""
    labels, scores = as_pair(y_true, y_pred)
    if labels.ndim < 2 or labels.shape != scores.shape:
        raise errors.InvalidArgumentError(
            "y_true and y_pred must both have the shape [batch, ..., classes]. Received: y_true "
            f"{tuple(labels.shape)}, y_pred {tuple(scores.shape)}. For integer labels, use the metric whose name "
            "begins with Sparse. (Labels come first, as in tf.)"
        )
    return _in_top_k(labels.argmax(-1), scores, k)


def in_top_k_sparse(y_true: Any, y_pred: Any, k: int | None) -> Tensor:
    """Say for each example whether its integer label is among the ``k`` best classes; ``None`` means the best."""
    labels, scores = as_pair(y_true, y_pred)
    shape = tuple(labels.shape)
    if labels.ndim == scores.ndim and labels.ndim > 0 and labels.shape[-1] == 1:
        labels = labels.squeeze(-1)
    if labels.ndim == 0 or labels.shape != scores.shape[:-1]:
        raise errors.InvalidArgumentError(
            "y_pred must have the shape of y_true and one more dimension for the classes. Received: y_true "
            f"{shape}, y_pred {tuple(scores.shape)}. (Labels come first, as in tf.)"
        )
    return _in_top_k(labels, scores, k)


def _in_top_k(labels: Tensor, scores: Tensor, k: int | None) -> Tensor:
    """Say for each example whether fewer than ``k`` classes are more probable; ``None`` means the first of the best."""
    is_number = ~scores.isnan().any(-1)
    if k is None:
        return (scores.argmax(-1) == labels) & is_number
    if not labels.numel():  # XLA can't gather from nothing
        return torch.zeros_like(labels, dtype=torch.bool)
    is_class = (labels >= 0) & (labels < scores.shape[-1])
    own = scores.gather(-1, torch.where(is_class, labels, 0).to(torch.int64).unsqueeze(-1))
    return ((scores > own).sum(-1) < k) & own.squeeze(-1).isfinite() & is_class & is_number
