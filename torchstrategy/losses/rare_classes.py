"""Losses for rare classes: with less weight on what is right already, and of the overlap of labels and predictions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from torchstrategy import errors
from torchstrategy.losses.loss import (
    EPSILON,
    DType,
    Loss,
    Reduction,
    as_pair,
    binary_terms,
    check_labels_come_first,
    clip,
    smoothed,
)

__all__ = [
    "BinaryFocalCrossentropy",
    "CategoricalFocalCrossentropy",
    "Dice",
    "Tversky",
    "binary_focal_crossentropy",
    "categorical_focal_crossentropy",
    "dice",
    "tversky",
]


def binary_focal_crossentropy(
    y_true: Any,
    y_pred: Any,
    apply_class_balancing: bool = False,  # noqa: FBT001, FBT002
    alpha: float = 0.25,
    gamma: float = 2.0,
    from_logits: bool = False,  # noqa: FBT001, FBT002
    label_smoothing: float = 0.0,
    axis: int = -1,
) -> Tensor:
    """Return the binary cross-entropy with less weight on examples that are right already.

    Source: Lin et al., "Focal Loss for Dense Object Detection", 2017: ``(1 - p)^gamma`` times the cross-entropy,
    where ``p`` is the probability of the right label.

    Args:
        y_true: labels from 0 to 1, ``[batch, ..., n]``.
        y_pred: probabilities of 1, or logits; ``[batch, ..., n]``.
        apply_class_balancing: whether to weigh label 1 with ``alpha`` and label 0 with ``1 - alpha``.
        alpha: the weight of label 1.
        gamma: the exponent; 0 gives the binary cross-entropy.
        from_logits: whether ``y_pred`` holds logits.
        label_smoothing: the part of each label that is moved to 0.5, from 0 to 1.
        axis: the axis to average over.

    Returns:
        The shape without the axis.

    Raises:
        InvalidArgumentError: the shapes differ.
        ValueError: the arguments seem to be in torch's order.

    Example:
        >>> ts.losses.binary_focal_crossentropy([[1.0]], [[0.0]], from_logits=True)  # a quarter of 0.6931
        tensor([0.1733])
    """
    check_labels_come_first(y_true, y_pred)
    labels, scores = smoothed(y_true, y_pred, label_smoothing)
    probabilities = scores.sigmoid() if from_logits else clip(scores)
    wrong = (labels * (1.0 - probabilities) + (1.0 - labels) * probabilities).clamp(min=EPSILON)
    losses = wrong.pow(gamma) * binary_terms(labels, scores, from_logits=from_logits)
    if apply_class_balancing:
        losses = losses * (labels * alpha + (1.0 - labels) * (1.0 - alpha))
    return losses.mean(axis)


def categorical_focal_crossentropy(
    y_true: Any,
    y_pred: Any,
    alpha: float | Sequence[float] = 0.25,
    gamma: float = 2.0,
    from_logits: bool = False,  # noqa: FBT001, FBT002
    label_smoothing: float = 0.0,
    axis: int = -1,
) -> Tensor:
    """Return the categorical cross-entropy with less weight on examples that are right already.

    Source: Lin et al., "Focal Loss for Dense Object Detection", 2017: ``alpha * (1 - p)^gamma`` times the
    cross-entropy, where ``p`` is the probability of the label.

    Args:
        y_true: label probabilities, such as one-hot labels, ``[batch, ..., classes]``.
        y_pred: probabilities, which are normalised to add up to 1, or logits; ``[batch, ..., classes]``.
        alpha: the weight of all classes, or one for each.
        gamma: the exponent; 0 gives ``alpha`` times the categorical cross-entropy.
        from_logits: whether ``y_pred`` holds logits.
        label_smoothing: the part of each label that is spread over all classes, from 0 to 1.
        axis: the classes' axis.

    Returns:
        The shape without the classes' axis.

    Raises:
        InvalidArgumentError: the shapes differ, or ``alpha`` has not one number for each class.
        ValueError: the arguments seem to be in torch's order.

    Example:
        >>> ts.losses.categorical_focal_crossentropy([[1.0, 0.0]], [[0.5, 0.5]])  # a sixteenth of 0.6931
        tensor([0.0433])
    """
    check_labels_come_first(y_true, y_pred)
    labels, scores = as_pair(y_true, y_pred)
    num_classes = labels.shape[axis]
    if label_smoothing:
        labels = labels * (1.0 - label_smoothing) + label_smoothing / num_classes
    weights = torch.as_tensor(alpha, dtype=scores.dtype, device=scores.device)
    if weights.shape not in ((), (num_classes,)):
        raise errors.InvalidArgumentError(
            f"alpha must be a number, or have one for each of {num_classes} classes. Received: {alpha!r}"
        )
    if weights.ndim:
        weights = weights.reshape(-1, *(1,) * (scores.ndim - 1 - axis % scores.ndim))
    shares = scores.softmax(axis) if from_logits else scores / scores.sum(axis, keepdim=True)
    shares = clip(shares)
    return -(weights * (1.0 - shares) ** gamma * labels * shares.log()).sum(axis)


def dice(y_true: Any, y_pred: Any, axis: int | Sequence[int] | None = None) -> Tensor:
    """Return 1 minus the Dice coefficient of each example: ``2 * sum(y_true * y_pred) / (sum(y_true) + sum(y_pred))``.

    Args:
        y_true: labels from 0 to 1, ``[batch, ...]``.
        y_pred: probabilities of the same shape.
        axis: the axes that are summed over, not the first one; ``None`` means all others. (Keras' ``None`` sums
            over the examples as well, of which replicas have different ones.)

    Returns:
        The shape without the axes.

    Raises:
        InvalidArgumentError: the shapes differ.
        ValueError: ``axis`` has that of the examples, there is no other one, or the arguments seem to be in torch's
            order.

    Example:
        >>> ts.losses.dice([[1.0, 0.0], [1.0, 1.0]], [[0.5, 0.5], [1.0, 1.0]])
        tensor([0.5000, 0.0000])
    """
    check_labels_come_first(y_true, y_pred)
    labels, scores = as_pair(y_true, y_pred)
    axes = _axes_of_examples(axis, scores)
    return 1.0 - 2.0 * (labels * scores).sum(axes) / (labels.sum(axes) + scores.sum(axes) + EPSILON)


def tversky(
    y_true: Any, y_pred: Any, alpha: float = 0.5, beta: float = 0.5, axis: int | Sequence[int] | None = None
) -> Tensor:
    """Return 1 minus the Tversky index of each example, which weighs the two kinds of mistakes.

    The index is ``hits / (hits + alpha * missed + beta * extra)`` with the sums ``hits`` of ``y_true * y_pred``,
    ``missed`` of ``y_true * (1 - y_pred)`` and ``extra`` of ``(1 - y_true) * y_pred``, as Keras computes it.

    Args:
        y_true: labels from 0 to 1, ``[batch, ...]``.
        y_pred: probabilities of the same shape.
        alpha: the weight of what is missed.
        beta: the weight of what is predicted and no label. With 0.5 and 0.5 this is ``ts.losses.dice``.
        axis: the axes that are summed over, not the first one; ``None`` means all others. (Keras' ``None`` sums
            over the examples as well, of which replicas have different ones.)

    Returns:
        The shape without the axes.

    Raises:
        InvalidArgumentError: the shapes differ.
        ValueError: ``axis`` has that of the examples, there is no other one, or the arguments seem to be in torch's
            order.

    Example:
        >>> ts.losses.tversky([[1.0, 0.0]], [[0.5, 0.5]], alpha=1.0, beta=1.0)
        tensor([0.6667])
    """
    check_labels_come_first(y_true, y_pred)
    labels, scores = as_pair(y_true, y_pred)
    axes = _axes_of_examples(axis, scores)
    hits = (labels * scores).sum(axes)
    missed, extra = (labels * (1.0 - scores)).sum(axes), ((1.0 - labels) * scores).sum(axes)
    return 1.0 - hits / (hits + alpha * missed + beta * extra + EPSILON)


class BinaryFocalCrossentropy(Loss):
    """Binary cross-entropy with less weight on what is right already; see ``ts.losses.binary_focal_crossentropy``.

    Args:
        apply_class_balancing: whether to weigh label 1 with ``alpha`` and label 0 with ``1 - alpha``.
        alpha: the weight of label 1.
        gamma: the exponent; 0 gives the binary cross-entropy.
        from_logits: whether predictions are logits.
        label_smoothing: the part of each label that is moved to 0.5, from 0 to 1.
        axis: the axis to average over.
        reduction: a ``Reduction`` or its string.
        name: the loss's name, for logs.
        dtype: dtype of the losses; ``None`` means that of the predictions.

    Example:
        >>> ts.losses.BinaryFocalCrossentropy(from_logits=True)(torch.tensor([[1.0]]), torch.zeros(1, 1))
        tensor(0.1733)
    """

    def __init__(  # noqa: PLR0913 - tf's arguments
        self,
        apply_class_balancing: bool = False,  # noqa: FBT001, FBT002
        alpha: float = 0.25,
        gamma: float = 2.0,
        from_logits: bool = False,  # noqa: FBT001, FBT002
        label_smoothing: float = 0.0,
        axis: int = -1,
        reduction: Reduction | str | None = Reduction.AUTO,
        name: str = "binary_focal_crossentropy",
        dtype: DType = None,
    ) -> None:
        super().__init__(name, reduction, dtype)
        self.apply_class_balancing = apply_class_balancing
        self.alpha = alpha
        self.gamma = gamma
        self.from_logits = from_logits
        self.label_smoothing = label_smoothing
        self.axis = axis

    def call(self, y_true: Any, y_pred: Any) -> Tensor:  # noqa: D102 - the base class's
        return binary_focal_crossentropy(
            y_true,
            y_pred,
            self.apply_class_balancing,
            self.alpha,
            self.gamma,
            self.from_logits,
            self.label_smoothing,
            self.axis,
        )


class CategoricalFocalCrossentropy(Loss):
    """Categorical cross-entropy with less weight on what is right; see ``ts.losses.categorical_focal_crossentropy``.

    Args:
        alpha: the weight of all classes, or one for each.
        gamma: the exponent; 0 gives ``alpha`` times the categorical cross-entropy.
        from_logits: whether predictions are logits.
        label_smoothing: the part of each label that is spread over all classes, from 0 to 1.
        axis: the classes' axis.
        reduction: a ``Reduction`` or its string.
        name: the loss's name, for logs.
        dtype: dtype of the losses; ``None`` means that of the predictions.

    Example:
        >>> ts.losses.CategoricalFocalCrossentropy(from_logits=True)(torch.tensor([[0.0, 1.0]]), torch.zeros(1, 2))
        tensor(0.0433)
    """

    def __init__(
        self,
        alpha: float | Sequence[float] = 0.25,
        gamma: float = 2.0,
        from_logits: bool = False,  # noqa: FBT001, FBT002
        label_smoothing: float = 0.0,
        axis: int = -1,
        reduction: Reduction | str | None = Reduction.AUTO,
        name: str = "categorical_focal_crossentropy",
        dtype: DType = None,
    ) -> None:
        super().__init__(name, reduction, dtype)
        self.alpha = alpha
        self.gamma = gamma
        self.from_logits = from_logits
        self.label_smoothing = label_smoothing
        self.axis = axis

    def call(self, y_true: Any, y_pred: Any) -> Tensor:  # noqa: D102
        return categorical_focal_crossentropy(
            y_true, y_pred, self.alpha, self.gamma, self.from_logits, self.label_smoothing, self.axis
        )


class Dice(Loss):
    """1 minus the Dice coefficient of each example; see ``ts.losses.dice``.

    Args:
        reduction: a ``Reduction`` or its string.
        name: the loss's name, for logs.
        axis: the axes that are summed over, not the first one; ``None`` means all others.
        dtype: dtype of the losses; ``None`` means that of the predictions.

    Example:
        >>> ts.losses.Dice()([[1.0, 0.0], [1.0, 1.0]], [[0.5, 0.5], [1.0, 1.0]])
        tensor(0.2500)
    """

    def __init__(
        self,
        reduction: Reduction | str | None = Reduction.AUTO,
        name: str = "dice",
        axis: int | Sequence[int] | None = None,
        dtype: DType = None,
    ) -> None:
        super().__init__(name, reduction, dtype)
        self.axis = axis

    def call(self, y_true: Any, y_pred: Any) -> Tensor:  # noqa: D102
        return dice(y_true, y_pred, self.axis)


class Tversky(Loss):
    """1 minus the Tversky index of each example; see ``ts.losses.tversky``.

    Args:
        alpha: the weight of what is missed.
        beta: the weight of what is predicted and no label.
        reduction: a ``Reduction`` or its string.
        name: the loss's name, for logs.
        axis: the axes that are summed over, not the first one; ``None`` means all others.
        dtype: dtype of the losses; ``None`` means that of the predictions.

    Example:
        >>> ts.losses.Tversky(alpha=1.0, beta=1.0)([[1.0, 0.0]], [[0.5, 0.5]])
        tensor(0.6667)
    """

    def __init__(
        self,
        alpha: float = 0.5,
        beta: float = 0.5,
        reduction: Reduction | str | None = Reduction.AUTO,
        name: str = "tversky",
        axis: int | Sequence[int] | None = None,
        dtype: DType = None,
    ) -> None:
        super().__init__(name, reduction, dtype)
        self.alpha = alpha
        self.beta = beta
        self.axis = axis

    def call(self, y_true: Any, y_pred: Any) -> Tensor:  # noqa: D102
        return tversky(y_true, y_pred, self.alpha, self.beta, self.axis)


def _axes_of_examples(axis: int | Sequence[int] | None, scores: Tensor) -> list[int]:
    """Return the axes to sum over, of which the first one, that of the examples, is none."""
    ndim = scores.ndim
    axes = range(1, ndim) if axis is None else [axis] if isinstance(axis, int) else axis
    if not axes or not all(-ndim < a < ndim and a != 0 for a in axes):
        raise ValueError(
            f"axis={axis} must be axes of y_pred other than the first one: a sum over examples would depend on how "
            f"they are split over replicas. Received y_pred of {tuple(scores.shape)}, where [batch, ...] is expected."
        )
    return list(axes)
