"""Weighted sums and means of what they are given, and means of a function of labels and predictions.

Sums are kept in ``float64`` whatever the values' dtype, so that the order and number of updates don't show.

Errors are computed in ``float64``. Every example counts once, whatever the shape: tf counts a call with values of one
dimension as one example, however many there are.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from torchstrategy import errors
from torchstrategy.metrics.metric import Metric, sum_dtype
from torchstrategy.metrics.metric_inputs import as_tensor, matching_weight, same_shape_pair

__all__ = [
    "AccuracyBaseline",
    "Mean",
    "MeanAbsoluteError",
    "MeanAbsolutePercentageError",
    "MeanMetricWrapper",
    "MeanSquaredError",
    "RootMeanSquaredError",
    "Sum",
    "WeightedMean",
]


class WeightedMean(Metric):
    """A mean over examples, kept as a sum and a count; subclasses call ``_add``.

    Args:
        name: the metric's name, for logs; ``None`` means the class's name in snake case.
        dtype: dtype of the result; ``None`` means torch's default dtype at construction.
    """

    def __init__(self, name: str | None = None, dtype: torch.dtype | str | None = None) -> None:
        super().__init__(name, dtype)
        self.total: Tensor = self.add_weight("total")
        self.count: Tensor = self.add_weight("count")

    def _add(self, values: Tensor, sample_weight: Any) -> None:
        """Add values of ``[batch, ...]``; an example's value is the mean over its other dimensions."""
        values = values.to(self.total)
        weight = matching_weight(sample_weight, values, values.dtype)
        values = values * weight
        if values.ndim > 1:
            values, weight = values.flatten(1).mean(1), weight.flatten(1).mean(1)
        self.total = self.total + values.sum()
        self.count = self.count + weight.sum()

    def _mean(self) -> Tensor:
        return torch.where(self.count == 0, 0.0, self.total / torch.where(self.count == 0, 1.0, self.count))

    def result(self) -> Tensor:
        """Return the mean over all examples since the last reset; 0 if there were none.

        In replica context this is the replica's own, in cross-replica context the one over all replicas.
        """
        return self._mean()


class Mean(WeightedMean):
    """Weighted mean of values.

    Made in a strategy's scope, ``result()`` in cross-replica context is the mean over all examples of all replicas,
    however they were split. Give it per-example losses, not losses that are already divided by the global batch size:
    the mean over replicas of those is too small by the number of replicas.

    Args:
        name: the metric's name, for logs.
        dtype: dtype of the result; ``None`` means torch's default dtype at construction. Sums are kept in ``float64``.

    Example:
        >>> metric = ts.metrics.Mean(name="loss")
        >>> metric.update_state(torch.tensor([1.0, 3.0]))
        >>> metric.update_state(6.0, sample_weight=2.0)
        >>> metric.result()
        tensor(4.)
        >>> metric.reset_state()
        >>> metric.result()
        tensor(0.)
    """

    def __init__(self, name: str = "mean", dtype: torch.dtype | str | None = None) -> None:
        super().__init__(name, dtype)

    def update_state(self, values: Any, sample_weight: Any = None) -> None:
        """Add values.

        Args:
            values: a scalar, which counts as one example, or ``[batch, ...]``; ``batch`` may be 0.
            sample_weight: scalar, ``[batch]``, or broadcastable to ``values``; ``None`` means that every example
                weighs 1.

        Raises:
            InvalidArgumentError: ``sample_weight`` does not fit the values.
        """
        self._add(as_tensor(values), sample_weight)


class Sum(Metric):
    """Weighted sum of values.

    Made in a strategy's scope, ``result()`` in cross-replica context is the sum over all replicas.

    Args:
        name: the metric's name, for logs.
        dtype: dtype of the result; ``None`` means torch's default dtype at construction. The sum is kept in
            ``float64``.

    Example:
        >>> metric = ts.metrics.Sum()
        >>> metric.update_state(torch.tensor([1.0, 3.0, 5.0, 7.0]), sample_weight=[1, 1, 0, 0])
        >>> metric.result()
        tensor(4.)
    """

    def __init__(self, name: str = "sum", dtype: torch.dtype | str | None = None) -> None:
        super().__init__(name, dtype)
        self.total: Tensor = self.add_weight("total")

    def update_state(self, values: Any, sample_weight: Any = None) -> None:
        """Add values.

        Args:
            values: a scalar or ``[batch, ...]``; ``batch`` may be 0. All elements are added.
            sample_weight: scalar, ``[batch]``, or broadcastable to ``values``; ``None`` means that every element
                weighs 1.

        Raises:
            InvalidArgumentError: ``sample_weight`` does not fit the values.
        """
        values = as_tensor(values).to(self.total)
        self.total = self.total + (values * matching_weight(sample_weight, values, values.dtype)).sum()

    def result(self) -> Tensor:
        """Return the sum since the last reset.

        In replica context this is the replica's own, in cross-replica context the one over all replicas.
        """
        return self.total


class MeanMetricWrapper(WeightedMean):
    """Mean over examples of a function of labels and predictions.

    Args:
        fn: ``fn(y_true, y_pred, **kwargs)`` returns a value for each example: ``[batch, ...]``.
        name: the metric's name, for logs; ``None`` means the class's name in snake case.
        dtype: dtype of the result; ``None`` means torch's default dtype at construction. Sums are kept in ``float64``.
        kwargs: further arguments of ``fn``.

    Example:
        >>> metric = ts.metrics.MeanMetricWrapper(lambda y_true, y_pred: (y_true - y_pred).abs(), name="distance")
        >>> metric.update_state(torch.tensor([1.0, 2.0]), torch.tensor([1.0, 5.0]))
        >>> metric.result()
        tensor(1.5000)
    """

    def __init__(
        self,
        fn: Callable[..., Any],
        name: str | None = None,
        dtype: torch.dtype | str | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(name, dtype)
        self.fn = fn
        self.fn_kwargs = kwargs

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        """Add a batch. As in tf, labels come first; torchmetrics' own metrics take predictions first.

        Args:
            y_true: labels, as the function wants them.
            y_pred: predictions, as the function wants them.
            sample_weight: scalar, ``[batch]``, or broadcastable to the function's values; ``None`` means that every
                example weighs 1.

        Raises:
            InvalidArgumentError: the shapes do not fit, or the function returned a single value.
        """
        values = as_tensor(self.fn(y_true, y_pred, **self.fn_kwargs))
        if values.ndim == 0:  # as one example it would weigh the same however large the batch is
            raise errors.InvalidArgumentError(
                f"The function of the metric {self.name!r} must return one value for each example, [batch, ...]. "
                "Received a scalar. Take the mean over an example's own dimensions only."
            )
        self._add(values, sample_weight)


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
