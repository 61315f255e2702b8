"""Where the time of training steps goes: traces of some of them, and a table."""

from torchstrategy.base import later
from torchstrategy.profiler.recording import Profile
from torchstrategy.profiler.traces import table

__all__ = ["Profile", "table"]

later.explain_absent(__name__)
