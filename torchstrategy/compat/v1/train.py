"""Hooks and the global step, under the names of ``tf.compat.v1.train``."""

from __future__ import annotations

import weakref

from torchstrategy.base import later
from torchstrategy.estimator.saver_hook import CheckpointSaverHook, SecondOrStepTimer
from torchstrategy.estimator.session_hooks import (
    CheckpointSaverListener,
    SessionRunArgs,
    SessionRunContext,
    SessionRunHook,
    SessionRunValues,
)
from torchstrategy.estimator.stopping_hooks import (
    FinalOpsHook,
    GlobalStepWaiterHook,
    NanLossDuringTrainingError,
    NanTensorHook,
    StopAtStepHook,
)
from torchstrategy.estimator.summary_hooks import LoggingTensorHook, ProfilerHook, StepCounterHook, SummarySaverHook
from torchstrategy.estimator.warm_start import current_global_step, make_global_step
from torchstrategy.replicas.variables import Variable
from torchstrategy.strategies.default import get_strategy
from torchstrategy.strategies.strategy import Strategy

__all__ = [
    "CheckpointSaverHook",
    "CheckpointSaverListener",
    "FinalOpsHook",
    "GlobalStepWaiterHook",
    "LoggingTensorHook",
    "NanLossDuringTrainingError",
    "NanTensorHook",
    "ProfilerHook",
    "SecondOrStepTimer",
    "SessionRunArgs",
    "SessionRunContext",
    "SessionRunHook",
    "SessionRunValues",
    "StepCounterHook",
    "StopAtStepHook",
    "SummarySaverHook",
    "get_global_step",
    "get_or_create_global_step",
]

later.explain_absent(__name__)

#: Made by programs that have a loop of their own, one for each strategy.
_made: weakref.WeakKeyDictionary[Strategy, Variable] = weakref.WeakKeyDictionary()


def get_global_step() -> Variable | None:
    """Return the variable that counts training steps.

    Returns:
        Within an Estimator's ``train``, ``evaluate`` or ``predict``, such as in ``model_fn``, the one of this call.
        Else the one that ``get_or_create_global_step`` made under the current strategy, or ``None``.

    Example:
        >>> with ts.OneDeviceStrategy("cpu:0").scope():
        ...     print(ts.compat.v1.train.get_global_step())
        None
    """
    current = current_global_step()
    return _made.get(get_strategy()) if current is None else current


def get_or_create_global_step() -> Variable:
    """Return the variable that counts training steps; make it, as int64 0, if there is none.

    Returns:
        What ``get_global_step`` returns. A loop of the program's own calls ``assign_add(1)`` after each step; an
        Estimator does that itself.

    Example:
        >>> with ts.OneDeviceStrategy("cpu:0").scope():
        ...     step = ts.compat.v1.train.get_or_create_global_step()
        ...     step is ts.compat.v1.train.get_global_step(), int(step)
        (True, 0)
    """
    current = get_global_step()
    if current is None:
        current = _made.setdefault(get_strategy(), make_global_step())
    return current
