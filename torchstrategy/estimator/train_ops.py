"""What a training step does with the gradients: optimizers, schedulers, a gradient scaler, and functions, in order."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from torchstrategy.base.log import logger
from torchstrategy.estimator.variables import OPTIMIZER, VARIABLE_NAMES, OptimizerNames
from torchstrategy.replicas.mirrored import bodies

__all__ = ["TrainOps"]


class TrainOps:
    """The elements of a spec's ``train_op``.

    Args:
        ops: optimizers, schedulers, at most one gradient scaler, and functions without arguments.
        module: the model.

    Raises:
        ValueError: there are several gradient scalers.
        TypeError: a scheduler needs the loss.
    """

    def __init__(self, ops: Sequence[Any], module: nn.Module) -> None:
        self._module = module
        self.optimizers = [op for op in ops if isinstance(op, Optimizer)]
        self._schedulers = [op for op in ops if isinstance(op, LRScheduler)]
        scalers = [op for op in ops if isinstance(op, torch.amp.GradScaler)]
        if len(scalers) > 1:
            raise ValueError(f"train_op holds {len(scalers)} gradient scalers. One scales the loss for all optimizers.")
        if any(isinstance(op, ReduceLROnPlateau) for op in ops):
            raise TypeError(
                "train_op holds a ReduceLROnPlateau, whose step needs a metric. Call its step in a hook: in "
                "SessionRunHook.after_run or a saving listener."
            )
        own = {id(p) for p in bodies(module)[0].parameters()}
        trained = {id(p) for one in self.optimizers for group in one.param_groups for p in group["params"]}
        if own and not own & trained:
            logger.warning(
                "No optimizer in train_op has parameters of EstimatorSpec(module=): training will not change the "
                "module. Give the optimizer module.parameters()."
            )
        self._scaler = scalers[0] if scalers else None
        self._in_turn = [op for op in ops if not isinstance(op, (LRScheduler, torch.amp.GradScaler))]

    def apply(self, loss: Tensor) -> None:
        """Compute the gradients of a replica's share of the loss and update the parameters. Replica context only."""
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        if self._scaler is None:
            loss.backward()  # type: ignore[no-untyped-call]
        else:
            self._scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
            if len(self._in_turn) > len(self.optimizers):  # a function, such as one that clips, sees true gradients
                for optimizer in self.optimizers:
                    self._scaler.unscale_(optimizer)
        for op in self._in_turn:
            if not isinstance(op, Optimizer):
                op()
            elif self._scaler is None:
                op.step()
            else:
                self._scaler.step(op)
        if self._scaler is not None:
            self._scaler.update()
        for scheduler in self._schedulers:
            scheduler.step()

    def saved(self) -> dict[str, Any]:
        """Return what belongs in a checkpoint, by names."""
        parts: dict[str, Any] = {VARIABLE_NAMES: OptimizerNames(self._module, self.optimizers)}
        for i, optimizer in enumerate(self.optimizers):
            parts[_numbered(OPTIMIZER, i)] = optimizer
        for i, scheduler in enumerate(self._schedulers):
            parts[_numbered("scheduler", i)] = scheduler
        if self._scaler is not None:
            parts["scaler"] = self._scaler
        return parts


def _numbered(name: str, i: int) -> str:
    return f"{name}_{i}" if i else name
