"""``ts.compat``: names that programs written for TensorFlow 1 use."""

from torchstrategy.compat import v1

__all__ = ["v1"]
