"""``ts.coordinator``: what tf has under ``tf.distribute.coordinator``."""

from torchstrategy.base import later
from torchstrategy.ps import coordinator as _home
from torchstrategy.ps.coordinator import *  # noqa: F403 - the names are listed there

__all__ = _home.__all__

later.explain_absent(__name__)
