"""``ts.feature_column``: feature columns under tf's names."""

from torchstrategy.base import later as _later
from torchstrategy.estimator import feature_column as _home
from torchstrategy.estimator.feature_column import *  # noqa: F403 - the names are listed there

__all__ = _home.__all__

_later.explain_absent(__name__)
