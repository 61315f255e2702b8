"""Nodes that make, change, combine or keep elements."""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from torch import Tensor
from typing_extensions import override

from torchstrategy.data.pipeline.access import Access
from torchstrategy.data.pipeline.elements import collate, map_leaves, split, to_element
from torchstrategy.data.pipeline.failures import add_note, call_noted
from torchstrategy.data.pipeline.node import Node, State

__all__ = ["Batch", "Cache", "CacheMemory", "Filter", "Gather", "Generate", "Lookup", "Map", "Unbatch"]


class Lookup(Node):
    """The elements at positions.

    Args:
        positions: of the elements.
        access: finds them.
    """

    def __init__(self, positions: Node, access: Access) -> None:
        super().__init__()
        self._positions = positions
        self._access = access

    @override
    def start(self, state: State | None) -> None:
        self._positions.reset(None if state is None else state["positions"])

    @override
    def next(self) -> Any:
        return self._access.get(next(self._positions))

    @override
    def skip(self, count: int) -> int:
        return self._positions.skip(count)

    @override
    def get_state(self) -> State:
        return {"positions": self._positions.state_dict()}


class Gather(Node):
    """Batches of the elements at positions, each read at once.

    Args:
        positions: of the elements.
        access: finds them.
        batch_size: elements of a batch.
        drop_remainder: leave out a last batch of fewer elements.
    """

    def __init__(self, positions: Node, access: Access, batch_size: int, *, drop_remainder: bool) -> None:
        super().__init__()
        self._positions = positions
        self._access = access
        self._batch_size = batch_size
        self._smallest = batch_size if drop_remainder else 1

    @override
    def start(self, state: State | None) -> None:
        self._positions.reset(None if state is None else state["positions"])

    @override
    def next(self) -> Any:
        positions = self._positions.read(self._batch_size)
        if len(positions) < self._smallest:
            raise StopIteration
        return self._access.gather(positions)

    @override
    def skip(self, count: int) -> int:
        num_elements = self._positions.skip(count * self._batch_size)
        last = num_elements % self._batch_size
        return num_elements // self._batch_size + (last >= self._smallest)

    @override
    def get_state(self) -> State:
        return {"positions": self._positions.state_dict()}


class Batch(Node):
    """Batches of elements.

    Args:
        source: of the elements.
        batch_size: elements of a batch.
        drop_remainder: leave out a last batch of fewer elements.
        stack: makes a batch of elements and the number of the first one.
    """

    def __init__(
        self,
        source: Node,
        batch_size: int,
        *,
        drop_remainder: bool,
        stack: Callable[[list[Any], int], Any] = collate,
    ) -> None:
        super().__init__()
        self._source = source
        self._batch_size = batch_size
        self._smallest = batch_size if drop_remainder else 1
        self._stack = stack

    @override
    def start(self, state: State | None) -> None:
        self._num_read = 0 if state is None else state["num_read"]
        self._source.reset(None if state is None else state["source"])

    @override
    def next(self) -> Any:
        elements = self._source.read(self._batch_size)
        if len(elements) < self._smallest:
            raise StopIteration
        self._num_read += len(elements)
        return self._stack(elements, self._num_read - len(elements))

    @override
    def get_state(self) -> State:
        return {"num_read": self._num_read, "source": self._source.state_dict()}


class Unbatch(Node):
    """The elements of batches.

    Args:
        source: of the batches.
    """

    def __init__(self, source: Node) -> None:
        super().__init__()
        self._source = source

    @override
    def start(self, state: State | None) -> None:
        self._source.reset(None if state is None else state["source"])
        self._before = self._source.state_dict()
        self._elements: deque[Any] = deque()
        self._num_given = 0
        if state is not None and state["num_given"]:
            self._read_batch()
            for _ in range(state["num_given"]):
                self._elements.popleft()
            self._num_given = state["num_given"]

    @override
    def next(self) -> Any:
        while not self._elements:
            self._read_batch()
        self._num_given += 1
        return self._elements.popleft()

    @override
    def get_state(self) -> State:
        return {"source": self._before, "num_given": self._num_given}

    def _read_batch(self) -> None:
        self._before = self._source.state_dict()
        self._num_given = 0
        self._elements.extend(split(next(self._source)))


class Map(Node):
    """Elements after a function.

    Args:
        source: of the elements.
        fn: the user's function.
    """

    def __init__(self, source: Node, fn: Callable[..., Any]) -> None:
        super().__init__()
        self._source = source
        self._fn = fn

    @override
    def start(self, state: State | None) -> None:
        self._number = 0 if state is None else state["number"]
        self._source.reset(None if state is None else state["source"])

    @override
    def next(self) -> Any:
        element = next(self._source)
        self._number += 1
        return to_element(call_noted("map", self._fn, element, f"element {self._number - 1}"))

    @override
    def get_state(self) -> State:
        return {"number": self._number, "source": self._source.state_dict()}


class Filter(Node):
    """The elements for which a function is true.

    Args:
        source: of the elements.
        predicate: the user's function.
    """

    def __init__(self, source: Node, predicate: Callable[..., Any]) -> None:
        super().__init__()
        self._source = source
        self._predicate = predicate

    @override
    def start(self, state: State | None) -> None:
        self._number = 0 if state is None else state["number"]
        self._source.reset(None if state is None else state["source"])

    @override
    def next(self) -> Any:
        while True:
            element = next(self._source)
            self._number += 1
            if _truth(call_noted("filter", self._predicate, element, f"element {self._number - 1}")):
                return element

    @override
    def get_state(self) -> State:
        return {"number": self._number, "source": self._source.state_dict()}


class Generate(Node):
    """What a function's iterator gives; resuming reads it again from the start.

    Args:
        make: returns an iterable.
        convert: makes an element of an item.
        fn: the user's function, for messages.
    """

    def __init__(
        self, make: Callable[[], Iterable[Any]], convert: Callable[[Any], Any], fn: Callable[..., Any]
    ) -> None:
        super().__init__()
        self._make = make
        self._fn = fn
        self._convert = convert

    @override
    def start(self, state: State | None) -> None:
        self._num_read = 0
        self._items: Iterator[Any] | None = None
        if state is not None and state["num_read"]:
            wanted = state["num_read"]
            found = self.skip(wanted)
            if found < wanted:
                raise RuntimeError(
                    f"The data has changed since the state was taken: {wanted} elements had been read, now there are "
                    f"only {found}."
                )

    @override
    def next(self) -> Any:
        return self._convert(self._next_item())

    @override
    def skip(self, count: int) -> int:
        for skipped in range(count):
            try:
                self._next_item()
            except StopIteration:
                return skipped
        return count

    @override
    def get_state(self) -> State:
        return {"num_read": self._num_read}

    def _next_item(self) -> Any:
        try:
            if self._items is None:
                self._items = iter(self._make())
            item = next(self._items)
        except StopIteration:
            raise
        except Exception as error:
            add_note(error, "from_generator", self._fn, f"element {self._num_read}")
            raise
        self._num_read += 1
        return item


class Cache(Node):
    """Keeps the elements of a source in memory; later passes read them there.

    Args:
        make_source: makes the source anew, always with the same order.
        memory: the elements read so far, and whether these are all.
    """

    def __init__(self, make_source: Callable[[], Node], memory: CacheMemory) -> None:
        super().__init__()
        self._make_source = make_source
        self._memory = memory

    @override
    def start(self, state: State | None) -> None:
        self._position = 0 if state is None else state["position"]
        self._source: Node | None = None
        self._num_read = 0

    @override
    def next(self) -> Any:
        with self._memory.lock:
            while self._position >= len(self._memory.elements):
                self._read_one()
        self._position += 1
        return map_leaves(_copy, self._memory.elements[self._position - 1])

    @override
    def skip(self, count: int) -> int:
        position = self._position
        with self._memory.lock, contextlib.suppress(StopIteration):
            while len(self._memory.elements) < position + count:
                self._read_one()
        self._position = max(position, min(position + count, len(self._memory.elements)))
        return self._position - position

    @override
    def get_state(self) -> State:
        return {"position": self._position}

    def _read_one(self) -> None:
        memory = self._memory
        if memory.is_complete:
            raise StopIteration
        if self._source is None:
            self._source = self._make_source()
            self._source.reset()
        if self._num_read < len(memory.elements):
            # Another iterator has read on meanwhile, or an earlier one stopped on its way.
            self._num_read += self._source.skip(len(memory.elements) - self._num_read)
        try:
            element = next(self._source)
        except StopIteration:
            memory.is_complete = True
            raise
        memory.elements.append(element)
        self._num_read += 1


class CacheMemory:
    """What a ``cache()`` keeps: elements in order, or by position if their source has random access."""

    def __init__(self) -> None:
        self.elements: list[Any] = []
        self.is_complete = False
        self.by_position: dict[int, Any] = {}
        self.keys: list[list[int]] | None = None
        self.lock = threading.RLock()  # iterators may read in threads

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "lock"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, lock=threading.RLock())

    def forget(self) -> None:
        """Forget everything."""
        self.elements, self.is_complete, self.by_position = [], False, {}


def _truth(answer: Any) -> bool:
    if isinstance(answer, Tensor) and answer.numel() != 1:
        raise TypeError(
            f"The function of filter() must return one truth value. Received a tensor of shape {list(answer.shape)}: "
            "take .all() or .any() of it."
        )
    return bool(answer)


def _copy(leaf: Any) -> Any:
    return leaf.clone() if hasattr(leaf, "clone") else leaf
