"""Batches that are too large for a replica, in parts that together make one optimizer step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from torchstrategy.base import tree
from torchstrategy.base.values import (
    BatchShares,
    DistributedValues,
    PerReplica,
    local_results,
    set_shares,
    shares_of,
)
from torchstrategy.data.batch import Components, as_given, batch_length, check_batch_sizes, components, take
from torchstrategy.data.split import even_sizes, share_bounds
from torchstrategy.errors import InvalidArgumentError

__all__ = ["micro_batches"]


def micro_batches(batch: Any, num_local: int, max_examples: int) -> list[Any]:
    """Cut a batch into parts of which no replica gets more than it has room for.

    All replicas get equally many parts, because they meet in each; of a small share some may be empty.

    Args:
        batch: an element of a distributed dataset, or one replica's part of it.
        num_local: replicas that the batch is for: those of this process, or 1 for one replica's own share.
        max_examples: how many examples a replica has room for.

    Returns:
        The parts, in order; the batch itself if it fits.

    Raises:
        InvalidArgumentError: its components have different numbers of examples, or are of different batches.
        ValueError: it is none of a distributed dataset, and there is nothing to count.
    """
    found = shares_of(batch)
    if len(found) > 1:
        raise InvalidArgumentError(
            "A batch can't be cut into micro-batches whose components were split over the replicas in different ways: "
            f"{', '.join(str(shares.shares) for shares in found)} examples. Give those of one batch."
        )
    locals_ = [components(own) for own in local_results(batch, num_local)]
    for own in locals_:
        check_batch_sizes(own)
    sizes = [
        next((length for leaf in own.leaves if (length := batch_length(leaf)) is not None), None) for own in locals_
    ]
    if found:
        shares = found[0]
    elif None not in sizes:
        shares = BatchShares(tuple(size for size in sizes if size is not None))
    else:
        raise ValueError(f"There are no examples to count in {type(batch).__name__}, so it can't be cut.")
    num_parts = -(-max(shares.shares) // max_examples)
    if num_parts < 2:
        return [batch]
    cut = [even_sizes(count, num_parts) for count in shares.shares]
    bounds = [share_bounds(even_sizes(size or 0, num_parts)) for size in sizes]
    parts = []
    for k in range(num_parts):
        tag = BatchShares(tuple(own[k] for own in cut), shares.step)
        own_parts = [_part(own, *bound[k]) for own, bound in zip(locals_, bounds, strict=True)]
        columns = zip(*(part.leaves for part in own_parts), strict=True)
        parts.append(tree.unflatten(own_parts[0].spec, [_tagged(column, tag) for column in columns]))
    return parts


def _part(batch: Components, start: int, stop: int) -> Components:
    """Return some of the examples; what has none, such as a number, is every part's."""
    cut = iter(
        take(Components([leaf for leaf in batch.leaves if batch_length(leaf) is not None], None), start, stop).leaves
    )
    return Components([leaf if batch_length(leaf) is None else next(cut) for leaf in batch.leaves], batch.spec)


def _tagged(column: Sequence[Any], tag: BatchShares) -> Any:
    """Return one component of a part, for the replicas of this process."""
    has_rows = batch_length(column[0]) is not None
    leaf = as_given(column[0]) if len(column) == 1 or not has_rows else PerReplica(map(as_given, column))
    is_taggable = isinstance(leaf, (torch.Tensor, DistributedValues))
    return set_shares(leaf, tag) if has_rows and is_taggable else leaf
