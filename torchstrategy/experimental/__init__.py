"""Names that tf.distribute keeps under ``experimental``."""

from torchstrategy.collectives.registry import register_communication
from torchstrategy.options import CollectiveHints, CommunicationImplementation, CommunicationOptions
from torchstrategy.options import CommunicationImplementation as CollectiveCommunication
from torchstrategy.strategies.multi_worker import (
    ExperimentalMultiWorkerMirroredStrategy as MultiWorkerMirroredStrategy,
)
from torchstrategy.values import ValueContext

__all__ = [
    "CollectiveCommunication",
    "CollectiveHints",
    "CommunicationImplementation",
    "CommunicationOptions",
    "MultiWorkerMirroredStrategy",
    "ValueContext",
    "register_communication",
]
