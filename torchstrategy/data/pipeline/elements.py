"""Elements of a dataset: nested tuples, dicts and dataclasses of tensors and strings.

As in tf, numbers, arrays and lists in an element become tensors. Strings, lists of strings, ``None`` and other objects
stay what they are. A list is therefore never a container.
"""

from __future__ import annotations

import copy
import dataclasses
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from torchstrategy.errors import InvalidArgumentError

__all__ = ["call", "collate", "describe", "leaf_paths", "map_leaves", "parts", "rebuild", "split", "to_element"]


def to_element(value: Any) -> Any:
    """Return the element that a value of the user's becomes; arrays are copied, because users often refill them.

    Raises:
        InvalidArgumentError: a list can't become a tensor.
    """
    if isinstance(value, Tensor) or value is None or type(value) in (str, bytes):
        return value
    if type(value) is tuple:
        return tuple([to_element(part) for part in value])
    if isinstance(value, np.generic) or hasattr(value, "__array__"):
        return _from_array(np.asarray(value))
    if isinstance(value, (bool, int, float, complex)):
        return torch.tensor(value, device="cpu")
    if isinstance(value, list):
        return _from_list(value)
    if isinstance(value, Mapping) and not isinstance(value, (dict, OrderedDict)):
        value = dict(value)
    found = parts(value)
    return value if found is None else rebuild(value, [to_element(part) for part in found[1]])


def parts(value: Any) -> tuple[list[Any], list[Any]] | None:
    """Return the keys and the values of a container; ``None`` for a leaf."""
    if isinstance(value, tuple):
        return list(getattr(value, "_fields", range(len(value)))), list(value)
    if isinstance(value, dict):
        return list(value), list(value.values())
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = [field.name for field in dataclasses.fields(value)]
        return names, [getattr(value, name) for name in names]
    return None


def rebuild(like: Any, values: list[Any]) -> Any:
    """Return a container of the same kind with other values."""
    if isinstance(like, tuple):
        return type(like)(*values) if hasattr(like, "_fields") else tuple(values)
    if isinstance(like, dict):
        pairs = zip(like, values, strict=True)
        return OrderedDict(pairs) if isinstance(like, OrderedDict) else dict(pairs)
    result = copy.copy(like)
    for field, value in zip(dataclasses.fields(like), values, strict=True):
        object.__setattr__(result, field.name, value)
    return result


def map_leaves(fn: Callable[[Any], Any], element: Any) -> Any:
    """Apply ``fn`` to every leaf and keep the structure."""
    if type(element) is tuple:  # by far the most frequent container: this is called for every element
        return tuple([map_leaves(fn, part) for part in element])
    if isinstance(element, Tensor):
        return fn(element)
    found = parts(element)
    return fn(element) if found is None else rebuild(element, [map_leaves(fn, part) for part in found[1]])


def leaf_paths(element: Any, path: str = "") -> list[tuple[str, Any]]:
    """Return every leaf with where it stands, such as ``['image'][0]``."""
    found = parts(element)
    if found is None:
        return [(path, element)]
    pairs = zip(*found, strict=True)
    return [pair for key, part in pairs for pair in leaf_paths(part, f"{path}[{key!r}]")]


def describe(element: Any) -> str:
    """Return an element's structure with a dtype and shape for each tensor, such as ``(float32[28, 28], int64[])``."""
    if isinstance(element, Tensor):
        return f"{str(element.dtype).removeprefix('torch.')}{list(element.shape)}"
    found = parts(element)
    if found is None:
        return f"list[{len(element)}]" if isinstance(element, list) else type(element).__name__
    inner = [describe(part) for part in found[1]]
    if isinstance(element, dict):
        return "{" + ", ".join(f"{key!r}: {text}" for key, text in zip(found[0], inner, strict=True)) + "}"
    if type(element) is tuple:
        return f"({', '.join(inner)}{',' if len(inner) == 1 else ''})"
    return f"{type(element).__name__}({', '.join(f'{k}={t}' for k, t in zip(found[0], inner, strict=True))})"


def call(fn: Callable[..., Any], element: Any) -> Any:
    """Call a user's function as tf does: a tuple is unpacked into arguments, anything else is one argument."""
    return fn(*element) if isinstance(element, tuple) else fn(element)


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


def _from_array(array: np.ndarray[Any, Any]) -> Any:
    if array.dtype.kind not in "biufc":
        return array.tolist()
    return torch.from_numpy(np.array(array, dtype=array.dtype.newbyteorder("="), order="C"))


def _from_list(values: list[Any]) -> Any:
    if not values:
        return torch.tensor([], device="cpu")
    if all(isinstance(value, (str, bytes)) for value in values):
        return list(values)
    if all(isinstance(value, (bool, int, float, complex)) and not isinstance(value, np.generic) for value in values):
        return torch.tensor(values, device="cpu")
    items = [to_element(list(value) if type(value) is tuple else value) for value in values]
    if all(isinstance(item, list) for item in items):
        return items
    try:
        return torch.stack(items)
    except (TypeError, RuntimeError):
        raise InvalidArgumentError(
            f"A list in an element becomes a tensor, as in tf, and this one can't: {describe(tuple(items))}. Use a "
            "tuple or a dict for several components."
        ) from None
