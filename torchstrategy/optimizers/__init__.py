"""Optimizers by name, as ``compile(optimizer=...)`` takes them: torch's classes with tf.keras' hyper-parameters.

``Ftrl`` is the one that torch does not have.
"""

from torchstrategy.base import later
from torchstrategy.optimizers.by_name import get
from torchstrategy.optimizers.ftrl import Ftrl

__all__ = ["Ftrl", "get"]

later.explain_absent(__name__)
