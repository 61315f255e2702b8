"""Callbacks: what ``fit``, ``evaluate`` and ``predict`` call at certain points, under Keras' names."""

from torchstrategy.fit.callbacks.backup import BackupAndRestore
from torchstrategy.fit.callbacks.callback import Callback, History
from torchstrategy.fit.callbacks.callback_list import CallbackList, LambdaCallback
from torchstrategy.fit.callbacks.model_checkpoint import ModelCheckpoint
from torchstrategy.fit.callbacks.progress import CSVLogger, ProgbarLogger
from torchstrategy.fit.callbacks.rates import LearningRateScheduler, ReduceLROnPlateau, TorchLRScheduler
from torchstrategy.fit.callbacks.stopping import EarlyStopping, TerminateOnNaN
from torchstrategy.fit.callbacks.tensorboard import TensorBoard

__all__ = [
    "BackupAndRestore",
    "CSVLogger",
    "Callback",
    "CallbackList",
    "EarlyStopping",
    "History",
    "LambdaCallback",
    "LearningRateScheduler",
    "ModelCheckpoint",
    "ProgbarLogger",
    "ReduceLROnPlateau",
    "TensorBoard",
    "TerminateOnNaN",
    "TorchLRScheduler",
]
