"""The strategies of ``tf.compat.v1.distribute``."""

from torchstrategy.compat.v1.distribute import experimental
from torchstrategy.strategies.mirrored_strategy import MirroredStrategy
from torchstrategy.strategies.one_device import OneDeviceStrategy

__all__ = ["MirroredStrategy", "OneDeviceStrategy", "experimental"]
