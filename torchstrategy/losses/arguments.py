"""What every loss does with its arguments: labels first, as in tf, and never a shape that broadcasts by accident."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from torchstrategy import errors

__all__ = ["EPSILON", "as_pair", "as_tensor", "check_labels_come_first", "clip", "predictions"]

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
