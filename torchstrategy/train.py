"""tf.train's names: checkpoints."""

from torchstrategy.checkpoint.checkpoint import Checkpoint, latest_checkpoint
from torchstrategy.checkpoint.manager import CheckpointManager

__all__ = ["Checkpoint", "CheckpointManager", "latest_checkpoint"]
