"""Numbers of true and false positives and negatives at thresholds, and what is computed from them.

A prediction is positive if it is greater than the threshold, compared in the prediction's dtype (halves as
``float32``). Counts are sums of weights in ``float64``. The definitions are those of ``tf.keras.metrics``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from torchstrategy import errors
from torchstrategy.base.devices import kind_of
from torchstrategy.metrics.metric import Metric, sum_dtype
from torchstrategy.metrics.metric_inputs import flaw_of, matching_weight, same_shape_pair

__all__ = [
    "STATES",
    "ConfusionMetric",
    "FalseNegatives",
    "FalsePositives",
    "Precision",
    "Recall",
    "TrueNegatives",
    "TruePositives",
    "check_scores",
    "check_thresholds",
    "confusion_counts",
    "divide_no_nan",
]

#: The counts' names, which are those of the metrics' states.
STATES = ("true_positives", "false_positives", "true_negatives", "false_negatives")


class ConfusionMetric(Metric):
    """Keeps some of the four counts for each threshold.

    Args:
        thresholds: a number or several in [0, 1]; ``None`` means 0.5, or, with ``top_k``, that the threshold is below
            all predictions.
        top_k: how many of an example's classes with the highest predictions can be positive; ``None`` means all.
        class_id: the only class that is looked at; ``None`` means all.
        name: the metric's name, for logs; ``None`` means the class's name in snake case.
        dtype: dtype of the result; ``None`` means torch's default dtype at construction.
    """

    _kept: ClassVar[tuple[str, ...]]

    def __init__(
        self,
        thresholds: float | Sequence[float] | None = None,
        top_k: int | None = None,
        class_id: int | None = None,
        name: str | None = None,
        dtype: torch.dtype | str | None = None,
    ) -> None:
        super().__init__(dtype, name)
        if top_k is not None and top_k < 1:
            raise ValueError(f"top_k must be at least 1. Received: {top_k}")
        if class_id is not None and class_id < 0:
            raise ValueError(f"class_id must be the number of a class, at least 0. Received: {class_id}")
        if thresholds is None:
            self.thresholds = [0.5 if top_k is None else -math.inf]
        else:
            self.thresholds = check_thresholds(thresholds)
        self.top_k = top_k
        self.class_id = class_id
        for state in self._kept:
            setattr(self, state, self.add_weight(state, (len(self.thresholds),)))

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        """Add a batch. As in tf, labels come first; torchmetrics' own metrics take predictions first.

        Args:
            y_true: labels, ``[batch, ...]``; those that are not 0 are positive.
            y_pred: predictions in [0, 1], of the same shape; ``batch`` may be 0. If 0 is the only threshold, or
                with ``top_k`` and no threshold, logits will do.
            sample_weight: scalar, ``[batch]``, or broadcastable to ``y_pred``; ``None`` means that everything weighs 1.

        Raises:
            InvalidArgumentError: the shapes do not fit, or a prediction is ``nan`` or outside [0, 1].
        """
        labels, scores = same_shape_pair(y_true, y_pred)
        flaw = check_scores(scores, self.thresholds, "Precision(thresholds=0) and its like count logits above 0.")
        weight = matching_weight(sample_weight, scores, sum_dtype())
        if self.top_k is not None:
            scores = _only_top_k(scores, self.top_k)
        if self.class_id is not None:
            _check_class(self.class_id, scores)
            labels, scores, weight = (x[..., self.class_id] for x in (labels, scores, weight))
        labels, scores, weight = (x.reshape(-1, 1) for x in (labels, scores, weight))
        counts = confusion_counts(labels, scores, weight, self.thresholds)
        for state in self._kept:
            own = getattr(self, state)
            added = counts[state] if flaw is None else counts[state] + flaw
            setattr(self, state, own + added.squeeze(1).to(own))

    def _argument(self, name: str) -> Any:
        return None if name == "thresholds" and self.thresholds == [-math.inf] else super()._argument(name)

    def _one_for_each_threshold(self, values: Tensor) -> Tensor:
        return values[0] if len(self.thresholds) == 1 else values


class Precision(ConfusionMetric):
    """What fraction of the positive predictions is right: ``true_positives / (true_positives + false_positives)``.

    Made in a strategy's scope, ``result()`` in cross-replica context is that of all examples of all replicas. It is 0
    without positive predictions.

    Args:
        thresholds: a number or several in [0, 1]: a prediction above it is positive. ``None`` means 0.5, or, with
            ``top_k``, that each of the ``k`` is positive. The result has one value for each threshold.
        top_k: only the ``k`` highest predictions of an example, over the last dimension, can be positive; of equal
            ones, the first. ``None`` means all. (As in tf, a ``y_pred`` of one dimension is one example's.)
        class_id: the class, an index of the last dimension, that alone is looked at; ``None`` means all.
        name: the metric's name, for logs; ``None`` means ``"precision"``.
        dtype: dtype of the result; ``None`` means torch's default dtype at construction. Counts are kept in
            ``float64``.

    Raises:
        ValueError: a threshold is outside [0, 1], ``top_k`` is less than 1 or ``class_id`` negative.

    Example:
        >>> metric = ts.metrics.Precision()
        >>> metric.update_state([0, 1, 1, 1], [1.0, 0.0, 1.0, 1.0])
        >>> metric.result()
        tensor(0.6667)
    """

    _kept = ("true_positives", "false_positives")
    true_positives: Tensor
    false_positives: Tensor

    def result(self) -> Tensor:
        """Return the precision since the last reset: a scalar, or ``[thresholds]`` if there are several.

        In replica context this is the replica's own, in cross-replica context the one over all replicas.
        """
        positive = self.true_positives + self.false_positives
        return self._one_for_each_threshold(divide_no_nan(self.true_positives, positive))


class Recall(ConfusionMetric):
    """What fraction of the positive labels is predicted: ``true_positives / (true_positives + false_negatives)``.

    Made in a strategy's scope, ``result()`` in cross-replica context is that of all examples of all replicas. It is 0
    without positive labels.

    Args:
        thresholds: a number or several in [0, 1]: a prediction above it is positive. ``None`` means 0.5, or, with
            ``top_k``, that each of the ``k`` is positive. The result has one value for each threshold.
        top_k: only the ``k`` highest predictions of an example, over the last dimension, can be positive; of equal
            ones, the first. ``None`` means all. (As in tf, a ``y_pred`` of one dimension is one example's.)
        class_id: the class, an index of the last dimension, that alone is looked at; ``None`` means all.
        name: the metric's name, for logs; ``None`` means ``"recall"``.
        dtype: dtype of the result; ``None`` means torch's default dtype at construction. Counts are kept in
            ``float64``.

    Raises:
        ValueError: a threshold is outside [0, 1], ``top_k`` is less than 1 or ``class_id`` negative.

    Example:
        >>> metric = ts.metrics.Recall()
        >>> metric.update_state([0, 1, 1, 1], [1.0, 0.0, 1.0, 1.0])
        >>> metric.result()
        tensor(0.6667)
    """

    _kept = ("true_positives", "false_negatives")
    true_positives: Tensor
    false_negatives: Tensor

    def result(self) -> Tensor:
        """Return the recall since the last reset: a scalar, or ``[thresholds]`` if there are several.

        In replica context this is the replica's own, in cross-replica context the one over all replicas.
        """
        return self._one_for_each_threshold(
            divide_no_nan(self.true_positives, self.true_positives + self.false_negatives)
        )


class _Count(ConfusionMetric):
    """One of the four counts.

    Args:
        thresholds: a number or several in [0, 1]: a prediction above it is positive; ``None`` means 0.5.
        name: the metric's name, for logs; ``None`` means the class's name in snake case.
        dtype: dtype of the result; ``None`` means torch's default dtype at construction.
    """

    def __init__(
        self,
        thresholds: float | Sequence[float] | None = None,
        name: str | None = None,
        dtype: torch.dtype | str | None = None,
    ) -> None:
        super().__init__(thresholds, name=name, dtype=dtype)

    def result(self) -> Tensor:
        """Return the sum of weights since the last reset: a scalar, or ``[thresholds]`` if there are several.

        In replica context this is the replica's own, in cross-replica context the one over all replicas.
        """
        return self._one_for_each_threshold(getattr(self, self._kept[0]))


class TruePositives(_Count):
    """Sum of the weights of positive predictions whose label is positive.

    Args:
        thresholds: a number or several in [0, 1]: a prediction above it is positive; ``None`` means 0.5.
        name: the metric's name, for logs; ``None`` means ``"true_positives"``.
        dtype: dtype of the result; ``None`` means torch's default dtype at construction.

    Raises:
        ValueError: a threshold is outside [0, 1].

    Example:
        >>> metric = ts.metrics.TruePositives()
        >>> metric.update_state([0, 1, 1, 1], [1.0, 0.0, 1.0, 1.0])
        >>> metric.result()
        tensor(2.)
    """

    _kept = ("true_positives",)


class FalsePositives(_Count):
    """Sum of the weights of positive predictions whose label is negative.

    Args:
        thresholds: a number or several in [0, 1]: a prediction above it is positive; ``None`` means 0.5.
        name: the metric's name, for logs; ``None`` means ``"false_positives"``.
        dtype: dtype of the result; ``None`` means torch's default dtype at construction.

    Raises:
        ValueError: a threshold is outside [0, 1].

    Example:
        >>> metric = ts.metrics.FalsePositives()
        >>> metric.update_state([0, 1, 0, 0], [0.0, 0.0, 1.0, 1.0])
        >>> metric.result()
        tensor(2.)
    """

    _kept = ("false_positives",)


class TrueNegatives(_Count):
    """Sum of the weights of negative predictions whose label is negative.

    Args:
        thresholds: a number or several in [0, 1]: a prediction above it is positive; ``None`` means 0.5.
        name: the metric's name, for logs; ``None`` means ``"true_negatives"``.
        dtype: dtype of the result; ``None`` means torch's default dtype at construction.

    Raises:
        ValueError: a threshold is outside [0, 1].

    Example:
        >>> metric = ts.metrics.TrueNegatives()
        >>> metric.update_state([0, 1, 0, 0], [1.0, 1.0, 0.0, 0.0])
        >>> metric.result()
        tensor(2.)
    """

    _kept = ("true_negatives",)


class FalseNegatives(_Count):
    """Sum of the weights of negative predictions whose label is positive.

    Args:
        thresholds: a number or several in [0, 1]: a prediction above it is positive; ``None`` means 0.5.
        name: the metric's name, for logs; ``None`` means ``"false_negatives"``.
        dtype: dtype of the result; ``None`` means torch's default dtype at construction.

    Raises:
        ValueError: a threshold is outside [0, 1].

    Example:
        >>> metric = ts.metrics.FalseNegatives()
        >>> metric.update_state([0, 1, 1, 1], [0.0, 1.0, 0.0, 0.0])
        >>> metric.result()
        tensor(2.)
    """

    _kept = ("false_negatives",)


def check_thresholds(thresholds: float | Sequence[float]) -> list[float]:
    """Return a list of thresholds.

    Raises:
        ValueError: there is none, or one is outside [0, 1].
    """
    try:
        values: list[float] = torch.as_tensor(thresholds, dtype=torch.float64, device="cpu").reshape(-1).tolist()
    except (TypeError, ValueError, RuntimeError):
        values = []
    if not values or not all(0 <= t <= 1 for t in values):
        raise ValueError(f"Thresholds must be numbers in [0, 1]. Received: {thresholds!r}")
    return values


def check_scores(scores: Tensor, thresholds: Sequence[float], remedy: str) -> Tensor | None:
    """Check that predictions are numbers and, if they are compared with more than 0, probabilities.

    Returns:
        ``None``, or what ``flaw_of`` does.

    Raises:
        InvalidArgumentError: they are not.
    """
    invalid = scores.isnan()
    if max(thresholds) > 0:
        invalid = invalid | (scores < 0) | (scores > 1)

    def explain() -> Exception:
        number = int(invalid.count_nonzero())
        return errors.InvalidArgumentError(
            f"Predictions must be in [0, 1]. Received {number} of {scores.numel()} that are not, such as "
            f"{scores[invalid][0].item()}. Pass probabilities, such as torch.sigmoid(logits). {remedy}"
        )

    return flaw_of(invalid, explain)


def confusion_counts(labels: Tensor, scores: Tensor, weight: Tensor, thresholds: Sequence[float]) -> dict[str, Tensor]:
    """Return the four counts, each ``[thresholds, labels]``, by their names.

    Args:
        labels: ``[batch, labels]``; those that are not 0 are positive.
        scores: predictions, ``[batch, labels]``.
        weight: ``[batch, labels]``; its dtype is that of the counts.
        thresholds: in any order.
    """
    scores = scores.to(torch.promote_types(scores.dtype, torch.float32))
    num_thresholds, num_labels = len(thresholds), scores.shape[1]
    order = sorted(range(num_thresholds), key=thresholds.__getitem__)
    limits = torch.tensor([thresholds[i] for i in order], dtype=scores.dtype, device=scores.device)
    # How many thresholds lie below a prediction says at which of them it is positive.
    if not kind_of(scores.device).has_search:  # XLA, which fuses the comparisons
        num_below = (scores.unsqueeze(-1) > limits).sum(-1)
    else:
        num_below = torch.searchsorted(limits, scores.contiguous())
    cells = num_below * num_labels + torch.arange(num_labels, device=scores.device)
    is_positive = labels != 0
    counts = {}
    for names, chosen in (
        (("true_positives", "false_negatives"), is_positive),
        (("false_positives", "true_negatives"), ~is_positive),
    ):
        sums = weight.new_zeros((num_thresholds + 1) * num_labels)
        sums = sums.index_add(0, cells.flatten(), torch.where(chosen, weight, 0).flatten())
        sums = sums.reshape(num_thresholds + 1, num_labels)
        above, below = sums.flip(0).cumsum(0).flip(0)[1:], sums.cumsum(0)[:-1]
        for name, values in zip(names, (above, below), strict=True):
            counts[name] = values
    if order == sorted(order):
        return counts
    places = torch.tensor(sorted(order, key=order.__getitem__), device=scores.device)
    return {name: values.index_select(0, places) for name, values in counts.items()}


def divide_no_nan(dividend: Tensor, divisor: Tensor) -> Tensor:
    """Return the quotient; 0 where the divisor is 0."""
    return torch.where(divisor == 0, 0.0, dividend / torch.where(divisor == 0, 1.0, divisor))


def _only_top_k(scores: Tensor, k: int) -> Tensor:
    """Return predictions in which all but the ``k`` highest of each example are below any threshold."""
    if scores.shape[-1] < k:
        raise errors.InvalidArgumentError(
            f"top_k={k} needs at least {k} classes in the last dimension. Received y_pred of {tuple(scores.shape)}"
        )
    # topk does not say which of equal values it takes; a stable sort takes the first, as tf does.
    best = scores.sort(dim=-1, descending=True, stable=True).indices[..., :k]
    is_best = torch.zeros_like(scores, dtype=torch.bool).scatter(-1, best, value=True)
    scores = scores.to(torch.promote_types(scores.dtype, torch.float32))
    return torch.where(is_best, scores, -math.inf)


def _check_class(class_id: int, scores: Tensor) -> None:
    if scores.ndim < 2 or class_id >= scores.shape[-1]:
        raise errors.InvalidArgumentError(
            f"class_id={class_id} needs y_pred of [batch, ..., classes] with more than {class_id} classes. Received "
            f"{tuple(scores.shape)}"
        )
