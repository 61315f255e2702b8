"""Losses of class probabilities. Logits are computed with torch's stable functions; probabilities are clipped as in tf.

Each function returns one loss for each example (or pixel, or token): the classes' axis is reduced.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from torchstrategy import errors
from torchstrategy.losses.loss import (
    EPSILON,
    Loss,
    Reduction,
    as_pair,
    as_tensor,
    check_labels_come_first,
    clip,
    predictions,
)

__all__ = [
    "BinaryCrossentropy",
    "BinaryFocalCrossentropy",
    "CategoricalCrossentropy",
    "SparseCategoricalCrossentropy",
    "binary_crossentropy",
    "binary_focal_crossentropy",
    "categorical_crossentropy",
    "sparse_categorical_crossentropy",
]

_NO_CLASS = -(2**31)


def sparse_categorical_crossentropy(
    y_true: Any,
    y_pred: Any,
    from_logits: bool = False,  # noqa: FBT001, FBT002 - tf's signature
    axis: int = -1,
    ignore_class: int | None = None,
) -> Tensor:
    """Return the cross-entropy of integer labels.

    Args:
        y_true: integer labels, the shape of ``y_pred`` without the classes' axis, which may be there with size 1.
        y_pred: probabilities or logits, ``[batch, ..., classes]``.
        from_logits: whether ``y_pred`` holds logits.
        axis: the classes' axis.
        ignore_class: a label whose loss is 0, such as that of unlabelled pixels.

    Returns:
        ``y_pred``'s shape without the classes' axis.

    Raises:
        InvalidArgumentError: the shapes do not fit.
        IndexError: a label on the CPU is no class.

    Example:
        >>> ts.losses.sparse_categorical_crossentropy([0, 1], [[0.5, 0.5], [0.75, 0.25]])
        tensor([0.6931, 1.3863])
    """
    scores = predictions(y_pred)
    labels = as_tensor(y_true, "y_true", scores.device)
    shape = tuple(labels.shape)
    if labels.ndim == scores.ndim > 0 and labels.shape[axis] == 1:
        labels = labels.squeeze(axis)
    if scores.ndim == 0 or labels.shape != scores.movedim(axis, -1).shape[:-1]:
        raise errors.InvalidArgumentError(
            f"y_pred must have the shape of y_true and one more axis, {axis}, for the classes. Received: y_true "
            f"{shape}, y_pred {tuple(scores.shape)}. (Labels come first, as in tf; one-hot labels are for "
            "categorical_crossentropy.)"
        )
    logits = scores if from_logits else clip(scores).log()
    return F.cross_entropy(
        logits.movedim(axis, min(1, logits.ndim - 1)),
        labels.long(),
        ignore_index=_NO_CLASS if ignore_class is None else ignore_class,
        reduction="none",
    )


def categorical_crossentropy(
    y_true: Any,
    y_pred: Any,
    from_logits: bool = False,  # noqa: FBT001, FBT002 - tf's signature
    label_smoothing: float = 0.0,
    axis: int = -1,
) -> Tensor:
    """Return the cross-entropy of label distributions, such as one-hot labels.

    Args:
        y_true: label probabilities, ``[batch, ..., classes]``.
        y_pred: probabilities, which are normalised to add up to 1, or logits; ``[batch, ..., classes]``.
        from_logits: whether ``y_pred`` holds logits.
        label_smoothing: the part of each label that is spread over all classes, from 0 to 1.
        axis: the classes' axis.

    Returns:
        The shape without the classes' axis.

    Raises:
        InvalidArgumentError: the shapes differ.
        ValueError: the arguments seem to be in torch's order.

    Example:
        >>> ts.losses.categorical_crossentropy([[1.0, 0.0]], [[0.5, 0.5]])
        tensor([0.6931])
    """
    check_labels_come_first(y_true, y_pred)
    labels, scores = as_pair(y_true, y_pred, "Integer labels are for sparse_categorical_crossentropy.")
    if label_smoothing:
        labels = labels * (1.0 - label_smoothing) + label_smoothing / labels.shape[axis]
    if from_logits:
        return -(labels * scores.log_softmax(axis)).sum(axis)
    return -(labels * clip(scores / scores.sum(axis, keepdim=True)).log()).sum(axis)


def binary_crossentropy(
    y_true: Any,
    y_pred: Any,
    from_logits: bool = False,  # noqa: FBT001, FBT002 - tf's signature
    label_smoothing: float = 0.0,
    axis: int = -1,
) -> Tensor:
    """Return the cross-entropy of labels 0 and 1, averaged over one axis.

    Args:
        y_true: labels from 0 to 1, ``[batch, ..., n]``.
        y_pred: probabilities of 1, or logits; ``[batch, ..., n]``.
        from_logits: whether ``y_pred`` holds logits.
        label_smoothing: the part of each label that is moved to 0.5, from 0 to 1.
        axis: the axis to average over.

    Returns:
        The shape without the axis.

    Raises:
        InvalidArgumentError: the shapes differ.
        ValueError: the arguments seem to be in torch's order.

    Example:
        >>> ts.losses.binary_crossentropy([[0.0, 1.0]], [[0.0, 0.0]], from_logits=True)
        tensor([0.6931])
    """
    check_labels_come_first(y_true, y_pred)
    labels, scores = _smoothed(y_true, y_pred, label_smoothing)
    return _binary(labels, scores, from_logits=from_logits).mean(axis)


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
    labels, scores = _smoothed(y_true, y_pred, label_smoothing)
    probabilities = scores.sigmoid() if from_logits else clip(scores)
    wrong = (labels * (1.0 - probabilities) + (1.0 - labels) * probabilities).clamp(min=EPSILON)
    losses = wrong.pow(gamma) * _binary(labels, scores, from_logits=from_logits)
    if apply_class_balancing:
        losses = losses * (labels * alpha + (1.0 - labels) * (1.0 - alpha))
    return losses.mean(axis)


class SparseCategoricalCrossentropy(Loss):
    """Cross-entropy of integer labels; see ``ts.losses.sparse_categorical_crossentropy``.

    Args:
        from_logits: whether predictions are logits.
        ignore_class: a label that does not count; means are then over the other labels.
        reduction: a ``Reduction`` or its string.
        name: the loss's name, for logs.
        axis: the classes' axis; 1 for images ``[batch, classes, height, width]``.

    Example:
        >>> loss = ts.losses.SparseCategoricalCrossentropy(from_logits=True, reduction="none")
        >>> loss(torch.tensor([0, 1]), torch.zeros(2, 2))
        tensor([0.6931, 0.6931])
    """

    def __init__(
        self,
        from_logits: bool = False,  # noqa: FBT001, FBT002 - tf's signature
        ignore_class: int | None = None,
        reduction: Reduction | str | None = Reduction.AUTO,
        name: str = "sparse_categorical_crossentropy",
        axis: int = -1,
    ) -> None:
        super().__init__(reduction, name)
        self.from_logits = from_logits
        self.ignore_class = ignore_class
        self.axis = axis

    def call(self, y_true: Any, y_pred: Any) -> Tensor:  # noqa: D102 - the base class's
        return sparse_categorical_crossentropy(y_true, y_pred, self.from_logits, self.axis, self.ignore_class)

    def _counts(self, y_true: Any) -> Tensor | None:
        if self.ignore_class is None:
            return None
        return as_tensor(y_true, "y_true") != self.ignore_class


class CategoricalCrossentropy(Loss):
    """Cross-entropy of one-hot labels; see ``ts.losses.categorical_crossentropy``.

    Args:
        from_logits: whether predictions are logits.
        label_smoothing: the part of each label that is spread over all classes, from 0 to 1.
        axis: the classes' axis.
        reduction: a ``Reduction`` or its string.
        name: the loss's name, for logs.

    Example:
        >>> loss = ts.losses.CategoricalCrossentropy(from_logits=True)
        >>> loss(torch.tensor([[0.0, 1.0]]), torch.zeros(1, 2))
        tensor(0.6931)
    """

    def __init__(
        self,
        from_logits: bool = False,  # noqa: FBT001, FBT002 - tf's signature
        label_smoothing: float = 0.0,
        axis: int = -1,
        reduction: Reduction | str | None = Reduction.AUTO,
        name: str = "categorical_crossentropy",
    ) -> None:
        super().__init__(reduction, name)
        self.from_logits = from_logits
        self.label_smoothing = label_smoothing
        self.axis = axis

    def call(self, y_true: Any, y_pred: Any) -> Tensor:  # noqa: D102
        return categorical_crossentropy(y_true, y_pred, self.from_logits, self.label_smoothing, self.axis)


class BinaryCrossentropy(Loss):
    """Cross-entropy of labels 0 and 1; see ``ts.losses.binary_crossentropy``.

    Args:
        from_logits: whether predictions are logits.
        label_smoothing: the part of each label that is moved to 0.5, from 0 to 1.
        axis: the axis to average over.
        reduction: a ``Reduction`` or its string.
        name: the loss's name, for logs.

    Example:
        >>> ts.losses.BinaryCrossentropy(from_logits=True)(torch.tensor([[0.0], [1.0]]), torch.zeros(2, 1))
        tensor(0.6931)
    """

    def __init__(
        self,
        from_logits: bool = False,  # noqa: FBT001, FBT002 - tf's signature
        label_smoothing: float = 0.0,
        axis: int = -1,
        reduction: Reduction | str | None = Reduction.AUTO,
        name: str = "binary_crossentropy",
    ) -> None:
        super().__init__(reduction, name)
        self.from_logits = from_logits
        self.label_smoothing = label_smoothing
        self.axis = axis

    def call(self, y_true: Any, y_pred: Any) -> Tensor:  # noqa: D102
        return binary_crossentropy(y_true, y_pred, self.from_logits, self.label_smoothing, self.axis)


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

    Example:
        >>> ts.losses.BinaryFocalCrossentropy(from_logits=True)(torch.tensor([[1.0]]), torch.zeros(1, 1))
        tensor(0.1733)
    """

    def __init__(
        self,
        apply_class_balancing: bool = False,  # noqa: FBT001, FBT002
        alpha: float = 0.25,
        gamma: float = 2.0,
        from_logits: bool = False,  # noqa: FBT001, FBT002
        label_smoothing: float = 0.0,
        axis: int = -1,
        reduction: Reduction | str | None = Reduction.AUTO,
        name: str = "binary_focal_crossentropy",
    ) -> None:
        super().__init__(reduction, name)
        self.apply_class_balancing = apply_class_balancing
        self.alpha = alpha
        self.gamma = gamma
        self.from_logits = from_logits
        self.label_smoothing = label_smoothing
        self.axis = axis

    def call(self, y_true: Any, y_pred: Any) -> Tensor:  # noqa: D102
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


def _smoothed(y_true: Any, y_pred: Any, label_smoothing: float) -> tuple[Tensor, Tensor]:
    labels, scores = as_pair(y_true, y_pred)
    return (labels * (1.0 - label_smoothing) + 0.5 * label_smoothing if label_smoothing else labels), scores


def _binary(labels: Tensor, scores: Tensor, *, from_logits: bool) -> Tensor:
    """Return the binary cross-entropy of each entry."""
    if from_logits:
        return F.binary_cross_entropy_with_logits(scores, labels, reduction="none")
    probabilities = clip(scores)
    # Written out: torch's own function on probabilities is refused under autocast.
    return -(labels * probabilities.log() + (1.0 - labels) * torch.log1p(-probabilities))
