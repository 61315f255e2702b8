"""Losses of predicted distributions."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from torchstrategy.losses.loss import EPSILON, Loss, Reduction, as_pair, check_labels_come_first, clip

__all__ = ["KLDivergence", "Poisson", "kl_divergence", "poisson"]


def kl_divergence(y_true: Any, y_pred: Any) -> Tensor:
    """Return the sum of ``y_true * log(y_true / y_pred)`` over the last axis.

    Args:
        y_true: probabilities, ``[batch, ..., classes]``.
        y_pred: probabilities of the same shape.

    Returns:
        The shape without the last axis.

    Raises:
        InvalidArgumentError: the shapes differ.
        ValueError: the arguments seem to be in torch's order.

    Example:
        >>> ts.losses.kl_divergence([[0.5, 0.5]], [[0.25, 0.75]])
        tensor([0.1438])
    """
    check_labels_come_first(y_true, y_pred)
    labels, probabilities = (clip(value, high=1.0) for value in as_pair(y_true, y_pred))
    return (labels * (labels / probabilities).log()).sum(-1)


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


class KLDivergence(Loss):
    """Kullback-Leibler divergence of the predictions from the labels; see ``ts.losses.kl_divergence``.

    Args:
        reduction: a ``Reduction`` or its string.
        name: the loss's name, for logs.

    Example:
        >>> ts.losses.KLDivergence()([[0.5, 0.5]], [[0.25, 0.75]])
        tensor(0.1438)
    """

    def __init__(self, reduction: Reduction | str | None = Reduction.AUTO, name: str = "kl_divergence") -> None:
        super().__init__(reduction, name)

    def call(self, y_true: Any, y_pred: Any) -> Tensor:  # noqa: D102 - the base class's
        return kl_divergence(y_true, y_pred)


class Poisson(Loss):
    """Negative log-likelihood of counts, without the part that the labels fix; see ``ts.losses.poisson``.

    Args:
        reduction: a ``Reduction`` or its string.
        name: the loss's name, for logs.

    Example:
        >>> ts.losses.Poisson()([[1.0]], [[2.0]])
        tensor(1.3069)
    """

    def __init__(self, reduction: Reduction | str | None = Reduction.AUTO, name: str = "poisson") -> None:
        super().__init__(reduction, name)

    def call(self, y_true: Any, y_pred: Any) -> Tensor:  # noqa: D102
        return poisson(y_true, y_pred)
