"""Nodes for positions and elements alike: they count, leave out, repeat and number their items."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from itertools import chain, islice
from typing import Any

import numpy as np
import torch
from typing_extensions import override

from torchstrategy.data.pipeline.elements import leaf_paths, map_leaves
from torchstrategy.data.pipeline.op import Node, SourcedNode, State
from torchstrategy.errors import InvalidArgumentError

__all__ = [
    "Concatenate",
    "Enumerate",
    "Number",
    "Positions",
    "Repeat",
    "Select",
    "Shard",
    "Skip",
    "Take",
    "Window",
    "Zip",
]


class Positions(Node):
    """The positions ``0 ... size - 1``.

    Args:
        size: how many there are.
    """

    def __init__(self, size: int) -> None:
        self._size = size

    @override
    def start(self, state: State | None) -> None:
        self._position = 0 if state is None else state["position"]

    @override
    def read(self, count: int) -> list[Any]:
        start = self._position
        return list(range(start, start + self.skip(count)))

    @override
    def read_integers(self, count: int) -> np.ndarray[Any, Any]:
        start = self._position
        return np.arange(start, start + self.skip(count), dtype=np.int64)

    @override
    def skip(self, count: int) -> int:
        start = self._position
        self._position = min(self._size, start + count)
        return self._position - start

    @override
    def get_state(self) -> State:
        return {"position": self._position}


class Take(SourcedNode):
    """The first ``count`` items.

    Args:
        source: of the items.
        count: how many.
    """

    saved = ("left",)

    def __init__(self, source: Node, count: int) -> None:
        super().__init__(source)
        self._count = count

    @override
    def begin(self) -> None:
        self.left = self._count

    @override
    def read(self, count: int) -> list[Any]:
        items = self._source.read(min(count, self.left)) if self.left else []
        self.left -= len(items)
        return items


class Skip(SourcedNode):
    """What follows the first ``count`` items.

    Args:
        source: of the items.
        count: how many are left out.
    """

    saved = ("is_done",)

    def __init__(self, source: Node, count: int) -> None:
        super().__init__(source)
        self._count = count

    @override
    def begin(self) -> None:
        self.is_done = False

    @override
    def read(self, count: int) -> list[Any]:
        if not self.is_done:
            self._source.skip(self._count)
            self.is_done = True
        return self._source.read(count)


class Shard(SourcedNode):
    """Every ``num_shards``-th item.

    Args:
        source: of the items.
        num_shards: how many shards there are.
        index: which one this is.
    """

    saved = ("ahead",)

    def __init__(self, source: Node, num_shards: int, index: int) -> None:
        super().__init__(source)
        self._num_shards = num_shards
        self._index = index

    @override
    def begin(self) -> None:
        self.ahead = self._index

    @override
    def read(self, count: int) -> list[Any]:
        items: list[Any] = []
        while len(items) < count and self._source.skip(self.ahead) == self.ahead:
            item = self._source.read(1)
            self.ahead = self._num_shards - 1 if item else 0
            if not item:
                break
            items += item
        return items


class Repeat(SourcedNode):
    """The items again and again; ends if there are none.

    Args:
        source: of the items.
        count: how many times; ``None`` for ever.
    """

    saved = ("repetition", "is_ended", "is_empty")

    def __init__(self, source: Node, count: int | None) -> None:
        super().__init__(source)
        self._count = count

    @override
    def begin(self) -> None:
        self.repetition = 0
        self.is_ended = self._count == 0
        self.is_empty = True  # no item yet in this repetition

    @override
    def read(self, count: int) -> list[Any]:
        items: list[Any] = []
        while not self.is_ended and len(items) < count:
            found = self._source.read(count - len(items))
            items += found
            self.is_empty = self.is_empty and not found
            if len(items) < count:
                self._begin_next()
        return items

    def _begin_next(self) -> None:
        self.repetition += 1
        self.is_ended = self.repetition == self._count or (self._count is None and self.is_empty)
        if not self.is_ended:
            self.is_empty = True
            self._source.reset()


class Number(SourcedNode):
    """Pairs of a number and an item.

    Args:
        source: of the items.
        first: the first number.
    """

    saved = ("number",)

    def __init__(self, source: Node, first: int = 0) -> None:
        super().__init__(source)
        self._first = first

    @override
    def begin(self) -> None:
        self.number = self._first

    @override
    def next(self) -> Any:
        self.number += 1  # what fails has a number, too
        return self.number - 1, next(self._source)

    @override
    def skip(self, count: int) -> int:
        skipped = self._source.skip(count)
        self.number += skipped
        return skipped


class Enumerate(Number):
    """Pairs of a number and an element; the number is a tensor."""

    @override
    def next(self) -> Any:
        number, element = super().next()
        return torch.tensor(number, device="cpu"), element


class Zip(Node):
    """One element of each source in a structure, until one ends.

    Args:
        sources: of the elements.
        structure: the numbers of the sources, nested as their elements shall be.
    """

    def __init__(self, sources: Sequence[Node], structure: Any) -> None:
        self._sources = list(sources)
        self._structure = structure

    @override
    def start(self, state: State | None) -> None:
        self._is_ended = state is not None and state["is_ended"]
        states = [None] * len(self._sources) if state is None else state["sources"]
        for source, source_state in zip(self._sources, states, strict=True):
            source.reset(source_state)

    @override
    def next(self) -> Any:
        if self._is_ended:
            raise StopIteration
        elements, errors = [], []
        for source in self._sources:  # all of them, so that they stay side by side where errors are ignored
            try:
                elements.append(next(source))
            except StopIteration:
                self._is_ended = True
                raise
            except Exception as error:  # noqa: BLE001 - raised below
                errors.append(error)
        if errors:
            raise errors[0]
        return map_leaves(elements.__getitem__, self._structure)

    @override
    def get_state(self) -> State:
        return {"is_ended": self._is_ended, "sources": [source.state_dict() for source in self._sources]}


class Concatenate(Node):
    """The elements of one source, then those of another.

    Args:
        first: the one.
        second: the other.
    """

    def __init__(self, first: Node, second: Node) -> None:
        self._sources = [first, second]

    @override
    def start(self, state: State | None) -> None:
        self._turn = 0 if state is None else state["turn"]
        states = [None, None] if state is None else state["sources"]
        for source, source_state in zip(self._sources, states, strict=True):
            source.reset(source_state)

    @override
    def read(self, count: int) -> list[Any]:
        items = self._sources[self._turn].read(count)
        if len(items) < count and self._turn == 0:
            self._turn = 1
            items += self._sources[1].read(count - len(items))
        return items

    @override
    def get_state(self) -> State:
        return {"turn": self._turn, "sources": [source.state_dict() for source in self._sources]}


class Select(Node):
    """Elements of several sources, each of the one that another node chooses.

    Args:
        choices: gives the numbers of sources.
        sources: of the elements.
        stops_early: end when a source that has no more is chosen, not when none has any.
    """

    def __init__(self, choices: Node, sources: Sequence[Node], *, stops_early: bool) -> None:
        self._choices = choices
        self._sources = list(sources)
        self._stops_early = stops_early

    @override
    def start(self, state: State | None) -> None:
        self._ended: set[int] = set() if state is None else set(state["ended"])
        self._is_ended = state is not None and state["is_ended"]
        self._choices.reset(None if state is None else state["choices"])
        states = [None] * len(self._sources) if state is None else state["sources"]
        for source, source_state in zip(self._sources, states, strict=True):
            source.reset(source_state)

    @override
    def next(self) -> Any:
        while not self._is_ended:
            chosen = self._choices.read(1)
            number = self._number(chosen[0]) if chosen else 0
            found = self._sources[number].read(1) if chosen and number not in self._ended else []
            if found:
                return found[0]
            self._ended.add(number)
            self._is_ended = not chosen or self._stops_early or len(self._ended) == len(self._sources)
        raise StopIteration

    @override
    def get_state(self) -> State:
        return {
            "ended": sorted(self._ended),
            "is_ended": self._is_ended,
            "choices": self._choices.state_dict(),
            "sources": [source.state_dict() for source in self._sources],
        }

    def _number(self, choice: Any) -> int:
        is_integer = isinstance(choice, torch.Tensor) and not choice.is_floating_point() and choice.dim() == 0
        if not is_integer or not 0 <= choice < len(self._sources):
            raise InvalidArgumentError(
                f"Each element of choice_dataset must be one integer from 0 to {len(self._sources) - 1}, the number of "
                f"a dataset. Received: {choice!r}"
            )
        return int(choice)


class Window(Node):
    """Datasets of consecutive elements; resuming reads again what the next one holds.

    Args:
        source: of the elements.
        size: elements of a dataset.
        shift: from the first element of one to that of the next.
        stride: from one element of a dataset to the next.
        make: makes a dataset of a list of elements.
        drop_remainder: leave out datasets of fewer elements at the end.
    """

    def __init__(
        self, source: Node, size: int, shift: int, stride: int, make: Callable[[Any], Any], *, drop_remainder: bool
    ) -> None:
        self._source = source
        self._span = (size - 1) * stride + 1
        self._smallest = size if drop_remainder else 1
        self._shift = shift
        self._stride = stride
        self._make = make

    @override
    def start(self, state: State | None) -> None:
        self._source.reset(None if state is None else state["source"])
        self._chunks: deque[tuple[State, list[Any]]] = deque()  # where each begins, and its ``shift`` elements

    @override
    def next(self) -> Any:
        while self._shift * len(self._chunks) < self._span:
            before = self._source.state_dict()
            self._chunks.append((before, self._source.read(self._shift)))
        kept = chain.from_iterable(elements for _, elements in self._chunks)
        window = list(islice(kept, 0, self._span, self._stride))
        if len(window) < self._smallest:
            raise StopIteration
        self._chunks.popleft()
        columns = zip(*([leaf for _, leaf in leaf_paths(element)] for element in window), strict=True)
        return map_leaves(lambda _: self._make(next(columns)), window[0])

    @override
    def get_state(self) -> State:
        return {"source": self._chunks[0][0] if self._chunks else self._source.state_dict()}
