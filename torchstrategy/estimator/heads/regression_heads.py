"""Heads for numbers as labels."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from typing_extensions import override

from torchstrategy.estimator.export_outputs import ExportOutput, PredictOutput, RegressionOutput
from torchstrategy.estimator.heads.head import Batch, Head, Rule, loss_mean, mean_of
from torchstrategy.estimator.heads.shapes import MetricKeys, PredictionKeys, as_logits, check_keys, label_tensor
from torchstrategy.losses.loss import Reduction

__all__ = ["LogisticRegressionHead", "PoissonRegressionHead", "RegressionHead"]


class RegressionHead(Head):
    """Mean squared error between numbers and logits.

    Labels are ``[batch, ..., label_dimension]``; with one label for each example ``[batch, ...]`` will do. Weights are
    ``[batch, ...]``, ``[batch, ..., 1]`` or one for each label. Predictions are ``"predictions"``, and ``"logits"`` if
    there is an ``inverse_link_fn``; metrics are ``average_loss``, ``prediction/mean`` and ``label/mean``.

    Args:
        label_dimension: how many numbers an example's label has.
        weight_column: see ``Head``.
        loss_reduction: see ``Head``.
        loss_fn: see ``Head``.
        inverse_link_fn: makes predictions of logits; ``None`` means that logits are predictions.
        name: see ``Head``.

    Raises:
        ValueError: ``label_dimension`` is less than 1, or the reduction or the loss function is refused.

    Example:
        >>> head = ts.estimator.RegressionHead()
        >>> head.loss(labels=torch.tensor([[1.0], [3.0]]), logits=torch.tensor([[2.0], [5.0]]))
        tensor(2.5000)
    """

    def __init__(
        self,
        label_dimension: int = 1,
        weight_column: Any = None,
        loss_reduction: Reduction | str = Reduction.SUM_OVER_BATCH_SIZE,
        loss_fn: Callable[..., Any] | None = None,
        inverse_link_fn: Callable[[Tensor], Tensor] | None = None,
        name: str | None = None,
    ) -> None:
        if label_dimension < 1:
            raise ValueError(f"label_dimension must be at least 1. Received: {label_dimension}")
        super().__init__(label_dimension, weight_column, loss_reduction, loss_fn, name)
        self._inverse_link_fn = inverse_link_fn

    @override
    def predictions(self, logits: Any, keys: Sequence[str] | None = None) -> dict[str, Any]:
        logits = as_logits(logits, self._logits_dimension)
        if self._inverse_link_fn is None:
            made = {PredictionKeys.PREDICTIONS: logits}
        else:
            made = {PredictionKeys.PREDICTIONS: self._inverse_link_fn(logits), PredictionKeys.LOGITS: logits}
        return {key: made[key] for key in check_keys(keys, made)}

    @override
    def _numeric_labels(self, labels: Any, logits: Tensor) -> Tensor:
        return label_tensor(labels, logits, self._logits_dimension).to(logits.dtype)

    @override
    def _losses(self, labels: Tensor, logits: Tensor) -> Tensor:
        return (logits - labels).square()

    @override
    def _rules(self) -> dict[str, Rule]:
        return {
            MetricKeys.LOSS_MEAN: loss_mean(),
            MetricKeys.PREDICTION_MEAN: mean_of(MetricKeys.PREDICTION_MEAN, self._predictions_and_weights),
            MetricKeys.LABEL_MEAN: mean_of(MetricKeys.LABEL_MEAN, lambda batch: (batch.labels, batch.weights)),
        }

    def _predictions_and_weights(self, batch: Batch) -> tuple[Any, ...]:
        return self._predicted(batch.logits), batch.weights

    def _predicted(self, logits: Any) -> Tensor:
        predicted: Tensor = self.predictions(logits)[PredictionKeys.PREDICTIONS]
        return predicted

    @override
    def _export_outputs(self) -> dict[str, ExportOutput]:
        regression = RegressionOutput(self._predicted)
        return {"serving_default": regression, "regression": regression, "predict": PredictOutput(self.predictions)}

    @property
    @override
    def _has_weights_for_each_logit(self) -> bool:
        return True


class LogisticRegressionHead(RegressionHead):
    """Logistic regression: labels are numbers in [0, 1], and predictions the sigmoid of the logits.

    Its predictions and metrics are those of ``RegressionHead``; ``BinaryClassHead`` has those of a classifier.

    Args:
        weight_column: see ``Head``.
        loss_reduction: see ``Head``.
        name: see ``Head``.

    Raises:
        ValueError: the reduction is refused.

    Example:
        >>> head = ts.estimator.LogisticRegressionHead()
        >>> head.predictions(torch.zeros(1, 1))["predictions"]
        tensor([[0.5000]])
    """

    def __init__(
        self,
        weight_column: Any = None,
        loss_reduction: Reduction | str = Reduction.SUM_OVER_BATCH_SIZE,
        name: str | None = None,
    ) -> None:
        super().__init__(1, weight_column, loss_reduction, inverse_link_fn=torch.sigmoid, name=name)

    @override
    def _losses(self, labels: Tensor, logits: Tensor) -> Tensor:
        return F.binary_cross_entropy_with_logits(logits, labels, reduction="none")


class PoissonRegressionHead(RegressionHead):
    """Poisson regression: labels are counts, and predictions, their expected values, are ``exp(logits)``.

    Args:
        label_dimension: how many counts an example's label has.
        weight_column: see ``Head``.
        loss_reduction: see ``Head``.
        compute_full_loss: whether to add the term of the loss that depends on the labels only, by Stirling's formula.
        name: see ``Head``.

    Raises:
        ValueError: ``label_dimension`` is less than 1, or the reduction is refused.

    Example:
        >>> head = ts.estimator.PoissonRegressionHead()
        >>> head.predictions(torch.zeros(1, 1))["predictions"]
        tensor([[1.]])
    """

    def __init__(
        self,
        label_dimension: int = 1,
        weight_column: Any = None,
        loss_reduction: Reduction | str = Reduction.SUM_OVER_BATCH_SIZE,
        compute_full_loss: bool = True,  # noqa: FBT001, FBT002
        name: str | None = None,
    ) -> None:
        super().__init__(label_dimension, weight_column, loss_reduction, inverse_link_fn=torch.exp, name=name)
        self._compute_full_loss = compute_full_loss

    @override
    def _losses(self, labels: Tensor, logits: Tensor) -> Tensor:
        losses = logits.exp() - logits * labels
        if not self._compute_full_loss:
            return losses
        # Stirling's formula for log(labels!), which is 0 for the labels 0 and 1.
        large = labels.clamp(min=1)
        stirling = large * large.log() - large + 0.5 * (2 * math.pi * large).log()
        return losses + torch.where(labels > 1, stirling, 0.0)
