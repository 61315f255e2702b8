"""What is looked at once, in a first batch: whether labels and predictions are what a loss is made for.

Without these checks logits taken for probabilities, or a label that is no class, give a wrong number or an error that
does not tell the reason. They read values, and so wait for an accelerator. An empty share passes. So do values on
XLA devices, which are not computed before the program that is being traced.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from torchstrategy import errors
from torchstrategy.base.devices import kind_of

__all__ = [
    "check_between_0_and_1",
    "check_class_ids",
    "check_integer_labels",
    "check_log_probabilities",
    "check_probabilities",
    "is_readable",
    "shape_of",
]

#: How far probabilities of classes may add up to another number than 1; rounding of bfloat16 stays far below it.
_TOLERANCE = 0.02


def is_readable(value: Tensor) -> bool:
    """Say whether a tensor's values can be looked at in a step."""
    return not kind_of(value.device).is_traced


def check_probabilities(y_pred: Tensor, dim: int, loss: str, remedy: str) -> None:
    """Check that predictions are probabilities of classes, which add up to 1.

    Args:
        y_pred: the predictions.
        dim: the classes' dimension.
        loss: the loss's name.
        remedy: ends the message.

    Raises:
        InvalidArgumentError: they are not.
    """
    check_between_0_and_1(y_pred, loss, remedy)
    if not is_readable(y_pred):
        return
    sums = y_pred.sum(dim)
    off = (sums - 1).abs() > _TOLERANCE  # False for nan, whose cause is another one
    if off.any():
        raise errors.InvalidArgumentError(
            f"{loss} takes probabilities that add up to 1 over the classes, but predictions (y_pred) add up to "
            f"{sums[off][0].item():.4g}. {remedy}"
        )


def check_between_0_and_1(y_pred: Tensor, loss: str, remedy: str) -> None:
    """Check that predictions are probabilities.

    Args:
        y_pred: the predictions.
        loss: the loss's name.
        remedy: ends the message.

    Raises:
        InvalidArgumentError: one is below 0 or above 1.
    """
    off = (y_pred < 0) | (y_pred > 1)
    if is_readable(off) and off.any():
        raise errors.InvalidArgumentError(
            f"{loss} takes probabilities, but among the predictions (y_pred) is {y_pred[off][0].item():.4g}. {remedy}"
        )


def check_log_probabilities(y_pred: Tensor, loss: str, remedy: str) -> None:
    """Check that predictions are logarithms of probabilities, none of which is above 0.

    Args:
        y_pred: the predictions.
        loss: the loss's name.
        remedy: ends the message.

    Raises:
        InvalidArgumentError: one is above 0.
    """
    off = y_pred > 1e-3
    if is_readable(off) and off.any():
        raise errors.InvalidArgumentError(
            f"{loss} takes logarithms of probabilities, but among the predictions (y_pred) is "
            f"{y_pred[off][0].item():.4g}. {remedy}"
        )


def check_integer_labels(y: Tensor, loss: str, remedy: str) -> None:
    """Check the dtype of labels that are numbers of classes.

    Args:
        y: the labels.
        loss: the loss's name.
        remedy: ends the message.

    Raises:
        InvalidArgumentError: they are no integers.
    """
    if y.dtype.is_floating_point or y.dtype.is_complex:
        raise errors.InvalidArgumentError(
            f"{loss} takes class ids of an integer dtype (int64) as labels. Received: y of dtype {y.dtype} and shape "
            f"{shape_of(y)}. {remedy}"
        )


def check_class_ids(y: Tensor, num_classes: int, ignored: int | None, loss: str) -> None:
    """Check that labels are classes.

    Args:
        y: integer labels.
        num_classes: how many classes there are predictions for.
        ignored: a label that does not count, if there is one.
        loss: the loss's name.

    Raises:
        InvalidArgumentError: a label is no class.
    """
    off = (y < 0) | (y >= num_classes)
    if ignored is not None:
        off &= y != ignored
    if is_readable(off) and off.any():
        raise errors.InvalidArgumentError(
            f"{loss}: labels must be class ids from 0 to {num_classes - 1}, because the model predicts {num_classes} "
            f"classes. Received: {y[off][0].item()} in y. Give the model's last layer one output for each class, or "
            "number the classes from 0; a label that does not count is given by ignore_class (ignore_index in torch)."
        )


def shape_of(value: Any) -> tuple[int, ...]:
    """Return a tensor's shape as a plain tuple, which is shorter to read."""
    return tuple(value.shape) if isinstance(value, Tensor) else tuple(torch.as_tensor(value).shape)
