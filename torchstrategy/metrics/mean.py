"""Weighted sums and means of what they are given, and means of a function of labels and predictions, such as a loss.

Sums are kept in ``float64`` whatever the values' dtype, so that the order and number of updates don't show. Every
example counts once, whatever the shape: tf counts a call with values of one dimension as one example, however many
there are.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from torchstrategy import errors, losses
from torchstrategy.metrics.metric import Metric
from torchstrategy.metrics.metric_inputs import as_pair, as_tensor, check_example_axis, matching_weight, warn_of_scaled

__all__ = [
    "BinaryCrossentropy",
    "CategoricalCrossentropy",
    "CategoricalHinge",
    "Hinge",
    "KLDivergence",
    "Mean",
    "MeanMetricWrapper",
    "Poisson",
    "SparseCategoricalCrossentropy",
    "SquaredHinge",
    "Sum",
    "WeightedMean",
    "value_of_loss",
]


class WeightedMean(Metric):
    """A mean over examples, kept as a sum and a count; subclasses call ``_add``.

    Args:
        name: the metric's name, for logs; ``None`` means the class's name in snake case.
        dtype: dtype of the result; ``None`` means torch's default dtype at construction.
    """

    def __init__(self, name: str | None = None, dtype: torch.dtype | str | None = None) -> None:
        super().__init__(dtype, name)
        self.total: Tensor = self.add_weight("total")
        self.count: Tensor = self.add_weight("count")

    def _add(self, values: Tensor, sample_weight: Any) -> None:
        """Add values of ``[batch, ...]``; an example's value is the mean over its other dimensions."""
        values = values.to(self.total)
        weight = matching_weight(sample_weight, values, values.dtype)
        values = values * weight
        if values.ndim > 1:
            values, weight = values.flatten(1).mean(1), weight.flatten(1).mean(1)
        self.total = self.total + values.sum()
        self.count = self.count + weight.sum()

    def _mean(self) -> Tensor:
        return torch.where(self.count == 0, 0.0, self.total / torch.where(self.count == 0, 1.0, self.count))

    def result(self) -> Tensor:
        """Return the mean over all examples since the last reset; 0 if there were none.

        In replica context this is the replica's own, in cross-replica context the one over all replicas.
        """
        return self._mean()


class Mean(WeightedMean):
    """Weighted mean of values.

    Made in a strategy's scope, ``result()`` in cross-replica context is the mean over all examples of all replicas,
    however they were split. Give it per-example losses, not losses that are already divided by the global batch size:
    the mean over replicas of those is too small by the number of replicas.

    Args:
        name: the metric's name, for logs.
        dtype: dtype of the result; ``None`` means torch's default dtype at construction. Sums are kept in ``float64``.

    Example:
        >>> metric = ts.metrics.Mean(name="loss")
        >>> metric.update_state(torch.tensor([1.0, 3.0]))
        >>> metric.update_state(6.0, sample_weight=2.0)
        >>> metric.result()
        tensor(4.)
        >>> metric.reset_state()
        >>> metric.result()
        tensor(0.)
    """

    def __init__(self, name: str = "mean", dtype: torch.dtype | str | None = None) -> None:
        super().__init__(name, dtype)

    def update_state(self, values: Any, sample_weight: Any = None) -> None:
        """Add values.

        Args:
            values: a scalar, which counts as one example, or ``[batch, ...]``; ``batch`` may be 0.
            sample_weight: scalar, ``[batch]``, or broadcastable to ``values``; ``None`` means that every example
                weighs 1.

        Raises:
            InvalidArgumentError: ``sample_weight`` does not fit the values.
        """
        tensor = as_tensor(values)
        warn_of_scaled(self.name, values)
        self._add(tensor, sample_weight)


class Sum(Metric):
    """Weighted sum of values.

    Made in a strategy's scope, ``result()`` in cross-replica context is the sum over all replicas.

    Args:
        name: the metric's name, for logs.
        dtype: dtype of the result; ``None`` means torch's default dtype at construction.

    Example:
        >>> metric = ts.metrics.Sum()
        >>> metric.update_state(torch.tensor([1.0, 3.0, 5.0, 7.0]), sample_weight=[1, 1, 0, 0])
        >>> metric.result()
        tensor(4.)
    """

    def __init__(self, name: str = "sum", dtype: torch.dtype | str | None = None) -> None:
        super().__init__(dtype, name)
        self.total: Tensor = self.add_weight("total")

    def update_state(self, values: Any, sample_weight: Any = None) -> None:
        """Add values.

        Args:
            values: a scalar or ``[batch, ...]``; ``batch`` may be 0. All elements are added.
            sample_weight: scalar, ``[batch]``, or broadcastable to ``values``; ``None`` means that every element
                weighs 1.

        Raises:
            InvalidArgumentError: ``sample_weight`` does not fit the values.
        """
        values = as_tensor(values).to(self.total)
        self.total = self.total + (values * matching_weight(sample_weight, values, values.dtype)).sum()

    def result(self) -> Tensor:
        """Return the sum since the last reset.

        In replica context this is the replica's own, in cross-replica context the one over all replicas.
        """
        return self.total


class MeanMetricWrapper(WeightedMean):
    """Mean over examples of a function of labels and predictions.

    Args:
        fn: ``fn(y_true, y_pred, **kwargs)`` returns a value for each example: ``[batch, ...]``.
        name: the metric's name, for logs; ``None`` means the class's name in snake case.
        dtype: dtype of the result; ``None`` means torch's default dtype at construction. Sums are kept in ``float64``.
        kwargs: further arguments of ``fn``.

    Example:
        >>> metric = ts.metrics.MeanMetricWrapper(lambda y_true, y_pred: (y_true - y_pred).abs(), name="distance")
        >>> metric.update_state(torch.tensor([1.0, 2.0]), torch.tensor([1.0, 5.0]))
        >>> metric.result()
        tensor(1.5000)
    """

    def __init__(
        self, fn: Callable[..., Any], name: str | None = None, dtype: torch.dtype | str | None = None, **kwargs: Any
    ) -> None:
        super().__init__(name, dtype)
        self.fn = fn
        self.fn_kwargs = kwargs

    def get_config(self) -> dict[str, Any]:  # noqa: D102 - the base class's
        return super().get_config() | (self.fn_kwargs if type(self) is MeanMetricWrapper else {})

    def _argument(self, name: str) -> Any:
        return self.fn_kwargs[name] if name in self.fn_kwargs else super()._argument(name)

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        """Add a batch. As in tf, labels come first; torchmetrics' own metrics take predictions first.

        Args:
            y_true: labels, as the function wants them.
            y_pred: predictions, as the function wants them.
            sample_weight: scalar, ``[batch]``, or broadcastable to the function's values; ``None`` means that every
                example weighs 1.

        Raises:
            InvalidArgumentError: the shapes do not fit, or the function returned a single value.
        """
        values = as_tensor(self.fn(y_true, y_pred, **self.fn_kwargs))
        if values.ndim == 0:  # as one example it would weigh the same however large the batch is
            raise errors.InvalidArgumentError(
                f"The function of the metric {self.name!r} must return one value for each example, [batch, ...]. "
                "Received a scalar. Take the mean over an example's own dimensions only."
            )
        self._add(values, sample_weight)


def value_of_loss(y_true: Any, y_pred: Any, loss: Callable[..., Tensor], **kwargs: Any) -> Tensor:
    """Return the losses of examples for a metric.

    Raises:
        InvalidArgumentError: ``axis`` is that of the examples, so that the number would depend on how they are split.
    """
    labels, scores = as_pair(y_true, y_pred)
    if scores.ndim == 1:  # losses take the mean over the last axis, which is that of the examples here
        scores = scores.unsqueeze(-1)
    check_example_axis(kwargs.get("axis", -1), scores)
    return loss(labels, scores, **kwargs)


class BinaryCrossentropy(MeanMetricWrapper):
    """Mean of ``ts.losses.binary_crossentropy``, which takes what ``update_state`` takes.

    Args:
        name: the metric's name, for logs.
        dtype: dtype of the result; ``None`` means torch's default dtype at construction. Sums are kept in ``float64``.
        from_logits: whether predictions are logits.
        label_smoothing: the part of each label that is moved to 0.5, from 0 to 1.

    Example:
        >>> metric = ts.metrics.BinaryCrossentropy()
        >>> metric.update_state([[0], [1]], [[0.5], [0.5]])
        >>> metric.result()
        tensor(0.6931)
    """

    def __init__(
        self,
        name: str = "binary_crossentropy",
        dtype: torch.dtype | str | None = None,
        from_logits: bool = False,  # noqa: FBT001, FBT002 - tf's arguments
        label_smoothing: float = 0.0,
    ) -> None:
        options = {"from_logits": from_logits, "label_smoothing": label_smoothing}
        super().__init__(value_of_loss, name, dtype, loss=losses.binary_crossentropy, **options)


class CategoricalCrossentropy(MeanMetricWrapper):
    """Mean of ``ts.losses.categorical_crossentropy``, which takes what ``update_state`` takes.

    Args:
        name: the metric's name, for logs.
        dtype: dtype of the result; ``None`` means torch's default dtype at construction. Sums are kept in ``float64``.
        from_logits: whether predictions are logits.
        label_smoothing: the part of each label that is spread over all classes, from 0 to 1.
        axis: the classes' axis, which is not the first one.

    Example:
        >>> metric = ts.metrics.CategoricalCrossentropy()
        >>> metric.update_state([[0, 1]], [[0.5, 0.5]])
        >>> metric.result()
        tensor(0.6931)
    """

    def __init__(
        self,
        name: str = "categorical_crossentropy",
        dtype: torch.dtype | str | None = None,
        from_logits: bool = False,  # noqa: FBT001, FBT002 - tf's arguments
        label_smoothing: float = 0.0,
        axis: int = -1,
    ) -> None:
        options = {"from_logits": from_logits, "label_smoothing": label_smoothing, "axis": axis}
        super().__init__(value_of_loss, name, dtype, loss=losses.categorical_crossentropy, **options)


class SparseCategoricalCrossentropy(MeanMetricWrapper):
    """Mean of ``ts.losses.sparse_categorical_crossentropy``, which takes what ``update_state`` takes.

    Args:
        name: the metric's name, for logs.
        dtype: dtype of the result; ``None`` means torch's default dtype at construction. Sums are kept in ``float64``.
        from_logits: whether predictions are logits.
        ignore_class: a label that does not count; the mean is over the others.
        axis: the classes' axis, which is not the first one.

    Example:
        >>> metric = ts.metrics.SparseCategoricalCrossentropy()
        >>> metric.update_state([1], [[0.5, 0.5]])
        >>> metric.result()
        tensor(0.6931)
    """

    def __init__(
        self,
        name: str = "sparse_categorical_crossentropy",
        dtype: torch.dtype | str | None = None,
        from_logits: bool = False,  # noqa: FBT001, FBT002 - tf's arguments
        ignore_class: int | None = None,
        axis: int = -1,
    ) -> None:
        options = {"from_logits": from_logits, "ignore_class": ignore_class, "axis": axis}
        super().__init__(value_of_loss, name, dtype, loss=losses.sparse_categorical_crossentropy, **options)
        self.ignore_class = ignore_class
        self.axis = axis

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:  # noqa: D102 - the base class's
        if self.ignore_class is not None:
            labels, scores = as_pair(y_true, y_pred)
            counts = (labels.squeeze(self.axis) if labels.ndim == scores.ndim else labels) != self.ignore_class
            sample_weight = matching_weight(sample_weight, counts, self.count.dtype) * counts
        super().update_state(y_true, y_pred, sample_weight)


class KLDivergence(MeanMetricWrapper):
    """Mean of ``ts.losses.kl_divergence``, which takes what ``update_state`` takes.

    Args:
        name: the metric's name, for logs.
        dtype: dtype of the result; ``None`` means torch's default dtype at construction. Sums are kept in ``float64``.

    Example:
        >>> metric = ts.metrics.KLDivergence()
        >>> metric.update_state([[0.5, 0.5]], [[0.25, 0.75]])
        >>> metric.result()
        tensor(0.1438)
    """

    def __init__(self, name: str = "kl_divergence", dtype: torch.dtype | str | None = None) -> None:
        super().__init__(value_of_loss, name, dtype, loss=losses.kl_divergence)


class Poisson(MeanMetricWrapper):
    """Mean of ``ts.losses.poisson``, which takes what ``update_state`` takes.

    Args:
        name: the metric's name, for logs.
        dtype: dtype of the result; ``None`` means torch's default dtype at construction. Sums are kept in ``float64``.

    Example:
        >>> metric = ts.metrics.Poisson()
        >>> metric.update_state([[1.0]], [[2.0]])
        >>> metric.result()
        tensor(1.3069)
    """

    def __init__(self, name: str = "poisson", dtype: torch.dtype | str | None = None) -> None:
        super().__init__(value_of_loss, name, dtype, loss=losses.poisson)


class Hinge(MeanMetricWrapper):
    """Mean of ``ts.losses.hinge``, which takes what ``update_state`` takes.

    Args:
        name: the metric's name, for logs.
        dtype: dtype of the result; ``None`` means torch's default dtype at construction. Sums are kept in ``float64``.

    Example:
        >>> metric = ts.metrics.Hinge()
        >>> metric.update_state([[-1.0, 1.0]], [[0.5, 0.5]])
        >>> metric.result()
        tensor(1.)
    """

    def __init__(self, name: str = "hinge", dtype: torch.dtype | str | None = None) -> None:
        super().__init__(value_of_loss, name, dtype, loss=losses.hinge)


class SquaredHinge(MeanMetricWrapper):
    """Mean of ``ts.losses.squared_hinge``, which takes what ``update_state`` takes.

    Args:
        name: the metric's name, for logs.
        dtype: dtype of the result; ``None`` means torch's default dtype at construction. Sums are kept in ``float64``.

    Example:
        >>> metric = ts.metrics.SquaredHinge()
        >>> metric.update_state([[-1.0, 1.0]], [[0.5, 0.5]])
        >>> metric.result()
        tensor(1.2500)
    """

    def __init__(self, name: str = "squared_hinge", dtype: torch.dtype | str | None = None) -> None:
        super().__init__(value_of_loss, name, dtype, loss=losses.squared_hinge)


class CategoricalHinge(MeanMetricWrapper):
    """Mean of ``ts.losses.categorical_hinge``, which takes what ``update_state`` takes.

    Args:
        name: the metric's name, for logs.
        dtype: dtype of the result; ``None`` means torch's default dtype at construction. Sums are kept in ``float64``.

    Example:
        >>> metric = ts.metrics.CategoricalHinge()
        >>> metric.update_state([[0.0, 1.0]], [[0.5, 0.75]])
        >>> metric.result()
        tensor(0.7500)
    """

    def __init__(self, name: str = "categorical_hinge", dtype: torch.dtype | str | None = None) -> None:
        super().__init__(value_of_loss, name, dtype, loss=losses.categorical_hinge)
