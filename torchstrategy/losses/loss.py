"""The base class of losses: what each does with its arguments, and how the losses of examples become one number."""

from __future__ import annotations

from contextlib import AbstractContextManager
from contextvars import ContextVar
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.nn import functional as F

from torchstrategy import errors
from torchstrategy.base.context import get_strategy, has_strategy, set_within
from torchstrategy.base.names import Configurable, as_dtype, snake_case
from torchstrategy.base.options import Choice

__all__ = [
    "EPSILON",
    "DType",
    "Loss",
    "Reduction",
    "as_pair",
    "as_tensor",
    "binary_terms",
    "check_labels_come_first",
    "clip",
    "matching_weight",
    "predictions",
    "replica_means",
    "smoothed",
]

#: Keras's ``backend.epsilon()``: how far probabilities stay away from 0 and 1.
EPSILON = 1e-7


def predictions(y_pred: Any) -> Tensor:
    """Return predictions as a floating-point tensor; halves become ``float32``, so that no square or sum overflows."""
    tensor = as_tensor(y_pred, "y_pred")
    if not tensor.dtype.is_floating_point:
        return tensor.to(torch.get_default_dtype())
    return tensor.float() if tensor.dtype.itemsize < 4 else tensor


def as_pair(y_true: Any, y_pred: Any, remedy: str = "") -> tuple[Tensor, Tensor]:
    """Return labels and predictions of one shape and dtype, for losses that compare them entry by entry.

    Args:
        y_true: labels.
        y_pred: predictions; a last axis of size 1 may be missing in one of the two.
        remedy: ends the message of the error.

    Returns:
        The labels and the predictions.

    Raises:
        InvalidArgumentError: the shapes differ in another way.
    """
    scores = predictions(y_pred)
    labels = as_tensor(y_true, "y_true", scores.device).to(scores.dtype)
    shapes = tuple(labels.shape), tuple(scores.shape)
    if labels.ndim == scores.ndim - 1 and scores.shape[-1] == 1:
        labels = labels.unsqueeze(-1)
    elif scores.ndim == labels.ndim - 1 and labels.shape[-1] == 1:
        scores = scores.unsqueeze(-1)
    if labels.shape != scores.shape:
        raise errors.InvalidArgumentError(
            "y_true and y_pred must have the same shape, but for a last axis of size 1. Received: y_true "
            f"{shapes[0]}, y_pred {shapes[1]}. {remedy or 'Broadcast them yourself if that is meant.'}"
        )
    return labels, scores


def check_labels_come_first(y_true: Any, y_pred: Any) -> None:
    """Refuse arguments in torch's order, which give another number without an error.

    Raises:
        ValueError: the labels need gradients and the predictions don't.
    """
    if isinstance(y_true, Tensor) and y_true.requires_grad and not getattr(y_pred, "requires_grad", False):
        raise ValueError(
            "y_true needs gradients and y_pred does not: the arguments seem to be in torch's order. As in tf, labels "
            "come first: loss(y_true, y_pred)."
        )


def clip(probabilities: Tensor, high: float = 1.0 - EPSILON) -> Tensor:
    """Keep probabilities away from 0, and from 1, where logarithms have no value."""
    return probabilities.clamp(EPSILON, high)


def smoothed(y_true: Any, y_pred: Any, label_smoothing: float) -> tuple[Tensor, Tensor]:
    """Return labels 0 and 1, of which a part is moved to 0.5, and predictions."""
    labels, scores = as_pair(y_true, y_pred)
    return (labels * (1.0 - label_smoothing) + 0.5 * label_smoothing if label_smoothing else labels), scores


def binary_terms(labels: Tensor, scores: Tensor, *, from_logits: bool) -> Tensor:
    """Return the binary cross-entropy of each entry."""
    if from_logits:
        return F.binary_cross_entropy_with_logits(scores, labels, reduction="none")
    probabilities = clip(scores)
    # Written out: torch's own function on probabilities is refused under autocast.
    return -(labels * probabilities.log() + (1.0 - labels) * torch.log1p(-probabilities))


def as_tensor(value: Any, name: str, device: torch.device | None = None) -> Tensor:
    """Return a tensor; numbers and arrays are put on ``device``.

    Raises:
        InvalidArgumentError: the value is neither a tensor nor numbers.
    """
    if isinstance(value, Tensor):
        return value
    if isinstance(value, (list, tuple)) and any(isinstance(part, Tensor) for part in value):
        return torch.stack([as_tensor(part, name, device) for part in value])  # torch.as_tensor would cut the graph
    try:
        return torch.as_tensor(value, device=device)
    except (TypeError, ValueError, RuntimeError, AttributeError) as error:
        raise errors.InvalidArgumentError(f"{name} must be a tensor or numbers. Received: {value!r}") from error


#: What can be given as a dtype.
DType: TypeAlias = torch.dtype | str | None

_means_are_meant: ContextVar[bool] = ContextVar("torchstrategy_replica_means", default=False)


def replica_means() -> AbstractContextManager[None]:
    """Let losses average over a replica's batch: the caller divides by the number of replicas. Replica context only."""
    return set_within(_means_are_meant, value=True)


class Reduction(str, Choice):
    """What becomes of the losses of a batch; the members equal tf's strings, which are accepted as well.

    ``NONE`` leaves one loss for each example (or pixel, or token), ``SUM`` adds them up, ``SUM_OVER_BATCH_SIZE`` takes
    their mean, and so do ``MEAN``, its other name, and ``AUTO``. ``MEAN_WITH_SAMPLE_WEIGHT`` divides by the sum of the
    sample weights instead. Under a strategy only ``NONE`` and ``SUM`` can be called, as in tf: a replica's mean does
    not know of the other replicas. ``Model.compile`` takes all of them, and averages over the global batch.

    Example:
        >>> ts.losses.Reduction.NONE == "none"
        True
    """

    AUTO = "auto"
    NONE = "none"
    SUM = "sum"
    SUM_OVER_BATCH_SIZE = "sum_over_batch_size"
    MEAN = "mean"
    MEAN_WITH_SAMPLE_WEIGHT = "mean_with_sample_weight"

    @classmethod
    def parse(cls, value: object) -> Reduction:
        """Return the member for a member or its string in any letter case; ``None`` is ``NONE``, as in Keras 3.

        Args:
            value: a ``Reduction``, a string or ``None``.

        Returns:
            The member.

        Raises:
            ValueError: it names no member.

        Example:
            >>> ts.losses.Reduction.parse("sum").name
            'SUM'
        """
        if isinstance(value, cls):
            return value
        name = "none" if value is None else value
        try:
            return cls(name.lower() if isinstance(name, str) else name)
        except ValueError:
            raise ValueError(
                f"{value!r} is not a valid reduction. Expected one of {[member.value for member in cls]}. (Under a "
                "strategy use 'none' and ts.nn.compute_average_loss.)"
            ) from None


class Loss(Configurable):
    """Base class of losses: calls ``call``, weighs its result and reduces it.

    A subclass defines ``call(y_true, y_pred)``, which returns one loss for each example.

    Args:
        name: the loss's name, for logs; ``None`` means the class's name in snake case.
        reduction: a ``Reduction`` or its string.
        dtype: floating-point dtype to which predictions are brought and which losses have, or its name; halves are
            computed in ``float32``. ``None`` means that of the predictions.

    Raises:
        TypeError: ``name`` is a ``Reduction``, whose place was the first one before Keras 3, or ``dtype`` is no dtype.
        ValueError: ``reduction`` is unknown, or ``dtype`` is not one of floating-point numbers.

    Example:
        >>> class Quartic(ts.losses.Loss):
        ...     def call(self, y_true, y_pred):
        ...         return (y_true - y_pred).pow(4).mean(-1)
        >>> Quartic(reduction="none")(torch.tensor([[1.0], [3.0]]), torch.tensor([[0.0], [1.0]]))
        tensor([ 1., 16.])
    """

    def __init__(
        self, name: str | None = None, reduction: Reduction | str | None = Reduction.AUTO, dtype: DType = None
    ) -> None:
        if name in tuple(Reduction):
            raise TypeError(f"The first argument of a Loss is its name. Write reduction={str(name)!r}.")
        self.reduction = Reduction.parse(reduction)
        self.name = snake_case(type(self).__name__) if name is None else name
        self.dtype = None if dtype is None else as_dtype(dtype)
        if self.dtype is not None and not self.dtype.is_floating_point:
            raise ValueError(f"The dtype of a loss must be one of floating-point numbers. Received: {dtype!r}")

    def call(self, y_true: Any, y_pred: Any) -> Tensor:
        """Return one loss for each example; to be defined by a subclass.

        Args:
            y_true: labels.
            y_pred: predictions.

        Returns:
            ``[batch, ...]``.

        Raises:
            NotImplementedError: the subclass does not define it.
        """
        raise NotImplementedError(f"{type(self).__name__} must define call(self, y_true, y_pred).")

    def __call__(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> Tensor:
        """Compute the loss. Labels come first, as in tf.

        Args:
            y_true: labels.
            y_pred: predictions.
            sample_weight: scalar, ``[batch]``, or broadcastable to the losses, whose first axes it has if it has
                fewer; ``None`` means that everything weighs 1. Weights change the divisor of a mean only with
                ``MEAN_WITH_SAMPLE_WEIGHT``.

        Returns:
            With ``NONE``, what ``call`` returns, weighted; else a scalar, which is 0 for an empty batch.

        Raises:
            ValueError: with a mean under a strategy; or, with several replicas, ``call`` returned a scalar.
            InvalidArgumentError: shapes do not fit.
        """
        self._check_reduction()
        losses = self._of_examples(y_true, y_pred)
        if not losses.dtype.is_floating_point:
            losses = losses.to(torch.get_default_dtype())
        if losses.ndim == 0 and get_strategy().num_replicas_in_sync > 1:
            raise ValueError(
                f"{self.name} reduced the examples of this replica to one number: the loss takes the mean over the "
                "last axis, and y_pred has no axis for the examples besides. Give y_true and y_pred the shape "
                "[batch, 1]: x.unsqueeze(-1)."
            )
        weighted = losses if sample_weight is None else losses * matching_weight(sample_weight, losses)
        if self.reduction is Reduction.NONE:
            return weighted
        total = weighted.sum(dtype=torch.float32 if weighted.dtype.itemsize < 4 else None)
        if self.reduction is not Reduction.SUM:
            divisor = self._label_divisor(y_true, sample_weight)
            total = total / (max(losses.numel(), 1) if divisor is None else divisor + (divisor == 0))
        return total.to(weighted.dtype)

    def _of_examples(self, y_true: Any, y_pred: Any) -> Tensor:
        """Return what ``call`` returns, in the loss's dtype."""
        if self.dtype is None:
            return as_tensor(self.call(y_true, y_pred), "the result of call")
        losses = self.call(y_true, as_tensor(y_pred, "y_pred").to(self.dtype))
        return as_tensor(losses, "the result of call").to(self.dtype)

    def _label_divisor(self, y_true: Any, sample_weight: Any = None) -> Tensor | None:
        """Return what a mean divides by if labels or weights say so; ``None`` if it is the number of losses."""
        counts = self._counts(y_true)
        if self.reduction is Reduction.MEAN_WITH_SAMPLE_WEIGHT and sample_weight is not None:
            weight = as_tensor(sample_weight, "sample_weight")
            return weight.sum() if counts is None else (matching_weight(weight, counts.to(weight.dtype)) * counts).sum()
        return None if counts is None else counts.sum()

    def _counts(self, y_true: Any) -> Tensor | None:  # noqa: ARG002 - for losses that skip labels
        """Say which labels count; ``None`` if all do."""
        return None

    def _check_reduction(self) -> None:
        if self.reduction not in (Reduction.NONE, Reduction.SUM) and has_strategy() and not _means_are_meant.get():
            raise ValueError(
                f"{self.name} was called under a strategy with reduction {self.reduction.name}, which would average "
                "over this replica's share of the batch only. Make the loss with "
                "reduction=ts.losses.Reduction.NONE, and average over the global batch: "
                'ts.nn.compute_average_loss(loss(y_true, y_pred), global_batch_size="actual").'
            )

    def __repr__(self) -> str:
        return f"{type(self).__name__}(reduction={self.reduction.value!r}, name={self.name!r})"


def matching_weight(sample_weight: Any, losses: Tensor) -> Tensor:
    """Return the weights with as many axes as the losses; those with fewer count for the first ones."""
    weight = as_tensor(sample_weight, "sample_weight", losses.device).to(losses.dtype)
    original = tuple(weight.shape)
    if weight.ndim == losses.ndim + 1 and weight.shape[-1] == 1:
        weight = weight.squeeze(-1)
    elif 0 < weight.ndim < losses.ndim:
        weight = weight.reshape(*weight.shape, *(1,) * (losses.ndim - weight.ndim))
    if weight.ndim > losses.ndim or any(
        own not in (1, size) for own, size in zip(reversed(weight.shape), reversed(losses.shape), strict=False)
    ):
        raise errors.InvalidArgumentError(
            "sample_weight must be a scalar, have one entry for each example, or be broadcastable to the losses' "
            f"shape {tuple(losses.shape)}. Received shape {original}"
        )
    return weight
