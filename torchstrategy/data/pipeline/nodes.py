"""Nodes for positions and elements alike: they count, leave out, repeat and number their items."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from typing_extensions import override

from torchstrategy.data.pipeline.elements import map_leaves
from torchstrategy.data.pipeline.node import Node, State

__all__ = ["Concatenate", "Enumerate", "Number", "Positions", "Repeat", "Shard", "Skip", "Take", "Zip"]


class Positions(Node):
    """The positions ``0 ... size - 1``.

    Args:
        size: how many there are.
    """

    def __init__(self, size: int) -> None:
        super().__init__()
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


class Take(Node):
    """The first ``count`` items.

    Args:
        source: of the items.
        count: how many.
    """

    def __init__(self, source: Node, count: int) -> None:
        super().__init__()
        self._source = source
        self._count = count

    @override
    def start(self, state: State | None) -> None:
        self._left = self._count if state is None else state["left"]
        self._source.reset(None if state is None else state["source"])

    @override
    def read(self, count: int) -> list[Any]:
        items = self._source.read(min(count, self._left)) if self._left else []
        self._left -= len(items)
        return items

    @override
    def skip(self, count: int) -> int:
        skipped = self._source.skip(min(count, self._left)) if self._left else 0
        self._left -= skipped
        return skipped

    @override
    def get_state(self) -> State:
        return {"left": self._left, "source": self._source.state_dict()}


class Skip(Node):
    """What follows the first ``count`` items.

    Args:
        source: of the items.
        count: how many are left out.
    """

    def __init__(self, source: Node, count: int) -> None:
        super().__init__()
        self._source = source
        self._count = count

    @override
    def start(self, state: State | None) -> None:
        self._is_done = state is not None and state["is_done"]
        self._source.reset(None if state is None else state["source"])

    @override
    def read(self, count: int) -> list[Any]:
        self._leave_out()
        return self._source.read(count)

    @override
    def skip(self, count: int) -> int:
        self._leave_out()
        return self._source.skip(count)

    @override
    def get_state(self) -> State:
        return {"is_done": self._is_done, "source": self._source.state_dict()}

    def _leave_out(self) -> None:
        if not self._is_done:
            self._source.skip(self._count)
            self._is_done = True


class Shard(Node):
    """Every ``num_shards``-th item.

    Args:
        source: of the items.
        num_shards: how many shards there are.
        index: which one this is.
    """

    def __init__(self, source: Node, num_shards: int, index: int) -> None:
        super().__init__()
        self._source = source
        self._num_shards = num_shards
        self._index = index

    @override
    def start(self, state: State | None) -> None:
        self._ahead = self._index if state is None else state["ahead"]
        self._source.reset(None if state is None else state["source"])

    @override
    def read(self, count: int) -> list[Any]:
        items: list[Any] = []
        while len(items) < count and self._source.skip(self._ahead) == self._ahead:
            item = self._source.read(1)
            if not item:
                self._ahead = 0
                break
            items += item
            self._ahead = self._num_shards - 1
        return items

    @override
    def skip(self, count: int) -> int:
        if not count:
            return 0
        found = self._source.skip(wanted := self._ahead + 1 + (count - 1) * self._num_shards)
        complete = found == wanted
        skipped = count if complete else max(0, -(-(found - self._ahead) // self._num_shards))
        self._ahead = self._num_shards - 1
        return skipped

    @override
    def get_state(self) -> State:
        return {"ahead": self._ahead, "source": self._source.state_dict()}


class Repeat(Node):
    """The items again and again; ends if there are none.

    Args:
        source: of the items.
        count: how many times; ``None`` for ever.
    """

    def __init__(self, source: Node, count: int | None) -> None:
        super().__init__()
        self._source = source
        self._count = count

    @override
    def start(self, state: State | None) -> None:
        self._is_ended = self._count == 0 if state is None else state["is_ended"]
        self._repetition = 0 if state is None else state["repetition"]
        self._is_empty = state is None or state["is_empty"]  # no item yet in this repetition
        self._source.reset(None if state is None else state["source"])

    @override
    def read(self, count: int) -> list[Any]:
        items: list[Any] = []
        while not self._is_ended and len(items) < count:
            found = self._source.read(wanted := count - len(items))
            items += found
            self._count_in(len(found), wanted)
        return items

    @override
    def skip(self, count: int) -> int:
        skipped = 0
        while not self._is_ended and skipped < count:
            found = self._source.skip(wanted := count - skipped)
            skipped += found
            self._count_in(found, wanted)
        return skipped

    @override
    def get_state(self) -> State:
        return {
            "repetition": self._repetition,
            "is_ended": self._is_ended,
            "is_empty": self._is_empty,
            "source": self._source.state_dict(),
        }

    def _count_in(self, found: int, wanted: int) -> None:
        self._is_empty = self._is_empty and found == 0
        if found == wanted:
            return
        self._repetition += 1
        self._is_ended = self._repetition == self._count or (self._count is None and self._is_empty)
        if not self._is_ended:
            self._is_empty = True
            self._source.reset()


class Number(Node):
    """Pairs of a number and an item.

    Args:
        source: of the items.
        first: the first number.
    """

    def __init__(self, source: Node, first: int = 0) -> None:
        super().__init__()
        self._source = source
        self._first = first

    @override
    def start(self, state: State | None) -> None:
        self._number = self._first if state is None else state["number"]
        self._source.reset(None if state is None else state["source"])

    @override
    def next(self) -> Any:
        item = next(self._source)
        self._number += 1
        return self._number - 1, item

    @override
    def skip(self, count: int) -> int:
        skipped = self._source.skip(count)
        self._number += skipped
        return skipped

    @override
    def get_state(self) -> State:
        return {"number": self._number, "source": self._source.state_dict()}


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
        super().__init__()
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
        try:
            elements = [next(source) for source in self._sources]
        except StopIteration:
            self._is_ended = True
            raise
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
        super().__init__()
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
    def skip(self, count: int) -> int:
        skipped = self._sources[self._turn].skip(count)
        if skipped < count and self._turn == 0:
            self._turn = 1
            skipped += self._sources[1].skip(count - skipped)
        return skipped

    @override
    def get_state(self) -> State:
        return {"turn": self._turn, "sources": [source.state_dict() for source in self._sources]}
