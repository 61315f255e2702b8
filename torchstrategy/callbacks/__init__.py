"""``ts.callbacks``: what ``fit``, ``evaluate`` and ``predict`` call at certain points, under Keras' names."""

from torchstrategy.base import later
from torchstrategy.fit import callbacks as _home
from torchstrategy.fit.callbacks import *  # noqa: F403 - the names are listed there

__all__ = _home.__all__

later.explain_absent(__name__)
