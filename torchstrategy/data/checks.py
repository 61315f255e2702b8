"""What is looked at before data is used: do all processes hold the same, and is a batch large enough for all replicas?

Processes that divide a batch rely on each other: where one holds other data than the rest, examples would be lost.
"""

from __future__ import annotations

import zlib
from array import array
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import ConcatDataset, DataLoader, Subset, TensorDataset

from torchstrategy.base import tree
from torchstrategy.base.devices import Placement
from torchstrategy.base.log import warn_once, warning_once
from torchstrategy.data.batch import Components, component_kind
from torchstrategy.data.data_order import Workers, known_length
from torchstrategy.data.example_lists import Examples
from torchstrategy.data.numpy import ArrayDataset
from torchstrategy.errors import DisagreementError

__all__ = [
    "check_first_batch",
    "check_kinds",
    "checksum",
    "declared_batch_size",
    "held_data",
    "kind_of",
    "note_small_batch",
    "raw_bytes",
    "warn_of_other_values",
]

_ROWS = 16


def kind_of(batch: Components) -> list[str]:
    """Return what must be the same in all processes: the structure, and each component's dtype and dimensions."""
    return [tree.describe(batch.spec), *map(component_kind, batch.leaves)]


def check_kinds(kinds: Sequence[list[str] | None]) -> None:
    """Check that the ranks' elements are of one kind.

    Args:
        kinds: what ``kind_of`` returned on each rank, ``None`` where it is not known.

    Raises:
        DisagreementError: they are not; the message shows each rank's.
    """
    known = [(rank, kind) for rank, kind in enumerate(kinds) if kind is not None]
    if any(kind != known[0][1] for _, kind in known):
        rows = "\n".join(f"  rank {rank}: {', '.join(leaves)}{structure}" for rank, (structure, *leaves) in known)
        raise DisagreementError(
            f"The ranks' elements have different structures, dtypes or numbers of dimensions:\n{rows}\n"
            "Every rank's dataset must give elements of the same structure (types and lengths of containers, keys "
            "of dicts) and dtypes; only sizes may differ."
        )


def check_first_batch(workers: Workers, batch: Components) -> None:
    """Check that the first batches that the ranks loaded are of one kind.

    Raises:
        DisagreementError: they are not.
    """
    check_kinds(workers.exchange("structure of the first batch", kind_of(batch)))


def held_data(dataset: Any) -> tuple[int | None, int]:
    """Return what can be compared of a map-style dataset without loading examples: its length, and a checksum.

    Tensors are compared in part, the indices of subsets wholly: a ``random_split`` may have been drawn on each rank.
    """
    return known_length(dataset), _held_checksum(dataset)


def warn_of_other_values(workers: Workers, batch: Components) -> None:
    """Warn if the ranks read a first batch with different values, each of which loses what the others divide."""
    values = workers.exchange("values of the first global batch", checksum(batch.leaves))
    different = [rank for rank, value in enumerate(values) if value != values[0]]
    if different:
        warn_once(
            f"Ranks {different} read other values in the first global batch than rank 0 did. Every rank must read the "
            "same global batches, because each keeps only its own part of them: a dataset that divides the data by "
            "rank itself would lose examples. Remove that, or distribute it with auto_shard_policy=OFF or "
            "distribute_datasets_from_function. If only random augmentation differs, all is well; seed it alike on "
            "all ranks (ts.utils.set_random_seed) and this is not said."
        )


def checksum(leaves: Iterable[Any]) -> int:
    """Return a checksum of the first and last examples of tensors and arrays."""
    value = 0
    for leaf in leaves:
        for rows in (raw_bytes(leaf, slice(None, _ROWS)), raw_bytes(leaf, slice(-_ROWS, None))):
            value = zlib.crc32(rows, value)
    return value


def declared_batch_size(data: Any) -> int | None:
    """Return the size of the data's batches if it says one, because its first batch may be a smaller last one."""
    size = getattr(data, "batch_size", None)
    if size is None and isinstance(data, DataLoader):
        size = getattr(data.batch_sampler, "batch_size", None) or getattr(data.dataset, "batch_size", None)
    return size if isinstance(size, int) else None


def note_small_batch(data: Any, placement: Placement) -> None:
    """Say once if data declares a global batch size that leaves replicas without examples in every step."""
    size, num_replicas = declared_batch_size(data), placement.num_replicas
    if size is not None and size < num_replicas and placement.first_replica == 0:
        warning_once(
            f"The batch size {size} is smaller than the number of replicas, {num_replicas}: every step leaves "
            f"{num_replicas - size} without examples. The batch size is that of all replicas together: choose "
            f"at least {num_replicas}, at best a multiple of it."
        )


def _held_checksum(dataset: Any) -> int:
    if isinstance(dataset, Subset):
        try:
            indices = array("q", dataset.indices).tobytes()
        except (TypeError, OverflowError):  # keys of another kind
            indices = b""
        return zlib.crc32(indices, _held_checksum(dataset.dataset))
    if isinstance(dataset, ConcatDataset):
        return zlib.crc32(repr([_held_checksum(part) for part in dataset.datasets]).encode())
    if isinstance(dataset, TensorDataset):
        return checksum(dataset.tensors)
    return checksum(dataset.arrays) if isinstance(dataset, ArrayDataset) else 0


def raw_bytes(leaf: Any, which: slice) -> bytes:
    """Return the memory of some examples of a component; nothing for what has no plain memory."""
    if isinstance(leaf, Tensor):
        if leaf.is_nested or leaf.layout is not torch.strided or leaf.is_quantized or not leaf.dim():
            return b""
        rows = leaf.detach()[which].cpu().resolve_conj().resolve_neg().contiguous()
        # A single row counts as contiguous whatever its stride, with which it can't be seen as bytes.
        return rows.flatten().as_strided((rows.numel(),), (1,)).view(torch.uint8).numpy().tobytes()
    if isinstance(leaf, np.ndarray):
        return b"" if leaf.dtype.hasobject or not leaf.ndim else np.ascontiguousarray(leaf[which]).tobytes()
    if isinstance(leaf, Examples) and leaf.kind != "strings":
        return b"".join(raw_bytes(value, slice(None)) for entry in leaf[which] for value in tree.all_leaves(entry))
    return repr(leaf[which]).encode() if isinstance(leaf, list) else b""
