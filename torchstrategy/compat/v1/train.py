"""Hooks and the global step, under the names of ``tf.compat.v1.train``."""

from torchstrategy.compat.v1.global_step import get_global_step, get_or_create_global_step
from torchstrategy.estimator.hooks import (
    CheckpointSaverListener,
    SessionRunArgs,
    SessionRunContext,
    SessionRunHook,
    SessionRunValues,
)
from torchstrategy.estimator.logging_hooks import LoggingTensorHook, StepCounterHook
from torchstrategy.estimator.saver_hook import CheckpointSaverHook
from torchstrategy.estimator.stopping_hooks import (
    FinalOpsHook,
    GlobalStepWaiterHook,
    NanLossDuringTrainingError,
    NanTensorHook,
    StopAtStepHook,
)
from torchstrategy.estimator.summary_hooks import ProfilerHook, SummarySaverHook
from torchstrategy.estimator.timers import SecondOrStepTimer

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
