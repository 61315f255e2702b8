"""What all heads do: weigh and reduce losses, count metrics, and make the spec that a ``model_fn`` returns."""

from __future__ import annotations

import abc
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor, nn

from torchstrategy import metrics as ts_metrics
from torchstrategy.estimator.export_outputs import ExportOutput
from torchstrategy.estimator.heads.shapes import (
    MetricKeys,
    as_logits,
    check_loss_fn,
    check_reduction,
    column_key,
    example_weights,
)
from torchstrategy.estimator.model_fn import argument_names
from torchstrategy.estimator.specs import EstimatorSpec, ModeKeys
from torchstrategy.losses.loss import Reduction
from torchstrategy.strategies.default import get_strategy

__all__ = ["Batch", "Head", "Rule", "loss_mean", "mean_of"]


class Batch(NamedTuple):
    """What metrics need to know of one batch.

    Args:
        logits: ``[batch, ..., logits_dimension]``.
        labels: numbers, ``[batch, ..., 1 or label_dimension]``.
        losses: one for each example, or for each label of it; in the shape of the labels.
        weights: ``[batch, ..., 1]`` or in the shape of the logits; ``None`` means 1.
        regularization: the sum of the regularization losses, or ``None``.
    """

    logits: Tensor
    labels: Tensor
    losses: Tensor
    weights: Tensor | None
    regularization: Tensor | None


class Rule(NamedTuple):
    """A metric: how it is made, and with what a batch updates it."""

    make: Callable[[], Any]
    arguments: Callable[[Batch], tuple[Any, ...]]


class Head(abc.ABC):
    """What stands on top of a network's logits: the loss, the predictions and the metrics of a task.

    Subclasses say what labels, losses, predictions and metrics are.

    Args:
        logits_dimension: how many logits the head needs for an example.
        weight_column: the name of the feature with the examples' weights, or a numeric column; ``None`` means that all
            weigh 1.
        loss_reduction: ``ts.losses.Reduction.SUM_OVER_BATCH_SIZE``, the sum of the weighted losses divided by their
            number, or ``SUM``.
        loss_fn: ``loss_fn(labels, logits)``, with ``features`` as a third argument if it names that, returns one loss
            for each label; ``None`` means the head's own.
        name: put after the metrics' names, as ``"<metric>/<name>"``.

    Raises:
        ValueError: the reduction or the function's arguments are others.
    """

    def __init__(
        self,
        logits_dimension: int,
        weight_column: Any,
        loss_reduction: Reduction | str,
        loss_fn: Callable[..., Any] | None,
        name: str | None,
    ) -> None:
        self._logits_dimension = logits_dimension
        self._weight_column = weight_column
        self._loss_reduction = check_reduction(loss_reduction)
        if loss_fn is not None:
            check_loss_fn(loss_fn)
        self._loss_fn = loss_fn
        self._name = name

    @property
    def name(self) -> str | None:
        """The head's name."""
        return self._name

    @property
    def logits_dimension(self) -> int:
        """How many logits the head needs for an example."""
        return self._logits_dimension

    @property
    def loss_reduction(self) -> Reduction:
        """How the examples' losses become one."""
        return self._loss_reduction

    @property
    def weight_key(self) -> str | None:
        """The key of the feature with the weights."""
        return None if self._weight_column is None else column_key(self._weight_column)

    def loss(
        self,
        labels: Any,
        logits: Any,
        features: Any = None,
        mode: str | None = None,  # noqa: ARG002 - tf's argument, for heads whose loss depends on it
        regularization_losses: Iterable[Tensor] | None = None,
    ) -> Tensor:
        """Return the loss of a batch: the weighted losses, reduced, and the regularization losses.

        Args:
            labels: ``[batch, ...]`` or ``[batch, ..., 1]``, or with several labels for each example ``[batch, ...,
                labels]``. Strings, in an array, if the head has a vocabulary.
            logits: ``[batch, ..., logits_dimension]``.
            features: holds the weights, if the head has a weight column.
            mode: one of ``ModeKeys``.
            regularization_losses: scalars that are added.

        Returns:
            A scalar; 0 for a batch without examples.

        Raises:
            ValueError: labels, logits or weights don't fit, as the message says.
        """
        batch = self._batch(features, labels, logits, regularization_losses)
        losses = batch.losses if batch.weights is None else batch.losses * batch.weights
        total = losses.sum()
        if self._loss_reduction is not Reduction.SUM:
            total = total / max(losses.numel(), 1)
        return total if batch.regularization is None else total + batch.regularization

    @abc.abstractmethod
    def predictions(self, logits: Any, keys: Sequence[str] | None = None) -> dict[str, Any]:
        """Return predictions by name: tensors ``[batch, ...]``, and arrays of strings for the names of classes.

        Args:
            logits: ``[batch, ..., logits_dimension]``.
            keys: which predictions; ``None`` means all.

        Raises:
            ValueError: the logits have another shape, or there is no such key.
        """

    def metrics(self, regularization_losses: Any = None) -> dict[str, Any]:
        """Make the head's metrics, by name.

        Args:
            regularization_losses: anything but ``None`` adds a metric for them.
        """
        return {key: rule.make() for key, rule in self._all_rules(regularization_losses is not None).items()}

    def update_metrics(
        self,
        eval_metrics: Mapping[str, Any],
        features: Any,
        logits: Any,
        labels: Any,
        mode: str | None = None,  # noqa: ARG002 - tf's argument
        regularization_losses: Iterable[Tensor] | None = None,
    ) -> Mapping[str, Any]:
        """Update the metrics with a batch, and return them.

        Args:
            eval_metrics: what ``metrics`` made.
            features: see ``loss``.
            logits: see ``loss``.
            labels: see ``loss``.
            mode: one of ``ModeKeys``.
            regularization_losses: see ``loss``.

        Raises:
            ValueError: labels, logits or weights don't fit, as the message says.
        """
        batch = self._batch(features, labels, logits, regularization_losses)
        for key, rule in self._all_rules(batch.regularization is not None).items():
            eval_metrics[key].update_state(*rule.arguments(batch))
        return eval_metrics

    def create_estimator_spec(
        self,
        features: Any,  # noqa: ARG002 - tf's order of arguments
        mode: str,
        module: nn.Module,
        labels: Any = None,  # noqa: ARG002
        optimizer: Any = None,
        regularization_losses: Callable[[], Iterable[Tensor]] | None = None,
    ) -> EstimatorSpec:
        """Return the spec of a model whose logits a module computes; tf takes the logits in place of the module.

        Args:
            features: those that the ``model_fn`` was given.
            mode: one of ``ModeKeys``.
            module: ``module(features)`` returns the logits, ``[batch, ..., logits_dimension]``.
            labels: those that the ``model_fn`` was given.
            optimizer: an optimizer of the module's parameters, or a list as ``EstimatorSpec(train_op=)`` takes it.
                Needed in TRAIN.
            regularization_losses: called in each step; returns scalars that are added to the loss.

        Raises:
            ValueError: there is no optimizer in TRAIN.

        Example:
            >>> def model_fn(features, labels, mode):
            ...     module = torch.nn.Linear(2, 1)
            ...     head = ts.estimator.BinaryClassHead()
            ...     optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
            ...     return head.create_estimator_spec(features, mode, module, labels, optimizer)
            >>> model_fn(torch.ones(1, 2), torch.ones(1), "train").mode
            'train'
        """
        if mode == ModeKeys.PREDICT:
            return EstimatorSpec(
                mode, predictions=self.predictions, export_outputs=dict(self._export_outputs()), module=module
            )
        if self._needs_features():
            module.register_forward_hook(_keep_features)

        def regularization() -> Iterable[Tensor] | None:
            return None if regularization_losses is None else regularization_losses()

        # A replica's sum counts whole, where the Estimator takes the mean over replicas.
        is_sum = mode == ModeKeys.TRAIN and self._loss_reduction is Reduction.SUM
        scale = get_strategy().num_replicas_in_sync if is_sum else 1

        def loss(outputs: Any, labels: Any) -> Tensor:
            features, logits = _parts(outputs)
            value = self.loss(labels, logits, features, mode, regularization())
            return value * scale if scale > 1 else value

        def predictions(outputs: Any) -> dict[str, Any]:
            return self.predictions(_parts(outputs)[1])

        if mode == ModeKeys.EVAL:
            ops = {
                key: (rule.make(), self._arguments_of(rule, regularization))
                for key, rule in self._all_rules(regularization_losses is not None).items()
            }
            return EstimatorSpec(mode, predictions=predictions, loss=loss, eval_metric_ops=ops, module=module)
        if optimizer is None:
            raise ValueError("optimizer cannot be None in TRAIN mode. Give create_estimator_spec(optimizer=) one.")
        return EstimatorSpec(mode, predictions=predictions, loss=loss, train_op=optimizer, module=module)

    @abc.abstractmethod
    def _numeric_labels(self, labels: Any, logits: Tensor) -> Tensor:
        """Return checked labels as numbers."""

    @abc.abstractmethod
    def _losses(self, labels: Tensor, logits: Tensor) -> Tensor:
        """Return one loss for each label."""

    @abc.abstractmethod
    def _rules(self) -> dict[str, Rule]:
        """Return the task's metrics by their names without the head's."""

    @abc.abstractmethod
    def _export_outputs(self) -> dict[str, ExportOutput]:
        """Return the signatures of an exported model."""

    @property
    def _has_weights_for_each_logit(self) -> bool:
        return False

    def _batch(self, features: Any, labels: Any, logits: Any, regularization_losses: Iterable[Tensor] | None) -> Batch:
        logits = as_logits(logits, self._logits_dimension)
        labels = self._numeric_labels(labels, logits)
        if self._loss_fn is None:
            losses = self._losses(labels, logits)
        else:
            losses = self._losses_of_the_program(self._loss_fn, labels, logits, features)
        weights = example_weights(
            features, self._weight_column, logits, allow_per_logit_weights=self._has_weights_for_each_logit
        )
        terms = None if regularization_losses is None else list(regularization_losses)
        regularization = None if terms is None else sum(terms[1:], start=terms[0]) if terms else losses.new_zeros(())
        return Batch(logits, labels, losses, weights, regularization)

    def _losses_of_the_program(
        self, loss_fn: Callable[..., Any], labels: Tensor, logits: Tensor, features: Any
    ) -> Tensor:
        names = argument_names(loss_fn)
        known = {"features": features, "loss_reduction": self._loss_reduction}
        losses = loss_fn(labels=labels, logits=logits, **{key: value for key, value in known.items() if key in names})
        if not isinstance(losses, Tensor) or losses.shape != labels.shape:
            shape = tuple(losses.shape) if isinstance(losses, Tensor) else f"{type(losses).__name__}"
            raise ValueError(
                f"loss_fn must return a tensor with one loss for each label, {tuple(labels.shape)}. Received: {shape}"
            )
        return losses

    def _needs_features(self) -> bool:
        return self._weight_column is not None or (
            self._loss_fn is not None and "features" in argument_names(self._loss_fn)
        )

    def _all_rules(self, has_regularization: bool) -> dict[str, Rule]:  # noqa: FBT001
        rules = self._rules()
        if has_regularization:
            rules[MetricKeys.LOSS_REGULARIZATION] = mean_of(
                MetricKeys.LOSS_REGULARIZATION, lambda batch: (batch.regularization,)
            )
        return {f"{key}/{self._name}" if self._name else key: rule for key, rule in rules.items()}

    def _arguments_of(
        self, rule: Rule, regularization: Callable[[], Iterable[Tensor] | None]
    ) -> Callable[[Any, Any, Any], tuple[Any, ...]]:
        def arguments(features: Any, labels: Any, outputs: Any) -> tuple[Any, ...]:
            return rule.arguments(self._batch(features, labels, _parts(outputs)[1], regularization()))

        return arguments


def mean_of(name: str, arguments: Callable[[Batch], tuple[Any, ...]]) -> Rule:
    """Return the rule of a weighted mean."""
    return Rule(lambda: ts_metrics.Mean(name), arguments)


def loss_mean() -> Rule:
    """Return the rule of the mean loss, which is weighted by the examples' weights."""
    return mean_of(MetricKeys.LOSS_MEAN, lambda batch: (batch.losses, batch.weights))


def _keep_features(module: nn.Module, args: tuple[Any, ...], output: Any) -> dict[str, Any]:  # noqa: ARG001
    """Let the features come with the logits, because a spec's loss gets the outputs and the labels only."""
    return {"features": args[0], "logits": output}


def _parts(outputs: Any) -> tuple[Any, Any]:
    """Return features, or ``None``, and logits."""
    return (outputs["features"], outputs["logits"]) if isinstance(outputs, dict) else (None, outputs)
