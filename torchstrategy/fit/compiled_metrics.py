"""What ``compile(metrics=..., weighted_metrics=...)`` becomes: metrics for each output, and their names in logs.

All metrics are made at once, in the strategy's scope; which output they belong to is known when there are outputs.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torchmetrics
from torch import Tensor, nn

from torchstrategy import errors, metrics
from torchstrategy.base.context import has_strategy
from torchstrategy.base.names import snake_case
from torchstrategy.fit.compiled_loss import CompiledLoss
from torchstrategy.fit.loss_parts import LossPart
from torchstrategy.fit.outputs import Outputs, check_has_rows, for_outputs, is_several
from torchstrategy.metrics.metric import Metric
from torchstrategy.metrics.metric_names import REMEDY, accuracy_by_shapes, crossentropy_by_shapes, with_logits
from torchstrategy.replicas.mirrored import resolve
from torchstrategy.replicas.record import owner
from torchstrategy.strategies.default import get_strategy

__all__ = ["CompiledMetrics"]


class CompiledMetrics:
    """The metrics of a model's outputs.

    Made in the strategy's scope, because it makes metrics, and notes those that were made outside.

    Args:
        metrics: a list of names, of objects of ``ts.metrics`` or torchmetrics (which get predictions first), and of
            functions ``f(y_true, y_pred)`` that return a value for each example; for several outputs, a list or dict
            of such lists. ``"accuracy"`` is binary, sparse or categorical as the shapes say.
        weighted_metrics: the same, for metrics that are given the sample weights. torchmetrics' take none.
        loss: the compiled loss, which tells whether predictions are logits.

    Raises:
        ValueError: a name is not known, or a metric belongs to another strategy or takes no weights.
        TypeError: a metric is nothing of the above.
    """

    def __init__(self, metrics: Any, weighted_metrics: Any = None, loss: CompiledLoss | None = None) -> None:
        self.metrics = metrics
        self.weighted_metrics = weighted_metrics
        self._plain = _Group(metrics, "metrics", loss)
        self._weighted = _Group(weighted_metrics, "weighted_metrics", loss)
        self._signature: tuple[Any, ...] | None = None
        self._names: tuple[str, ...] | None = None
        #: For each output, its entries of both groups.
        self._plain_of: list[list[_Entry]] = []
        self._weighted_of: list[list[_Entry]] = []

    def update_state(self, y: Any, y_pred: Any, sample_weight: Any = None) -> None:
        """Add this replica's share of a batch. Replica context.

        Args:
            y: labels; for several outputs a list or dict of them, as the outputs are.
            y_pred: the model's outputs, ``[batch, ...]``; ``batch`` may be 0.
            sample_weight: weights as for the loss; only ``weighted_metrics`` are given them.

        Raises:
            InvalidArgumentError: shapes do not fit, or labels are missing.
            ValueError: the metrics are not those of the model's outputs.
        """
        if self.is_empty:
            return
        outputs = Outputs(y_pred)
        self._bind(outputs)
        needed = [bool(plain or weighted) for plain, weighted in zip(self._plain_of, self._weighted_of, strict=True)]
        if y is None:
            raise errors.InvalidArgumentError(
                "metrics= are given, but the data has no labels (y is None). Give them: fit(x, y), or a dataset of "
                "(x, y)."
            )
        labels = outputs.parts_of(y, "y", needed)
        weights = outputs.weights_of(sample_weight) if sample_weight is not None else [None] * len(needed)
        for i, scores in enumerate(outputs.tensors):
            for entry in self._plain_of[i]:
                entry.update(labels[i], scores, None)
            for entry in self._weighted_of[i]:
                entry.update(labels[i], scores, weights[i])

    @property
    def is_empty(self) -> bool:
        """Whether there are no metrics."""
        return not (self._plain.entries or self._weighted.entries)

    def build(self, y: Any, y_pred: Any) -> None:  # noqa: ARG002 - Keras' arguments
        """Find out which metrics belong to which output; an update does so by itself.

        Args:
            y: not used.
            y_pred: the model's outputs, of any batch.

        Raises:
            InvalidArgumentError: they are no tensors, or are others than in an earlier update.
            ValueError: the metrics are not those of the outputs.
        """
        if not self.is_empty:
            self._bind(Outputs(y_pred))

    def named(self) -> dict[str, Any]:
        """Return the metrics by their names in logs.

        They are Keras': ``"mae"``, ``"<output>_mae"`` if there are several outputs, ``"weighted_mae"`` if a plain
        metric has the name already, and ``"mae_1"`` if that is taken too. Before the first batch, names follow what
        ``compile`` was given.
        """
        if self._signature is not None:
            prefixes = _prefixes(self._names)
            rows = [list(zip(prefixes, group, strict=True)) for group in (self._plain_of, self._weighted_of)]
        else:
            rows = [self._plain.guess(), self._weighted.guess()]
        found: dict[str, Any] = {}
        counts: dict[str, int] = {}
        for is_weighted, row in enumerate(rows):
            for prefix, entries in row:
                for entry in entries:
                    name = prefix + entry.name
                    if name in counts and is_weighted:
                        name = f"{prefix}weighted_{entry.name}"
                    counts[name] = counts.get(name, -1) + 1
                    found[f"{name}_{counts[name]}" if counts[name] else name] = entry.metric
        return found

    def with_places(self) -> Iterator[tuple[str, Any, int, bool]]:
        """Yield name, metric, number of its output, and whether it is one of ``ts.metrics``. After ``build``."""
        names = {id(metric): name for name, metric in self.named().items()}
        for rows in (self._plain_of, self._weighted_of):
            for place, entries in enumerate(rows):
                yield from ((names[id(entry.metric)], entry.metric, place, entry.is_ours) for entry in entries)

    def _bind(self, outputs: Outputs) -> None:
        if self._signature == outputs.signature:
            return
        if self._signature is not None:
            raise errors.InvalidArgumentError(
                f"The model's outputs have changed: they were {self._signature[0]}, and are {outputs.keys} now."
            )
        self._plain_of, self._weighted_of = self._plain.of(outputs), self._weighted.of(outputs)
        self._names, self._signature = outputs.names, outputs.signature


class _Entry:
    """A metric of one output.

    Args:
        metric: of ``ts.metrics`` or torchmetrics.
        name: its name in logs, without the output's.
    """

    def __init__(self, metric: Any, name: str) -> None:
        self.metric = metric
        self.name = name
        self.is_ours = isinstance(metric, Metric)

    def update(self, y: Any, y_pred: Tensor, sample_weight: Any) -> None:
        check_has_rows(y_pred)
        try:
            self._update(y, y_pred, sample_weight)
        except ValueError as error:
            raise errors.InvalidArgumentError(f"The metric {self.name!r} of compile(metrics=...): {error}") from error

    def _update(self, y: Any, y_pred: Tensor, sample_weight: Any) -> None:
        if not self.is_ours:
            if len(y_pred):  # some of torchmetrics' fail or become nan with an empty share
                self.metric.update(y_pred.detach(), y)
        elif sample_weight is None:
            self.metric.update_state(y, y_pred)
        else:
            self.metric.update_state(y, y_pred, sample_weight=sample_weight)


class _Group:
    """The argument ``metrics`` or ``weighted_metrics``.

    Args:
        spec: the argument.
        argument: its name.
        loss: the compiled loss.
    """

    def __init__(self, spec: Any, argument: str, loss: CompiledLoss | None) -> None:
        self.argument = argument
        self.loss = loss
        #: Entries by output (dict), for each output (list), or for one output, or one for each (flat).
        self.by_key: dict[Any, list[_Entry]] | None = None
        self.by_place: list[list[_Entry]] | None = None
        self.flat: list[list[_Entry]] = []
        if isinstance(spec, Mapping) and not isinstance(spec, nn.Module):
            self.by_key = {key: self._entries(value, key) for key, value in spec.items()}
        elif isinstance(spec, (list, tuple)) and any(is_several(part) or part is None for part in spec):
            self.by_place = [self._entries(value, place) for place, value in enumerate(spec)]
        elif isinstance(spec, (list, tuple)):
            self.flat = [self._made(value, place) for place, value in enumerate(spec)]
        elif spec is not None:
            self.flat = [self._made(spec, None)]

    @property
    def entries(self) -> list[_Entry]:
        """All entries."""
        rows = self.flat if self.by_key is None else list(self.by_key.values())
        return [entry for row in (rows if self.by_place is None else self.by_place) for entry in row]

    def of(self, outputs: Outputs) -> list[list[_Entry]]:
        """Return the entries of each output."""
        num_outputs = len(outputs.tensors)
        if self.by_key is not None:
            return [row or [] for row in for_outputs(self.by_key, outputs, self.argument, may_miss=True)]
        if self.by_place is not None:
            return for_outputs(self.by_place, outputs, self.argument, may_miss=True)
        if not self.flat:
            return [[] for _ in outputs.tensors]
        if num_outputs == 1:
            return [self.entries]
        if len(self.flat) != num_outputs or outputs.is_mapping:
            example = {name: ["mae"] for name in outputs.names or ()} if outputs.is_mapping else [["mae"]] * num_outputs
            raise ValueError(
                f"{self.argument}= is one list, but the model has {num_outputs} outputs. Give metrics for each output, "
                f"such as {self.argument}={example}."
            )
        return self.flat

    def guess(self) -> list[tuple[str, list[_Entry]]]:
        """Return the entries with their names' beginnings, before the outputs are known."""
        num_outputs = None if self.loss is None else self.loss.num_outputs
        if self.by_key is not None:
            is_one = (num_outputs or len(self.by_key)) == 1
            return [("" if is_one else f"{key}_", row) for key, row in self.by_key.items()]
        rows = self.by_place
        if rows is None:
            rows = self.flat if (num_outputs or 1) > 1 else [self.entries]
        return [("" if len(rows) == 1 else f"output_{place}_", row) for place, row in enumerate(rows)]

    def _entries(self, value: Any, place: Any) -> list[_Entry]:
        if value is None:
            return []
        values = value if isinstance(value, (list, tuple)) else [value]
        return [entry for part in values for entry in self._made(part, place)]

    def _made(self, value: Any, place: Any) -> list[_Entry]:
        part = None if self.loss is None else self.loss.part_at(place)
        if isinstance(value, torchmetrics.MetricCollection):
            _note_for_the_strategy(value, self.argument)
            items = [(name, metric) for name, metric in value.items(keep_base=False, copy_state=False)]
            return [_Entry(self._accepting_weights(metric), name) for name, metric in items]
        metric, name = _metric_and_name(value, self.argument, part)
        _note_for_the_strategy(metric, self.argument)
        return [_Entry(self._accepting_weights(metric), name)]

    def _accepting_weights(self, metric: Any) -> Any:
        if self.argument == "weighted_metrics" and not isinstance(metric, Metric):
            raise ValueError(
                f"weighted_metrics= holds {type(resolve(metric)).__name__}, a torchmetrics metric, which takes no "
                "sample weights. Give it in metrics=, or use the metric of ts.metrics."
            )
        return metric


def _metric_and_name(value: Any, argument: str, part: LossPart | None) -> tuple[Any, str]:
    if isinstance(value, str):
        return _named_metric(value, argument, part), value
    if inspect.isclass(value) and issubclass(value, torchmetrics.Metric):
        value = value()
    if isinstance(value, Metric):
        return value, value.name
    if isinstance(value, torchmetrics.Metric):
        return value, snake_case(type(resolve(value)).__name__)
    if callable(value) and not inspect.isclass(value):
        name = getattr(value, "__name__", None) or snake_case(type(value).__name__)
        return metrics.MeanMetricWrapper(value, name), name
    raise TypeError(
        f"{argument}= must be a list of metrics. Received in it: {value!r} of type {type(value).__name__}. {REMEDY}"
    )


def _named_metric(name: str, argument: str, part: LossPart | None) -> Any:
    from_logits = part is not None and part.takes_logits
    axis = -1 if part is None else part.class_axis
    if name.lower() in ("accuracy", "acc"):
        return accuracy_by_shapes(name, from_logits=from_logits, axis=axis)
    if name.lower() in ("crossentropy", "ce"):
        return crossentropy_by_shapes(name, from_logits=from_logits, axis=axis)
    try:
        metric = metrics.get(name)
    except ValueError as error:
        raise ValueError(str(error).replace("metrics=", f"{argument}=", 1)) from None
    metric = with_logits(metric) if from_logits else metric
    metric.name = name
    return metric


def _note_for_the_strategy(metric: nn.Module, argument: str) -> None:
    """Let the strategy have a metric that was made outside its scope, so that its result is that of all replicas."""
    if not has_strategy():
        return
    strategy = get_strategy()
    for module in metric.modules():
        if owner(module) not in (None, strategy):
            raise ValueError(
                f"{argument}= holds {type(resolve(metric)).__name__}, which was made in the scope of another strategy. "
                "Make it in the scope of the model's strategy, or outside every scope."
            )
        strategy.record.add(module)


def _prefixes(names: Sequence[str] | None) -> list[str]:
    return [""] if names is None or len(names) == 1 else [f"{name}_" for name in names]
