"""What ``compile(loss=..., loss_weights=...)`` becomes: a replica's share of the loss of the global batch.

The sum over replicas is the loss that one replica would have, for shares of every size: each part of it is a sum over
this replica's elements, divided by what the whole batch has. ``LossTracker`` makes its mean over examples, for the
logs.
"""

from __future__ import annotations

import numbers
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from torchstrategy import errors
from torchstrategy.base import tree
from torchstrategy.base.context import has_strategy
from torchstrategy.base.values import example_counts, known_counts
from torchstrategy.fit.label_divisors import LabelDivisors, entry_of
from torchstrategy.fit.loss_parts import LossPart, differentiated_as_sum, share_of
from torchstrategy.fit.outputs import Outputs, check_has_rows, for_outputs, is_several
from torchstrategy.fit.steps import current_step
from torchstrategy.fit.torch_loss_parts import make_part
from torchstrategy.metrics.mean import Mean
from torchstrategy.metrics.metric import sum_dtype
from torchstrategy.strategies.default import get_replica_context

__all__ = ["CompiledLoss", "LossTracker"]


class LossTracker(Mean):
    """A mean over examples, from replicas' shares of batch means.

    Summed over replicas, shares are a batch's mean loss, and the epoch's is the mean over its examples. So a share
    counts with the number that it was divided by, and the examples count once each.

    Args:
        name: the name in logs.
    """

    def __init__(self, name: str = "loss") -> None:
        super().__init__(name, sum_dtype())

    def track(self, loss: Tensor) -> None:
        """Count a replica's share of the loss of the batch that it works on; if it did before, count this instead.

        Args:
            loss: scalar; the sum over replicas is the batch's mean loss.
        """
        num_examples, divisor = known_counts(get_replica_context())
        share, tracked = loss.detach(), current_step().tracked
        if tracked:
            self.add_share(share - tracked[-1], 0, divisor)
        else:
            self.add_share(share, num_examples, divisor)
        if current_step().method:
            tracked.append(share)

    @override
    def update_state(self, values: Any, sample_weight: Any = None) -> None:
        if sample_weight is None and current_step().method:
            self.track(values)  # what Keras' steps call it with
        else:
            super().update_state(values, sample_weight)

    def add_share(self, loss: Tensor, num_examples: int, divisor: int) -> None:
        """Add a replica's share of the loss of a batch.

        Args:
            loss: scalar; the sum over replicas is the batch's mean loss.
            num_examples: this replica's.
            divisor: examples of the whole batch (of all batches of an optimizer step).
        """
        with torch.no_grad():  # in place, and past update_state: this is in every step's way
            self.total.add_(loss.detach(), alpha=divisor)
            self.count.add_(num_examples)
        self._update_count += 1
        self._computed = None


class CompiledLoss:
    """The losses of a model's outputs, added up with their weights.

    Made in the strategy's scope, because it makes trackers and notes loss modules for the strategy; everything else is
    called in replica context. Means are over all elements of the global batch, sums (``reduction="sum"``) over all of
    them, and so both are independent of the number of replicas. With ``reduction="none"`` the value is the mean, and
    the gradient that of the sum, as in Keras on one device: there a vector is differentiated, and its mean is shown.

    Args:
        loss: a name, a ``ts.losses.Loss``, a torch loss (module, or function of ``torch.nn.functional``, which get
            predictions first), or a function ``f(y_true, y_pred)`` that returns a loss for each example; for several
            outputs one of them for all, or a list or dict of them, with ``None`` for an output without a loss.
        loss_weights: a number for each output, in a list or dict; or one number. ``None`` means 1.

    Raises:
        ValueError: a name is not known, or a loss can't be taken apart into those of examples.
        TypeError: an argument is nothing of the above.
    """

    def __init__(self, loss: Any, loss_weights: Any = None) -> None:
        self.loss = loss
        self.loss_weights = loss_weights
        _check_weights(loss_weights)
        if isinstance(loss, Mapping):
            self._parts: Any = {key: make_part(value) for key, value in loss.items()}
        else:
            self._parts = [make_part(value) for value in loss] if is_several(loss) else make_part(loss)
        self._signature: tuple[Any, ...] | None = None
        self._flat: list[_OutputLoss] = []
        self._trackers = _known_trackers(self._parts)
        #: Of losses whose labels or weights say them.
        self.divisors = LabelDivisors(self._parts)

    @property
    def metrics(self) -> list[LossTracker]:
        """The means of the outputs' losses, without their weights, if several outputs have one.

        With one loss for several outputs, they are made when the first batch shows how many there are.
        """
        return list(self._trackers.values())

    @property
    def is_empty(self) -> bool:
        """Whether no output has a loss."""
        return all(part is None for part in _all_parts(self._parts))

    @property
    def is_unreduced(self) -> bool:
        """Whether an output's loss has ``reduction="none"``, so that its examples' gradients are added up."""
        return any(part is not None and part.is_unreduced for part in _all_parts(self._parts))

    @property
    def num_outputs(self) -> int | None:
        """How many outputs there must be; ``None`` if one loss is for any number of them."""
        return len(self._parts) if is_several(self._parts) else None

    def part_at(self, place: Any = None) -> LossPart | None:
        """Return the loss of an output, if it is known before there are outputs.

        Args:
            place: the output's key, or its number in a list; ``None`` if there is one output.
        """
        parts = self._parts
        if is_several(parts):
            if len(parts) == 1:
                place = next(iter(parts)) if isinstance(parts, Mapping) else 0
            parts = entry_of(parts, place)
        return parts if isinstance(parts, LossPart) else None

    def __call__(self, y: Any, y_pred: Any, sample_weight: Any = None, *, alone: bool = False) -> Tensor:
        """Return this replica's share of the loss: the sum over replicas is the loss of the global batch.

        Replica context. The batch that the replica function was called with says how many examples there are over all
        replicas. If a divisor depends on labels or weights, all replicas must call this, unless
        ``divisors.using`` gives it.

        Args:
            y: labels; for several outputs a list or dict of them, as the outputs are.
            y_pred: the model's outputs, ``[batch, ...]``; ``batch`` may be 0.
            sample_weight: ``[batch]``, or broadcastable to the losses of the examples' elements; or a list or dict of
                them. ``None`` means that every example weighs 1.
            alone: whether this replica's batch is a batch of its own, whatever others have.

        Returns:
            Scalar, of ``float32`` at least. Without any loss it is 0.

        Raises:
            InvalidArgumentError: shapes or dtypes do not fit, labels are missing, or a loss did not return one number
                for each example.
            ValueError: the losses or their weights are not those of the model's outputs.
            RuntimeError: with several replicas, the function was called with no batch, whose examples would count.
        """
        outputs = Outputs(y_pred)
        self._bind(outputs)
        labels, weights = self._labels_and_weights(outputs, y, sample_weight)
        keys = (None,) if len(self._flat) == 1 else outputs.keys or ()
        rows = [(key, own.part, *of) for key, own, *of in zip(keys, self._flat, labels, weights, strict=True)]
        divisors = self.divisors.find(rows, alone=alone)
        context = get_replica_context()
        total: Tensor | None = None
        unreduced: dict[str, int] = {}
        for i, own in enumerate(self._flat):
            if own.part is None:
                continue
            scores = outputs.tensors[i]
            check_has_rows(scores)
            counts = (len(scores), len(scores)) if alone else example_counts(context, len(scores))
            # None of an output whose rows are others than the examples: then labels say the divisor, or it has none.
            num_losses = counts[1] if counts is not None and counts[0] == len(scores) else None
            share, elements = share_of(own.part, labels[i], scores, weights[i], divisors[i], num_losses)
            if own.tracker is not None:
                own.tracker.add_share(share, *(counts or known_counts(context)))
            if own.part.is_unreduced:
                name = own.part.name if outputs.names is None else f"{own.part.name} of {outputs.names[i]}"
                unreduced[name] = (num_losses or 0) * elements
            share = share if own.weight == 1 else share * own.weight
            total = share if total is None else total + share
        if total is None:
            return torch.zeros((), device=outputs.tensors[0].device)
        return total if alone or not unreduced else differentiated_as_sum(total, unreduced)

    def check_first(self, y: Any, y_pred: Any, labels_on_host: Sequence[Any] = ()) -> None:
        """Look at the values of a first batch: probabilities, class ids, dtypes.

        Replica context. It reads values, and so waits for an accelerator; it does not communicate. Predictions on XLA
        devices are not looked at.

        Args:
            y: labels, as for a call.
            y_pred: the model's outputs.
            labels_on_host: the labels of several replicas where ``y`` can't be looked at; those of its shape count.

        Raises:
            InvalidArgumentError: labels or predictions are not what a loss is made for; the message says what to do.
            ValueError: the losses or their weights are not those of the model's outputs.
        """
        outputs = Outputs(y_pred)
        self._bind(outputs)
        shapes = tree.map_leaves(_shape_of, y)
        for given in (y, *(own for own in labels_on_host if tree.map_leaves(_shape_of, own) == shapes)):
            labels, _ = self._labels_and_weights(outputs, given, None)
            for own, label, scores in zip(self._flat, labels, outputs.tensors, strict=True):
                if own.part is not None:
                    check_has_rows(scores)
                    own.part.check(label, scores)

    def build(self, y_pred: Any) -> None:
        """Make what depends on the number and names of the outputs; a call does so by itself.

        Args:
            y_pred: the model's outputs, of any batch.

        Raises:
            InvalidArgumentError: they are no tensors, or are others than in an earlier call.
            ValueError: the losses or their weights are not those of the outputs.
        """
        self._bind(Outputs(y_pred))

    def _bind(self, outputs: Outputs) -> None:
        """Find the losses of the outputs, once."""
        if self._signature == outputs.signature:
            return
        if self._signature is not None:
            raise errors.InvalidArgumentError(
                f"The model's outputs have changed: they were {self._signature[0]}, and are {outputs.keys} now."
            )
        num_outputs = len(outputs.tensors)
        parts = self._parts
        parts = for_outputs(parts, outputs, "loss", may_miss=False) if is_several(parts) else [parts] * num_outputs
        weights = self.loss_weights
        if is_several(weights):
            weights = for_outputs(weights, outputs, "loss_weights", may_miss=False)
        else:
            weights = [weights] * num_outputs
        names = outputs.names or (None,) * num_outputs
        if sum(part is not None for part in parts) > 1 and not self._trackers:
            self._trackers = _made_by_all(tuple(str(name) for name in names))
        self._flat = [
            _OutputLoss(part, 1.0 if weight is None else float(weight), self._trackers.get(str(name)))
            for part, weight, name in zip(parts, weights, names, strict=True)
        ]
        self._signature = outputs.signature

    def _labels_and_weights(self, outputs: Outputs, y: Any, sample_weight: Any) -> tuple[list[Any], list[Any]]:
        if isinstance(y, Tensor) and outputs.keys is None and not is_several(sample_weight):
            return [y], [sample_weight]
        needed = [own.part is not None for own in self._flat]
        if y is None and any(needed):
            raise errors.InvalidArgumentError(
                "loss= is given, but the data has no labels (y is None). Give them: fit(x, y), or a dataset of "
                "(x, y); or override compute_loss for a loss without labels."
            )
        labels = [None] * len(needed) if y is None else outputs.parts_of(y, "y", needed)
        for own, label, name in zip(self._flat, labels, outputs.names or ("",), strict=True):
            if own.part is not None and label is None:
                raise errors.InvalidArgumentError(f"The output {name!r} has a loss, but its labels in y are None.")
        return labels, outputs.weights_of(sample_weight)


def _shape_of(value: Any) -> Any:
    return tuple(value.shape) if isinstance(value, Tensor) else value


class _OutputLoss:
    """The loss of one output, with its weight and what keeps its mean."""

    def __init__(self, part: LossPart | None, weight: float, tracker: LossTracker | None) -> None:
        self.part = part
        self.weight = weight
        self.tracker = tracker


def _known_trackers(parts: Any) -> dict[str, LossTracker]:
    if not is_several(parts) or sum(part is not None for part in _all_parts(parts)) < 2:
        return {}
    entries = parts.items() if isinstance(parts, Mapping) else enumerate(parts)
    names = [key if isinstance(parts, Mapping) else f"output_{key}" for key, part in entries if part is not None]
    return _make_trackers(tuple(map(str, names)))


def _make_trackers(names: Sequence[str]) -> dict[str, LossTracker]:
    return {name: LossTracker(f"{name}_loss") for name in names}


def _made_by_all(names: tuple[str, ...]) -> dict[str, LossTracker]:
    """Make trackers in the middle of a run: once for all replicas, and recorded for the strategy."""
    context = get_replica_context()
    if context is None or not has_strategy():
        return _make_trackers(names)

    def make(strategy: Any) -> Any:
        with strategy.scope():
            return _Box(_make_trackers(names))

    made: dict[str, LossTracker] = context.merge_call(make).value
    return made


class _Box:
    """Keeps a structure from being taken apart as the replicas' values."""

    def __init__(self, value: Any) -> None:
        self.value = value


def _all_parts(parts: Any) -> Sequence[Any]:
    if isinstance(parts, Mapping):
        return list(parts.values())
    return parts if is_several(parts) else [parts]


def _check_weights(loss_weights: Any) -> None:
    if loss_weights is None:
        return
    for weight in _all_parts(loss_weights):
        if not isinstance(weight, numbers.Real) or isinstance(weight, bool):
            raise TypeError(
                "loss_weights= must be a number, or a list or dict with a number for each output. Received: "
                f"{loss_weights!r}"
            )
