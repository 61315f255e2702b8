"""``ts.data``: datasets under tf.data's names, readers of files, and, inside, how batches reach the replicas."""

from __future__ import annotations

import typing

from torchstrategy.base import later

if typing.TYPE_CHECKING:
    from torchstrategy.base.options import AutoShardPolicy
    from torchstrategy.data import experimental, readers
    from torchstrategy.data.batch import TensorSpec
    from torchstrategy.data.pipeline.dataset import AUTOTUNE, Dataset, TextLineDataset
    from torchstrategy.data.pipeline.dataset_options import Options
    from torchstrategy.data.pipeline.op import INFINITE_CARDINALITY, SHARD_HINT, UNKNOWN_CARDINALITY
    from torchstrategy.data.splitters import register_splitter

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
    "register_splitter",
]

#: Programs that bring a DataLoader or arrays need none of these modules.
_LATER = {
    "AUTOTUNE": "torchstrategy.data.pipeline.dataset",
    "AutoShardPolicy": "torchstrategy.base.options",
    "Dataset": "torchstrategy.data.pipeline.dataset",
    "INFINITE_CARDINALITY": "torchstrategy.data.pipeline.op",
    "Options": "torchstrategy.data.pipeline.dataset_options",
    "SHARD_HINT": "torchstrategy.data.pipeline.op",
    "TensorSpec": "torchstrategy.data.batch",
    "TextLineDataset": "torchstrategy.data.pipeline.dataset",
    "UNKNOWN_CARDINALITY": "torchstrategy.data.pipeline.op",
    "experimental": "torchstrategy.data.experimental",
    "readers": "torchstrategy.data.readers",
    "register_splitter": "torchstrategy.data.splitters",
}

if not typing.TYPE_CHECKING:
    __getattr__, __dir__ = later.import_later(__name__, _LATER)
