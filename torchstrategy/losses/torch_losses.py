"""A warning for torch's own losses that average over a replica's share of the batch.

Loss modules that were made in a scope have a hook. Functions, and modules made elsewhere, are seen in the first run of
a strategy, by a mode of torch's functions.
"""

from __future__ import annotations

import sys
from contextlib import AbstractContextManager
from contextvars import ContextVar
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

from torchstrategy.context import current_replica_context, set_within
from torchstrategy.log import warn_once
from torchstrategy.replicas.adapters import register_first_run_mode, register_preparation

__all__ = ["means_are_meant", "replica_means"]

_LOSS = "torch.nn.modules.loss._Loss"
#: One key for all replicas' objects: hooks whose keys differ between replicas are removed.
_HOOK = "torchstrategy.losses"
_MEANS = ("mean", "batchmean")
#: Files whose frames lie between the program's call of a loss and its hook.
_BETWEEN = (str(Path(__file__).parents[1]), str(Path(torch.__file__).parent))
_LOSS_MODULES = str(Path("torch", "nn", "modules", "loss.py"))
_FUNCTIONS = frozenset({
    F.binary_cross_entropy, F.binary_cross_entropy_with_logits, F.cosine_embedding_loss, F.cross_entropy, F.ctc_loss,
    F.gaussian_nll_loss, F.hinge_embedding_loss, F.huber_loss, F.kl_div, F.l1_loss, F.margin_ranking_loss, F.mse_loss,
    F.multi_margin_loss, F.multilabel_margin_loss, F.multilabel_soft_margin_loss, F.nll_loss, F.poisson_nll_loss,
    F.smooth_l1_loss, F.soft_margin_loss, F.triplet_margin_loss, F.triplet_margin_with_distance_loss,
})  # fmt: skip

_are_meant: ContextVar[bool] = ContextVar("torchstrategy_replica_means", default=False)


def replica_means() -> AbstractContextManager[None]:
    """Let losses average over a replica's batch: the caller divides by the number of replicas. Replica context only."""
    return set_within(_are_meant, value=True)


def means_are_meant() -> bool:
    """Say whether a loss may average over this replica's batch."""
    return _are_meant.get()


def _watch(body: Any, local_id: int) -> None:  # noqa: ARG001 - a preparation's signature
    body._forward_pre_hooks[_HOOK] = _warn_of_module


def _warn_of_module(loss: Any, args: Any) -> None:  # noqa: ARG001 - a hook's signature
    if loss.reduction in _MEANS:
        _warn(type(loss).__name__, f"(reduction={loss.reduction!r})", f"{type(loss).__name__}(reduction='none')")


class _WatchFunctions(TorchFunctionMode):
    """Sees the loss functions of ``torch.nn.functional`` that are called while it is entered."""

    is_carried = True  # into the threads of a run inside a run

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        reduction = kwargs.get("reduction", "mean")
        if func in _FUNCTIONS and reduction in _MEANS and result.requires_grad and not _is_hooked():
            name = func.__name__
            _warn(name, f" with reduction={reduction!r}", f"{name}(..., reduction='none')")
        return result


def _is_hooked() -> bool:
    """Say whether a loss module with our hook calls the function."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and not frame.f_code.co_filename.endswith(_LOSS_MODULES):
        if not frame.f_code.co_filename.startswith(_BETWEEN):
            return False
        frame = frame.f_back
    return frame is not None and _HOOK in getattr(frame.f_locals.get("self"), "_forward_pre_hooks", ())


def _warn(name: str, how: str, remedy: str) -> None:
    context = current_replica_context()
    if torch.compiler.is_compiling() or context is None or context.num_replicas_in_sync == 1 or _are_meant.get():
        return
    warn_once(
        f"{name}{how} averages over this replica's share of the batch, but the gradients of all replicas are added up: "
        "the step becomes larger with each replica, and examples of small shares weigh more. Take the loss of each "
        f"example, {remedy}, and average over the global batch: "
        'ts.nn.compute_average_loss(per_example_loss, global_batch_size="actual").',
        stacklevel=3 + _frames_to_the_call(),
    )


def _frames_to_the_call() -> int:
    """Return how many frames above ``_warn`` the program calls the loss."""
    frame: FrameType | None = sys._getframe(2)
    count = 0
    while frame is not None and frame.f_code.co_filename.startswith(_BETWEEN):
        frame, count = frame.f_back, count + 1
    return count


register_preparation(_LOSS, _watch)
register_first_run_mode(_WatchFunctions)
