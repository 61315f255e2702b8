"""Errors, similarities and correlations of predicted numbers.

Errors are computed in ``float64``. Every example counts once, whatever the shape. Correlations and similarities are of
each example's own numbers, so that they don't depend on how examples are split.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from torchstrategy import errors, losses
from torchstrategy.base.log import warn_once
from torchstrategy.metrics.confusion import divide_no_nan
from torchstrategy.metrics.mean import MeanMetricWrapper, value_of_loss
from torchstrategy.metrics.metric import Metric, sum_dtype
from torchstrategy.metrics.metric_inputs import check_example_axis, matching_weight, same_shape_pair

__all__ = [
    "ConcordanceCorrelation",
    "CosineSimilarity",
    "LogCoshError",
    "MeanAbsoluteError",
    "MeanAbsolutePercentageError",
    "MeanSquaredError",
    "MeanSquaredLogarithmicError",
    "PearsonCorrelation",
    "R2Score",
    "RootMeanSquaredError",
]

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


class MeanSquaredLogarithmicError(MeanMetricWrapper):
    """Mean of ``(log(1 + y_true) - log(1 + y_pred)) ** 2``; see ``ts.losses.mean_squared_logarithmic_error``.

    Args:
        name: the metric's name, for logs.
        dtype: dtype of the result; ``None`` means torch's default dtype at construction. Sums are kept in ``float64``.

    ``update_state(y_true, y_pred, sample_weight)`` takes numbers of one shape, ``[batch, ...]``.

    Example:
        >>> metric = ts.metrics.MeanSquaredLogarithmicError()
        >>> metric.update_state([[0.0]], [[1.0]])
        >>> metric.result()
        tensor(0.4805)
    """

    def __init__(self, name: str = "mean_squared_logarithmic_error", dtype: torch.dtype | str | None = None) -> None:
        super().__init__(_loss, name, dtype, loss=losses.mean_squared_logarithmic_error)


class LogCoshError(MeanMetricWrapper):
    """Mean of ``log(cosh(y_pred - y_true))``.

    Args:
        name: the metric's name, for logs.
        dtype: dtype of the result; ``None`` means torch's default dtype at construction. Sums are kept in ``float64``.

    ``update_state(y_true, y_pred, sample_weight)`` takes numbers of one shape, ``[batch, ...]``.

    Example:
        >>> metric = ts.metrics.LogCoshError()
        >>> metric.update_state([[0.0]], [[1.0]])
        >>> metric.result()
        tensor(0.4338)
    """

    def __init__(self, name: str = "logcosh", dtype: torch.dtype | str | None = None) -> None:
        super().__init__(_loss, name, dtype, loss=losses.log_cosh)


class CosineSimilarity(MeanMetricWrapper):
    """Mean cosine of the angle between labels and predictions: 1 means the same direction.

    Args:
        name: the metric's name, for logs.
        dtype: dtype of the result; ``None`` means torch's default dtype at construction. Sums are kept in ``float64``.
        axis: the axis of the vectors, which is not the first one.

    ``update_state(y_true, y_pred, sample_weight)`` takes numbers of one shape, ``[batch, ..., n]``.

    Example:
        >>> metric = ts.metrics.CosineSimilarity()
        >>> metric.update_state([[0.0, 2.0], [1.0, 1.0]], [[0.0, 1.0], [1.0, -1.0]])
        >>> metric.result()
        tensor(0.5000)
    """

    def __init__(self, name: str = "cosine_similarity", dtype: torch.dtype | str | None = None, axis: int = -1) -> None:
        super().__init__(_cosine, name, dtype, axis=axis)


class PearsonCorrelation(MeanMetricWrapper):
    """Mean over examples of the correlation between an example's labels and predictions, from -1 to 1.

    It is ``nan`` where the labels or the predictions of an example are all equal, as in Keras. (For one correlation of
    all examples' numbers, use ``torchmetrics.PearsonCorrCoef``.)

    Args:
        name: the metric's name, for logs.
        dtype: dtype of the result; ``None`` means torch's default dtype at construction. Sums are kept in ``float64``.
        axis: the axis, or several, over which an example's numbers are correlated; not the first one.

    ``update_state(y_true, y_pred, sample_weight)`` takes numbers of one shape, ``[batch, ..., n]``.

    Example:
        >>> metric = ts.metrics.PearsonCorrelation()
        >>> metric.update_state([[0, 1, 0.5], [1, 1, 0.2]], [[0.1, 0.9, 0.5], [1, 0.9, 0.2]])
        >>> metric.result()
        tensor(0.9967)
    """

    def __init__(
        self,
        name: str = "pearson_correlation",
        dtype: torch.dtype | str | None = None,
        axis: int | Sequence[int] = -1,
    ) -> None:
        super().__init__(_pearson, name, dtype, axis=axis)


class ConcordanceCorrelation(MeanMetricWrapper):
    """Mean over examples of the agreement of an example's labels and predictions: 1 means that they are equal.

    It is ``2 * covariance / (both variances + (difference of means)^2)``. (For one of all examples' numbers, use
    ``torchmetrics.ConcordanceCorrCoef``.)

    Args:
        name: the metric's name, for logs.
        dtype: dtype of the result; ``None`` means torch's default dtype at construction. Sums are kept in ``float64``.
        axis: the axis, or several, over which an example's numbers are compared; not the first one.

    ``update_state(y_true, y_pred, sample_weight)`` takes numbers of one shape, ``[batch, ..., n]``.

    Example:
        >>> metric = ts.metrics.ConcordanceCorrelation()
        >>> metric.update_state([[0, 1, 0.5], [1, 1, 0.2]], [[0.1, 0.9, 0.5], [1, 0.9, 0.2]])
        >>> metric.result()
        tensor(0.9816)
    """

    def __init__(
        self,
        name: str = "concordance_correlation",
        dtype: torch.dtype | str | None = None,
        axis: int | Sequence[int] = -1,
    ) -> None:
        super().__init__(_concordance, name, dtype, axis=axis)


class R2Score(Metric):
    """Coefficient of determination: 1 minus the squared errors over the labels' squared distances from their mean.

    Made in a strategy's scope, ``result()`` in cross-replica context is that of all examples of all replicas: the sums
    are added. An output whose labels are all equal has 0, or ``nan`` if its predictions are right, as in Keras.

    Args:
        class_aggregation: ``"uniform_average"`` for the mean over outputs, ``"variance_weighted_average"`` for the mean
            weighted by the labels' variances, ``None`` for one number for each output.
        num_regressors: how many independent variables the adjusted score assumes; 0 means the plain score.
        name: the metric's name, for logs.
        dtype: dtype of the result; ``None`` means torch's default dtype at construction. Sums are kept in ``float64``.

    Raises:
        ValueError: an argument has a value that the above does not list.

    Example:
        >>> metric = ts.metrics.R2Score()
        >>> metric.update_state([[1.0], [4.0], [3.0]], [[2.0], [4.0], [4.0]])
        >>> metric.result()
        tensor(0.5714)
    """

    def __init__(
        self,
        class_aggregation: str | None = "uniform_average",
        num_regressors: int = 0,
        name: str = "r2_score",
        dtype: torch.dtype | str | None = None,
    ) -> None:
        super().__init__(name=name, dtype=dtype)
        if class_aggregation not in (None, "uniform_average", "variance_weighted_average"):
            raise ValueError(
                "class_aggregation must be None, 'uniform_average' or 'variance_weighted_average'. Received: "
                f"{class_aggregation!r}"
            )
        if num_regressors < 0:
            raise ValueError(f"num_regressors must be at least 0. Received: {num_regressors}")
        self.class_aggregation = class_aggregation
        self.num_regressors = num_regressors
        # Numbers take the shape [outputs] of what is added to them first.
        self.label_sum: Tensor = self.add_weight("sum")
        self.squared_sum: Tensor = self.add_weight("squared_sum")
        self.residual: Tensor = self.add_weight("residual")
        self.count: Tensor = self.add_weight("count")
        self.num_samples: Tensor = self.add_weight("num_samples")

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        """Add a batch. As in tf, labels come first; torchmetrics' own metrics take predictions first.

        Args:
            y_true: labels, ``[batch, outputs]``, or ``[batch]`` of one output; ``batch`` may be 0.
            y_pred: predictions of the same shape.
            sample_weight: scalar, ``[batch]``, or broadcastable to ``y_pred``; ``None`` means that everything weighs 1.

        Raises:
            InvalidArgumentError: the shapes do not fit, or the number of outputs is not that of the batches before.
        """
        labels, values = (x.unsqueeze(-1) if x.ndim == 1 else x for x in _pair(y_true, y_pred))
        known = self.count.shape[0] if self.count.ndim else None
        if labels.ndim != 2 or known not in (None, labels.shape[1]):
            raise errors.InvalidArgumentError(
                f"y_true and y_pred must be [batch, {known or 'outputs'}]. Received: {tuple(labels.shape)}"
            )
        weight = matching_weight(sample_weight, labels, labels.dtype)
        for state, added in (
            ("label_sum", labels * weight),
            ("squared_sum", labels.square() * weight),
            ("residual", (labels - values).square() * weight),
            ("count", weight),
        ):
            own = getattr(self, state)
            setattr(self, state, own + added.sum(0).to(own))
        self.num_samples = self.num_samples + labels.numel()  # of all outputs, as Keras counts

    def result(self) -> Tensor:
        """Return the score since the last reset: a scalar, or ``[outputs]``; 0 if there were no examples.

        In replica context this is the replica's own, in cross-replica context the one over all replicas.
        """
        total = self.squared_sum - self.label_sum * divide_no_nan(self.label_sum, self.count)
        rounding = 8 * torch.finfo(total.dtype).eps * self.squared_sum  # of equal labels it is all that is left
        total = torch.where(total <= rounding, 0.0, total)
        scores = 1 - self.residual / total
        scores = torch.where(scores.isinf() | (self.count == 0), 0.0, scores)
        if self.class_aggregation == "uniform_average":
            scores = scores.mean()
        elif self.class_aggregation == "variance_weighted_average":
            scores = divide_no_nan((total * scores).sum(), total.sum())
        if not self.num_regressors or not self.num_samples:
            return scores
        degrees = self.num_samples - self.num_regressors - 1
        if degrees <= 0:
            warn_once(
                f"R2Score(num_regressors={self.num_regressors}) has seen {int(self.num_samples)} numbers, too few for "
                "the adjusted score: the plain one is returned."
            )
            return scores
        return 1 - (1 - scores) * (self.num_samples - 1) / degrees


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


def _loss(y_true: Any, y_pred: Any, loss: Callable[..., Tensor], **kwargs: Any) -> Tensor:
    return value_of_loss(*_pair(y_true, y_pred), loss, **kwargs)


def _cosine(y_true: Any, y_pred: Any, axis: int) -> Tensor:
    return -_loss(y_true, y_pred, losses.cosine_similarity, axis=axis)


def _centered(y_true: Any, y_pred: Any, axis: int | Sequence[int]) -> tuple[Tensor, Tensor, Tensor, Any]:
    """Return labels and predictions without their means, the difference of the means, and the axes."""
    labels, values = _pair(y_true, y_pred)
    check_example_axis(axis, values)
    axes = axis if isinstance(axis, int) else tuple(axis)
    label_mean, mean = labels.mean(axes, keepdim=True), values.mean(axes, keepdim=True)
    return labels - label_mean, values - mean, (label_mean - mean).mean(axes), axes


def _pearson(y_true: Any, y_pred: Any, axis: int | Sequence[int]) -> Tensor:
    labels, values, _, axes = _centered(y_true, y_pred, axis)
    deviations = labels.square().mean(axes).sqrt() * values.square().mean(axes).sqrt()
    return (labels * values).mean(axes) / deviations


def _concordance(y_true: Any, y_pred: Any, axis: int | Sequence[int]) -> Tensor:
    labels, values, difference, axes = _centered(y_true, y_pred, axis)
    norm = labels.square().mean(axes) + values.square().mean(axes) + difference.square()
    return 2 * (labels * values).mean(axes) / (norm + _SMALLEST_DIVISOR)
