"""The number of training steps: a variable that is made before the model, saved with it, and shared by all replicas."""

from __future__ import annotations

from contextlib import AbstractContextManager
from contextvars import ContextVar

import torch

from torchstrategy.base.context import set_within
from torchstrategy.base.options import VariableAggregation
from torchstrategy.replicas.variables import Variable

__all__ = ["GLOBAL_STEP", "as_current", "current_global_step", "make_global_step"]

GLOBAL_STEP = "global_step"

_current: ContextVar[Variable | None] = ContextVar("torchstrategy_global_step", default=None)


def make_global_step() -> Variable:
    """Return a new global step, which is 0. It belongs in the scope of the training's strategy."""
    first = VariableAggregation.ONLY_FIRST_REPLICA
    return Variable(0, trainable=False, name=GLOBAL_STEP, dtype=torch.int64, aggregation=first)


def current_global_step() -> Variable | None:
    """Return the global step of the train, evaluate or predict that is running here, or ``None``."""
    return _current.get()


def as_current(global_step: Variable) -> AbstractContextManager[None]:
    """Make a global step the current one."""
    return set_within(_current, global_step)
