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
    DType,
    Loss,
    Reduction,
    as_pair,
    as_tensor,
    binary_terms,
    check_labels_come_first,
    clip,
    predictions,
    smoothed,
)

__all__ = [
    "BinaryCrossentropy",
    "CategoricalCrossentropy",
    "CategoricalGeneralizedCrossEntropy",
    "KLDivergence",
    "SparseCategoricalCrossentropy",
    "binary_crossentropy",
    "categorical_crossentropy",
    "categorical_generalized_cross_entropy",
    "kl_divergence",
    "sparse_categorical_crossentropy",
]

_NO_CLASS = -(2**31)


def sparse_categorical_crossentropy(
    y_true: Any,
    y_pred: Any,
    from_logits: bool = False,  # noqa: FBT001, FBT002 - tf's signature
    ignore_class: int | None = None,
    axis: int = -1,
) -> Tensor:
    """Return the cross-entropy of integer labels.

    Args:
        y_true: integer labels, the shape of ``y_pred`` without the classes' axis, which may be there with size 1.
        y_pred: probabilities or logits, ``[batch, ..., classes]``.
        from_logits: whether ``y_pred`` holds logits.
        ignore_class: a label whose loss is 0, such as that of unlabelled pixels.
        axis: the classes' axis.

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
    labels, scores = smoothed(y_true, y_pred, label_smoothing)
    return binary_terms(labels, scores, from_logits=from_logits).mean(axis)


def categorical_generalized_cross_entropy(y_true: Any, y_pred: Any, q: float) -> Tensor:
    """Return ``(1 - p^q) / q``, where ``p`` is the probability of the label: less of wrong labels is learnt.

    Source: Zhang and Sabuncu, "Generalized Cross Entropy Loss for Training Deep Neural Networks with
    Noisy Labels", 2018.

    Args:
        y_true: integer labels, the shape of ``y_pred`` without the last axis, which may be there with size 1.
        y_pred: probabilities, ``[batch, ..., classes]``.
        q: near 0 the loss is like the cross-entropy, near 1 like the absolute error.

    Returns:
        ``y_pred``'s shape without the last axis.

    Raises:
        InvalidArgumentError: the shapes do not fit.

    Example:
        >>> ts.losses.categorical_generalized_cross_entropy([0, 1], [[0.25, 0.75], [0.0, 1.0]], q=0.5)
        tensor([1., 0.])
    """
    scores = predictions(y_pred)
    labels = as_tensor(y_true, "y_true", scores.device)
    if labels.ndim == scores.ndim - 1:
        labels = labels.unsqueeze(-1)
    if scores.ndim == 0 or labels.shape != (*scores.shape[:-1], 1):
        raise errors.InvalidArgumentError(
            "y_pred must have the shape of y_true and one more axis for the classes. Received: y_true "
            f"{tuple(labels.shape)}, y_pred {tuple(scores.shape)}. (Labels come first, as in tf.)"
        )
    right = scores.gather(-1, labels.long()).squeeze(-1)
    return (1.0 - right.clamp(min=torch.finfo(right.dtype).tiny) ** q) / q  # at 0 the gradient would be infinite


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


class SparseCategoricalCrossentropy(Loss):
    """Cross-entropy of integer labels; see ``ts.losses.sparse_categorical_crossentropy``.

    Args:
        from_logits: whether predictions are logits.
        ignore_class: a label that does not count; means are then over the other labels.
        reduction: a ``Reduction`` or its string.
        axis: the classes' axis; 1 for images ``[batch, classes, height, width]``.
        name: the loss's name, for logs.
        dtype: dtype of the losses; ``None`` means that of the predictions.

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
        axis: int = -1,
        name: str = "sparse_categorical_crossentropy",
        dtype: DType = None,
    ) -> None:
        super().__init__(name, reduction, dtype)
        self.from_logits = from_logits
        self.ignore_class = ignore_class
        self.axis = axis

    def call(self, y_true: Any, y_pred: Any) -> Tensor:  # noqa: D102 - the base class's
        return sparse_categorical_crossentropy(y_true, y_pred, self.from_logits, self.ignore_class, self.axis)

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
        dtype: dtype of the losses; ``None`` means that of the predictions.

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
        dtype: DType = None,
    ) -> None:
        super().__init__(name, reduction, dtype)
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
        dtype: dtype of the losses; ``None`` means that of the predictions.

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
        dtype: DType = None,
    ) -> None:
        super().__init__(name, reduction, dtype)
        self.from_logits = from_logits
        self.label_smoothing = label_smoothing
        self.axis = axis

    def call(self, y_true: Any, y_pred: Any) -> Tensor:  # noqa: D102
        return binary_crossentropy(y_true, y_pred, self.from_logits, self.label_smoothing, self.axis)


class CategoricalGeneralizedCrossEntropy(Loss):
    """Cross-entropy of integer labels that may be wrong; see ``ts.losses.categorical_generalized_cross_entropy``.

    Args:
        q: near 0 the loss is like the cross-entropy, near 1 like the absolute error; between 0 and 1.
        reduction: a ``Reduction`` or its string.
        name: the loss's name, for logs.
        dtype: dtype of the losses; ``None`` means that of the predictions.

    Raises:
        ValueError: ``q`` is not between 0 and 1.

    Example:
        >>> ts.losses.CategoricalGeneralizedCrossEntropy()([0, 1], [[0.25, 0.75], [0.0, 1.0]])
        tensor(0.5000)
    """

    def __init__(
        self,
        q: float = 0.5,
        reduction: Reduction | str | None = Reduction.AUTO,
        name: str = "categorical_generalized_cross_entropy",
        dtype: DType = None,
    ) -> None:
        super().__init__(name, reduction, dtype)
        if not 0 < q < 1:
            raise ValueError(f"q must be between 0 and 1. Received: {q!r}")
        self.q = q

    def call(self, y_true: Any, y_pred: Any) -> Tensor:  # noqa: D102
        return categorical_generalized_cross_entropy(y_true, y_pred, self.q)


class KLDivergence(Loss):
    """Kullback-Leibler divergence of the predictions from the labels; see ``ts.losses.kl_divergence``.

    Args:
        reduction: a ``Reduction`` or its string.
        name: the loss's name, for logs.
        dtype: dtype of the losses; ``None`` means that of the predictions.

    Example:
        >>> ts.losses.KLDivergence()([[0.5, 0.5]], [[0.25, 0.75]])
        tensor(0.1438)
    """

    def __init__(
        self, reduction: Reduction | str | None = Reduction.AUTO, name: str = "kl_divergence", dtype: DType = None
    ) -> None:
        super().__init__(name, reduction, dtype)

    def call(self, y_true: Any, y_pred: Any) -> Tensor:  # noqa: D102
        return kl_divergence(y_true, y_pred)
