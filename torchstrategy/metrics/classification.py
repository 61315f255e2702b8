"""How often predictions are right.

A prediction that is ``nan`` is wrong; a label that is no class is never predicted. So nothing is skipped in silence.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from torchstrategy import errors
from torchstrategy.metrics.confusion import divide_no_nan
from torchstrategy.metrics.mean import MeanMetricWrapper, WeightedMean
from torchstrategy.metrics.metric import Metric, sum_dtype
from torchstrategy.metrics.metric_inputs import as_pair, as_tensor, matching_weight, same_shape_pair

__all__ = [
    "Accuracy",
    "AccuracyBaseline",
    "BinaryAccuracy",
    "CategoricalAccuracy",
    "F1Score",
    "FBetaScore",
    "SparseCategoricalAccuracy",
    "SparseTopKCategoricalAccuracy",
    "TopKCategoricalAccuracy",
    "equal_above",
    "in_top_k_dense",
    "in_top_k_sparse",
]


_ZERO = 1e-9  # an example whose highest prediction is not above it has none, as in Keras


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


class FBetaScore(Metric):
    """Weighted harmonic mean of precision and recall of each class.

    It is ``(1 + beta^2) * precision * recall / (beta^2 * precision + recall)``, and 0 for a class that is neither a
    label nor predicted. Made in a strategy's scope, ``result()`` in cross-replica context is that of all examples of
    all replicas: the counts are added.

    Args:
        average: ``None`` for a number for each class, ``"micro"`` for that of all classes' counts, ``"macro"`` for the
            mean over classes, ``"weighted"`` for the mean weighted by how often a class is a label.
        beta: how many times as much recall weighs as precision; more than 0.
        threshold: predictions above it are positive, in (0, 1]; ``None`` means that the highest one of an example is,
            and equal ones, unless it is 0.
        name: the metric's name, for logs.
        dtype: dtype of the result; ``None`` means torch's default dtype at construction. Counts are kept in
            ``float64``.

    Raises:
        ValueError: an argument has a value that the above does not list.

    Example:
        >>> metric = ts.metrics.FBetaScore(beta=2.0)
        >>> metric.update_state([[1, 0], [1, 0], [0, 1]], [[0.9, 0.1], [0.2, 0.8], [0.3, 0.7]])
        >>> metric.result()
        tensor([0.5556, 0.8333])
    """

    def __init__(
        self,
        average: str | None = None,
        beta: float = 1.0,
        threshold: float | None = None,
        name: str = "fbeta_score",
        dtype: torch.dtype | str | None = None,
    ) -> None:
        super().__init__(name=name, dtype=dtype)
        if average not in (None, "micro", "macro", "weighted"):
            raise ValueError(f"average must be None, 'micro', 'macro' or 'weighted'. Received: {average!r}")
        if not (isinstance(beta, (int, float)) and 0 < beta < math.inf):
            raise ValueError(f"beta must be a number greater than 0. Received: {beta!r}")
        if threshold is not None and not (isinstance(threshold, (int, float)) and 0 < threshold <= 1):
            raise ValueError(f"threshold must be None or a number in (0, 1]. Received: {threshold!r}")
        self.average = average
        self.beta = beta
        self.threshold = threshold
        # Numbers take the shape [classes] of what is added to them first.
        self.true_positives: Tensor = self.add_weight("true_positives")
        self.false_positives: Tensor = self.add_weight("false_positives")
        self.false_negatives: Tensor = self.add_weight("false_negatives")

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        """Add a batch. As in tf, labels come first; torchmetrics' own metrics take predictions first.

        Args:
            y_true: labels 0 and 1, ``[batch, classes]``; ``batch`` may be 0.
            y_pred: predictions of the same shape.
            sample_weight: scalar, ``[batch]``, or broadcastable to ``y_pred``; ``None`` means that everything weighs 1.

        Raises:
            InvalidArgumentError: the shapes do not fit, or the number of classes is not that of the batches before.
        """
        labels, scores = as_pair(y_true, y_pred)
        known = self.true_positives.shape[0] if self.true_positives.ndim else None
        if scores.ndim != 2 or labels.shape != scores.shape or known not in (None, scores.shape[1]):
            raise errors.InvalidArgumentError(
                f"y_true and y_pred must both be [batch, {known or 'classes'}]. Received: y_true "
                f"{tuple(labels.shape)}, y_pred {tuple(scores.shape)}. (Labels come first, as in tf.)"
            )
        if self.threshold is None:  # comparisons with nan are false
            positive = (scores >= scores.amax(-1, keepdim=True)) & (scores.abs() > _ZERO)
        else:
            positive = scores > self.threshold
        weight = matching_weight(sample_weight, scores, sum_dtype())
        labels = labels.to(weight.dtype)
        for state, values in (
            ("true_positives", labels * positive),
            ("false_positives", (1 - labels) * positive),
            ("false_negatives", labels * ~positive),
        ):
            own = getattr(self, state)
            setattr(self, state, own + (values * weight).sum(0).to(own))

    def result(self) -> Tensor:
        """Return the score since the last reset: a scalar, or ``[classes]`` without ``average``.

        In replica context this is the replica's own, in cross-replica context the one over all replicas.
        """
        hits, extra, missed = self.true_positives, self.false_positives, self.false_negatives
        labels = hits + missed
        if self.average == "micro":
            hits, extra, missed = hits.sum(), extra.sum(), missed.sum()
        factor = self.beta**2
        scores = divide_no_nan((1 + factor) * hits, (1 + factor) * hits + factor * missed + extra)
        if self.average == "weighted":
            return divide_no_nan((scores * labels).sum(), labels.sum())
        return scores if self.average is None else scores.mean()


class F1Score(FBetaScore):
    """Harmonic mean of precision and recall of each class: ``ts.metrics.FBetaScore`` with ``beta=1``.

    Args:
        average: ``None`` for a number for each class, ``"micro"`` for that of all classes' counts, ``"macro"`` for the
            mean over classes, ``"weighted"`` for the mean weighted by how often a class is a label.
        threshold: predictions above it are positive, in (0, 1]; ``None`` means that the highest one of an example is,
            and equal ones, unless it is 0.
        name: the metric's name, for logs.
        dtype: dtype of the result; ``None`` means torch's default dtype at construction.

    Raises:
        ValueError: an argument has a value that the above does not list.

    Example:
        >>> metric = ts.metrics.F1Score(average="macro")
        >>> metric.update_state([[1, 0], [1, 0], [0, 1]], [[0.9, 0.1], [0.2, 0.8], [0.3, 0.7]])
        >>> metric.result()
        tensor(0.6667)
    """

    def __init__(
        self,
        average: str | None = None,
        threshold: float | None = None,
        name: str = "f1_score",
        dtype: torch.dtype | str | None = None,
    ) -> None:
        super().__init__(average, 1.0, threshold, name, dtype)


class AccuracyBaseline(WeightedMean):
    """The accuracy of always predicting the more frequent one of the labels 0 and 1.

    Args:
        name: the metric's name.
    """

    def __init__(self, name: str) -> None:
        super().__init__(name)

    def update_state(self, labels: Any, sample_weight: Any = None) -> None:
        """Add the labels of a batch.

        Args:
            labels: numbers in [0, 1], ``[batch, ...]``.
            sample_weight: as for ``ts.metrics.Mean``.
        """
        self._add(as_tensor(labels), sample_weight)

    def result(self) -> Tensor:
        """Return the larger one of the classes' shares; 0 if there were no labels."""
        mean = self._mean()
        return torch.where(self.count == 0, 0.0, torch.maximum(mean, 1 - mean))


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
