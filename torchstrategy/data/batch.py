"""The components of one batch: cut along their first dimension, put together, made empty, described.

Components are tensors; numpy arrays become tensors that share their memory. A list with an entry for each example,
such as torch's default collate function makes of strings, and an object of a registered type count as one component.
``None`` goes to every replica as it is.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import warnings
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from torchstrategy.base import tree
from torchstrategy.base.devices import Placement
from torchstrategy.base.values import BatchShares
from torchstrategy.data.example_lists import Examples
from torchstrategy.data.split import Splittable, as_splittable, share_bounds, share_sizes
from torchstrategy.errors import InvalidArgumentError

__all__ = [
    "Components",
    "LocalBatch",
    "TensorSpec",
    "as_given",
    "batch_length",
    "blank_leaf",
    "check_batch_sizes",
    "check_splittable",
    "component_kind",
    "components",
    "concatenate",
    "describe",
    "division",
    "empty_like",
    "from_plain",
    "join_parts",
    "plain_leaves",
    "signature",
    "split_batch",
    "take",
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

    def clone(self) -> Components:
        """Return a copy whose tensors have memory of their own."""
        return Components([leaf.clone() if isinstance(leaf, Tensor) else leaf for leaf in self.leaves], self.spec)


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


def components(batch: Any) -> Components:
    """Take a batch apart; numpy arrays become tensors."""
    cls = type(batch)
    is_row = cls in (tuple, list, dict) and batch
    if is_row and all(isinstance(leaf, Tensor) for leaf in (batch.values() if cls is dict else batch)):
        return Components(*tree.flatten_row(batch))
    return Components(*tree.flatten(_unify(batch)))


def batch_length(leaf: Any) -> int | None:
    """Return the size of a component's batch dimension, or ``None`` if it has none."""
    if isinstance(leaf, (Examples, Splittable)):
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
                " Every component of a global batch must be a tensor of shape [batch, ...]. Batch the dataset, pass "
                "such a value to `run` as an argument of its own, or say how the examples of its type are cut "
                "(ts.data.register_splitter)."
            )


def check_batch_sizes(batch: Components) -> None:
    """Check that all components have the same batch size, as they must to be divided.

    Raises:
        InvalidArgumentError: they have different ones.
    """
    sizes = [batch_length(leaf) for leaf in batch.leaves]
    if len(set(sizes) - {None}) > 1:
        raise InvalidArgumentError(
            f"The components of a batch have {sizes} examples. A global batch can be split only if all components have "
            "the same batch size. Give the others to `run` as arguments of their own, or make one row of them for each "
            "example."
        )


def split_batch(batch: Components, placement: Placement) -> LocalBatch:
    """Split a whole global batch and keep this process's shares.

    Raises:
        IndexError: a component has no batch dimension and there is more than one replica.
        ValueError: a component is a dataset itself and there is more than one replica.
        InvalidArgumentError: components have different batch sizes and there is more than one replica, as in tf.
    """
    check_splittable(batch, placement.num_replicas)
    if placement.num_replicas > 1:
        check_batch_sizes(batch)
    columns: list[tuple[Any, ...]] = []
    shares: list[BatchShares | None] = []
    for leaf in batch.leaves:
        length = batch_length(leaf)
        if length is None:
            columns.append((leaf,) * placement.num_local)
            shares.append(None)
            continue
        bounds, share = division(length, placement.num_replicas)
        columns.append(tuple([_cut(leaf, *bounds[i]) for i in placement.local_replica_ids]))
        shares.append(share)
    return LocalBatch(columns, shares, batch.spec)


@functools.lru_cache(maxsize=64)
def division(length: int, num_replicas: int) -> tuple[list[tuple[int, int]], BatchShares]:
    """Return where each replica's share of a batch starts and ends, and the tag that says so."""
    sizes = share_sizes(length, num_replicas)
    return share_bounds(sizes), BatchShares(sizes)


def take(batch: Components, start: int, stop: int) -> Components:
    """Return the examples from ``start`` to ``stop`` of a batch whose components all have a batch dimension."""
    return Components([_cut(leaf, start, stop) for leaf in batch.leaves], batch.spec)


def concatenate(parts: Sequence[Components]) -> Components:
    """Put batches of one structure together along the batch dimension.

    Raises:
        ValueError: their nested structures differ.
    """
    if len(parts) == 1:
        return parts[0]
    _check_specs(parts)
    columns = zip(*(part.leaves for part in parts), strict=True)
    return Components([_concatenate(column) for column in columns], parts[0].spec)


def plain_leaves(batch: Components) -> list[Any]:
    """Return the leaves as what a state may hold: tensors with memory of their own, lists."""
    return list(map(_plain, batch.leaves))


def from_plain(leaf: Any) -> Any:
    """Return the leaf that ``plain_leaves`` made something plain of."""
    return Examples(leaf["examples"], leaf["kind"]) if isinstance(leaf, dict) and "examples" in leaf else leaf


def signature(leaf: Any) -> str:
    """Return what two processes compare to know that a component of theirs may be the same."""
    if isinstance(leaf, Tensor):
        return f"{str(leaf.dtype)[6:]}{[] if leaf.is_nested else list(leaf.shape)}"
    return component_kind(leaf) + str(batch_length(leaf) or "")


def component_kind(leaf: Any) -> str:
    """Return dtype and number of dimensions of a component, or its type."""
    if isinstance(leaf, Tensor):
        return _tensor_kind(leaf.dtype, leaf.dim())
    if isinstance(leaf, Examples):
        return leaf.kind if _is_strings(leaf) else f"{leaf.kind} of examples"
    return type(leaf.value if isinstance(leaf, Splittable) else leaf).__name__


@functools.lru_cache(maxsize=64)
def _tensor_kind(dtype: torch.dtype, num_dims: int) -> str:
    return f"{str(dtype)[6:]} tensor of {num_dims} dimensions"


def blank_leaf(kind: str, sizes: Sequence[int] | None) -> Any:
    """Return an empty component of a kind, or ``NotImplemented`` if its kind does not say how to make one.

    Args:
        kind: what ``component_kind`` returned.
        sizes: its dimensions but the first.
    """
    if kind == "strings" or kind.endswith(" of examples"):
        return Examples(kind=kind.partition(" ")[0])
    if kind == "NoneType":
        return None
    if kind == "ndarray":  # of strings or other objects: numbers are tensors
        return np.empty((0, *(sizes or ())), dtype=object)
    dtype = getattr(torch, kind.partition(" ")[0], None)
    if sizes is None or not isinstance(dtype, torch.dtype) or " tensor of 0 " in kind:
        return NotImplemented
    return torch.empty((0, *sizes), dtype=dtype)


def join_parts(
    parts: Sequence[Components], shares: Sequence[BatchShares | None], *, are_new: bool = False
) -> LocalBatch:
    """Combine one batch for each local replica into one element.

    Args:
        parts: the batches.
        shares: for each component, the examples of every replica; ``None`` without batch dimension.
        are_new: whether nobody else holds the tensors.

    Raises:
        ValueError: the batches' nested structures, dtypes or numbers of dimensions differ.
    """
    _check_specs(parts)
    columns = list(zip(*(part.leaves for part in parts), strict=True))
    if len(parts) > 1 and any(_differ(column) for column in columns):
        kinds = "; ".join(", ".join(map(component_kind, part.leaves)) for part in parts)
        raise ValueError(
            "The batches for the replicas of one step must have the same dtypes and numbers of dimensions. Received: "
            + kinds
        )
    if not are_new:  # a view, so that a tag never lands on a tensor which the user keeps
        columns = [tuple([_cut(leaf, 0, batch_length(leaf)) for leaf in column]) for column in columns]
    return LocalBatch(columns, list(shares), parts[0].spec)


def empty_like(batch: Components) -> Components:
    """Return a batch without examples that keeps structure, dtypes, the other dimensions, and what has no examples."""
    leaves = [leaf if batch_length(leaf) is None else _cut(leaf, 0, 0) for leaf in batch.leaves]
    return Components(leaves, batch.spec)


def as_given(leaf: Any) -> Any:
    """Return a component as the user's batches have it."""
    if isinstance(leaf, Examples):
        return leaf.as_given()
    return leaf.value if isinstance(leaf, Splittable) else leaf


def describe(leaf: Any) -> Any:
    """Return a component's spec with the batch dimension open; ``None`` for ``None``."""
    if leaf is None:
        return None
    if isinstance(leaf, Tensor):
        sizes = (None,) * leaf.dim() if leaf.is_nested else leaf.shape
        return TensorSpec((None, *sizes[1:]) if leaf.dim() else (), leaf.dtype)
    if isinstance(leaf, np.ndarray):
        return TensorSpec((None, *leaf.shape[1:]), leaf.dtype.type)
    if isinstance(leaf, Examples):
        return TensorSpec((None,), str if _is_strings(leaf) else type(leaf.as_given()))
    return TensorSpec((None,), type(leaf.value)) if isinstance(leaf, Splittable) else TensorSpec((), type(leaf))


def _check_specs(parts: Sequence[Components]) -> None:
    for part in parts[1:]:
        if part.spec != parts[0].spec:
            raise ValueError(
                "The batches for the replicas of one step must have the same nested structure (types and lengths of "
                f"containers, keys of dicts). Received: {parts[0].spec} and {part.spec}"
            )


def _differ(column: Sequence[Any]) -> bool:
    first = column[0]
    if not isinstance(first, Tensor):
        return any(type(leaf) is not type(first) for leaf in column)
    others = column[1:]
    return any(not isinstance(x, Tensor) or x.dtype is not first.dtype or x.dim() != first.dim() for x in others)


def _concatenate(column: Sequence[Any]) -> Any:
    first = column[0]
    if isinstance(first, Examples):
        return Examples((value for leaf in column for value in leaf), first.kind)
    if isinstance(first, Splittable):
        raise TypeError(
            f"Batches of {type(first.value).__name__} can't be put together to make the sizes that the replicas need. "
            "Give batches of one replica's size with distribute_datasets_from_function, or a map-style DataLoader."
        )
    if isinstance(first, np.ndarray):
        return np.concatenate(column)
    return torch.cat(tuple(column)) if isinstance(first, Tensor) else first


def _unify(batch: Any) -> Any:
    if isinstance(batch, np.ndarray):
        return _as_tensor(batch)
    if type(batch) is Examples:
        return Examples(map(_tensors, batch), batch.kind)
    registered = as_splittable(batch)
    if registered is not None:
        return registered
    if isinstance(batch, Mapping):
        cls = OrderedDict if isinstance(batch, OrderedDict) else dict
        return cls((key, _unify(value)) for key, value in batch.items())
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*map(_unify, batch))
    if dataclasses.is_dataclass(batch) and not isinstance(batch, type):
        result = copy.copy(batch)
        for field in dataclasses.fields(batch):
            object.__setattr__(result, field.name, _unify(getattr(batch, field.name)))
        return result
    if type(batch) in (list, tuple):
        return Examples(batch, "strings") if _all_strings(batch) else type(batch)(map(_unify, batch))
    return _tensors(batch)


def _plain(leaf: Any) -> Any:
    if isinstance(leaf, Splittable):
        raise TypeError(
            f"The position in the data can't be saved while part of a {type(leaf.value).__name__} is left over. Save "
            "it at the end of an epoch, or give batches of one replica's size with distribute_datasets_from_function."
        )
    if isinstance(leaf, Examples) and not _is_strings(leaf):
        return {"examples": list(leaf), "kind": leaf.kind}
    return leaf.clone() if isinstance(leaf, Tensor) else list(leaf) if isinstance(leaf, Examples) else leaf


def _tensors(structure: Any) -> Any:
    return tree.map_leaves(lambda leaf: _as_tensor(leaf) if isinstance(leaf, np.ndarray) else leaf, structure)


def _is_strings(leaf: Any) -> bool:
    return isinstance(leaf, Examples) and leaf.kind == "strings"


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
    if type(leaf) is Tensor and stop is not None and leaf.layout is torch.strided and not leaf.is_nested:
        return leaf[start:stop]  # twice as fast as narrow
    if leaf is None or stop is None:
        return leaf
    if isinstance(leaf, (Examples, Splittable)):
        return leaf.cut(start, stop)
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


def _name(leaf: Any) -> str:
    if isinstance(leaf, Tensor):
        return f"a scalar tensor of dtype {leaf.dtype}"
    return f"{leaf!r} of type {type(leaf).__name__}"
