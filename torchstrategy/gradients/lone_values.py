"""Norms of a share that has one value for each channel.

torch refuses to train on it, because the variance of one value is not known. But a batch that trains on one replica
must not fail because it was split into shares of one example, so such a share is computed as Keras does: its variance
is 0, and so its normalised value is 0, whatever the value is.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor
from torch._compile import _disable_dynamo
from torch.nn import functional

from torchstrategy import patches
from torchstrategy.base.context import current_replica_context
from torchstrategy.base.devices import kind_of

__all__ = ["serve_lone_values", "trains_on_one"]

#: Whether batches of one example train as well, as in Keras' ``fit``; else that is torch's error.
trains_on_one: ContextVar[bool] = ContextVar("torchstrategy_trains_on_one", default=False)


def serve_lone_values(user: Any) -> None:
    """Let ``batch_norm`` and ``group_norm`` of torch compute shares of one value.

    The functions are replaced and not the layers' ``forward``, so that this reaches layers of other packages, too.

    Args:
        user: as long as it lives torch's functions are replaced: a strategy.
    """
    _norms.use(user)


def _replace_norms() -> list[Callable[[], None]]:
    return [
        patches.replace(
            functional,
            name,
            _serving(getattr(functional, name), instead),
            "a share of one value for each channel trains",
            "no strategy that has several replicas or fits a model is left",
        )
        for name, instead in (("batch_norm", _batch_norm), ("group_norm", _group_norm))
    ]


def _serving(original: Callable[..., Tensor], instead: Callable[..., Tensor | None]) -> Callable[..., Tensor]:
    """Return a function that calls ``instead``, and ``original`` where that has no result."""

    @functools.wraps(original)
    def norm(input: Any, *args: Any, **kwargs: Any) -> Tensor:
        if isinstance(input, Tensor) and input.ndim > 1 and input.shape[0] == 1:
            result = instead(input, *args, **kwargs)
            if result is not None:
                return result
        return original(input, *args, **kwargs)

    # torch.jit.script compiles the original.
    vars(norm).update(__script_if_tracing_wrapper=True, __original_fn=original)
    return norm


def _batch_norm(
    input: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,  # noqa: FBT001, FBT002 - torch's signature
    momentum: float = 0.1,
    eps: float = 1e-5,  # noqa: ARG001 - does not matter to 0
) -> Tensor | None:
    if not training or input.numel() != input.shape[1] or not _is_enough(input):
        return None
    if running_mean is not None and running_var is not None:
        with torch.no_grad():
            running_mean.lerp_(input.detach().flatten().to(running_mean.dtype), momentum)
            running_var.mul_(1 - momentum)
    result = input - input  # with nan where the value is, and no gradient
    shape = (1, -1, *(1,) * (input.ndim - 2))
    result = result if weight is None else result * weight.reshape(shape)
    result = result if bias is None else result + bias.reshape(shape)
    return result.to(input.dtype)


def _group_norm(
    input: Tensor, num_groups: int, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5
) -> Tensor | None:
    if input.numel() != num_groups or not _is_enough(input):  # torch refuses one value for each group of one example
        return None
    return torch.group_norm(input, num_groups, weight, bias, eps, torch.backends.cudnn.enabled)


_norms = patches.WhileUsed(_replace_norms)


@_disable_dynamo
def _is_enough(input: Tensor) -> bool:
    """Say whether one value is to be computed: it is a share of a larger batch, or a batch of ``fit``."""
    if kind_of(input.device).is_traced:  # a replica function is traced once for shares of all sizes
        return False
    if trains_on_one.get():
        return True
    context = current_replica_context()
    if context is None or context.num_replicas_in_sync == 1:
        return False
    shares = context.batch_shares
    return shares is None or shares.total > 1
