"""What the steps of training, evaluation and prediction have in common."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchstrategy.base import tree

__all__ = ["StepResult", "compute_loss", "detached", "is_first_here", "mean", "total"]


class StepResult(NamedTuple):
    """What a step gives to the loop.

    Args:
        loss: the mean over this process's replicas, ``None`` if there is none.
        outputs: what the model returned on the first replica.
        global_step: its new value; ``None`` if the step did not train.
    """

    loss: Tensor | None
    outputs: Any
    global_step: int | None = None


def compute_loss(loss_fn: Any, outputs: Any, labels: Any) -> Tensor:
    """Return the loss of a replica's batch as a scalar.

    Raises:
        TypeError: it is no tensor.
        ValueError: it has several elements, or can't be computed without labels.
    """
    try:
        loss = loss_fn(outputs, labels)
    except (TypeError, AttributeError, KeyError) as error:
        if labels is not None:
            raise
        raise ValueError(
            "EstimatorSpec(loss=) failed because input_fn returned features alone, without labels. Let it return "
            "batches (features, labels)."
        ) from error
    if not isinstance(loss, Tensor):
        raise TypeError(f"EstimatorSpec(loss=) must return a tensor. Received a {type(loss).__name__}: {loss!r}")
    if loss.shape not in ((), (1,)):
        raise ValueError(
            f"EstimatorSpec(loss=) must return a scalar: the mean, or the sum, over the batch. Received a tensor of "
            f"shape {tuple(loss.shape)}. Did the loss have reduction='none'?"
        )
    return loss.reshape(())


def detached(outputs: Any) -> Any:
    """Return outputs without the graph that they come from."""
    return tree.map_leaves(lambda leaf: leaf.detach() if isinstance(leaf, Tensor) else leaf, outputs)


def is_first_here(context: Any) -> bool:
    """Say whether a replica is this process's first one."""
    return bool(context.replica_id_in_sync_group == context.strategy.placement.local_replica_ids[0])


def total(values: Sequence[float]) -> float:
    """Return the sum of losses; where infinite ones cancel, or it is too large, what plain addition gives."""
    try:
        return math.fsum(values)
    except (ValueError, OverflowError):
        return sum(values)


def mean(losses: Sequence[Tensor]) -> Tensor:
    """Return the mean of the losses of replicas, which may be on several devices."""
    return losses[0] if len(losses) == 1 else torch.stack([loss.to(losses[0].device) for loss in losses]).mean()
