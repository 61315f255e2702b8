"""Losses of margins, for labels -1 and 1 and for classes."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from torchstrategy.losses.loss import DType, Loss, Reduction, as_pair, check_labels_come_first

__all__ = ["CategoricalHinge", "Hinge", "SquaredHinge", "categorical_hinge", "hinge", "squared_hinge"]


def hinge(y_true: Any, y_pred: Any) -> Tensor:
    """Return the mean of ``max(1 - y_true * y_pred, 0)`` over the last axis.

    Args:
        y_true: labels, ``[batch, ..., n]``, -1 or 1; 0 counts as -1.
        y_pred: predictions of the same shape.

    Returns:
        The shape without the last axis.

    Raises:
        InvalidArgumentError: the shapes differ.
        ValueError: the arguments seem to be in torch's order.

    Example:
        >>> ts.losses.hinge([[-1.0, 1.0]], [[0.5, 0.5]])
        tensor([1.])
    """
    return _margin_errors(y_true, y_pred).mean(-1)


def squared_hinge(y_true: Any, y_pred: Any) -> Tensor:
    """Return the mean of ``max(1 - y_true * y_pred, 0)^2`` over the last axis.

    Args:
        y_true: labels, ``[batch, ..., n]``, -1 or 1; 0 counts as -1.
        y_pred: predictions of the same shape.

    Returns:
        The shape without the last axis.

    Raises:
        InvalidArgumentError: the shapes differ.
        ValueError: the arguments seem to be in torch's order.

    Example:
        >>> ts.losses.squared_hinge([[-1.0, 1.0]], [[0.5, 0.5]])
        tensor([1.2500])
    """
    return _margin_errors(y_true, y_pred).square().mean(-1)


def categorical_hinge(y_true: Any, y_pred: Any) -> Tensor:
    """Return ``max(wrong - right + 1, 0)``: ``right`` is the label's prediction, ``wrong`` the largest other one.

    Args:
        y_true: one-hot labels, ``[batch, ..., classes]``.
        y_pred: predictions of the same shape.

    Returns:
        The shape without the last axis.

    Raises:
        InvalidArgumentError: the shapes differ.
        ValueError: the arguments seem to be in torch's order.

    Example:
        >>> ts.losses.categorical_hinge([[0.0, 1.0]], [[0.5, 0.75]])
        tensor([0.7500])
    """
    check_labels_come_first(y_true, y_pred)
    labels, scores = as_pair(y_true, y_pred)
    right = (labels * scores).sum(-1)
    wrong = ((1.0 - labels) * scores).amax(-1)
    return (wrong - right + 1.0).clamp(min=0.0)


class Hinge(Loss):
    """Margin error of labels -1 and 1; see ``ts.losses.hinge``.

    Args:
        reduction: a ``Reduction`` or its string.
        name: the loss's name, for logs.
        dtype: dtype of the losses; ``None`` means that of the predictions.

    Example:
        >>> ts.losses.Hinge()([[-1.0, 1.0]], [[0.5, 0.5]])
        tensor(1.)
    """

    def __init__(
        self, reduction: Reduction | str | None = Reduction.AUTO, name: str = "hinge", dtype: DType = None
    ) -> None:
        super().__init__(name, reduction, dtype)

    def call(self, y_true: Any, y_pred: Any) -> Tensor:  # noqa: D102 - the base class's
        return hinge(y_true, y_pred)


class SquaredHinge(Loss):
    """Squared margin error of labels -1 and 1; see ``ts.losses.squared_hinge``.

    Args:
        reduction: a ``Reduction`` or its string.
        name: the loss's name, for logs.
        dtype: dtype of the losses; ``None`` means that of the predictions.

    Example:
        >>> ts.losses.SquaredHinge()([[-1.0, 1.0]], [[0.5, 0.5]])
        tensor(1.2500)
    """

    def __init__(
        self, reduction: Reduction | str | None = Reduction.AUTO, name: str = "squared_hinge", dtype: DType = None
    ) -> None:
        super().__init__(name, reduction, dtype)

    def call(self, y_true: Any, y_pred: Any) -> Tensor:  # noqa: D102
        return squared_hinge(y_true, y_pred)


class CategoricalHinge(Loss):
    """Margin error of one-hot labels; see ``ts.losses.categorical_hinge``.

    Args:
        reduction: a ``Reduction`` or its string.
        name: the loss's name, for logs.
        dtype: dtype of the losses; ``None`` means that of the predictions.

    Example:
        >>> ts.losses.CategoricalHinge()([[0.0, 1.0]], [[0.5, 0.75]])
        tensor(0.7500)
    """

    def __init__(
        self, reduction: Reduction | str | None = Reduction.AUTO, name: str = "categorical_hinge", dtype: DType = None
    ) -> None:
        super().__init__(name, reduction, dtype)

    def call(self, y_true: Any, y_pred: Any) -> Tensor:  # noqa: D102
        return categorical_hinge(y_true, y_pred)


def _margin_errors(y_true: Any, y_pred: Any) -> Tensor:
    check_labels_come_first(y_true, y_pred)
    labels, scores = as_pair(y_true, y_pred)
    # tf decides by all labels of a batch whether 0 means -1, which would make a replica's loss depend on its share.
    signs = torch.where(labels == 0, -1.0, labels)
    return (1.0 - signs * scores).clamp(min=0.0)
