"""Names that tf.distribute keeps under ``experimental``."""

from torchstrategy.options import CommunicationImplementation, CommunicationOptions
from torchstrategy.values import ValueContext

__all__ = ["CommunicationImplementation", "CommunicationOptions", "ValueContext"]
