"""``ts.feature_column``: feature columns under tf's names."""

from torchstrategy.estimator import feature_column
from torchstrategy.estimator.feature_column import *  # noqa: F403 - the names are listed there

__all__ = feature_column.__all__
