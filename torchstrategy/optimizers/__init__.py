"""Optimizers by name, as ``compile(optimizer=...)`` takes them: torch's classes with tf.keras' hyper-parameters.

``Ftrl`` is the one that torch does not have.
"""

from torchstrategy.optimizers.by_name import get
from torchstrategy.optimizers.ftrl import Ftrl

__all__ = ["Ftrl", "get"]
