"""Accuracy of class predictions."""

from __future__ import annotations

from typing import Any

import torch

from torchstrategy import errors
from torchstrategy.metrics.base import MeanMetric

__all__ = ["SparseCategoricalAccuracy"]


class SparseCategoricalAccuracy(MeanMetric):
    """How often the most probable class is the integer label.

    Made in a strategy's scope, ``result()`` in cross-replica context is the accuracy over all examples of all
    replicas, however they were split.

    Args:
        name: the metric's name, for logs.
        dtype: dtype of the result; ``None`` means torch's default dtype at construction. Sums are kept in ``float64``.
        kwargs: torchmetrics' arguments.

    Example:
        >>> metric = ts.metrics.SparseCategoricalAccuracy()
        >>> logits = torch.tensor([[2.0, 1.0], [0.1, 0.3], [0.9, 0.8]])
        >>> metric.update_state(torch.tensor([0, 1, 1]), logits)
        >>> metric.result()
        tensor(0.6667)
    """

    def __init__(
        self, name: str = "sparse_categorical_accuracy", dtype: torch.dtype | None = None, **kwargs: Any
    ) -> None:
        super().__init__(name, dtype, **kwargs)

    def update(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        """Add a batch. As in tf, labels come first; torchmetrics' own metrics take predictions first.

        Args:
            y_true: integer labels, ``[batch, ...]`` or ``[batch, ..., 1]``; ``batch`` may be 0.
            y_pred: logits or probabilities, ``[batch, ..., classes]``.
            sample_weight: scalar, ``[batch]``, or broadcastable to the labels; ``None`` means that every example
                weighs 1.

        Raises:
            InvalidArgumentError: the shapes do not fit.
        """
        labels, scores = torch.as_tensor(y_true), torch.as_tensor(y_pred)
        shape = tuple(labels.shape)
        if labels.ndim == scores.ndim and labels.ndim > 0 and labels.shape[-1] == 1:
            labels = labels.squeeze(-1)
        if labels.ndim == 0 or labels.shape != scores.shape[:-1]:
            raise errors.InvalidArgumentError(
                "y_pred must have the shape of y_true and one more dimension for the classes. Received: y_true "
                f"{shape}, y_pred {tuple(scores.shape)}. (Labels come first, as in tf.)"
            )
        self._add(scores.argmax(-1) == labels, sample_weight)
