"""tf.distribute for PyTorch: one training program, any number of replicas."""

from torchstrategy import (
    callbacks,
    cluster_resolver,
    compat,
    config,
    coordinator,
    data,
    errors,
    estimator,
    experimental,
    feature_column,
    losses,
    metrics,
    models,
    nn,
    optimizers,
    regularizers,
    summary,
    testing,
    tpu,
    train,
    utils,
)
from torchstrategy.collectives.cross_device_ops import (
    CrossDeviceOps,
    HierarchicalCopyAllReduce,
    NcclAllReduce,
    ReductionToOneDevice,
)
from torchstrategy.data.context import InputContext
from torchstrategy.data.dataset import DistributedDataset, DistributedIterator
from torchstrategy.functions import function
from torchstrategy.layer_losses import add_loss, losses_of, regularize
from torchstrategy.nn import compute_average_loss, scale_regularization_loss
from torchstrategy.options import (
    InputOptions,
    InputReplicationMode,
    ReduceOp,
    RunOptions,
    VariableAggregation,
    VariableSynchronization,
)
from torchstrategy.replica_context import ReplicaContext
from torchstrategy.replicas.distributed_variables import MirroredVariable
from torchstrategy.replicas.on_read import SyncOnReadVariable
from torchstrategy.replicas.variables import Variable
from torchstrategy.server import Server
from torchstrategy.strategies.default import (
    experimental_set_strategy,
    get_replica_context,
    get_strategy,
    has_strategy,
    in_cross_replica_context,
)
from torchstrategy.strategies.mirrored import MirroredStrategy
from torchstrategy.strategies.multi_worker import MultiWorkerMirroredStrategy
from torchstrategy.strategies.one_device import OneDeviceStrategy
from torchstrategy.strategies.parameter_server import ParameterServerStrategy
from torchstrategy.strategies.tpu import TPUStrategy
from torchstrategy.strategy import Strategy
from torchstrategy.training.model import Model
from torchstrategy.training.sidecar import SidecarEvaluator
from torchstrategy.values import DistributedValues, Mirrored, PerReplica
from torchstrategy.version import __version__

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
