"""Names that tf.distribute keeps under ``experimental``."""

from torchstrategy.base import later
from torchstrategy.base.options import CollectiveHints, CommunicationImplementation, CommunicationOptions, PowerSGD
from torchstrategy.base.options import CommunicationImplementation as CollectiveCommunication
from torchstrategy.base.values import ValueContext
from torchstrategy.checkpoint.preemption import PreemptionWatcher, TerminationConfig
from torchstrategy.checkpoint.preemption_handler import PreemptionCheckpointHandler
from torchstrategy.collectives.routes import register_communication
from torchstrategy.experimental import partitioners
from torchstrategy.fit.callbacks.elastic_training import ElasticTraining
from torchstrategy.ps import coordinator
from torchstrategy.ps.parameter_server_strategy import ParameterServerStrategy
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
    "ElasticTraining",
    "MultiWorkerMirroredStrategy",
    "ParameterServerStrategy",
    "PowerSGD",
    "PreemptionCheckpointHandler",
    "PreemptionWatcher",
    "TPUStrategy",
    "TerminationConfig",
    "ValueContext",
    "coordinator",
    "partitioners",
    "register_communication",
]

later.explain_absent(__name__)
