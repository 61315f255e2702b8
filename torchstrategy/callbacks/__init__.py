"""Callbacks: what ``fit``, ``evaluate`` and ``predict`` call at certain points, under Keras' names."""

from torchstrategy.callbacks.backup import BackupAndRestore
from torchstrategy.callbacks.base import Callback
from torchstrategy.callbacks.callback_list import CallbackList
from torchstrategy.callbacks.csv_logger import CSVLogger
from torchstrategy.callbacks.history import History
from torchstrategy.callbacks.lambda_callback import LambdaCallback
from torchstrategy.callbacks.model_checkpoint import ModelCheckpoint
from torchstrategy.callbacks.progress import ProgbarLogger
from torchstrategy.callbacks.rates import LearningRateScheduler, ReduceLROnPlateau
from torchstrategy.callbacks.stopping import EarlyStopping, TerminateOnNaN
from torchstrategy.callbacks.tensorboard import TensorBoard
from torchstrategy.callbacks.torch_scheduler import TorchLRScheduler

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
