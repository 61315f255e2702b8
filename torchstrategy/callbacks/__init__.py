"""``ts.callbacks``: what ``fit``, ``evaluate`` and ``predict`` call at certain points, under Keras' names."""

from torchstrategy.fit import callbacks
from torchstrategy.fit.callbacks import *  # noqa: F403 - the names are listed there

__all__ = callbacks.__all__
