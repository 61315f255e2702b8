"""Batches: elements stacked, and cut apart again."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from torchstrategy.data.pipeline.elements import describe, leaf_paths, map_leaves, parts, rebuild, to_element
from torchstrategy.errors import InvalidArgumentError

__all__ = ["Buckets", "PaddedStack", "collate", "collate_raw", "split"]


class PaddedStack:
    """Pads tensors and stacks them.

    Args:
        shapes: in the structure of the elements, a list for each component; ``None`` means the longest.
        values: in the structure of the elements, or one number for all; ``None`` means 0.
    """

    def __init__(self, shapes: Any, values: Any) -> None:
        self._shapes = shapes
        self._values = values

    def __call__(self, elements: list[Any], first_number: int) -> Any:
        """Return a batch."""
        return self._stack(elements, self._shapes, self._values, first_number)

    def _stack(self, elements: Sequence[Any], shapes: Any, values: Any, number: int) -> Any:
        first = parts(elements[0])
        if first is None:
            padded = _pad(elements, shapes, 0 if values is None else values, number)
            return collate(padded, number)
        keys = first[0]
        columns = [[_component(element, key, i) for element in elements] for i, key in enumerate(keys)]
        return rebuild(
            elements[0],
            [
                self._stack(column, _argument(shapes, key, i), _argument(values, key, i), number)
                for i, (key, column) in enumerate(zip(keys, columns, strict=True))
            ],
        )


class Buckets:
    """What ``bucket_by_sequence_length`` gives ``group_by_window``.

    Args:
        length_func: the user's, returns an element's length.
        boundaries: the length from which on an element belongs to the next bucket.
        batch_sizes: of each bucket.
        padding: arguments of ``padded_batch`` besides the size; ``None`` for ``batch``.
        pads_to_boundary: ``None`` in a shape means the longest that belongs to the bucket.
        drop_remainder: leave out batches that are not full at the end.
    """

    def __init__(
        self,
        length_func: Callable[..., Any],
        boundaries: Sequence[int],
        batch_sizes: Sequence[int],
        padding: tuple[Any, Any] | None,
        *,
        pads_to_boundary: bool,
        drop_remainder: bool,
    ) -> None:
        self._length_func = length_func
        self._boundaries = boundaries
        self._batch_sizes = batch_sizes
        self._padding = padding
        self._pads_to_boundary = pads_to_boundary
        self._drop_remainder = drop_remainder

    def key(self, *element: Any) -> int:
        """Return the bucket of an element."""
        bucket = bisect_right(self._boundaries, int(self._length_func(*element)))
        if self._pads_to_boundary and bucket == len(self._boundaries):
            raise InvalidArgumentError(
                "With pad_to_bucket_boundary=True elements must be shorter than the last boundary, "
                f"{self._boundaries[-1]}. Add a boundary, or leave longer elements out by filter()."
            )
        return bucket

    def size(self, bucket: Tensor) -> int:
        """Return the size of a bucket's batches."""
        return self._batch_sizes[int(bucket)]

    def stack(self, bucket: Tensor, window: Any) -> Any:
        """Return a dataset of one batch."""
        if self._padding is None:
            return window.batch(self.size(bucket), self._drop_remainder)
        shapes, values = self._padding
        if self._pads_to_boundary:
            shapes = _filled(shapes, self._boundaries[int(bucket)] - 1)
        return window.padded_batch(self.size(bucket), shapes, values, self._drop_remainder)


def _filled(shapes: Any, size: int) -> Any:
    """Return shapes with a number in place of ``None``."""
    if shapes is None:
        return None
    found = None if isinstance(shapes, torch.Size) else parts(shapes)
    if found is not None:
        return rebuild(shapes, [_filled(shape, size) for shape in found[1]])
    return [size if number in (None, -1) else number for number in shapes]


def _component(element: Any, key: Any, index: int) -> Any:
    found = parts(element)
    if found is None or key not in found[0]:
        raise InvalidArgumentError(f"padded_batch() needs elements of one structure. Received: {describe(element)}")
    return element[key] if isinstance(element, dict) else found[1][index]


def _argument(argument: Any, key: Any, index: int) -> Any:
    """Return a component's part of a structure; a single value is for all."""
    found = None if isinstance(argument, torch.Size) else parts(argument)
    if found is None:
        return argument
    return argument[key] if isinstance(argument, dict) else found[1][index]


def _pad(tensors: Sequence[Any], shape: Any, value: Any, number: int) -> Sequence[Any]:
    if not all(isinstance(tensor, Tensor) for tensor in tensors):
        return tensors
    num_dims = tensors[0].dim()
    if any(tensor.dim() != num_dims for tensor in tensors) or (shape is not None and len(shape) != num_dims):
        found = sorted({tuple(tensor.shape) for tensor in tensors})
        raise InvalidArgumentError(
            f"padded_batch() needs tensors with one number of dimensions{'' if shape is None else f', that of {shape}'}"
            f". Elements {number} to {number + len(tensors) - 1} have the shapes {found}."
        )
    longest = [max(tensor.shape[i] for tensor in tensors) for i in range(num_dims)]
    wanted = [None] * num_dims if shape is None else [None if size in (None, -1) else int(size) for size in shape]
    sizes = [long if size is None else size for size, long in zip(wanted, longest, strict=True)]
    if any(long > size for long, size in zip(longest, sizes, strict=True)):
        raise InvalidArgumentError(
            f"An element of {number} to {number + len(tensors) - 1} is larger than its padded shape {shape}: {longest}."
        )
    return [_padded(tensor, sizes, value) for tensor in tensors]


def _padded(tensor: Tensor, sizes: list[int], value: Any) -> Tensor:
    if list(tensor.shape) == sizes:
        return tensor
    filler = torch.as_tensor(value, device="cpu")
    if not (tensor.is_floating_point() or tensor.is_complex()) and filler.to(tensor.dtype) != filler:
        raise InvalidArgumentError(f"The padding value {value} does not fit tensors of {tensor.dtype}.")
    result = tensor.new_full(sizes, filler.item())
    result[tuple(slice(0, size) for size in tensor.shape)] = tensor
    return result


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
