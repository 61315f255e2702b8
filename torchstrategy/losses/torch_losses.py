"""A warning for torch's own losses that average over a replica's share of the batch."""

from __future__ import annotations

import sys
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from torchstrategy.context import current_replica_context
from torchstrategy.log import warn_once
from torchstrategy.replicas.adapters import register_preparation

__all__: list[str] = []

_LOSS = "torch.nn.modules.loss._Loss"
#: One key for all replicas' objects: hooks whose keys differ between replicas are removed.
_HOOK = "torchstrategy.losses"
_MEANS = ("mean", "batchmean")
#: Files whose frames lie between the program's call of a loss and its hook.
_BETWEEN = (str(Path(__file__).parents[1]), str(torch.nn.modules.module.__file__))


def _watch(body: Any, local_id: int) -> None:  # noqa: ARG001 - a preparation's signature
    body._forward_pre_hooks[_HOOK] = _warn_of_mean


def _warn_of_mean(loss: Any, args: Any) -> None:  # noqa: ARG001 - a hook's signature
    if torch.compiler.is_compiling() or loss.reduction not in _MEANS:
        return
    context = current_replica_context()
    if context is None or context.num_replicas_in_sync == 1:
        return
    name = type(loss).__name__
    warn_once(
        f"{name}(reduction={loss.reduction!r}) averages over this replica's share of the batch, but the gradients of "
        "all replicas are added up: the step becomes larger with each replica, and examples of small shares weigh "
        f"more. Make the loss with {name}(reduction='none') and average over the global batch: "
        'ts.nn.compute_average_loss(per_example_loss, global_batch_size="actual").',
        stacklevel=2 + _frames_to_the_call(),
    )


def _frames_to_the_call() -> int:
    """Return how many frames above the hook the program calls the loss."""
    frame: FrameType | None = sys._getframe(1)
    count = 0
    while frame is not None and frame.f_code.co_filename.startswith(_BETWEEN):
        frame, count = frame.f_back, count + 1
    return count


register_preparation(_LOSS, _watch)
