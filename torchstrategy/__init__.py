"""tf.distribute for PyTorch: one training program, any number of replicas."""

from __future__ import annotations

import typing

from torchstrategy import errors, nn, patches
from torchstrategy.base import later
from torchstrategy.base.context import has_strategy, in_cross_replica_context
from torchstrategy.base.options import (
    InputOptions,
    InputReplicationMode,
    ReduceOp,
    RunOptions,
    VariableAggregation,
    VariableSynchronization,
)
from torchstrategy.base.values import DistributedValues, Mirrored, PerReplica
from torchstrategy.base.version import __version__
from torchstrategy.collectives.cross_device_ops import (
    CrossDeviceOps,
    HierarchicalCopyAllReduce,
    NcclAllReduce,
    ReductionToOneDevice,
)
from torchstrategy.nn import compute_average_loss, scale_regularization_loss
from torchstrategy.strategies.default import experimental_set_strategy, get_replica_context, get_strategy
from torchstrategy.strategies.mirrored import MirroredStrategy
from torchstrategy.strategies.one_device import OneDeviceStrategy
from torchstrategy.strategies.replica_context import ReplicaContext
from torchstrategy.strategies.strategy import Strategy

if typing.TYPE_CHECKING:
    from torchstrategy import (
        callbacks,
        cluster_resolver,
        compat,
        config,
        coordinator,
        data,
        estimator,
        experimental,
        feature_column,
        losses,
        metrics,
        models,
        optimizers,
        regularizers,
        summary,
        testing,
        tpu,
        train,
        utils,
    )
    from torchstrategy.data.distributed_dataset import DistributedDataset, DistributedIterator
    from torchstrategy.data.input_context import InputContext
    from torchstrategy.fit.model import Model
    from torchstrategy.fit.sidecar import SidecarEvaluator
    from torchstrategy.losses.layer_losses import add_loss, losses_of, regularize
    from torchstrategy.ps.parameter_server_strategy import ParameterServerStrategy
    from torchstrategy.ps.server import Server
    from torchstrategy.replicas.distributed_variables import MirroredVariable
    from torchstrategy.replicas.functions import function
    from torchstrategy.replicas.on_read import SyncOnReadVariable
    from torchstrategy.replicas.variables import Variable
    from torchstrategy.strategies.multi_worker import MultiWorkerMirroredStrategy
    from torchstrategy.tpu.tpu_strategy import TPUStrategy

__all__ = [
    "CrossDeviceOps",
    "DistributedDataset",
    "DistributedIterator",
    "DistributedValues",
    "HierarchicalCopyAllReduce",
    "InputContext",
    "InputOptions",
    "InputReplicationMode",
    "Mirrored",
    "MirroredStrategy",
    "MirroredVariable",
    "Model",
    "MultiWorkerMirroredStrategy",
    "NcclAllReduce",
    "OneDeviceStrategy",
    "ParameterServerStrategy",
    "PerReplica",
    "ReduceOp",
    "ReductionToOneDevice",
    "ReplicaContext",
    "RunOptions",
    "Server",
    "SidecarEvaluator",
    "Strategy",
    "SyncOnReadVariable",
    "TPUStrategy",
    "Variable",
    "VariableAggregation",
    "VariableSynchronization",
    "__version__",
    "add_loss",
    "callbacks",
    "cluster_resolver",
    "compat",
    "compute_average_loss",
    "config",
    "coordinator",
    "data",
    "errors",
    "estimator",
    "experimental",
    "experimental_set_strategy",
    "feature_column",
    "function",
    "get_replica_context",
    "get_strategy",
    "has_strategy",
    "in_cross_replica_context",
    "losses",
    "losses_of",
    "metrics",
    "models",
    "nn",
    "optimizers",
    "regularize",
    "regularizers",
    "scale_regularization_loss",
    "summary",
    "testing",
    "tpu",
    "train",
    "utils",
]

#: Where the names are that are imported when they are first used. Few programs need many of them, and all together take
#: 8 MB of each process and as long to import as the rest.
_LATER = {
    "DistributedDataset": "torchstrategy.data.distributed_dataset",
    "DistributedIterator": "torchstrategy.data.distributed_dataset",
    "InputContext": "torchstrategy.data.input_context",
    "MirroredVariable": "torchstrategy.replicas.distributed_variables",
    "Model": "torchstrategy.fit.model",
    "MultiWorkerMirroredStrategy": "torchstrategy.strategies.multi_worker",
    "ParameterServerStrategy": "torchstrategy.ps.parameter_server_strategy",
    "Server": "torchstrategy.ps.server",
    "SidecarEvaluator": "torchstrategy.fit.sidecar",
    "SyncOnReadVariable": "torchstrategy.replicas.on_read",
    "TPUStrategy": "torchstrategy.tpu.tpu_strategy",
    "Variable": "torchstrategy.replicas.variables",
    "add_loss": "torchstrategy.losses.layer_losses",
    "callbacks": "torchstrategy.callbacks",
    "cluster_resolver": "torchstrategy.cluster_resolver",
    "compat": "torchstrategy.compat",
    "config": "torchstrategy.config",
    "coordinator": "torchstrategy.coordinator",
    "data": "torchstrategy.data",
    "estimator": "torchstrategy.estimator",
    "experimental": "torchstrategy.experimental",
    "feature_column": "torchstrategy.feature_column",
    "function": "torchstrategy.replicas.functions",
    "losses": "torchstrategy.losses",
    "losses_of": "torchstrategy.losses.layer_losses",
    "metrics": "torchstrategy.metrics",
    "models": "torchstrategy.models",
    "optimizers": "torchstrategy.optimizers",
    "regularize": "torchstrategy.losses.layer_losses",
    "regularizers": "torchstrategy.regularizers",
    "summary": "torchstrategy.summary",
    "testing": "torchstrategy.testing",
    "tpu": "torchstrategy.tpu",
    "train": "torchstrategy.train",
    "utils": "torchstrategy.utils",
}

if not typing.TYPE_CHECKING:  # for type checkers there are the names above and no others
    __getattr__, __dir__ = later.import_later(__name__, _LATER)

patches.forget_sources()
