"""Changing a whole pipeline: its files, its shard hints, its buffers."""

from __future__ import annotations

import dataclasses

from torchstrategy.data.pipeline.op import Op
from torchstrategy.data.pipeline.ops import BatchOp, ShardOp

__all__ = ["has_hint", "shard_by_hint", "shard_files", "splits_by_file", "without_buffers"]


def splits_by_file(op: Op) -> bool:
    """Say whether the elements over parts of the files are, together, those over all files."""
    drops = any(isinstance(part, BatchOp) and part.drop_remainder for part in op.tree())
    return op.num_files is not None and not drops and all(part.splits_by_file for part in op.tree())


def shard_files(op: Op, num_shards: int, index: int) -> Op:
    """Return the pipeline over every ``num_shards``-th file."""
    return op.transformed(lambda part: part.with_part_of_files(num_shards, index))


def has_hint(op: Op) -> bool:
    """Say whether there is a ``shard`` whose numbers a strategy chooses."""
    return any(isinstance(part, ShardOp) and part.is_hint for part in op.tree())


def shard_by_hint(op: Op, num_shards: int, index: int) -> Op:
    """Return the pipeline with numbers in place of the hints."""

    def change(part: Op) -> Op:
        if isinstance(part, ShardOp) and part.is_hint:
            return dataclasses.replace(part, num_shards=num_shards, index=index)
        return part

    return op.transformed(change)


def without_buffers(op: Op) -> Op:
    """Return the pipeline without what only orders, keeps or reads ahead, to look at one element."""
    return op.transformed(lambda part: part.inputs[0] if part.only_buffers else part)
