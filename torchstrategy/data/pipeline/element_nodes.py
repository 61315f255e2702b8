"""Nodes that change, combine or keep elements."""

from __future__ import annotations

import contextlib
import math
import threading
from collections import deque
from collections.abc import Callable
from typing import Any, ClassVar

import numpy as np
from torch import Tensor
from typing_extensions import override

from torchstrategy.data.pipeline.access import Access
from torchstrategy.data.pipeline.batches import split
from torchstrategy.data.pipeline.elements import call_noted, describe, leaf_paths, map_leaves, to_element, to_raw
from torchstrategy.data.pipeline.op import Node, SourcedNode, State

__all__ = ["Batch", "Cache", "CacheMemory", "Filter", "Lookup", "Map", "Scan", "TakeWhile", "Unbatch", "Unique"]


class Lookup(SourcedNode):
    """The elements of items.

    Args:
        source: of the items, positions or raw elements.
        access: makes elements of them.
    """

    def __init__(self, source: Node, access: Access) -> None:
        super().__init__(source)
        self._access = access

    @override
    def read(self, count: int) -> list[Any]:
        return [self._access.get(item) for item in self._source.read(count)]

    @override
    def skip(self, count: int) -> int:
        return self._source.skip(count)


class Batch(SourcedNode):
    """Batches of elements, each made at once.

    Args:
        source: of the items.
        batch_size: elements of a batch.
        drop_remainder: leave out a last batch of fewer elements.
        stack: makes a batch of items and the number of the first one.
    """

    saved = ("num_read",)

    def __init__(
        self, source: Node, batch_size: int, stack: Callable[[list[Any], int], Any], *, drop_remainder: bool
    ) -> None:
        super().__init__(source)
        self._batch_size = batch_size
        self._smallest = batch_size if drop_remainder else 1
        self._stack = stack

    @override
    def begin(self) -> None:
        self.num_read = 0

    @override
    def next(self) -> Any:
        elements = self._source.read(self._batch_size)
        if len(elements) < self._smallest:
            raise StopIteration
        self.num_read += len(elements)
        return self._stack(elements, self.num_read - len(elements))

    @override
    def skip(self, count: int) -> int:
        num_elements = self._source.skip(count * self._batch_size)
        self.num_read += num_elements
        last = num_elements % self._batch_size
        return num_elements // self._batch_size + (last >= self._smallest)


class Unbatch(Node):
    """The elements of batches.

    Args:
        source: of the batches.
    """

    def __init__(self, source: Node) -> None:
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


class Map(SourcedNode):
    """Raw elements after a function.

    Args:
        source: of the elements.
        fn: the user's function.
    """

    saved = ("number",)

    def __init__(self, source: Node, fn: Callable[..., Any]) -> None:
        super().__init__(source)
        self._fn = fn

    @override
    def begin(self) -> None:
        self.number = 0

    @override
    def read(self, count: int) -> list[Any]:
        items = []
        for element in self._source.read(count):
            items.append(to_raw(call_noted("map", self._fn, element, f"element {self.number}")))
            self.number += 1
        return items


class Filter(SourcedNode):
    """The elements for which a function is true.

    Args:
        source: of the elements.
        predicate: the user's function.
    """

    saved: ClassVar[tuple[str, ...]] = ("number",)

    def __init__(self, source: Node, predicate: Callable[..., Any]) -> None:
        super().__init__(source)
        self._predicate = predicate

    @override
    def begin(self) -> None:
        self.number = 0

    @override
    def next(self) -> Any:
        while True:
            element = next(self._source)
            self.number += 1
            if _truth("filter", call_noted("filter", self._predicate, element, f"element {self.number - 1}")):
                return element


class TakeWhile(Filter):
    """The elements before the first one for which a function is false.

    Args:
        source: of the elements.
        predicate: the user's function.
    """

    saved = ("number", "is_ended")

    @override
    def begin(self) -> None:
        super().begin()
        self.is_ended = False

    @override
    def next(self) -> Any:
        if self.is_ended:
            raise StopIteration
        element = next(self._source)
        answer = call_noted("take_while", self._predicate, element, f"element {self.number}")
        self.number += 1
        self.is_ended = not _truth("take_while", answer)
        if self.is_ended:
            raise StopIteration
        return element


class Scan(SourcedNode):
    """What a function returns besides a value that it passes on from element to element.

    Args:
        source: of the elements.
        initial: the value before the first element.
        fn: the user's function.
    """

    saved = ("number",)

    def __init__(self, source: Node, initial: Any, fn: Callable[..., Any]) -> None:
        super().__init__(source)
        self._initial = initial
        self._fn = fn

    @override
    def start(self, state: State | None) -> None:
        super().start(state)
        leaves = None if state is None else iter(state["value"])
        # Only leaves are saved: a state has no containers of the user's.
        self._value = map_leaves(lambda leaf: _copy(leaf if leaves is None else next(leaves)), self._initial)

    @override
    def begin(self) -> None:
        self.number = 0

    @override
    def next(self) -> Any:
        pair = (self._value, next(self._source))
        result = call_noted("scan", self._fn, pair, f"element {self.number}")
        if type(result) is not tuple or len(result) != 2:
            raise TypeError(
                f"The function of scan() must return the new state and an element. Received: {describe(result)}"
            )
        value, element = map(to_element, result)
        if _form(value) != _form(self._initial):
            raise TypeError(
                "The new state of scan() must have the structure and dtypes of initial_state. Expected: "
                f"{describe(self._initial)}. Received: {describe(value)}"
            )
        self._value = value
        self.number += 1
        return element

    @override
    def get_state(self) -> State:
        return super().get_state() | {"value": [_copy(leaf) for _, leaf in leaf_paths(self._value)]}


class Unique(SourcedNode):
    """Each element once; resuming reads again what was read, so that a state holds no elements.

    Args:
        source: of the elements.
    """

    @override
    def start(self, state: State | None) -> None:
        self._seen: set[Any] = set()
        self._num_read = 0
        self._source.reset(None if state is None else state["beginning"])
        self._beginning = self._source.state_dict()
        while state is not None and self._num_read < state["num_read"]:
            if not self._read_one():
                raise RuntimeError(
                    f"The data has changed since the state was taken: {state['num_read']} elements had been read "
                    f"before unique(), now there are {self._num_read}."
                )

    @override
    def next(self) -> Any:
        while found := self._read_one():
            element, is_new = found
            if is_new:
                return element
        raise StopIteration

    @override
    def get_state(self) -> State:
        return {"beginning": self._beginning, "num_read": self._num_read}

    def _read_one(self) -> tuple[Any, bool] | None:
        found = self._source.read(1)
        if not found:
            return None
        key, num_seen = _key(found[0]), len(self._seen)
        self._num_read += 1
        self._seen.add(key)
        return found[0], len(self._seen) > num_seen


class Cache(Node):
    """Keeps the elements of a source in memory; later passes read them there.

    Args:
        make_source: makes the source anew, always with the same order.
        memory: the elements read so far, and whether these are all.
    """

    def __init__(self, make_source: Callable[[], Node], memory: CacheMemory) -> None:
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
    """The elements that a ``cache()`` keeps: in order, or by position if their source has random access."""

    def __init__(self) -> None:
        self.elements: list[Any] = []
        self.is_complete = False
        self.by_position: dict[int, Any] = {}
        self.lock = threading.RLock()  # iterators may read in threads

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "lock"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, lock=threading.RLock())


def _truth(operation: str, answer: Any) -> bool:
    if isinstance(answer, (bool, int, np.generic)):
        return bool(answer)
    if not isinstance(answer, (Tensor, np.ndarray)) or math.prod(answer.shape) != 1:
        raise TypeError(
            f"The function of {operation}() must return one truth value. Received: {describe(answer)}. Of a tensor "
            "take .all() or .any()."
        )
    return bool(answer)


def _form(value: Any) -> list[tuple[str, Any]]:
    return [(path, getattr(leaf, "dtype", type(leaf))) for path, leaf in leaf_paths(value)]


def _key(element: Any) -> Any:
    if isinstance(element, (str, bytes)):
        return element
    if not isinstance(element, Tensor) or element.is_floating_point() or element.is_complex():
        raise TypeError(
            f"unique() takes elements that are one tensor of integers, or a string. Received: {describe(element)}"
        )
    return element.dtype, tuple(element.shape), tuple(element.flatten().tolist())


def _copy(leaf: Any) -> Any:
    return leaf.clone() if hasattr(leaf, "clone") else leaf
