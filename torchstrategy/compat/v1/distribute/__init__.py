"""The names of ``tf.compat.v1.distribute``: those of ``ts``, and its strategies."""

import torchstrategy.cluster_resolver as cluster_resolver
from torchstrategy.base import later
from torchstrategy.base.context import has_strategy, in_cross_replica_context
from torchstrategy.base.options import InputReplicationMode, ReduceOp, RunOptions
from torchstrategy.collectives.cross_device_ops import (
    CrossDeviceOps,
    HierarchicalCopyAllReduce,
    NcclAllReduce,
    ReductionToOneDevice,
)
from torchstrategy.compat.v1.distribute import experimental
from torchstrategy.data.own_streams import InputContext
from torchstrategy.ps.server import Server
from torchstrategy.strategies.default import experimental_set_strategy, get_replica_context, get_strategy
from torchstrategy.strategies.extended import StrategyExtended
from torchstrategy.strategies.mirrored_strategy import MirroredStrategy
from torchstrategy.strategies.one_device import OneDeviceStrategy
from torchstrategy.strategies.replica_context import ReplicaContext
from torchstrategy.strategies.strategy import Strategy

__all__ = [
    "CrossDeviceOps",
    "HierarchicalCopyAllReduce",
    "InputContext",
    "InputReplicationMode",
    "MirroredStrategy",
    "NcclAllReduce",
    "OneDeviceStrategy",
    "ReduceOp",
    "ReductionToOneDevice",
    "ReplicaContext",
    "RunOptions",
    "Server",
    "Strategy",
    "StrategyExtended",
    "cluster_resolver",
    "experimental",
    "experimental_set_strategy",
    "get_replica_context",
    "get_strategy",
    "has_strategy",
    "in_cross_replica_context",
]

later.explain_absent(__name__)
