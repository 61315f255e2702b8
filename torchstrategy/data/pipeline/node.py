"""What every node of a pipeline can do: it is an iterator that begins anew, or at a state that it gave away.

The methods are those of ``torchdata.nodes.BaseNode``.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar, NamedTuple

import numpy as np
from typing_extensions import override

from torchstrategy.data.pipeline.access import Access

__all__ = ["Node", "SourcedNode", "State", "Stream"]

State = dict[str, Any]
_SKIP_CHUNK = 1024


class Node(Iterator[Any]):
    """A node that also reads and skips several items at once.

    Subclasses fill in ``start`` and ``get_state``, and ``next`` or ``read``. A state is never changed after it was
    given away. Items are elements, or what an ``Access`` makes elements of.
    """

    _has_begun = False

    def __next__(self) -> Any:
        if not self._has_begun:
            self.reset()
        return self.next()

    def reset(self, initial_state: State | None = None) -> None:
        """Begin, or continue at a state."""
        self._has_begun = True
        self.start(initial_state)

    def state_dict(self) -> State:
        """Return where the node is; ``reset`` continues there."""
        if not self._has_begun:
            self.reset()
        return self.get_state()

    def get_state(self) -> State:
        """Return where the node is, which has begun."""
        raise NotImplementedError

    def start(self, state: State | None) -> None:
        """Begin, or continue at a state; a second beginning is the next repetition."""
        raise NotImplementedError

    def next(self) -> Any:
        """Return the next item."""
        items = self.read(1)
        if not items:
            raise StopIteration
        return items[0]

    def read(self, count: int) -> list[Any]:
        """Return the next ``count`` items; fewer only at the end."""
        items: list[Any] = []
        try:
            while len(items) < count:
                items.append(self.next())
        except StopIteration:
            pass
        return items

    def read_integers(self, count: int) -> np.ndarray[Any, Any]:
        """Return the next ``count`` items as an array, if they are integers."""
        return np.array(self.read(count), dtype=np.int64)

    def skip(self, count: int) -> int:
        """Leave items out, and return how many there were; fewer than ``count`` only at the end."""
        skipped = 0
        while skipped < count:
            wanted = min(count - skipped, _SKIP_CHUNK)
            found = len(self.read(wanted))
            skipped += found
            if found < wanted:
                break
        return skipped


class SourcedNode(Node):
    """A node that reads one other node.

    Subclasses fill in ``begin``, which sets the attributes named in ``saved``, and ``next`` or ``read``.

    Args:
        source: the other node.
    """

    saved: ClassVar[tuple[str, ...]] = ()  # attributes that make up the state

    def __init__(self, source: Node) -> None:
        self._source = source

    def begin(self) -> None:
        """Set the attributes that are saved."""

    @override
    def start(self, state: State | None) -> None:
        self.begin()
        if state is not None:
            for name in self.saved:
                setattr(self, name, state[name])
        self._source.reset(None if state is None else state["source"])

    @override
    def get_state(self) -> State:
        return {name: getattr(self, name) for name in self.saved} | {"source": self._source.state_dict()}


class Stream(NamedTuple):
    """Items, and what makes elements of them if they are none."""

    node: Node
    access: Access | None = None
