"""From items to elements.

While a pipeline only reorders or leaves out elements of a source with random access, it works on positions: buffers
hold integers, states are tiny, and a batch is gathered with one indexing operation. Those of other sources stay as the
user made them until then, so that a batch is converted at once.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from torchstrategy.data.pipeline.batches import collate, collate_raw
from torchstrategy.data.pipeline.elements import call_noted, describe, leaf_paths, map_leaves, to_element
from torchstrategy.errors import InvalidArgumentError

__all__ = ["RAW", "Access", "CachedAccess", "Columns", "MappedAccess", "Progression"]


class Access(Protocol):
    """Elements by item."""

    by_position: bool  # items are positions
    num_parallel_calls: int

    def get(self, item: Any) -> Any:
        """Return one element; the caller may change it in place."""

    def gather(self, items: Sequence[Any], first_number: int) -> Any:
        """Return a batch; ``first_number`` is the first element's number in the dataset, for messages."""


class _RawAccess:
    """Elements that are not converted yet."""

    by_position = False
    num_parallel_calls = 0
    get = staticmethod(to_element)
    gather = staticmethod(collate_raw)


RAW = _RawAccess()


class Progression:
    """Equally spaced numbers, of a ``range`` or a ``counter``.

    Args:
        start: the first one.
        step: what is added to each.
        dtype: of the tensors; integers that do not fit wrap around.
    """

    by_position = True
    num_parallel_calls = 0

    def __init__(self, start: float, step: float, dtype: torch.dtype) -> None:
        self._start = start
        self._step = step
        self._dtype = dtype
        self._exact = torch.float64 if isinstance(start, float) or isinstance(step, float) else torch.int64

    def get(self, position: int) -> Tensor:
        """Return one number."""
        return torch.tensor(self._start + position * self._step, dtype=self._exact, device="cpu").to(self._dtype)

    def gather(self, positions: Sequence[int], first_number: int) -> Tensor:  # noqa: ARG002 - all are alike
        """Return several numbers."""
        values = torch.tensor(positions, dtype=self._exact, device="cpu") * self._step + self._start
        return values.to(self._dtype)


class Columns:
    """Slices of tensors along their first dimension; the tensors share the memory of the user's arrays.

    Args:
        structure: nested tensors, arrays and lists of one length.

    Raises:
        InvalidArgumentError: there are none, one is a scalar, or their lengths differ.
    """

    by_position = True
    num_parallel_calls = 0

    def __init__(self, structure: Any) -> None:
        self._columns = map_leaves(_as_column, structure)
        self.length = _column_length(self._columns)

    @classmethod
    def of_one(cls, element: Any) -> Columns:
        """Return the columns of a single element."""
        element = to_element(element)
        return cls(
            map_leaves(lambda leaf: leaf.unsqueeze(0) if isinstance(leaf, Tensor) else _Objects([leaf]), element)
        )

    def get(self, position: int) -> Any:
        """Return a copy of one slice."""
        return map_leaves(lambda column: _copy(column[position]), self._columns)

    def gather(self, positions: Sequence[int], first_number: int) -> Any:  # noqa: ARG002 - all are alike
        """Return the slices at some positions in one batch."""
        start, count = positions[0], len(positions)
        if positions[-1] - start == count - 1 and list(positions) == list(range(start, start + count)):
            return map_leaves(lambda column: _copy(column[start : start + count]), self._columns)
        index = torch.tensor(positions, dtype=torch.int64, device="cpu")
        return map_leaves(lambda column: _take(column, index, positions), self._columns)


class MappedAccess:
    """The elements of another source after a function.

    Args:
        inner: the source.
        fn: the user's function.
        num_parallel_calls: threads that call it; 0 for none.
    """

    by_position = True

    def __init__(self, inner: Access, fn: Callable[..., Any], num_parallel_calls: int) -> None:
        self._inner = inner
        self._fn = fn
        self.num_parallel_calls = max(num_parallel_calls, inner.num_parallel_calls)

    def get(self, position: int) -> Any:
        """Return one element."""
        element = self._inner.get(position)
        return to_element(call_noted("map", self._fn, element, f"element {position} of its source"))

    def gather(self, positions: Sequence[int], first_number: int) -> Any:
        """Return a batch."""
        return collate([self.get(position) for position in positions], first_number)


class CachedAccess:
    """Keeps the elements of another source once they have been read.

    Args:
        inner: the source.
        memory: where they are kept, by position.
    """

    by_position = True

    def __init__(self, inner: Access, memory: dict[int, Any]) -> None:
        self._inner = inner
        self._memory = memory
        self.num_parallel_calls = inner.num_parallel_calls

    def get(self, position: int) -> Any:
        """Return a copy of one element."""
        if position not in self._memory:
            self._memory[position] = self._inner.get(position)
        return map_leaves(_copy, self._memory[position])

    def gather(self, positions: Sequence[int], first_number: int) -> Any:
        """Return a batch."""
        return collate([self.get(position) for position in positions], first_number)


def _column_length(structure: Any) -> int:
    """Return the one length of all columns.

    Raises:
        InvalidArgumentError: there are none, one is a scalar, or the lengths differ.
    """
    columns = leaf_paths(structure)
    if not columns:
        raise InvalidArgumentError("There are no tensors to slice: the structure is empty.")
    for path, column in columns:
        if isinstance(column, Tensor) and column.dim() == 0:
            raise InvalidArgumentError(
                f"Component {path or '0'} is a scalar and can't be sliced along its first dimension. For a dataset of "
                "one element, use from_tensors()."
            )
    first_path, first = columns[0]
    for path, column in columns[1:]:
        if len(column) != len(first):
            raise InvalidArgumentError(
                "All components must have the same first dimension, the number of elements. Component "
                f"{first_path or '0'} has {len(first)}, component {path} has {len(column)}: {describe(structure)}"
            )
    return len(first)


# torch can't index these; the numbers have the same bits as signed ones.
_SIGNED = {torch.uint16: torch.int16, torch.uint32: torch.int32, torch.uint64: torch.int64}


class _Objects(list[Any]):
    """A column of strings or other objects."""


def _as_column(leaf: Any) -> Any:
    if isinstance(leaf, Tensor):
        return leaf.detach()
    if isinstance(leaf, _Objects):
        return leaf
    if isinstance(leaf, list):
        converted = to_element(leaf)
        return _Objects(converted) if isinstance(converted, list) else converted
    if hasattr(leaf, "__array__"):
        return _share(np.asarray(leaf))
    converted = to_element(leaf)
    if isinstance(converted, Tensor):
        return converted
    raise TypeError(f"Can't slice a {type(leaf).__name__}: pass tensors, arrays or lists of equal length.")


def _share(array: np.ndarray[Any, Any]) -> Any:
    if array.dtype.kind not in "biufc":
        return _Objects(array.tolist())
    if not array.dtype.isnative or any(stride < 0 for stride in array.strides):
        return to_element(array)
    with warnings.catch_warnings():
        # Read-only arrays such as memory maps: elements are copies, so nothing writes to them.
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        return torch.from_numpy(array)


def _copy(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else list(value) if isinstance(value, _Objects) else value


def _take(column: Any, index: Tensor, positions: Sequence[int]) -> Any:
    if isinstance(column, Tensor):
        signed = column.view(_SIGNED[column.dtype]) if column.dtype in _SIGNED else column
        return signed.index_select(0, index.to(column.device)).view(column.dtype)
    return [column[position] for position in positions]
