"""What the canned models write for TensorBoard, under tf's tags, in the training steps that are written."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from torchstrategy import summary

__all__ = ["write_layer", "write_weights"]


def write_layer(tag: str, values: Tensor, module: nn.Module) -> None:
    """Write which share of a layer's outputs is 0, and their histogram.

    Args:
        tag: the layer's name.
        values: its outputs.
        module: the model; summaries are written in training only.
    """
    if _wants_summaries(module):
        summary.scalar(f"{tag}/fraction_of_zero_values", (values == 0).float().mean())
        _write_histogram(f"{tag}/activation", values)


def write_weights(bias: Tensor, weights: Iterable[Tensor], module: nn.Module) -> None:
    """Write a linear model's bias, and which share of its weights is 0.

    Args:
        bias: ``[units]``.
        weights: those of its columns.
        module: the model; summaries are written in training only.
    """
    if _wants_summaries(module):
        if len(bias) > 1:
            _write_histogram("bias", bias)
        else:
            summary.scalar("bias", bias[0])
        every = torch.cat([weight.detach().flatten() for weight in weights])
        summary.scalar("fraction_of_zero_weights", (every == 0).float().mean())


def _wants_summaries(module: nn.Module) -> bool:
    has_step = summary.experimental.get_step() is not None  # a program's own default writer may have none
    return module.training and has_step and summary.should_record_summaries()


def _write_histogram(tag: str, values: Tensor) -> None:
    values = values.detach()
    finite = values[values.isfinite()]  # the loss tells of others
    if finite.numel():
        summary.histogram(tag, finite)
