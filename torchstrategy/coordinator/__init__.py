"""``ts.coordinator``: what tf has under ``tf.distribute.coordinator``."""

from torchstrategy.ps import coordinator
from torchstrategy.ps.coordinator import *  # noqa: F403 - the names are listed there

__all__ = coordinator.__all__
