"""tf.train's names: checkpoints."""

from torchstrategy.checkpoint.checkpoint import Checkpoint
from torchstrategy.checkpoint.directory import CheckpointState, get_checkpoint_state, latest_checkpoint
from torchstrategy.checkpoint.manager import CheckpointManager
from torchstrategy.checkpoint.reader import CheckpointReader, list_variables, load_checkpoint, load_variable
from torchstrategy.checkpoint.status import CheckpointLoadStatus, InitializationOnlyStatus
from torchstrategy.cluster_resolver.cluster_spec import ClusterSpec

__all__ = [
    "Checkpoint",
    "CheckpointLoadStatus",
    "CheckpointManager",
    "CheckpointReader",
    "CheckpointState",
    "ClusterSpec",
    "InitializationOnlyStatus",
    "get_checkpoint_state",
    "latest_checkpoint",
    "list_variables",
    "load_checkpoint",
    "load_variable",
]
