"""Collectives that autograd can differentiate.

The gradient is that of the sum of all replicas' losses, as in ``tf.distribute``: the backward of an all-reduce is an
all-reduce of the upstream gradients, so every replica must run the same backward.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

__all__ = ["differentiable_all_gather", "differentiable_all_reduce"]

Reduce = Callable[[Sequence[Tensor]], Sequence[Tensor]]


class _AllReduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, reduce: Reduce, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.reduce = reduce
        return tuple(reduce(tensors))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        return None, *_AllReduce.apply(ctx.reduce, *grads)  # type: ignore[no-untyped-call]


class _AllGather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gather: Any, reduce: Reduce, axis: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        gathered, offsets = gather(tensors)
        ctx.reduce, ctx.axis, ctx.offsets = reduce, axis, offsets
        ctx.sizes = [tensor.shape[axis] for tensor in tensors]
        return tuple(gathered)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        totals = _AllReduce.apply(ctx.reduce, *grads)  # type: ignore[no-untyped-call]
        own = [
            _own_part(total, ctx.axis, offset, size)
            for total, offset, size in zip(totals, ctx.offsets, ctx.sizes, strict=True)
        ]
        return None, None, None, *own


def _own_part(total: Tensor, axis: int, offset: int | Tensor, size: int) -> Tensor:
    """Return a replica's part of what was gathered; its offset is a tensor where one program computes all replicas."""
    if isinstance(offset, Tensor):
        return total.index_select(axis, offset + torch.arange(size, device=total.device))
    return total.narrow(axis, offset, size)


def differentiable_all_reduce(reduce: Reduce, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
    """Return ``reduce(tensors)``; gradients go through the same ``reduce``."""
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):
        return _AllReduce.apply(reduce, *tensors)  # type: ignore[no-any-return,no-untyped-call]
    return reduce(tensors)


def differentiable_all_gather(
    gather: Callable[[Sequence[Tensor]], tuple[Sequence[Tensor], Sequence[int | Tensor]]],
    reduce: Reduce,
    axis: int,
    tensors: Sequence[Tensor],
) -> Sequence[Tensor]:
    """Return ``gather(tensors)[0]``; a gradient is summed over replicas, and each takes its own part of it."""
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):
        return _AllGather.apply(gather, reduce, axis, *tensors)  # type: ignore[no-any-return,no-untyped-call]
    return gather(tensors)[0]
