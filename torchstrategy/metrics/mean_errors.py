"""Mean errors of predicted numbers.

Errors are computed in ``float64``. Every example counts once, whatever the shape: tf counts a call with values of one
dimension as one example, however many there are.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from torchstrategy.metrics.mean import MeanMetricWrapper
from torchstrategy.metrics.metric import sum_dtype
from torchstrategy.metrics.metric_inputs import same_shape_pair

__all__ = ["MeanAbsoluteError", "MeanAbsolutePercentageError", "MeanSquaredError", "RootMeanSquaredError"]

_SMALLEST_DIVISOR = 1e-7  # keras.backend.epsilon()


class MeanSquaredError(MeanMetricWrapper):
    """Mean of ``(y_true - y_pred) ** 2``.

    Args:
        name: the metric's name, for logs.
        dtype: dtype of the result; ``None`` means torch's default dtype at construction. Sums are kept in ``float64``.

    ``update_state(y_true, y_pred, sample_weight)`` takes numbers of one shape, ``[batch, ...]``.

    Example:
        >>> metric = ts.metrics.MeanSquaredError()
        >>> metric.update_state([[0.0, 1.0], [0.0, 0.0]], [[1.0, 1.0], [0.0, 0.0]])
        >>> metric.result()
        tensor(0.2500)
    """

    def __init__(self, name: str = "mean_squared_error", dtype: torch.dtype | str | None = None) -> None:
        super().__init__(_squared, name, dtype)


class RootMeanSquaredError(MeanMetricWrapper):
    """Square root of the mean of ``(y_true - y_pred) ** 2`` over all examples.

    Args:
        name: the metric's name, for logs.
        dtype: dtype of the result; ``None`` means torch's default dtype at construction. Sums are kept in ``float64``.

    ``update_state(y_true, y_pred, sample_weight)`` takes numbers of one shape, ``[batch, ...]``.

    Example:
        >>> metric = ts.metrics.RootMeanSquaredError()
        >>> metric.update_state([[0.0, 1.0], [0.0, 0.0]], [[1.0, 1.0], [0.0, 0.0]])
        >>> metric.result()
        tensor(0.5000)
    """

    def __init__(self, name: str = "root_mean_squared_error", dtype: torch.dtype | str | None = None) -> None:
        super().__init__(_squared, name, dtype)

    def result(self) -> Tensor:
        """Return the square root of the mean over all examples since the last reset; 0 if there were none.

        In replica context this is the replica's own, in cross-replica context the one over all replicas.
        """
        return self._mean().sqrt()


class MeanAbsoluteError(MeanMetricWrapper):
    """Mean of ``abs(y_true - y_pred)``.

    Args:
        name: the metric's name, for logs.
        dtype: dtype of the result; ``None`` means torch's default dtype at construction. Sums are kept in ``float64``.

    ``update_state(y_true, y_pred, sample_weight)`` takes numbers of one shape, ``[batch, ...]``.

    Example:
        >>> metric = ts.metrics.MeanAbsoluteError()
        >>> metric.update_state([[0.0, 1.0], [0.0, 0.0]], [[1.0, 1.0], [0.0, 0.0]])
        >>> metric.result()
        tensor(0.2500)
    """

    def __init__(self, name: str = "mean_absolute_error", dtype: torch.dtype | str | None = None) -> None:
        super().__init__(_absolute, name, dtype)


class MeanAbsolutePercentageError(MeanMetricWrapper):
    """Mean of ``100 * abs(y_true - y_pred) / abs(y_true)``; labels nearer to 0 than 1e-7 count as 1e-7.

    Args:
        name: the metric's name, for logs.
        dtype: dtype of the result; ``None`` means torch's default dtype at construction. Sums are kept in ``float64``.

    ``update_state(y_true, y_pred, sample_weight)`` takes numbers of one shape, ``[batch, ...]``.

    Example:
        >>> metric = ts.metrics.MeanAbsolutePercentageError()
        >>> metric.update_state([2.0, 4.0], [1.0, 5.0])
        >>> metric.result()
        tensor(37.5000)
    """

    def __init__(self, name: str = "mean_absolute_percentage_error", dtype: torch.dtype | str | None = None) -> None:
        super().__init__(_percentage, name, dtype)


def _pair(y_true: Any, y_pred: Any) -> tuple[Tensor, Tensor]:
    labels, predictions = same_shape_pair(y_true, y_pred)
    return labels.to(sum_dtype()), predictions.to(sum_dtype())


def _over_last(values: Tensor) -> Tensor:
    """Average over the last dimension, as tf's functions do: weights may be given for each of the other elements."""
    return values.mean(-1) if values.ndim > 1 else values


def _squared(y_true: Any, y_pred: Any) -> Tensor:
    labels, predictions = _pair(y_true, y_pred)
    return _over_last((labels - predictions).square())


def _absolute(y_true: Any, y_pred: Any) -> Tensor:
    labels, predictions = _pair(y_true, y_pred)
    return _over_last((labels - predictions).abs())


def _percentage(y_true: Any, y_pred: Any) -> Tensor:
    labels, predictions = _pair(y_true, y_pred)
    return _over_last(100 * (labels - predictions).abs() / labels.abs().clamp_min(_SMALLEST_DIVISOR))
