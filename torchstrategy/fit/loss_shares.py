"""A replica's share of the mean, or of the sum, over the elements of the global batch."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from torchstrategy import errors
from torchstrategy.fit.loss_parts import LossPart
from torchstrategy.losses.loss import matching_weight
from torchstrategy.nn import compute_average_loss
from torchstrategy.strategies.default import get_replica_context

__all__ = ["differentiated_as_sum", "global_batch_size", "share_of"]


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


def global_batch_size(num_own: int) -> int | None:
    """Return how many examples the global batch has, or all batches of the optimizer step together.

    Args:
        num_own: how many this replica has predictions for.

    Returns:
        The number; ``None`` if it is not known, or if this replica's share has another number of examples.
    """
    context = get_replica_context()
    shares = None if context is None else context.batch_shares
    if context is not None and shares is not None:
        return shares.divisor if context._num_own_examples == num_own else None
    return num_own if context is None or context.num_replicas_in_sync == 1 else None
