"""Area under the ROC or precision-recall curve, and best points of them, from counts at fixed thresholds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from torchstrategy import errors
from torchstrategy.metrics.confusion import (
    STATES,
    ConfusionMetric,
    check_scores,
    check_thresholds,
    confusion_counts,
    divide_no_nan,
)
from torchstrategy.metrics.metric import Metric, sum_dtype
from torchstrategy.metrics.metric_inputs import matching_weight, same_shape_pair

__all__ = ["AUC", "PrecisionAtRecall", "RecallAtPrecision", "SensitivityAtSpecificity", "SpecificityAtSensitivity"]

_EPSILON = 1e-7  # keras.backend.epsilon(): the first and the last threshold lie so far outside [0, 1]


class AUC(Metric):
    """Area under the ROC or precision-recall curve, approximated as in tf from counts at fixed thresholds.

    Made in a strategy's scope, ``result()`` in cross-replica context is the area for all examples of all replicas: the
    counts are added, not the areas averaged.

    Args:
        num_thresholds: how many thresholds, evenly spaced from just below 0 to just above 1; at least 2.
        curve: ``"ROC"`` (true over false positive rate) or ``"PR"`` (precision over recall).
        summation_method: ``"interpolation"``: trapezoids; for ``"PR"`` true positives, but not precision, vary linearly
            between thresholds. ``"minoring"`` and ``"majoring"``: the lower and the higher end of each interval.
        name: the metric's name, for logs; ``None`` means ``"auc"``.
        dtype: dtype of the result; ``None`` means torch's default dtype at construction. Counts are kept in
            ``float64``.
        thresholds: thresholds in [0, 1] instead of ``num_thresholds``; those just outside [0, 1] are added.
        multi_label: compute the area of each label, the last of two dimensions, and return their mean. Otherwise every
            element is an example.
        num_labels: the number of labels, with ``multi_label`` only; ``None`` means that of the first batch.
        label_weights: one weight, not negative, for each label: of its area in the mean with ``multi_label``, else of
            its elements in the counts.
        from_logits: predictions are logits, to which ``sigmoid`` is applied.

    Raises:
        ValueError: an argument has a value that the above does not list.

    The definition is that of ``tf.keras.metrics.AUC``; the interpolation of precision is that of section 4 of Davis and
    Goadrich, "The relationship between Precision-Recall and ROC curves", ICML 2006, integrated in closed form.

    Example:
        >>> metric = ts.metrics.AUC(num_thresholds=3)
        >>> metric.update_state([0, 0, 1, 1], [0.0, 0.5, 0.3, 0.9])
        >>> metric.result()
        tensor(0.7500)
    """

    true_positives: Tensor
    false_positives: Tensor
    true_negatives: Tensor
    false_negatives: Tensor

    def __init__(  # noqa: PLR0913 - tf's arguments
        self,
        num_thresholds: int = 200,
        curve: str = "ROC",
        summation_method: str = "interpolation",
        name: str | None = None,
        dtype: torch.dtype | str | None = None,
        thresholds: Sequence[float] | None = None,
        multi_label: bool = False,  # noqa: FBT001, FBT002
        num_labels: int | None = None,
        label_weights: Any = None,
        from_logits: bool = False,  # noqa: FBT001, FBT002
    ) -> None:
        super().__init__(dtype, name)
        self.thresholds = _thresholds(num_thresholds, thresholds)
        self.curve = _one_of("curve", curve, ("ROC", "PR"))
        self.summation_method = _one_of("summation_method", summation_method, ("interpolation", "minoring", "majoring"))
        if num_labels is not None and (not multi_label or num_labels < 1):
            raise ValueError(f"num_labels must be at least 1, and needs multi_label=True. Received: {num_labels}")
        self.multi_label = multi_label
        self.num_labels = num_labels
        self.label_weights = _label_weights(label_weights)
        self.from_logits = from_logits
        shape: tuple[int, ...] = (len(self.thresholds),)
        if multi_label:  # a number takes the shape of what is added to it first
            shape = () if num_labels is None else (*shape, num_labels)
        for state in STATES:
            setattr(self, state, self.add_weight(state, shape))

    @property
    def num_thresholds(self) -> int:
        """How many thresholds there are."""
        return len(self.thresholds)

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        """Add a batch. As in tf, labels come first; torchmetrics' own metrics take predictions first.

        Args:
            y_true: labels, ``[batch, ...]``; those that are not 0 are positive.
            y_pred: predictions in [0, 1], or logits with ``from_logits``, of the same shape; ``batch`` may be 0. With
                ``multi_label``, ``[batch, labels]``.
            sample_weight: scalar, ``[batch]``, or broadcastable to ``y_pred``; ``None`` means that everything weighs 1.

        Raises:
            InvalidArgumentError: the shapes do not fit, or a prediction is ``nan`` or outside [0, 1].
        """
        labels, scores = same_shape_pair(y_true, y_pred)
        if self.from_logits:
            scores = torch.sigmoid(scores)
        flaw = check_scores(scores, self.thresholds, "Or make the metric with from_logits=True.")
        weight = matching_weight(sample_weight, scores, sum_dtype())
        if self.multi_label:
            self._check_labels(scores)
            counts = confusion_counts(labels, scores, weight, self.thresholds)
        else:
            if self.label_weights is not None:
                weight = weight * _label_tensor(self.label_weights, scores.shape[-1]).to(weight)
            labels, scores, weight = (x.reshape(-1, 1) for x in (labels, scores, weight))
            counts = confusion_counts(labels, scores, weight, self.thresholds)
            counts = {name: values.squeeze(1) for name, values in counts.items()}
        for state in STATES:
            own = getattr(self, state)
            added = counts[state] if flaw is None else counts[state] + flaw
            setattr(self, state, own + added.to(own))

    def result(self) -> Tensor:
        """Return the area for all examples since the last reset; 0 if there were none.

        In replica context this is the replica's own, in cross-replica context the one over all replicas.
        """
        if self.true_positives.ndim == 0:
            return self.true_positives
        if self.curve == "PR" and self.summation_method == "interpolation":
            return self._mean_over_labels(self._interpolated_precision().sum(0))
        recall = divide_no_nan(self.true_positives, self.true_positives + self.false_negatives)
        if self.curve == "ROC":
            x, y = divide_no_nan(self.false_positives, self.false_positives + self.true_negatives), recall
        else:
            x, y = recall, divide_no_nan(self.true_positives, self.true_positives + self.false_positives)
        if self.summation_method == "interpolation":
            heights = (y[:-1] + y[1:]) / 2
        else:
            heights = (torch.minimum if self.summation_method == "minoring" else torch.maximum)(y[:-1], y[1:])
        return self._mean_over_labels(((x[:-1] - x[1:]) * heights).sum(0))

    def _argument(self, name: str) -> Any:
        return self.thresholds[1:-1] if name == "thresholds" else super()._argument(name)

    def _interpolated_precision(self) -> Tensor:
        """Return the area of each interval, from the integral of precision over true positives.

        In the interval, ``TP = TP_B + slope * (P - P_B)``, where ``P = TP + FP``; its ends are A, the lower threshold,
        and B. The integral of ``slope * TP / P`` over ``P`` from ``P_B`` to ``P_A`` has the logarithm in it.
        """
        predicted = self.true_positives + self.false_positives
        gained = self.true_positives[:-1] - self.true_positives[1:]
        slope = divide_no_nan(gained, predicted[:-1] - predicted[1:])
        offset = self.true_positives[1:] - slope * predicted[1:]
        is_finite = (predicted[:-1] > 0) & (predicted[1:] > 0)
        ratio = torch.where(is_finite, divide_no_nan(predicted[:-1], predicted[1:]), 1.0)
        area = slope * (gained + offset * ratio.log())
        return divide_no_nan(area, self.true_positives[1:] + self.false_negatives[1:])

    def _mean_over_labels(self, areas: Tensor) -> Tensor:
        if not self.multi_label:
            return areas
        if self.label_weights is None:
            return areas.mean()
        weights = _label_tensor(self.label_weights, len(areas)).to(areas)
        return divide_no_nan((areas * weights).sum(), weights.sum())

    def _check_labels(self, scores: Tensor) -> None:
        known = self.true_positives.shape[1] if self.true_positives.ndim else None
        if scores.ndim != 2 or (known is not None and scores.shape[1] != known):
            raise errors.InvalidArgumentError(
                f"With multi_label, y_pred must be [batch, {known or 'labels'}]. Received {tuple(scores.shape)}"
            )
        if self.label_weights is not None:
            _label_tensor(self.label_weights, scores.shape[1])


class _BestAt(ConfusionMetric):
    """The best of one rate at the thresholds where another one is at least a given value.

    Args:
        least: the least value of the first of ``_rates``, in [0, 1]; the others are those of the public classes.
    """

    _kept = STATES
    _rates: ClassVar[tuple[str, str]]
    #: For each rate the count in its numerator, and what is added to that in its denominator.
    _parts: ClassVar = {
        "precision": ("true_positives", "false_positives"),
        "recall": ("true_positives", "false_negatives"),
        "sensitivity": ("true_positives", "false_negatives"),
        "specificity": ("true_negatives", "false_positives"),
    }

    def __init__(
        self, least: float, num_thresholds: int, class_id: int | None, name: str | None, dtype: torch.dtype | str | None
    ) -> None:
        if not 0 <= least <= 1:
            raise ValueError(f"{self._rates[0]} must be in [0, 1]. Received: {least}")
        if num_thresholds < 1:
            raise ValueError(f"num_thresholds must be at least 1. Received: {num_thresholds}")
        thresholds = [i / (num_thresholds - 1) for i in range(num_thresholds)] if num_thresholds > 1 else [0.5]
        super().__init__(thresholds, class_id=class_id, name=name, dtype=dtype)
        setattr(self, self._rates[0], least)
        self.num_thresholds = num_thresholds

    def result(self) -> Tensor:
        """Return the best rate since the last reset; 0 if no threshold has the other one.

        In replica context this is the replica's own, in cross-replica context the one over all replicas.
        """
        given, best = (self._rate(name) for name in self._rates)
        return torch.where(given >= getattr(self, self._rates[0]), best, 0.0).amax()

    def _rate(self, name: str) -> Tensor:
        hits, others = (getattr(self, state) for state in self._parts[name])
        return divide_no_nan(hits, hits + others)


class PrecisionAtRecall(_BestAt):
    """The best precision at the thresholds whose recall is at least a given one; 0 if there is none.

    Args:
        recall: the least recall, true positives over positive labels.
        num_thresholds: how many thresholds, evenly spaced from 0 to 1; a single one is 0.5.
        class_id: the class, an index of the last dimension, that alone is looked at; ``None`` means all.
        name: the metric's name, for logs; ``None`` means ``"precision_at_recall"``.
        dtype: dtype of the result; ``None`` means torch's default dtype at construction.

    Raises:
        ValueError: ``recall`` is outside [0, 1], ``num_thresholds`` less than 1 or ``class_id`` negative.

    Example:
        >>> metric = ts.metrics.PrecisionAtRecall(0.5)
        >>> metric.update_state([0, 0, 0, 1, 1], [0.0, 0.3, 0.8, 0.3, 0.8])
        >>> metric.result()
        tensor(0.5000)
    """

    _rates = ("recall", "precision")

    def __init__(
        self,
        recall: float,
        num_thresholds: int = 200,
        class_id: int | None = None,
        name: str | None = None,
        dtype: torch.dtype | str | None = None,
    ) -> None:
        super().__init__(recall, num_thresholds, class_id, name, dtype)


class RecallAtPrecision(_BestAt):
    """The best recall at the thresholds whose precision is at least a given one; 0 if there is none.

    Args:
        precision: the least precision, true positives over positive predictions.
        num_thresholds: how many thresholds, evenly spaced from 0 to 1; a single one is 0.5.
        class_id: the class, an index of the last dimension, that alone is looked at; ``None`` means all.
        name: the metric's name, for logs; ``None`` means ``"recall_at_precision"``.
        dtype: dtype of the result; ``None`` means torch's default dtype at construction.

    Raises:
        ValueError: ``precision`` is outside [0, 1], ``num_thresholds`` less than 1 or ``class_id`` negative.

    Example:
        >>> metric = ts.metrics.RecallAtPrecision(0.5)
        >>> metric.update_state([0, 0, 0, 1, 1], [0.0, 0.3, 0.8, 0.3, 0.8])
        >>> metric.result()
        tensor(1.)
    """

    _rates = ("precision", "recall")

    def __init__(
        self,
        precision: float,
        num_thresholds: int = 200,
        class_id: int | None = None,
        name: str | None = None,
        dtype: torch.dtype | str | None = None,
    ) -> None:
        super().__init__(precision, num_thresholds, class_id, name, dtype)


class SensitivityAtSpecificity(_BestAt):
    """The best sensitivity at the thresholds whose specificity is at least a given one; 0 if there is none.

    Args:
        specificity: the least specificity, true negatives over negative labels.
        num_thresholds: how many thresholds, evenly spaced from 0 to 1; a single one is 0.5.
        class_id: the class, an index of the last dimension, that alone is looked at; ``None`` means all.
        name: the metric's name, for logs; ``None`` means ``"sensitivity_at_specificity"``.
        dtype: dtype of the result; ``None`` means torch's default dtype at construction.

    Raises:
        ValueError: ``specificity`` is outside [0, 1], ``num_thresholds`` less than 1 or ``class_id`` negative.

    Example:
        >>> metric = ts.metrics.SensitivityAtSpecificity(0.5)
        >>> metric.update_state([0, 0, 0, 1, 1], [0.0, 0.3, 0.8, 0.3, 0.8])
        >>> metric.result()
        tensor(0.5000)
    """

    _rates = ("specificity", "sensitivity")

    def __init__(
        self,
        specificity: float,
        num_thresholds: int = 200,
        class_id: int | None = None,
        name: str | None = None,
        dtype: torch.dtype | str | None = None,
    ) -> None:
        super().__init__(specificity, num_thresholds, class_id, name, dtype)


class SpecificityAtSensitivity(_BestAt):
    """The best specificity at the thresholds whose sensitivity is at least a given one; 0 if there is none.

    Args:
        sensitivity: the least sensitivity, true positives over positive labels.
        num_thresholds: how many thresholds, evenly spaced from 0 to 1; a single one is 0.5.
        class_id: the class, an index of the last dimension, that alone is looked at; ``None`` means all.
        name: the metric's name, for logs; ``None`` means ``"specificity_at_sensitivity"``.
        dtype: dtype of the result; ``None`` means torch's default dtype at construction.

    Raises:
        ValueError: ``sensitivity`` is outside [0, 1], ``num_thresholds`` less than 1 or ``class_id`` negative.

    Example:
        >>> metric = ts.metrics.SpecificityAtSensitivity(0.5)
        >>> metric.update_state([0, 0, 0, 1, 1], [0.0, 0.3, 0.8, 0.3, 0.8])
        >>> metric.result()
        tensor(0.6667)
    """

    _rates = ("sensitivity", "specificity")

    def __init__(
        self,
        sensitivity: float,
        num_thresholds: int = 200,
        class_id: int | None = None,
        name: str | None = None,
        dtype: torch.dtype | str | None = None,
    ) -> None:
        super().__init__(sensitivity, num_thresholds, class_id, name, dtype)


def _label_tensor(label_weights: list[float], num_labels: int) -> Tensor:
    """Return the weights as a tensor, of which there must be one for each label."""
    if len(label_weights) != num_labels:
        raise errors.InvalidArgumentError(
            f"label_weights must have one entry for each label. Received {len(label_weights)} for {num_labels} labels, "
            "the last dimension of y_pred."
        )
    return torch.tensor(label_weights, dtype=torch.float64)


def _thresholds(num_thresholds: int, thresholds: Sequence[float] | None) -> list[float]:
    if thresholds is not None:
        inner = sorted(check_thresholds(thresholds)) if len(thresholds) else []
    elif num_thresholds < 2:
        raise ValueError(f"num_thresholds must be at least 2. Received: {num_thresholds}")
    else:
        inner = [i / (num_thresholds - 1) for i in range(1, num_thresholds - 1)]
    return [-_EPSILON, *inner, 1 + _EPSILON]


def _one_of(argument: str, value: str, allowed: tuple[str, ...]) -> str:
    for name in allowed:
        if isinstance(value, str) and value.lower() == name.lower():
            return name
    raise ValueError(f"{argument} must be one of {', '.join(allowed)}. Received: {value!r}")


def _label_weights(label_weights: Any) -> list[float] | None:
    if label_weights is None:
        return None
    weights = torch.as_tensor(label_weights, dtype=torch.float64, device="cpu")
    if weights.ndim != 1 or (weights < 0).any() or weights.isnan().any():
        raise ValueError(f"label_weights must be one number, not negative, for each label. Received: {label_weights!r}")
    values: list[float] = weights.tolist()
    return values
