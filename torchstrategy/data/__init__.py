"""``ts.data``: datasets under tf.data's names, readers of files, and, inside, how batches reach the replicas."""

from torchstrategy.data import experimental, readers
from torchstrategy.data.batch import TensorSpec
from torchstrategy.data.pipeline.dataset import AUTOTUNE, Dataset, TextLineDataset
from torchstrategy.data.pipeline.op import INFINITE_CARDINALITY, SHARD_HINT, UNKNOWN_CARDINALITY
from torchstrategy.data.pipeline.options import Options
from torchstrategy.options import AutoShardPolicy

__all__ = [
    "AUTOTUNE",
    "INFINITE_CARDINALITY",
    "SHARD_HINT",
    "UNKNOWN_CARDINALITY",
    "AutoShardPolicy",
    "Dataset",
    "Options",
    "TensorSpec",
    "TextLineDataset",
    "experimental",
    "readers",
]
