"""The names of ``tf.compat.v1.distribute.experimental``: its ``ParameterServerStrategy`` has no coordinator."""

from torchstrategy.base import later
from torchstrategy.base.options import CollectiveHints, CommunicationImplementation, CommunicationOptions
from torchstrategy.base.options import CommunicationImplementation as CollectiveCommunication
from torchstrategy.ps.between_graph import (
    BetweenGraphParameterServerStrategy as ParameterServerStrategy,
)
from torchstrategy.strategies.central_storage import CentralStorageStrategy
from torchstrategy.strategies.multi_worker import (
    ExperimentalMultiWorkerMirroredStrategy as MultiWorkerMirroredStrategy,
)
from torchstrategy.tpu.tpu_strategy import TPUStrategy

__all__ = [
    "CentralStorageStrategy",
    "CollectiveCommunication",
    "CollectiveHints",
    "CommunicationImplementation",
    "CommunicationOptions",
    "MultiWorkerMirroredStrategy",
    "ParameterServerStrategy",
    "TPUStrategy",
]

later.explain_absent(__name__)
