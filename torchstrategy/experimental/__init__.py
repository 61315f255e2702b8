"""Names that tf.distribute keeps under ``experimental``."""

from torchstrategy import coordinator
from torchstrategy.base.options import CollectiveHints, CommunicationImplementation, CommunicationOptions, PowerSGD
from torchstrategy.base.options import CommunicationImplementation as CollectiveCommunication
from torchstrategy.base.values import ValueContext
from torchstrategy.collectives.registry import register_communication
from torchstrategy.experimental import partitioners
from torchstrategy.spmd.tpu_strategy import TPUStrategy
from torchstrategy.strategies.central_storage import CentralStorageStrategy
from torchstrategy.strategies.multi_worker import (
    ExperimentalMultiWorkerMirroredStrategy as MultiWorkerMirroredStrategy,
)
from torchstrategy.strategies.parameter_server import ParameterServerStrategy

__all__ = [
    "CentralStorageStrategy",
    "CollectiveCommunication",
    "CollectiveHints",
    "CommunicationImplementation",
    "CommunicationOptions",
    "MultiWorkerMirroredStrategy",
    "ParameterServerStrategy",
    "PowerSGD",
    "TPUStrategy",
    "ValueContext",
    "coordinator",
    "partitioners",
    "register_communication",
]
