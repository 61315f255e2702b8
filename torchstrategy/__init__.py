"""tf.distribute for PyTorch: one training program, any number of replicas."""

from torchstrategy import errors, experimental, metrics, nn, testing, train
from torchstrategy.collectives.cross_device_ops import (
    CrossDeviceOps,
    HierarchicalCopyAllReduce,
    NcclAllReduce,
    ReductionToOneDevice,
)
from torchstrategy.data.context import InputContext
from torchstrategy.nn import compute_average_loss, scale_regularization_loss
from torchstrategy.options import InputOptions, InputReplicationMode, ReduceOp, RunOptions
from torchstrategy.replica_context import ReplicaContext
from torchstrategy.strategies.default import (
    experimental_set_strategy,
    get_replica_context,
    get_strategy,
    has_strategy,
    in_cross_replica_context,
)
from torchstrategy.strategies.mirrored import MirroredStrategy
from torchstrategy.strategies.one_device import OneDeviceStrategy
from torchstrategy.strategy import Strategy
from torchstrategy.values import DistributedValues, Mirrored, PerReplica
from torchstrategy.version import __version__

__all__ = [
    "CrossDeviceOps",
    "DistributedValues",
    "HierarchicalCopyAllReduce",
    "InputContext",
    "InputOptions",
    "InputReplicationMode",
    "Mirrored",
    "MirroredStrategy",
    "NcclAllReduce",
    "OneDeviceStrategy",
    "PerReplica",
    "ReduceOp",
    "ReductionToOneDevice",
    "ReplicaContext",
    "RunOptions",
    "Strategy",
    "__version__",
    "compute_average_loss",
    "errors",
    "experimental",
    "experimental_set_strategy",
    "get_replica_context",
    "get_strategy",
    "has_strategy",
    "in_cross_replica_context",
    "metrics",
    "nn",
    "scale_regularization_loss",
    "testing",
    "train",
]
