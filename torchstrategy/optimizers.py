"""Optimizers by name, as ``compile(optimizer=...)`` takes them: torch's classes with tf.keras' hyper-parameters.

``Ftrl`` is the one that torch does not have.
"""

from torchstrategy.training.ftrl import Ftrl
from torchstrategy.training.optimizers import get

__all__ = ["Ftrl", "get"]
