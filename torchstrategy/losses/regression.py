"""Losses of real-valued predictions. Each function returns the mean over the last axis: one loss for each example."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from torchstrategy.losses.loss import EPSILON, DType, Loss, Reduction, as_pair, check_labels_come_first

__all__ = [
    "CosineSimilarity",
    "Huber",
    "LogCosh",
    "MeanAbsoluteError",
    "MeanAbsolutePercentageError",
    "MeanSquaredError",
    "MeanSquaredLogarithmicError",
    "Poisson",
    "cosine_similarity",
    "huber",
    "log_cosh",
    "mean_absolute_error",
    "mean_absolute_percentage_error",
    "mean_squared_error",
    "mean_squared_logarithmic_error",
    "poisson",
]


def mean_squared_error(y_true: Any, y_pred: Any) -> Tensor:
    """Return the mean of ``(y_true - y_pred)^2`` over the last axis.

    Args:
        y_true: labels, ``[batch, ..., n]``.
        y_pred: predictions of the same shape.

    Returns:
        The shape without the last axis.

    Raises:
        InvalidArgumentError: the shapes differ.

    Example:
        >>> ts.losses.mean_squared_error([[0.0, 1.0]], [[2.0, 1.0]])
        tensor([2.])
    """
    labels, values = as_pair(y_true, y_pred)
    return (values - labels).square().mean(-1)


def mean_absolute_error(y_true: Any, y_pred: Any) -> Tensor:
    """Return the mean of ``|y_true - y_pred|`` over the last axis.

    Args:
        y_true: labels, ``[batch, ..., n]``.
        y_pred: predictions of the same shape.

    Returns:
        The shape without the last axis.

    Raises:
        InvalidArgumentError: the shapes differ.

    Example:
        >>> ts.losses.mean_absolute_error([[0.0, 1.0]], [[2.0, 1.0]])
        tensor([1.])
    """
    labels, values = as_pair(y_true, y_pred)
    return (values - labels).abs().mean(-1)


def mean_absolute_percentage_error(y_true: Any, y_pred: Any) -> Tensor:
    """Return 100 times the mean of ``|(y_true - y_pred) / y_true|`` over the last axis.

    Args:
        y_true: labels, ``[batch, ..., n]``; their absolute values count as 1e-7 at least.
        y_pred: predictions of the same shape.

    Returns:
        The shape without the last axis.

    Raises:
        InvalidArgumentError: the shapes differ.
        ValueError: the arguments seem to be in torch's order.

    Example:
        >>> ts.losses.mean_absolute_percentage_error([[4.0]], [[3.0]])
        tensor([25.])
    """
    check_labels_come_first(y_true, y_pred)
    labels, values = as_pair(y_true, y_pred)
    return 100.0 * ((labels - values) / labels.abs().clamp(min=EPSILON)).abs().mean(-1)


def mean_squared_logarithmic_error(y_true: Any, y_pred: Any) -> Tensor:
    """Return the mean of ``(log(1 + y_true) - log(1 + y_pred))^2`` over the last axis.

    Args:
        y_true: labels, ``[batch, ..., n]``; they count as 1e-7 at least.
        y_pred: predictions of the same shape; they count as 1e-7 at least.

    Returns:
        The shape without the last axis.

    Raises:
        InvalidArgumentError: the shapes differ.

    Example:
        >>> ts.losses.mean_squared_logarithmic_error([[0.0]], [[1.0]])
        tensor([0.4805])
    """
    labels, values = as_pair(y_true, y_pred)
    return (values.clamp(min=EPSILON).log1p() - labels.clamp(min=EPSILON).log1p()).square().mean(-1)


def huber(y_true: Any, y_pred: Any, delta: float = 1.0) -> Tensor:
    """Return the mean over the last axis of ``error^2 / 2``, and of ``delta * (|error| - delta / 2)`` above ``delta``.

    Args:
        y_true: labels, ``[batch, ..., n]``.
        y_pred: predictions of the same shape.
        delta: where the loss changes from quadratic to linear; more than 0.

    Returns:
        The shape without the last axis.

    Raises:
        InvalidArgumentError: the shapes differ.

    Example:
        >>> ts.losses.huber([[0.0], [0.0]], [[1.0], [3.0]])
        tensor([0.5000, 2.5000])
    """
    labels, values = as_pair(y_true, y_pred)
    return F.huber_loss(values, labels, reduction="none", delta=delta).mean(-1)


def log_cosh(y_true: Any, y_pred: Any) -> Tensor:
    """Return the mean of ``log(cosh(y_pred - y_true))`` over the last axis.

    Args:
        y_true: labels, ``[batch, ..., n]``.
        y_pred: predictions of the same shape.

    Returns:
        The shape without the last axis.

    Raises:
        InvalidArgumentError: the shapes differ.

    Example:
        >>> ts.losses.log_cosh([[0.0]], [[1.0]])
        tensor([0.4338])
    """
    labels, values = as_pair(y_true, y_pred)
    error = values - labels
    return (error + F.softplus(-2.0 * error) - math.log(2.0)).mean(-1)  # cosh itself overflows


def cosine_similarity(y_true: Any, y_pred: Any, axis: int = -1) -> Tensor:
    """Return minus the cosine of the angle between labels and predictions: -1 means the same direction.

    Args:
        y_true: labels, ``[batch, ..., n]``.
        y_pred: predictions of the same shape.
        axis: the axis of the vectors.

    Returns:
        The shape without the axis; 0 where a vector is 0.

    Raises:
        InvalidArgumentError: the shapes differ.

    Example:
        >>> ts.losses.cosine_similarity([[0.0, 2.0], [1.0, 1.0]], [[0.0, 1.0], [1.0, -1.0]])
        tensor([-1., -0.])
    """
    labels, values = as_pair(y_true, y_pred)
    return -F.cosine_similarity(labels, values, dim=axis, eps=EPSILON)


def poisson(y_true: Any, y_pred: Any) -> Tensor:
    """Return the mean of ``y_pred - y_true * log(y_pred)`` over the last axis.

    Args:
        y_true: counts, ``[batch, ..., n]``.
        y_pred: expected counts of the same shape, not their logarithms.

    Returns:
        The shape without the last axis.

    Raises:
        InvalidArgumentError: the shapes differ.
        ValueError: the arguments seem to be in torch's order.

    Example:
        >>> ts.losses.poisson([[1.0]], [[2.0]])
        tensor([1.3069])
    """
    check_labels_come_first(y_true, y_pred)
    counts, expected = as_pair(y_true, y_pred)
    return (expected - counts * torch.log(expected + EPSILON)).mean(-1)


class MeanSquaredError(Loss):
    """Mean of squared errors; see ``ts.losses.mean_squared_error``.

    Args:
        reduction: a ``Reduction`` or its string.
        name: the loss's name, for logs.
        dtype: dtype of the losses; ``None`` means that of the predictions.

    Example:
        >>> ts.losses.MeanSquaredError(reduction="none")([[0.0, 1.0]], [[2.0, 1.0]])
        tensor([2.])
    """

    def __init__(
        self, reduction: Reduction | str | None = Reduction.AUTO, name: str = "mean_squared_error", dtype: DType = None
    ) -> None:
        super().__init__(name, reduction, dtype)

    def call(self, y_true: Any, y_pred: Any) -> Tensor:  # noqa: D102 - the base class's
        return mean_squared_error(y_true, y_pred)


class MeanAbsoluteError(Loss):
    """Mean of absolute errors; see ``ts.losses.mean_absolute_error``.

    Args:
        reduction: a ``Reduction`` or its string.
        name: the loss's name, for logs.
        dtype: dtype of the losses; ``None`` means that of the predictions.

    Example:
        >>> ts.losses.MeanAbsoluteError(reduction="none")([[0.0, 1.0]], [[2.0, 1.0]])
        tensor([1.])
    """

    def __init__(
        self, reduction: Reduction | str | None = Reduction.AUTO, name: str = "mean_absolute_error", dtype: DType = None
    ) -> None:
        super().__init__(name, reduction, dtype)

    def call(self, y_true: Any, y_pred: Any) -> Tensor:  # noqa: D102
        return mean_absolute_error(y_true, y_pred)


class MeanAbsolutePercentageError(Loss):
    """Mean of absolute errors in percent of the labels; see ``ts.losses.mean_absolute_percentage_error``.

    Args:
        reduction: a ``Reduction`` or its string.
        name: the loss's name, for logs.
        dtype: dtype of the losses; ``None`` means that of the predictions.

    Example:
        >>> ts.losses.MeanAbsolutePercentageError()([[4.0]], [[3.0]])
        tensor(25.)
    """

    def __init__(
        self,
        reduction: Reduction | str | None = Reduction.AUTO,
        name: str = "mean_absolute_percentage_error",
        dtype: DType = None,
    ) -> None:
        super().__init__(name, reduction, dtype)

    def call(self, y_true: Any, y_pred: Any) -> Tensor:  # noqa: D102
        return mean_absolute_percentage_error(y_true, y_pred)


class MeanSquaredLogarithmicError(Loss):
    """Mean of squared differences of logarithms; see ``ts.losses.mean_squared_logarithmic_error``.

    Args:
        reduction: a ``Reduction`` or its string.
        name: the loss's name, for logs.
        dtype: dtype of the losses; ``None`` means that of the predictions.

    Example:
        >>> ts.losses.MeanSquaredLogarithmicError()([[0.0]], [[1.0]])
        tensor(0.4805)
    """

    def __init__(
        self,
        reduction: Reduction | str | None = Reduction.AUTO,
        name: str = "mean_squared_logarithmic_error",
        dtype: DType = None,
    ) -> None:
        super().__init__(name, reduction, dtype)

    def call(self, y_true: Any, y_pred: Any) -> Tensor:  # noqa: D102
        return mean_squared_logarithmic_error(y_true, y_pred)


class Huber(Loss):
    """Squared errors that become linear above ``delta``; see ``ts.losses.huber``.

    Args:
        delta: where the loss changes from quadratic to linear; more than 0.
        reduction: a ``Reduction`` or its string.
        name: the loss's name, for logs.
        dtype: dtype of the losses; ``None`` means that of the predictions.

    Example:
        >>> ts.losses.Huber(reduction="none")([[0.0], [0.0]], [[1.0], [3.0]])
        tensor([0.5000, 2.5000])
    """

    def __init__(
        self,
        delta: float = 1.0,
        reduction: Reduction | str | None = Reduction.AUTO,
        name: str = "huber_loss",
        dtype: DType = None,
    ) -> None:
        super().__init__(name, reduction, dtype)
        self.delta = delta

    def call(self, y_true: Any, y_pred: Any) -> Tensor:  # noqa: D102
        return huber(y_true, y_pred, self.delta)


class LogCosh(Loss):
    """Logarithm of the hyperbolic cosine of the error; see ``ts.losses.log_cosh``.

    Args:
        reduction: a ``Reduction`` or its string.
        name: the loss's name, for logs.
        dtype: dtype of the losses; ``None`` means that of the predictions.

    Example:
        >>> ts.losses.LogCosh()([[0.0]], [[1.0]])
        tensor(0.4338)
    """

    def __init__(
        self, reduction: Reduction | str | None = Reduction.AUTO, name: str = "log_cosh", dtype: DType = None
    ) -> None:
        super().__init__(name, reduction, dtype)

    def call(self, y_true: Any, y_pred: Any) -> Tensor:  # noqa: D102
        return log_cosh(y_true, y_pred)


class CosineSimilarity(Loss):
    """Minus the cosine of the angle between labels and predictions; see ``ts.losses.cosine_similarity``.

    Args:
        axis: the axis of the vectors.
        reduction: a ``Reduction`` or its string.
        name: the loss's name, for logs.
        dtype: dtype of the losses; ``None`` means that of the predictions.

    Example:
        >>> ts.losses.CosineSimilarity()([[0.0, 2.0]], [[0.0, 1.0]])
        tensor(-1.)
    """

    def __init__(
        self,
        axis: int = -1,
        reduction: Reduction | str | None = Reduction.AUTO,
        name: str = "cosine_similarity",
        dtype: DType = None,
    ) -> None:
        super().__init__(name, reduction, dtype)
        self.axis = axis

    def call(self, y_true: Any, y_pred: Any) -> Tensor:  # noqa: D102
        return cosine_similarity(y_true, y_pred, self.axis)


class Poisson(Loss):
    """Negative log-likelihood of counts, without the part that the labels fix; see ``ts.losses.poisson``.

    Args:
        reduction: a ``Reduction`` or its string.
        name: the loss's name, for logs.
        dtype: dtype of the losses; ``None`` means that of the predictions.

    Example:
        >>> ts.losses.Poisson()([[1.0]], [[2.0]])
        tensor(1.3069)
    """

    def __init__(
        self, reduction: Reduction | str | None = Reduction.AUTO, name: str = "poisson", dtype: DType = None
    ) -> None:
        super().__init__(name, reduction, dtype)

    def call(self, y_true: Any, y_pred: Any) -> Tensor:  # noqa: D102
        return poisson(y_true, y_pred)
