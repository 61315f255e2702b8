"""Batch normalisation as torch computes it on other devices, where torch_xla 2.9 differs.

Its running variance lacks the factor ``n / (n - 1)``, its backward pass takes the batch's statistics even if the
forward pass took the running ones, and `momentum=None` reads a number on the host.
"""

from __future__ import annotations

import math
import sys
from typing import Any

from torch import Tensor
from torch.nn.modules.batchnorm import _BatchNorm

from torchstrategy.tpu.protocols import AnyRegion

__all__ = ["reads_batch_count", "run_batch_norm", "run_batch_norm_backward"]

_FORWARD = _BatchNorm.forward.__code__


def reads_batch_count(region: AnyRegion, value: Tensor) -> bool:
    """Say whether a batch norm with ``momentum=None`` reads its count of batches, and remember that count.

    The layer divides 1 by the number that it reads, and passes the quotient to the operation that comes next.
    """
    frame = sys._getframe(2)
    for _ in range(8):  # a mode for torch functions may lie between
        if frame.f_code is _FORWARD:
            region.batch_count = value
            return True
        if frame.f_back is None:
            return False
        frame = frame.f_back
    return False


def run_batch_norm(region: AnyRegion, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Normalise, and update the running statistics."""
    value, _, _, mean, variance, training, momentum, _ = args
    count, region.batch_count = region.batch_count, None
    updates = training and isinstance(variance, Tensor) and value.is_xla
    site = region.site_if_local(func, args)
    given = (mean, variance)
    if site is not None:
        args = region.entered(args)
        count = None if count is None else region.enter(count)
        if updates:
            args = (*args[:3], args[3].clone(), args[4].clone(), *args[5:])
            mean, variance = args[3], args[4]
    before = (mean.clone(), variance.clone()) if updates else None
    results = func(*args, **kwargs)
    if before is not None:
        n = value.numel() // value.shape[1]
        unbiased = n / (n - 1) if n > 1 else math.nan
        if count is None:
            # XLA: before * (1 - momentum) + biased * momentum.
            kept = before[1] * (1 - momentum)
            variance.copy_(kept + (variance - kept) * unbiased)
        else:  # momentum is 1, so that these are the batch's
            mean.copy_(before[0] + (mean - before[0]) / count)
            variance.copy_(before[1] + (variance * unbiased - before[1]) / count)
    if site is not None:
        region.mark_results(results, site)
        if updates:  # not `copy_`, which keeps what is noted of the shared value's sharding
            region.runtime.assign(given[0], mean)
            region.runtime.assign(given[1], variance)
            region.mark_results(given, site)
    return results


def run_batch_norm_backward(region: AnyRegion, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Compute the gradients; with the running statistics if the forward pass took them."""
    gradient, value, weight, mean, variance, _, _, training, epsilon, wanted = args
    if training or not value.is_xla:
        results = func(*args, **kwargs)
    else:
        shape = (1, -1, *(1,) * (value.dim() - 2))
        inverse = (variance + epsilon).rsqrt().reshape(shape)
        others = [i for i in range(value.dim()) if i != 1]
        scaled = gradient * inverse
        results = (
            (scaled if weight is None else scaled * weight.reshape(shape)) if wanted[0] else None,
            (scaled * (value - mean.reshape(shape))).sum(others) if wanted[1] else None,
            gradient.sum(others) if wanted[2] else None,
        )
    return region.marked(results, func, args)
