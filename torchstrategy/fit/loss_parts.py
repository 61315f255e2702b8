"""The loss of one output as ``compile`` takes it, brought to one form: a loss for each element, and its divisor.

``TorchLoss`` is in ``torch_loss_parts``. Halves become ``float32`` first, so that no sum overflows.
"""

from __future__ import annotations

import functools
import inspect
import math
import re
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from torchstrategy import errors, losses
from torchstrategy.base.log import add_note, warning_once
from torchstrategy.fit import label_checks
from torchstrategy.fit.label_checks import shape_of
from torchstrategy.losses.loss import Loss, Reduction, as_tensor, matching_weight
from torchstrategy.losses.loss_names import CLASSES
from torchstrategy.nn import compute_average_loss
from torchstrategy.strategies.default import get_replica_context

__all__ = [
    "FunctionLoss",
    "LossPart",
    "ObjectLoss",
    "check_labels_between_0_and_1",
    "chosen_crossentropy",
    "differentiated_as_sum",
    "loss_object",
    "one_for_each_example",
    "predictions_of",
    "share_of",
]


_OF_IDS = (losses.CategoricalGeneralizedCrossEntropy, losses.SparseCategoricalCrossentropy)
_WITH_CLASSES = (
    losses.CategoricalCrossentropy,
    losses.CategoricalFocalCrossentropy,
    losses.SparseCategoricalCrossentropy,
)


class LossPart:
    """The loss of one output.

    Args:
        name: what messages call it.
    """

    #: Whether it adds up the examples of the global batch, instead of taking their mean.
    is_sum = False
    #: Whether it leaves one loss for each example, whose gradients are added up, and whose mean is shown.
    is_unreduced = False
    #: Whether the elements of an example are added up, instead of taking their mean.
    adds_elements = False
    #: Whether predictions are logits, where 0 is the border between two classes.
    takes_logits = False
    #: The axis of the classes in predictions.
    class_axis = -1

    def __init__(self, name: str) -> None:
        self.name = name

    def losses(self, y: Any, y_pred: Tensor) -> Tensor:
        """Return the losses of a replica's share.

        Args:
            y: labels.
            y_pred: predictions, ``[batch, ...]``; ``batch`` may be 0.

        Returns:
            ``[batch, ...]``; an example may have several elements.

        Raises:
            InvalidArgumentError: shapes or dtypes do not fit, or there is not a loss for each example.
        """
        raise NotImplementedError

    def has_divisor(self, y: Any, sample_weight: Any) -> bool:  # noqa: ARG002 - for parts without one
        """Say whether the divisor of the mean depends on labels or weights; else it is the number of elements.

        Args:
            y: labels.
            sample_weight: weights or ``None``.
        """
        return False

    def divisor(self, y: Any, sample_weight: Any) -> Tensor:
        """Return what this share adds to the divisor that depends on labels or weights.

        Args:
            y: labels.
            sample_weight: weights or ``None``.
        """
        raise NotImplementedError

    def counts_all(self, y: Any) -> bool:  # noqa: ARG002
        """Say whether all of the labels count alike, so that the divisor is the number of elements after all.

        Args:
            y: all labels of a data set.
        """
        return False

    def check(self, y: Any, y_pred: Tensor) -> None:
        """Look at the values of a batch.

        Args:
            y: labels.
            y_pred: predictions, ``[batch, ...]``; ``batch`` may be 0.

        Raises:
            InvalidArgumentError: they are not what the loss is made for; the message says what to do.
        """


class ObjectLoss(LossPart):
    """An object of ``ts.losses`` or of a subclass of ``ts.losses.Loss``.

    Args:
        loss: the object.
    """

    def __init__(self, loss: Loss) -> None:
        super().__init__(type(loss).__name__)
        self.loss = loss
        self.is_sum = loss.reduction is Reduction.SUM
        self.is_unreduced = loss.reduction is Reduction.NONE
        self.takes_logits = bool(getattr(loss, "from_logits", False))
        self.class_axis = loss.axis if isinstance(loss, _WITH_CLASSES) else -1
        #: Their functions average over the last axis, and predictions of one axis have only that of the examples.
        self._is_ours = any(type(loss) is cls for cls in CLASSES.values())

    def losses(self, y: Any, y_pred: Tensor) -> Tensor:  # noqa: D102 - the base class's
        scores = predictions_of(y_pred)
        if self._is_ours and scores.ndim == 1 and not isinstance(self.loss, _OF_IDS):
            scores = scores.unsqueeze(-1)
        labels = as_tensor(y, "y", scores.device)
        if isinstance(self.loss, _OF_IDS):
            label_checks.check_integer_labels(labels, self.name, _remedy_of_float_labels(labels, scores))
        return one_for_each_example(self.loss._of_examples(labels, scores), labels, y_pred, self.name)

    def has_divisor(self, y: Any, sample_weight: Any) -> bool:  # noqa: ARG002, D102
        is_by_weight = self.loss.reduction is Reduction.MEAN_WITH_SAMPLE_WEIGHT and sample_weight is not None
        return not (self.is_sum or self.is_unreduced) and (
            is_by_weight or getattr(self.loss, "ignore_class", None) is not None
        )

    def divisor(self, y: Any, sample_weight: Any) -> Tensor:  # noqa: D102
        return torch.as_tensor(self.loss._label_divisor(y, sample_weight))

    def counts_all(self, y: Any) -> bool:  # noqa: D102
        if self.loss.reduction is Reduction.MEAN_WITH_SAMPLE_WEIGHT:
            return False
        counts = self.loss._counts(y)
        return counts is None or bool(counts.all())

    def check(self, y: Any, y_pred: Tensor) -> None:  # noqa: D102
        loss: Any = self.loss
        scores = y_pred.detach().float()
        labels = as_tensor(y, "y", scores.device).detach()
        if scores.numel() == 0:
            return
        logits = f"If the model returns logits, write loss=ts.losses.{self.name}(from_logits=True)"
        softmax = f"{logits}, or end the model with torch.nn.Softmax(dim={getattr(loss, 'axis', -1)})."
        sigmoid = f"{logits}, or end the model with torch.nn.Sigmoid()."
        if isinstance(loss, losses.SparseCategoricalCrossentropy):
            label_checks.check_integer_labels(labels, self.name, _remedy_of_float_labels(labels, scores))
            if not loss.from_logits:
                label_checks.check_probabilities(scores, loss.axis, self.name, softmax)
            label_checks.check_class_ids(labels, scores.shape[loss.axis], loss.ignore_class, self.name)
        elif isinstance(loss, _WITH_CLASSES) and not loss.from_logits:
            label_checks.check_probabilities(scores, loss.axis, self.name, softmax)
        elif isinstance(loss, (losses.BinaryCrossentropy, losses.BinaryFocalCrossentropy)):
            if not loss.from_logits:
                label_checks.check_between_0_and_1(scores, self.name, sigmoid)
            check_labels_between_0_and_1(labels, self.name)
        elif isinstance(loss, losses.KLDivergence):
            label_checks.check_probabilities(scores, -1, self.name, "End the model with torch.nn.Softmax(dim=-1).")


class FunctionLoss(LossPart):
    """A function of labels and predictions that returns a loss for each example.

    Args:
        fn: called as ``fn(y_true, y_pred)``.
    """

    def __init__(self, fn: Callable[[Any, Any], Any]) -> None:
        super().__init__(getattr(fn, "__name__", None) or type(fn).__name__)
        self.fn = fn
        self._order = f"loss={self.name} is called as {self.name}(y_true, y_pred), as in tf: labels come first."
        names = [name.lower() for name in _parameters_of(fn)][:2]
        if len(names) == 2 and _OF_PREDICTIONS.search(names[0]) and _OF_LABELS.search(names[1]):
            warning_once(f"{self._order} Its parameters are ({', '.join(names)}): exchange them.")

    def losses(self, y: Any, y_pred: Tensor) -> Tensor:  # noqa: D102 - the base class's
        try:
            values = self.fn(y, predictions_of(y_pred))
        except Exception as error:
            add_note(error, self._order)
            raise
        return one_for_each_example(values, y, y_pred, self.name)


#: Parts of names of a function's parameters.
_OF_PREDICTIONS = re.compile("pred|hat|output|logit|score")
_OF_LABELS = re.compile("true|target|label")


def _parameters_of(fn: Callable[..., Any]) -> list[str]:
    try:
        return list(inspect.signature(fn).parameters)
    except (TypeError, ValueError):  # it is not Python's
        return []


def share_of(
    part: LossPart, y: Any, y_pred: Tensor, sample_weight: Any, divisor: Tensor | None, num_examples: int | None
) -> tuple[Tensor, int]:
    """Return a replica's share of one output's loss, and how many elements an example's losses have.

    Args:
        part: the loss.
        y: labels.
        y_pred: predictions, ``[batch, ...]``; ``batch`` may be 0.
        sample_weight: weights or ``None``.
        divisor: what the whole batch's sum is divided by, if that depends on labels or weights.
        num_examples: how many examples the whole batch has; ``None`` if that is not known.

    Returns:
        A scalar and a number.

    Raises:
        InvalidArgumentError: shapes or dtypes do not fit.
        RuntimeError: the number of examples is needed and not known.
        ValueError: the predictions are not this replica's share of the batch.
    """
    try:
        values = part.losses(y, y_pred)
    except errors.OpError:
        raise
    except (IndexError, RuntimeError, TypeError, ValueError):
        part.check(y, y_pred)  # knows better what is wrong, if it is with the values
        raise
    weighted = values if sample_weight is None else values * matching_weight(sample_weight, values)
    num_elements = 1 if part.adds_elements else max(math.prod(values.shape[1:]), 1)
    if part.is_sum:
        return weighted.sum(), num_elements
    context = get_replica_context()
    if context is not None:
        context.has_scaled_losses = True
    if divisor is not None:
        divisor = divisor.to(weighted.device, weighted.dtype)
        return weighted.sum() / (divisor + (divisor == 0)), num_elements  # where nothing counts, all losses are 0
    if num_examples is None or len(values) != len(y_pred):
        # This raises, and says why.
        return compute_average_loss(weighted, global_batch_size="actual") / num_elements, num_elements
    return weighted.sum() / (max(num_examples, 1) * num_elements), num_elements


def differentiated_as_sum(mean: Tensor, numbers: Mapping[str, int]) -> Tensor:
    """Return a mean whose gradient is that of the sum.

    Args:
        mean: a replica's share.
        numbers: how many losses of the global batch there are, by the name of what computes them without a reduction.

    Raises:
        InvalidArgumentError: outputs have different numbers of them, so that they can't be added up.
    """
    if len(set(numbers.values())) > 1:
        raise errors.InvalidArgumentError(
            f"With reduction='none' the outputs' losses are added up one by one, and these have different numbers: "
            f"{dict(numbers)}. Give them reduction='sum', or leave the reduction out for means."
        )
    return _Scaled.apply(mean, next(iter(numbers.values())))  # type: ignore[no-any-return, no-untyped-call]


class _Scaled(torch.autograd.Function):
    """The same value, with a gradient that is some times as large."""

    @staticmethod
    @override
    def forward(ctx: Any, value: Tensor, factor: int) -> Tensor:
        ctx.factor = factor
        return value.view_as(value)

    @staticmethod
    @override
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient * ctx.factor, None


def predictions_of(y_pred: Tensor) -> Tensor:
    """Return predictions of ``float32`` at least."""
    return y_pred.float() if y_pred.dtype.is_floating_point and y_pred.dtype.itemsize < 4 else y_pred


def loss_object(loss: Any) -> Any:
    """Return an object of ``ts.losses`` for one of its functions, which may have some arguments bound, or the loss."""
    if isinstance(loss, functools.partial) and not loss.args and loss.func in CLASSES:
        return CLASSES[loss.func](**loss.keywords)
    if inspect.isfunction(loss) and loss in CLASSES:
        return CLASSES[loss]()
    return loss


def chosen_crossentropy(y_true: Any, y_pred: Tensor) -> Loss:
    """Return the cross-entropy that tf.keras takes for ``"crossentropy"``, by the shapes.

    Args:
        y_true: labels.
        y_pred: predictions.
    """
    if y_pred.ndim < 2 or y_pred.shape[-1] == 1:
        return losses.BinaryCrossentropy()
    labels = shape_of(y_true)
    is_sparse = len(labels) < y_pred.ndim or labels[-1] == 1
    return losses.SparseCategoricalCrossentropy() if is_sparse else losses.CategoricalCrossentropy()


def one_for_each_example(values: Any, y: Any, y_pred: Tensor, name: str) -> Tensor:
    """Return losses, of which there must be one or more for each example.

    Args:
        values: what a loss returned.
        y: the labels that it was given.
        y_pred: the predictions that it was given, ``[batch, ...]``.
        name: the loss's name.

    Returns:
        ``[batch, ...]``, of ``float32`` at least.

    Raises:
        InvalidArgumentError: it returned one number for the batch, or labels and predictions were broadcast.
        TypeError: it did not return a tensor.
    """
    if not isinstance(values, Tensor):
        raise TypeError(f"loss={name} must return a tensor with one loss for each example. It returned: {values!r}")
    if values.ndim == 0:
        raise errors.InvalidArgumentError(
            f"loss={name} returned one number for the batch. It must return one loss for each example, [batch, ...], so"
            " that the mean over all replicas' examples can be taken: use reduction='none', or take means over the axes"
            " after the first only, such as .flatten(1).mean(1)."
        )
    if values.shape[0] != y_pred.shape[0]:
        raise errors.InvalidArgumentError(
            f"loss={name} returned losses of shape {shape_of(values)} for {y_pred.shape[0]} examples (y_pred "
            f"{shape_of(y_pred)}). It must return one loss for each example, [batch, ...]."
        )
    given = max(y.numel() if isinstance(y, Tensor) else 0, y_pred.numel())
    if isinstance(y, Tensor) and values.numel() > given:
        raise errors.InvalidArgumentError(
            f"loss={name} returned {shape_of(values)} losses for y {shape_of(y)} and y_pred {shape_of(y_pred)}: the "
            "shapes were broadcast against each other. Give labels and predictions one shape: y.unsqueeze(-1), or "
            "y_pred.squeeze(-1) at the end of the model."
        )
    if not values.dtype.is_floating_point:
        return values.to(torch.get_default_dtype())
    return values.float() if values.dtype.itemsize < 4 else values


def check_labels_between_0_and_1(y: Tensor, name: str) -> None:
    """Check labels of a binary cross-entropy.

    Args:
        y: the labels.
        name: the loss's name.

    Raises:
        InvalidArgumentError: one is below 0 or above 1.
    """
    off = (y < 0) | (y > 1)
    if label_checks.is_readable(off) and off.any():
        raise errors.InvalidArgumentError(
            f"{name} takes labels from 0 to 1. Received: {y[off][0].item():.4g} in y. For labels -1 and 1, write "
            "(y + 1) / 2; for several classes, use SparseCategoricalCrossentropy."
        )


def _remedy_of_float_labels(labels: Tensor, scores: Tensor) -> str:
    if labels.ndim == scores.ndim and labels.shape[-1] != 1:
        return "One-hot labels are for CategoricalCrossentropy."
    return "Convert them: y.long(), or y.astype('int64') in NumPy; numbers to be predicted are for MeanSquaredError."
