"""The heads for two classes and for several, of which each example has one."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from typing_extensions import override

from torchstrategy import metrics
from torchstrategy.estimator.export_outputs import ClassificationOutput, ExportOutput, PredictOutput, RegressionOutput
from torchstrategy.estimator.heads.head import Batch, Head, Rule, loss_mean, mean_of
from torchstrategy.estimator.heads.shapes import (
    MetricKeys,
    PredictionKeys,
    all_class_ids,
    all_class_names,
    as_logits,
    check_keys,
    check_label_range,
    check_vocabulary,
    class_names,
    label_ids,
    label_tensor,
    names_of,
)
from torchstrategy.losses.loss import Reduction

__all__ = ["BinaryClassHead", "MultiClassHead", "binary_or_multi_class_head"]

_KEYS = PredictionKeys
_TENSORS = (_KEYS.LOGITS, _KEYS.LOGISTIC, _KEYS.PROBABILITIES, _KEYS.CLASS_IDS, _KEYS.ALL_CLASS_IDS)


class BinaryClassHead(Head):
    """Sigmoid cross entropy between one logit and a label that is one of two classes.

    Labels are numbers in [0, 1], or strings if there is a vocabulary: ``[batch, ...]`` or ``[batch, ..., 1]``.
    Predictions are ``logits``, ``logistic``, ``probabilities``, ``class_ids``, ``classes``, ``all_class_ids`` and
    ``all_classes``; metrics are ``average_loss``, ``accuracy``, ``accuracy_baseline``, ``precision``, ``recall``,
    ``auc``, ``auc_precision_recall``, ``prediction/mean`` and ``label/mean``.

    Args:
        weight_column: see ``Head``.
        thresholds: numbers in (0, 1): for each there are an accuracy, a precision and a recall if it is the least
            probability that counts as class 1.
        label_vocabulary: the two labels, as strings; ``None`` means that labels are numbers.
        loss_reduction: see ``Head``.
        loss_fn: see ``Head``.
        name: see ``Head``.

    Raises:
        ValueError: a threshold is not in (0, 1), or the vocabulary, the reduction or the loss function is refused.

    Example:
        >>> head = ts.estimator.BinaryClassHead(label_vocabulary=["cat", "dog"])
        >>> head.loss(labels=["dog", "dog"], logits=torch.tensor([[45.0], [-41.0]]))
        tensor(20.5000)
        >>> head.predictions(torch.tensor([[45.0]]))["classes"]
        array([['dog']], dtype=object)
    """

    def __init__(
        self,
        weight_column: Any = None,
        thresholds: Iterable[float] | None = None,
        label_vocabulary: Sequence[str] | None = None,
        loss_reduction: Reduction | str = Reduction.SUM_OVER_BATCH_SIZE,
        loss_fn: Callable[..., Any] | None = None,
        name: str | None = None,
    ) -> None:
        self._label_vocabulary = check_vocabulary(label_vocabulary)
        self._thresholds = tuple(thresholds or ())
        for threshold in self._thresholds:
            if not 0 < threshold < 1:
                raise ValueError(f"thresholds must be numbers in (0, 1). Received: {self._thresholds}")
        super().__init__(1, weight_column, loss_reduction, loss_fn, name)

    @override
    def predictions(self, logits: Any, keys: Sequence[str] | None = None) -> dict[str, Any]:
        logits = as_logits(logits, 1)
        two_class_logits = torch.cat((torch.zeros_like(logits), logits), -1)
        class_ids = two_class_logits.argmax(-1, keepdim=True)
        make: dict[str, Callable[[], Any]] = {
            _KEYS.LOGITS: lambda: logits,
            _KEYS.LOGISTIC: lambda: torch.sigmoid(logits),
            _KEYS.PROBABILITIES: lambda: torch.softmax(two_class_logits, -1),
            _KEYS.CLASS_IDS: lambda: class_ids,
            _KEYS.CLASSES: lambda: class_names(class_ids, self._label_vocabulary),
            _KEYS.ALL_CLASS_IDS: lambda: all_class_ids(logits, 2),
            _KEYS.ALL_CLASSES: lambda: all_class_names(logits, 2, self._label_vocabulary),
        }
        return {key: make[key]() for key in check_keys(keys, make)}

    @override
    def _numeric_labels(self, labels: Any, logits: Tensor) -> Tensor:
        if self._label_vocabulary is None:
            numbers = label_tensor(labels, logits, 1)
        else:
            numbers = label_ids(labels, logits, self._label_vocabulary)
        return check_label_range(numbers.to(logits.dtype), 2)

    @override
    def _losses(self, labels: Tensor, logits: Tensor) -> Tensor:
        return F.binary_cross_entropy_with_logits(logits, labels, reduction="none")

    @override
    def _rules(self) -> dict[str, Rule]:
        keys = MetricKeys
        rules = {
            keys.LOSS_MEAN: loss_mean(),
            keys.ACCURACY: Rule(lambda: metrics.Accuracy(keys.ACCURACY), self._labels_and_classes),
            keys.PRECISION: Rule(lambda: metrics.Precision(name=keys.PRECISION), self._labels_and_classes),
            keys.RECALL: Rule(lambda: metrics.Recall(name=keys.RECALL), self._labels_and_classes),
            keys.PREDICTION_MEAN: mean_of(
                keys.PREDICTION_MEAN, lambda batch: (torch.sigmoid(batch.logits), batch.weights)
            ),
            keys.LABEL_MEAN: mean_of(keys.LABEL_MEAN, lambda batch: (batch.labels, batch.weights)),
            keys.ACCURACY_BASELINE: Rule(_accuracy_baseline, lambda batch: (batch.labels, batch.weights)),
            keys.AUC: Rule(lambda: metrics.AUC(name=keys.AUC), self._labels_and_logistic),
            keys.AUC_PR: Rule(lambda: metrics.AUC(curve="PR", name=keys.AUC_PR), self._labels_and_logistic),
        }
        for threshold in self._thresholds:
            rules |= self._rules_at(threshold)
        return rules

    def _rules_at(self, threshold: float) -> dict[str, Rule]:
        accuracy = MetricKeys.ACCURACY_AT_THRESHOLD % threshold
        precision = MetricKeys.PRECISION_AT_THRESHOLD % threshold
        recall = MetricKeys.RECALL_AT_THRESHOLD % threshold
        arguments = self._labels_and_logistic
        return {
            accuracy: Rule(lambda: metrics.BinaryAccuracy(accuracy, threshold=threshold), arguments),
            precision: Rule(lambda: metrics.Precision(threshold, name=precision), arguments),
            recall: Rule(lambda: metrics.Recall(threshold, name=recall), arguments),
        }

    def _labels_and_classes(self, batch: Batch) -> tuple[Any, ...]:
        return batch.labels, self.predictions(batch.logits, [_KEYS.CLASS_IDS])[_KEYS.CLASS_IDS], batch.weights

    def _labels_and_logistic(self, batch: Batch) -> tuple[Any, ...]:
        return batch.labels, torch.sigmoid(batch.logits), batch.weights

    @override
    def _export_outputs(self) -> dict[str, ExportOutput]:
        classification = ClassificationOutput(
            scores=lambda logits: self.predictions(logits, [_KEYS.PROBABILITIES])[_KEYS.PROBABILITIES],
            classes=names_of(2, self._label_vocabulary),
        )
        return {
            "serving_default": classification,
            "classification": classification,
            "regression": RegressionOutput(lambda logits: torch.sigmoid(as_logits(logits, 1))),
            "predict": PredictOutput(lambda logits: self.predictions(logits, _TENSORS)),
        }


def _accuracy_baseline() -> Any:
    from torchstrategy.metrics.classification import AccuracyBaseline  # noqa: PLC0415 - loads torchmetrics

    return AccuracyBaseline(MetricKeys.ACCURACY_BASELINE)


_TENSORS_OF_CLASSES = (
    _KEYS.LOGITS,
    _KEYS.PROBABILITIES,
    _KEYS.CLASS_IDS,
    _KEYS.ALL_CLASS_IDS,
)


class MultiClassHead(Head):
    """Softmax cross entropy between logits and a label that is one of three classes or more.

    Labels are integers from 0 to ``n_classes - 1``, or strings if there is a vocabulary: ``[batch, ...]`` or
    ``[batch, ..., 1]``. Predictions are ``logits``, ``probabilities``, ``class_ids``, ``classes``, ``all_class_ids``
    and ``all_classes``; metrics are ``average_loss`` and ``accuracy``.

    Args:
        n_classes: how many classes there are, more than 2; ``BinaryClassHead`` is for 2.
        weight_column: see ``Head``.
        label_vocabulary: the labels, as strings, in the order of the logits; ``None`` means that labels are integers.
        loss_reduction: see ``Head``.
        loss_fn: see ``Head``.
        name: see ``Head``.

    Raises:
        ValueError: ``n_classes`` is not more than 2 or not the vocabulary's length, or the vocabulary, the reduction or
            the loss function is refused.

    Example:
        >>> head = ts.estimator.MultiClassHead(n_classes=3)
        >>> head.loss(labels=torch.tensor([2]), logits=torch.zeros(1, 3))
        tensor(1.0986)
    """

    def __init__(
        self,
        n_classes: int,
        weight_column: Any = None,
        label_vocabulary: Sequence[str] | None = None,
        loss_reduction: Reduction | str = Reduction.SUM_OVER_BATCH_SIZE,
        loss_fn: Callable[..., Any] | None = None,
        name: str | None = None,
    ) -> None:
        if not isinstance(n_classes, int) or n_classes <= 2:
            raise ValueError(
                f"n_classes must be an integer > 2: {n_classes!r}. (For two classes there is BinaryClassHead, or a "
                "classifier with n_classes=2.)"
            )
        self._label_vocabulary = check_vocabulary(label_vocabulary)
        if self._label_vocabulary is not None and len(self._label_vocabulary) != n_classes:
            raise ValueError(
                f"label_vocabulary must have n_classes={n_classes} labels. It has {len(self._label_vocabulary)}: "
                f"{label_vocabulary!r:.500}"
            )
        super().__init__(n_classes, weight_column, loss_reduction, loss_fn, name)

    @override
    def predictions(self, logits: Any, keys: Sequence[str] | None = None) -> dict[str, Any]:
        n_classes = self._logits_dimension
        logits = as_logits(logits, n_classes)
        class_ids = logits.argmax(-1, keepdim=True)
        make: dict[str, Callable[[], Any]] = {
            _KEYS.LOGITS: lambda: logits,
            _KEYS.PROBABILITIES: lambda: torch.softmax(logits, -1),
            _KEYS.CLASS_IDS: lambda: class_ids,
            _KEYS.CLASSES: lambda: class_names(class_ids, self._label_vocabulary),
            _KEYS.ALL_CLASS_IDS: lambda: all_class_ids(logits, n_classes),
            _KEYS.ALL_CLASSES: lambda: all_class_names(logits, n_classes, self._label_vocabulary),
        }
        return {key: make[key]() for key in check_keys(keys, make)}

    @override
    def _numeric_labels(self, labels: Any, logits: Tensor) -> Tensor:
        if self._label_vocabulary is not None:
            return label_ids(labels, logits, self._label_vocabulary)
        ids = label_tensor(labels, logits, 1)
        if ids.is_floating_point() or ids.is_complex() or ids.dtype is torch.bool:
            raise ValueError(f"Labels must be integers, the numbers of classes. Received: {ids.dtype}")
        return check_label_range(ids.to(torch.int64), self._logits_dimension)

    @override
    def _losses(self, labels: Tensor, logits: Tensor) -> Tensor:
        losses = F.cross_entropy(logits.reshape(-1, self._logits_dimension), labels.reshape(-1), reduction="none")
        return losses.reshape(labels.shape)

    @override
    def _rules(self) -> dict[str, Rule]:
        return {
            MetricKeys.LOSS_MEAN: loss_mean(),
            MetricKeys.ACCURACY: Rule(lambda: metrics.Accuracy(MetricKeys.ACCURACY), self._labels_and_classes),
        }

    def _labels_and_classes(self, batch: Batch) -> tuple[Any, ...]:
        return batch.labels, batch.logits.argmax(-1, keepdim=True), batch.weights

    @override
    def _export_outputs(self) -> dict[str, ExportOutput]:
        classification = ClassificationOutput(
            scores=lambda logits: self.predictions(logits, [_KEYS.PROBABILITIES])[_KEYS.PROBABILITIES],
            classes=names_of(self._logits_dimension, self._label_vocabulary),
        )
        return {
            "serving_default": classification,
            "classification": classification,
            "predict": PredictOutput(lambda logits: self.predictions(logits, _TENSORS_OF_CLASSES)),
        }


def binary_or_multi_class_head(
    n_classes: int, weight_column: Any, label_vocabulary: Sequence[str] | None, loss_reduction: Reduction | str
) -> Head:
    """Return the head of a classifier.

    Raises:
        ValueError: ``n_classes`` is less than 2, or a head refuses another argument.
    """
    if n_classes == 2:
        return BinaryClassHead(
            weight_column=weight_column, label_vocabulary=label_vocabulary, loss_reduction=loss_reduction
        )
    return MultiClassHead(n_classes, weight_column, label_vocabulary, loss_reduction)
