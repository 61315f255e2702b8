"""The components of one batch: cut along their first dimension, made empty, tagged, moved to the replicas' devices.

Components are tensors; numpy arrays become tensors that share their memory, and a list of strings, as torch's default
collate function makes, counts as one component. ``None`` goes to every replica as it is.
"""

from __future__ import annotations

import warnings
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from torchstrategy import tree
from torchstrategy.data.split import share_bounds, share_sizes
from torchstrategy.devices import Placement, tensor_device
from torchstrategy.values import BatchShares, PerReplica, set_shares

__all__ = [
    "Components",
    "LocalBatch",
    "TensorSpec",
    "batch_length",
    "check_splittable",
    "components",
    "deliver",
    "describe",
    "empty_like",
    "join_parts",
    "split_batch",
]


@dataclass(frozen=True)
class TensorSpec:
    """Shape and dtype of one component of a dataset's elements.

    Args:
        shape: sizes of its dimensions; ``None`` for the batch dimension, which differs between elements.
        dtype: a ``torch.dtype``, or the Python type of a component that is no tensor.
    """

    shape: tuple[int | None, ...]
    dtype: torch.dtype | type


@dataclass(frozen=True)
class Components:
    """A batch taken apart.

    Args:
        leaves: tensors, lists of strings, or whatever else the batch holds.
        spec: builds the nested structure again.
    """

    leaves: list[Any]
    spec: Any


@dataclass(frozen=True)
class LocalBatch:
    """One element for the replicas of this process.

    Args:
        columns: for each component, one value for each local replica.
        shares: for each component, the examples of every replica of the strategy; ``None`` without batch dimension.
        spec: builds the nested structure again.
    """

    columns: list[tuple[Any, ...]]
    shares: list[BatchShares | None]
    spec: Any


class _Strings(list[str]):
    """A list of strings that counts as one component; being a subclass, pytrees take it for a leaf."""


def components(batch: Any) -> Components:
    """Take a batch apart; numpy arrays become tensors."""
    leaves, spec = tree.flatten(_unify(batch))
    return Components(leaves, spec)


def batch_length(leaf: Any) -> int | None:
    """Return the size of a component's batch dimension, or ``None`` if it has none."""
    if isinstance(leaf, _Strings):
        return len(leaf)
    if isinstance(leaf, Tensor):
        return int(leaf.size(0)) if leaf.dim() else None
    return len(leaf) if isinstance(leaf, np.ndarray) and leaf.ndim else None


def check_splittable(batch: Components, num_replicas: int) -> None:
    """Check that every component has a batch dimension, if there is more than one replica.

    Raises:
        IndexError: one has none.
        ValueError: one is a dataset itself.
    """
    if num_replicas == 1:
        return
    for i, leaf in enumerate(batch.leaves):
        if isinstance(leaf, (Dataset, DataLoader)):
            raise ValueError(
                f"Component {i} of an element is a {type(leaf).__name__}. A dataset of datasets can't be distributed: "
                "distribute each one, or chain them."
            )
        if leaf is not None and batch_length(leaf) is None:
            raise IndexError(
                f"Component {i} of a batch has no batch dimension to split over {num_replicas} replicas: {_name(leaf)}."
                " Every component of a global batch must be a tensor of shape [batch, ...]. Batch the dataset, or pass "
                "such a value to `run` as an argument of its own."
            )


def split_batch(batch: Components, placement: Placement) -> LocalBatch:
    """Split a whole global batch, each component by its own first dimension, and keep this process's shares.

    Raises:
        IndexError: a component has no batch dimension and there is more than one replica.
        ValueError: a component is a dataset itself and there is more than one replica.
    """
    check_splittable(batch, placement.num_replicas)
    columns: list[tuple[Any, ...]] = []
    shares: list[BatchShares | None] = []
    for leaf in batch.leaves:
        length = batch_length(leaf)
        if length is None:
            columns.append((leaf,) * len(placement.devices))
            shares.append(None)
            continue
        sizes = share_sizes(length, placement.num_replicas)
        bounds = share_bounds(sizes)
        columns.append(tuple(_cut(leaf, *bounds[i]) for i in placement.local_replica_ids))
        shares.append(BatchShares(sizes))
    return LocalBatch(columns, shares, batch.spec)


def join_parts(parts: Sequence[Components], shares: Sequence[BatchShares | None]) -> LocalBatch:
    """Combine one batch for each local replica into one element.

    Raises:
        ValueError: the batches' nested structures differ.
    """
    spec = parts[0].spec
    for part in parts[1:]:
        if part.spec != spec:
            raise ValueError(
                "The batches for the replicas of one step must have the same nested structure (types and lengths of "
                f"containers, keys of dicts). Received: {spec} and {part.spec}"
            )
    columns = list(zip(*(part.leaves for part in parts), strict=True))
    # a view, so that a tag never lands on a tensor which the user keeps
    columns = [tuple(_cut(leaf, 0, batch_length(leaf)) for leaf in column) for column in columns]
    return LocalBatch(columns, list(shares), spec)


def empty_like(batch: Components) -> Components:
    """Return a batch without examples that keeps structure, dtypes and the other dimensions."""
    return Components([_cut(leaf, 0, 0) for leaf in batch.leaves], batch.spec)


def deliver(local: LocalBatch, placement: Placement, *, to_device: bool) -> Any:
    """Build the element that the user gets: on the replicas' devices, tagged with its shares.

    Args:
        local: the components for this process's replicas.
        placement: their devices.
        to_device: move each part to its replica's device; copies to accelerators don't wait.

    Returns:
        The batch with ``PerReplica`` leaves, or with plain ones if this process has one replica.
    """
    devices = [tensor_device(device) if to_device else torch.device("cpu") for device in placement.devices]
    leaves = []
    for column, shares in zip(local.columns, local.shares, strict=True):
        values = [_finish(leaf, device) for leaf, device in zip(column, devices, strict=True)]
        leaf = values[0] if len(values) == 1 or values[0] is None else PerReplica(values)
        leaves.append(leaf if shares is None else set_shares(leaf, shares))
    return local.spec.unflatten(leaves)


def describe(leaf: Any) -> Any:
    """Return a component's spec with the batch dimension open; ``None`` for ``None``."""
    if leaf is None:
        return None
    if isinstance(leaf, Tensor):
        sizes = (None,) * leaf.dim() if leaf.is_nested else leaf.shape
        return TensorSpec((None, *sizes[1:]) if leaf.dim() else (), leaf.dtype)
    if isinstance(leaf, np.ndarray):
        return TensorSpec((None, *leaf.shape[1:]), leaf.dtype.type)
    return TensorSpec((None,), str) if isinstance(leaf, _Strings) else TensorSpec((), type(leaf))


def _unify(batch: Any) -> Any:
    if isinstance(batch, np.ndarray):
        return _as_tensor(batch)
    if isinstance(batch, Mapping):
        cls = OrderedDict if isinstance(batch, OrderedDict) else dict
        return cls((key, _unify(value)) for key, value in batch.items())
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*map(_unify, batch))
    if type(batch) in (list, tuple):
        return _Strings(batch) if _all_strings(batch) else type(batch)(map(_unify, batch))
    return tree.map_leaves(lambda leaf: _as_tensor(leaf) if isinstance(leaf, np.ndarray) else leaf, batch)


def _all_strings(values: Iterable[Any]) -> bool:
    values = list(values)
    return bool(values) and all(isinstance(value, (str, bytes)) for value in values)


def _as_tensor(array: np.ndarray[Any, Any]) -> Any:
    if array.dtype.kind not in "biufc":  # strings and objects stay what they are
        return array
    with warnings.catch_warnings():
        # Read-only arrays, such as memory maps: a batch is only read, and copying it would double its cost.
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        return torch.from_numpy(array)


def _cut(leaf: Any, start: int, stop: int | None) -> Any:
    if leaf is None or stop is None:
        return leaf
    if isinstance(leaf, _Strings):
        return _Strings(leaf[start:stop])
    if isinstance(leaf, np.ndarray):
        return leaf[start:stop]
    if leaf.is_nested:
        return _cut_nested(leaf, start, stop)
    if leaf.layout is torch.strided:
        return leaf.narrow(0, start, stop - start)
    return leaf.narrow_copy(0, start, stop - start)


def _cut_nested(tensor: Tensor, start: int, stop: int) -> Tensor:
    if tensor.layout is torch.strided:
        return torch.nested.as_nested_tensor(list(tensor.unbind()[start:stop]), dtype=tensor.dtype)
    offsets = tensor.offsets()[start : stop + 1]  # type: ignore[attr-defined]
    values = tensor.values()[offsets[0] : offsets[-1]]
    return torch.nested.nested_tensor_from_jagged(values, offsets - offsets[0])


def _finish(leaf: Any, device: torch.device) -> Any:
    if isinstance(leaf, _Strings):
        return list(leaf)
    if isinstance(leaf, Tensor) and device.type != "cpu":
        return leaf.to(device, non_blocking=True)
    return leaf


def _name(leaf: Any) -> str:
    if isinstance(leaf, Tensor):
        return f"a scalar tensor of dtype {leaf.dtype}"
    return f"{leaf!r} of type {type(leaf).__name__}"
