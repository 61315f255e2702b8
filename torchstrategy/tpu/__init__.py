"""``ts.tpu``: what tf has under ``tf.tpu``."""

from torchstrategy.tpu import experimental

__all__ = ["experimental"]
