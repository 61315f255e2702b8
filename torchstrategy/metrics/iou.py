"""Intersection over union, from the confusion matrix of all classes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from torchstrategy import errors
from torchstrategy.metrics.confusion import divide_no_nan
from torchstrategy.metrics.metric import Metric
from torchstrategy.metrics.metric_inputs import as_pair, flaw_of, matching_weight, same_shape_pair

__all__ = ["BinaryIoU", "IoU", "MeanIoU", "OneHotIoU", "OneHotMeanIoU"]


class IoU(Metric):
    """Mean intersection over union of some classes: ``true positives / (true + false positives + false negatives)``.

    Made in a strategy's scope, ``result()`` in cross-replica context is that of all examples of all replicas: the
    confusion matrices are added. Classes that neither occur nor are predicted are left out of the mean.

    Args:
        num_classes: the number of classes.
        target_class_ids: the classes in the mean.
        name: the metric's name, for logs; ``None`` means the class's name in snake case, here ``"io_u"``.
        dtype: dtype of the result; ``None`` means torch's default dtype at construction. Counts are kept in
            ``float64``.
        ignore_class: the label of elements that don't count, such as 255; it need not be a class. ``None`` means none.
        sparse_y_true: labels are class ids; otherwise they are one-hot or probabilities along ``axis``.
        sparse_y_pred: predictions are class ids; otherwise they are logits or probabilities along ``axis``.
        axis: the dimension of the classes, where ids are not given.

    Raises:
        ValueError: there is no class, or a target class is not one of them.

    Example:
        >>> metric = ts.metrics.IoU(num_classes=2, target_class_ids=[0])
        >>> metric.update_state([0, 0, 1, 1], [0, 1, 0, 1])
        >>> metric.result()
        tensor(0.3333)
    """

    def __init__(
        self,
        num_classes: int,
        target_class_ids: Sequence[int],
        name: str | None = None,
        dtype: torch.dtype | str | None = None,
        ignore_class: int | None = None,
        sparse_y_true: bool = True,  # noqa: FBT001, FBT002 - tf's arguments
        sparse_y_pred: bool = True,  # noqa: FBT001, FBT002
        axis: int = -1,
    ) -> None:
        super().__init__(dtype, name)
        if num_classes < 1:
            raise ValueError(f"num_classes must be at least 1. Received: {num_classes}")
        targets = list(target_class_ids)
        if not targets or min(targets) < 0 or max(targets) >= num_classes:
            raise ValueError(f"target_class_ids must be in [0, {num_classes}). Received: {target_class_ids!r}")
        self.num_classes = num_classes
        self.target_class_ids = targets
        self.ignore_class = ignore_class
        self.sparse_y_true = sparse_y_true
        self.sparse_y_pred = sparse_y_pred
        self.axis = axis
        self.total_cm: Tensor = self.add_weight("total_confusion_matrix", (num_classes, num_classes))

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        """Add a batch. As in tf, labels come first; torchmetrics' own metrics take predictions first.

        Args:
            y_true: class ids, ``[batch, ...]``, or with one more dimension of the classes; ``batch`` may be 0.
            y_pred: class ids, ``[batch, ...]``, or with one more dimension of the classes.
            sample_weight: scalar, ``[batch]``, or broadcastable to the ids; ``None`` means that everything weighs 1.

        Raises:
            InvalidArgumentError: the shapes do not fit, or an id that counts is none of a class.
        """
        labels, predictions = as_pair(y_true, y_pred)
        flaws = []
        if not self.sparse_y_true:
            flaws.append(self._check_numbers("y_true", labels))
            labels = labels.argmax(self.axis)
        if not self.sparse_y_pred:
            flaws.append(self._check_numbers("y_pred", predictions))
            predictions = predictions.argmax(self.axis)
        labels, predictions = same_shape_pair(
            labels,
            predictions,
            "For logits, probabilities or one-hot vectors, make the metric with sparse_y_pred=False or "
            "sparse_y_true=False.",
        )
        weight = matching_weight(sample_weight, labels, self.total_cm.dtype).flatten()
        labels, predictions = labels.flatten(), predictions.flatten()
        if self.ignore_class is not None:
            counts = labels != self.ignore_class
            labels, predictions, weight = (torch.where(counts, x, 0) for x in (labels, predictions, weight))
        flaws += [self._check_ids("y_true", labels), self._check_ids("y_pred", predictions)]
        cells = labels.to(torch.int64) * self.num_classes + predictions.to(torch.int64)
        flaw = sum(flaw for flaw in flaws if flaw is not None)
        added = weight.new_zeros(self.num_classes**2).index_add(0, cells.clamp(0, self.num_classes**2 - 1), weight)
        added = added + flaw  # 0, unless XLA traces
        self.total_cm = self.total_cm + added.reshape(self.num_classes, self.num_classes).to(self.total_cm)

    def result(self) -> Tensor:
        """Return the mean over the target classes since the last reset; 0 if none of them occurred.

        In replica context this is the replica's own, in cross-replica context the one over all replicas.
        """
        intersection = self.total_cm.diagonal()
        union = self.total_cm.sum(0) + self.total_cm.sum(1) - intersection
        intersection, union = intersection[self.target_class_ids], union[self.target_class_ids]
        return divide_no_nan(divide_no_nan(intersection, union).sum(), (union != 0).sum())

    def _check_numbers(self, argument: str, scores: Tensor) -> Tensor | None:
        if not -scores.ndim <= self.axis < scores.ndim or scores.shape[self.axis] != self.num_classes:
            raise errors.InvalidArgumentError(
                f"{argument} must have {self.num_classes} classes along axis {self.axis}. Received "
                f"{tuple(scores.shape)}. If it holds class ids, make the metric with sparse_{argument}=True."
            )
        return flaw_of(
            scores.isnan(), lambda: errors.InvalidArgumentError(f"{argument} must be numbers. Received nan.")
        )

    def _check_ids(self, argument: str, ids: Tensor) -> Tensor | None:
        invalid = (ids < 0) | (ids >= self.num_classes) | (ids != ids.to(torch.int64))
        return flaw_of(
            invalid,
            lambda: errors.InvalidArgumentError(
                f"{argument} must hold class ids in [0, {self.num_classes}). Received {ids[invalid][0].item()}. Labels "
                "that don't count are given by ignore_class; for logits or probabilities, make the metric with "
                f"sparse_{argument}=False."
            ),
        )


class MeanIoU(IoU):
    """Mean intersection over union of all classes: ``true positives / (true + false positives + false negatives)``.

    Made in a strategy's scope, ``result()`` in cross-replica context is that of all examples of all replicas: the
    confusion matrices are added. Classes that neither occur nor are predicted are left out of the mean.

    Args:
        num_classes: the number of classes.
        name: the metric's name, for logs; ``None`` means ``"mean_io_u"``, as in tf.
        dtype: dtype of the result; ``None`` means torch's default dtype at construction. Counts are kept in
            ``float64``.
        ignore_class: the label of elements that don't count, such as 255; it need not be a class. ``None`` means none.
        sparse_y_true: labels are class ids; otherwise they are one-hot or probabilities along ``axis``.
        sparse_y_pred: predictions are class ids; otherwise they are logits or probabilities along ``axis``.
        axis: the dimension of the classes, where ids are not given.

    Raises:
        ValueError: there is no class.

    Example:
        >>> metric = ts.metrics.MeanIoU(num_classes=2)
        >>> metric.update_state([0, 0, 1, 1], [0, 1, 0, 1], sample_weight=[0.3, 0.3, 0.3, 0.1])
        >>> metric.result()
        tensor(0.2381)
    """

    def __init__(
        self,
        num_classes: int,
        name: str | None = None,
        dtype: torch.dtype | str | None = None,
        ignore_class: int | None = None,
        sparse_y_true: bool = True,  # noqa: FBT001, FBT002 - tf's arguments
        sparse_y_pred: bool = True,  # noqa: FBT001, FBT002
        axis: int = -1,
    ) -> None:
        super().__init__(num_classes, range(num_classes), name, dtype, ignore_class, sparse_y_true, sparse_y_pred, axis)


class BinaryIoU(IoU):
    """Mean intersection over union of the classes 0 and 1, or of one of them, for predictions and a threshold.

    Made in a strategy's scope, ``result()`` in cross-replica context is that of all examples of all replicas. Classes
    that neither occur nor are predicted are left out of the mean.

    Args:
        target_class_ids: the classes in the mean, of 0 and 1.
        threshold: predictions that are not below it mean 1. For logits, use 0.
        name: the metric's name, for logs; ``None`` means ``"binary_io_u"``, as in tf.
        dtype: dtype of the result; ``None`` means torch's default dtype at construction.

    ``update_state(y_true, y_pred, sample_weight)`` takes labels 0 and 1 and predictions of one shape, ``[batch, ...]``.

    Raises:
        ValueError: a target class is neither 0 nor 1, or there is none.

    Example:
        >>> metric = ts.metrics.BinaryIoU(threshold=0.3)
        >>> metric.update_state([0, 1, 0, 1], [0.1, 0.2, 0.4, 0.7])
        >>> metric.result()
        tensor(0.3333)
    """

    def __init__(
        self,
        target_class_ids: Sequence[int] = (0, 1),
        threshold: float = 0.5,
        name: str | None = None,
        dtype: torch.dtype | str | None = None,
    ) -> None:
        super().__init__(2, target_class_ids, name, dtype)
        self.threshold = threshold

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:  # noqa: D102 - the base class's
        labels, scores = as_pair(y_true, y_pred)
        above = (scores >= self.threshold).to(torch.float32)
        super().update_state(labels, torch.where(scores.isnan(), torch.nan, above), sample_weight)  # which refuses nan


class OneHotIoU(IoU):
    """Mean intersection over union of some classes for one-hot labels: ``ts.metrics.IoU`` with ``sparse_y_true=False``.

    Args:
        num_classes: the number of classes.
        target_class_ids: the classes in the mean.
        name: the metric's name, for logs; ``None`` means ``"one_hot_io_u"``, as in tf.
        dtype: dtype of the result; ``None`` means torch's default dtype at construction.
        ignore_class: the class of labels that don't count; ``None`` means none.
        sparse_y_pred: predictions are class ids; otherwise they are logits or probabilities along ``axis``.
        axis: the dimension of the classes.

    Raises:
        ValueError: there is no class, or a target class is not one of them.

    Example:
        >>> metric = ts.metrics.OneHotIoU(num_classes=3, target_class_ids=[0, 2])
        >>> metric.update_state([[0, 0, 1], [1, 0, 0], [0, 1, 0]], [[0.2, 0.3, 0.5], [0.1, 0.2, 0.7], [0.5, 0.3, 0.2]])
        >>> metric.result()
        tensor(0.2500)
    """

    def __init__(
        self,
        num_classes: int,
        target_class_ids: Sequence[int],
        name: str | None = None,
        dtype: torch.dtype | str | None = None,
        ignore_class: int | None = None,
        sparse_y_pred: bool = False,  # noqa: FBT001, FBT002 - tf's arguments
        axis: int = -1,
    ) -> None:
        super().__init__(num_classes, target_class_ids, name, dtype, ignore_class, False, sparse_y_pred, axis)  # noqa: FBT003


class OneHotMeanIoU(MeanIoU):
    """Mean intersection over union of all classes for one-hot labels: ``MeanIoU`` with ``sparse_y_true=False``.

    Args:
        num_classes: the number of classes.
        name: the metric's name, for logs; ``None`` means ``"one_hot_mean_io_u"``, as in tf.
        dtype: dtype of the result; ``None`` means torch's default dtype at construction.
        ignore_class: the class of labels that don't count; ``None`` means none.
        sparse_y_pred: predictions are class ids; otherwise they are logits or probabilities along ``axis``.
        axis: the dimension of the classes.

    Raises:
        ValueError: there is no class.

    Example:
        >>> metric = ts.metrics.OneHotMeanIoU(num_classes=2)
        >>> metric.update_state([[1, 0], [1, 0], [0, 1]], [[0.9, 0.1], [0.2, 0.8], [0.3, 0.7]])
        >>> metric.result()
        tensor(0.5000)
    """

    def __init__(
        self,
        num_classes: int,
        name: str | None = None,
        dtype: torch.dtype | str | None = None,
        ignore_class: int | None = None,
        sparse_y_pred: bool = False,  # noqa: FBT001, FBT002 - tf's arguments
        axis: int = -1,
    ) -> None:
        super().__init__(num_classes, name, dtype, ignore_class, False, sparse_y_pred, axis)  # noqa: FBT003
