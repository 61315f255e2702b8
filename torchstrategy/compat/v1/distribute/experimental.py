"""The strategies of ``tf.compat.v1.distribute.experimental``: its ``ParameterServerStrategy`` has no coordinator."""

from torchstrategy.ps.between_graph import (
    BetweenGraphParameterServerStrategy as ParameterServerStrategy,
)
from torchstrategy.strategies.central_storage import CentralStorageStrategy
from torchstrategy.strategies.multi_worker import (
    ExperimentalMultiWorkerMirroredStrategy as MultiWorkerMirroredStrategy,
)

__all__ = ["CentralStorageStrategy", "MultiWorkerMirroredStrategy", "ParameterServerStrategy"]
