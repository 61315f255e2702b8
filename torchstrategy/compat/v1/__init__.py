"""``ts.compat.v1``: what an Estimator's program takes from ``tf.compat.v1``."""

from torchstrategy.compat.v1 import distribute, train

__all__ = ["distribute", "train"]
