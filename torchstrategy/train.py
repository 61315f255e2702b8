"""tf.train's names: checkpoints, and descriptions of clusters."""

from torchstrategy.base import later
from torchstrategy.checkpoint.background import CheckpointOptions
from torchstrategy.checkpoint.checkpoint import Checkpoint
from torchstrategy.checkpoint.manager import CheckpointManager
from torchstrategy.checkpoint.reader import (
    CheckpointReader,
    CheckpointState,
    get_checkpoint_state,
    latest_checkpoint,
    list_variables,
    load_checkpoint,
    load_variable,
)
from torchstrategy.checkpoint.restoration import CheckpointLoadStatus, InitializationOnlyStatus
from torchstrategy.cluster_resolver.cluster_spec import ClusterSpec
from torchstrategy.ps.server.definition import ServerDef

__all__ = [
    "Checkpoint",
    "CheckpointLoadStatus",
    "CheckpointManager",
    "CheckpointOptions",
    "CheckpointReader",
    "CheckpointState",
    "ClusterSpec",
    "InitializationOnlyStatus",
    "ServerDef",
    "get_checkpoint_state",
    "latest_checkpoint",
    "list_variables",
    "load_checkpoint",
    "load_variable",
]

later.explain_absent(__name__)
