"""Batches: elements stacked, and cut apart again."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from torchstrategy.data.pipeline.elements import describe, leaf_paths, map_leaves, parts, rebuild, to_element
from torchstrategy.errors import InvalidArgumentError

__all__ = ["collate", "collate_raw", "split"]


def collate(elements: Sequence[Any], first_number: int = 0) -> Any:
    """Stack elements into a batch.

    Args:
        elements: at least one; all of the same structure, shapes and dtypes.
        first_number: the first element's number in the dataset, for messages.

    Returns:
        Their structure, with tensors of shape ``[batch, ...]`` and lists of strings.

    Raises:
        InvalidArgumentError: the elements' structures, shapes or dtypes differ.
        TypeError: a component is neither a tensor nor a string.
    """
    try:
        return _collate(elements, "")
    except _MismatchError as error:
        i = error.position
        raise InvalidArgumentError(
            f"Elements of one batch must have the same structure, shapes and dtypes. {error.problem} Element "
            f"{first_number} is {describe(elements[0])}, element {first_number + i} is {describe(elements[i])}. Make "
            "them equal with map() before batch(), or use padded_batch()."
        ) from None


def collate_raw(items: Sequence[Any], first_number: int = 0) -> Any:
    """Return what ``collate`` makes of the elements of raw items, with one conversion for each component."""
    batch = _stack_alike(items)
    return collate([to_element(item) for item in items], first_number) if batch is _NOT_ALIKE else batch


def split(batch: Any) -> list[Any]:
    """Return the elements of a batch, cut along the first dimension of every component.

    Raises:
        InvalidArgumentError: a component has no first dimension, or the lengths differ.
    """
    leaves = [(path, leaf) for path, leaf in leaf_paths(batch) if leaf is not None]
    for path, leaf in leaves:
        if not isinstance(leaf, list) and not (isinstance(leaf, Tensor) and leaf.dim()):
            raise InvalidArgumentError(
                f"unbatch() needs components with a first dimension; {path or 'the one'} has none: {describe(batch)}."
            )
    lengths = {len(leaf) for _, leaf in leaves}
    if len(lengths) != 1:
        raise InvalidArgumentError(f"unbatch() needs components of one length. Received: {describe(batch)}")
    return [map_leaves(partial(_at, i), batch) for i in range(lengths.pop())]


def _at(position: int, leaf: Any) -> Any:
    return None if leaf is None else leaf[position]


_NOT_ALIKE = object()


def _stack_alike(items: Sequence[Any]) -> Any:
    """Stack items of one type and structure, the usual case; all others are ``_NOT_ALIKE``."""
    first = items[0]
    kind = type(first)
    if len(set(map(type, items))) > 1:
        return _NOT_ALIKE
    if kind is tuple and len(set(map(len, items))) == 1:
        columns = [_stack_alike(column) for column in zip(*items, strict=True)]
        return _NOT_ALIKE if any(column is _NOT_ALIKE for column in columns) else tuple(columns)
    if kind is dict and all(item.keys() == first.keys() for item in items):
        columns = [_stack_alike([item[key] for item in items]) for key in first]
        return _NOT_ALIKE if any(c is _NOT_ALIKE for c in columns) else dict(zip(first, columns, strict=True))
    return _stack_leaves(items, kind)


def _stack_leaves(items: Sequence[Any], kind: type) -> Any:
    if kind is Tensor and len({item.dtype for item in items}) == 1:
        try:
            return torch.stack(items)  # type: ignore[arg-type]
        except RuntimeError:  # of different shapes
            return _NOT_ALIKE
    if kind in (int, float, bool):
        return torch.tensor(items, device="cpu")
    if kind in (str, bytes):
        return list(items)
    return torch.from_numpy(np.array(items)) if issubclass(kind, np.generic) else _NOT_ALIKE


class _MismatchError(Exception):
    """The element at ``position`` does not fit the first one."""

    def __init__(self, position: int, problem: str) -> None:
        super().__init__(problem)
        self.position = position
        self.problem = problem


def _collate(items: Sequence[Any], path: str) -> Any:
    first = items[0]
    if isinstance(first, Tensor):
        return _stack(items, path)
    found = parts(first)
    if found is None:
        return _collate_objects(items, path)
    columns: list[list[Any]] = [[] for _ in found[0]]
    for position, item in enumerate(items):
        other = parts(item)
        if other is None or type(item) is not type(first) or set(other[0]) != set(found[0]):
            raise _MismatchError(position, f"Component {path or 'structure'} differs.")
        values = other[1] if other[0] == found[0] else [item[key] for key in found[0]]
        for column, value in zip(columns, values, strict=True):
            column.append(value)
    return rebuild(first, [_collate(c, f"{path}[{key!r}]") for key, c in zip(found[0], columns, strict=True)])


def _stack(items: Sequence[Any], path: str) -> Tensor:
    first = items[0]
    shape, dtype = first.shape, first.dtype
    for position, item in enumerate(items):
        if not isinstance(item, Tensor) or item.shape != shape or item.dtype != dtype:
            raise _MismatchError(position, f"Component {path or '0'} differs.")
    return torch.stack(list(items))


def _collate_objects(items: Sequence[Any], path: str) -> Any:
    first = items[0]
    for position, item in enumerate(items):
        if type(item) is not type(first):
            raise _MismatchError(position, f"Component {path or '0'} differs.")
    if first is None:
        return None
    if isinstance(first, (str, bytes, list)):
        return list(items)
    raise TypeError(
        f"Can't batch component {path or '0'} of type {type(first).__name__}: only tensors, arrays, numbers and "
        "strings can be stacked. Convert it with map() before batch()."
    )
