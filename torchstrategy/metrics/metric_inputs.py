"""What metrics are given: labels, predictions and weights, brought to shapes that fit.

Shapes that don't fit raise, where broadcasting would give a wrong number.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from torchstrategy import errors
from torchstrategy.base.context import current_replica_context
from torchstrategy.base.devices import kind_of
from torchstrategy.base.log import warn_once
from torchstrategy.base.values import DistributedValues, is_scaled

__all__ = [
    "as_pair",
    "as_tensor",
    "check_example_axis",
    "flaw_of",
    "matching_weight",
    "same_shape_pair",
    "warn_of_scaled",
]


def as_tensor(value: Any, device: torch.device | None = None) -> Tensor:
    """Return a tensor without a graph.

    Raises:
        TypeError: the value can't become one.
    """
    if isinstance(value, DistributedValues):
        raise TypeError(
            f"A metric can't be given a {type(value).__name__}, the values of several replicas. Update it inside "
            "strategy.run, where each replica gets its own: strategy.run(metric.update_state, args=(values,))."
        )
    try:
        return torch.as_tensor(value, device=device).detach()
    except (TypeError, ValueError, RuntimeError) as error:
        raise TypeError(f"A metric needs tensors, arrays, numbers or lists of numbers. Received: {value!r}") from error


def as_pair(y_true: Any, y_pred: Any) -> tuple[Tensor, Tensor]:
    """Return labels and predictions as tensors on the predictions' device, without a graph."""
    predictions = as_tensor(y_pred)
    return as_tensor(y_true, predictions.device), predictions


def same_shape_pair(y_true: Any, y_pred: Any, remedy: str = "(Labels come first, as in tf.)") -> tuple[Tensor, Tensor]:
    """Return labels and predictions, which must have one shape, except that either may have one more dimension of 1.

    Raises:
        InvalidArgumentError: the shapes do not fit.
    """
    labels, predictions = as_pair(y_true, y_pred)
    fitting_labels, fitting_predictions = labels, predictions
    if labels.ndim == predictions.ndim + 1 and labels.shape[-1] == 1:
        fitting_labels = labels.squeeze(-1)
    elif predictions.ndim == labels.ndim + 1 and predictions.shape[-1] == 1:
        fitting_predictions = predictions.squeeze(-1)
    if fitting_labels.ndim == 0 or fitting_labels.shape != fitting_predictions.shape:
        raise errors.InvalidArgumentError(
            "y_true and y_pred must have the same shape, with the batch first. Received: y_true "
            f"{tuple(labels.shape)}, y_pred {tuple(predictions.shape)}. {remedy}"
        )
    return fitting_labels, fitting_predictions


def check_example_axis(axis: int | Sequence[int], values: Tensor) -> None:
    """Refuse to reduce over the examples, which would make a metric depend on how they are split over replicas.

    Raises:
        InvalidArgumentError: ``axis`` has the first axis of ``[batch, ...]``, or one that is not there.
    """
    axes = [axis] if isinstance(axis, int) else list(axis)
    if not axes or not all(-values.ndim < a < values.ndim and a != 0 for a in axes):
        raise errors.InvalidArgumentError(
            f"axis={axis} must be of y_pred and not its first one, that of the examples: replicas have different ones. "
            f"Received y_pred of {tuple(values.shape)}, where [batch, ..., n] is expected."
        )


def flaw_of(invalid: Tensor, explain: Callable[[], Exception]) -> Tensor | None:
    """Raise if any value is invalid; where XLA traces a program, values can't be looked at.

    Args:
        invalid: boolean, of any shape.
        explain: returns the exception to raise.

    Returns:
        ``None``; with XLA a scalar to add to counts: ``nan`` if any value is invalid, which the result then is, or 0.
    """
    if kind_of(invalid.device).is_traced:
        is_flawed = invalid.any()
        return torch.zeros_like(is_flawed, dtype=torch.float32).masked_fill(is_flawed, math.nan)
    if invalid.any():
        raise explain()
    return None


def matching_weight(sample_weight: Any, values: Tensor, dtype: torch.dtype) -> Tensor:
    """Return weights in the shape of the values; ``[batch]`` and ``[batch, 1]`` weights count for whole examples.

    Args:
        sample_weight: a scalar, one entry for each example, or broadcastable to the values; ``None`` means 1.
        values: ``[batch, ...]``.
        dtype: dtype of the result.

    Raises:
        InvalidArgumentError: the shape does not fit.
    """
    if sample_weight is None:
        return torch.ones_like(values, dtype=dtype)
    weight = as_tensor(sample_weight, values.device).to(dtype)
    original = tuple(weight.shape)
    if weight.ndim == values.ndim + 1 and weight.shape[-1] == 1:
        weight = weight.squeeze(-1)
    elif 0 < weight.ndim < values.ndim:
        weight = weight.reshape(*weight.shape, *(1,) * (values.ndim - weight.ndim))
    try:
        return weight.broadcast_to(values.shape)
    except RuntimeError as error:
        raise errors.InvalidArgumentError(
            f"sample_weight must be a scalar, have one entry for each example, or be broadcastable to the values' "
            f"shape {tuple(values.shape)}. Received shape {original}"
        ) from error


def warn_of_scaled(name: str, values: Any) -> None:
    """Warn of a replica's part of a loss, which is given to a mean."""
    context = current_replica_context()
    if context is not None and isinstance(values, Tensor) and values.numel() == 1 and is_scaled(context, values):
        warn_once(
            f"The Mean {name!r} was given a replica's part of a loss, as ts.nn.compute_average_loss and a model's "
            "compute_loss return it. It is divided by the size of the global batch already, so the mean over replicas "
            "is too small by their number. Give a Mean the loss of each example; or let the function return the part, "
            'and add them up by strategy.reduce("SUM", loss). In a step of a model it is self.track_loss(loss).',
            of=context.strategy,
        )
