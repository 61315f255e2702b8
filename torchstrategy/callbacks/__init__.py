"""``ts.callbacks``: what ``fit``, ``evaluate`` and ``predict`` call at certain points, under Keras' names."""

from torchstrategy.fit import callbacks as _home
from torchstrategy.fit.callbacks import *  # noqa: F403 - the names are listed there

__all__ = _home.__all__
