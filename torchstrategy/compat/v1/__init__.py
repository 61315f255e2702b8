"""``ts.compat.v1``: what an Estimator's program takes from ``tf.compat.v1``."""

from torchstrategy.base import later
from torchstrategy.compat.v1 import distribute, train

__all__ = ["distribute", "train"]

later.explain_absent(__name__)
