"""Names of ``tf.distribute.coordinator``."""

from torchstrategy.base.values import PerWorkerValues
from torchstrategy.base.values import PerWorkerValues as PerWorkerValue
from torchstrategy.ps.coordinator.cluster_coordinator import ClusterCoordinator
from torchstrategy.ps.coordinator.per_worker import RemoteValue
from torchstrategy.ps.current_worker import experimental_get_current_worker_index

__all__ = [
    "ClusterCoordinator",
    "PerWorkerValue",
    "PerWorkerValues",
    "RemoteValue",
    "experimental_get_current_worker_index",
]
