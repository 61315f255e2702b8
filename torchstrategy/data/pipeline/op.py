"""The bases of a pipeline's operations, an immutable tree, and of the nodes that each iteration builds from them.

The methods are those of ``torchdata.nodes.BaseNode``.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, ClassVar, NamedTuple

import numpy as np
from typing_extensions import override

from torchstrategy.data.pipeline.access import Access
from torchstrategy.data.pipeline.randomness import Draws, Memory

__all__ = [
    "INFINITE_CARDINALITY",
    "OTHER_POSITION",
    "SHARD_HINT",
    "UNKNOWN_CARDINALITY",
    "Node",
    "Op",
    "RandomOp",
    "SourcedNode",
    "State",
    "Stream",
]

State = dict[str, Any]
#: For a position of a dataset that went through a strategy where it is loaded into one that did not, or the other way.
OTHER_POSITION = (
    "The default strategy returns datasets as they are, and the others' count global batches, so neither goes on where "
    "the other was. Save and restore under one that distributes: with one replica ts.OneDeviceStrategy."
)
_SKIP_CHUNK = 1024


class Node(Iterator[Any]):
    """A node that also reads and skips several items at once.

    Subclasses fill in ``start`` and ``get_state``, and ``next`` or ``read``. A state is never changed after it was
    given away. Items are elements, or what an ``Access`` makes elements of.
    """

    _has_begun = False
    chunk = _SKIP_CHUNK  # items that are read at once where none or all are needed

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
            wanted = min(count - skipped, self.chunk)
            found = len(self.read(wanted))
            skipped += found
            if found < wanted:
                break
        return skipped

    def read_singly(self) -> None:
        """Read one item at a time, here and below, so that an error loses that one only."""
        self.chunk = 1
        for value in vars(self).values():
            for node in value if isinstance(value, list) else [value]:
                if isinstance(node, Node):
                    node.read_singly()


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


INFINITE_CARDINALITY = -1
UNKNOWN_CARDINALITY = -2
SHARD_HINT = -1


@dataclass(frozen=True, eq=False)
class Op:
    """One operation.

    Args:
        inputs: the operations whose elements it gets.
    """

    inputs: tuple[Op, ...]

    form: ClassVar[str]  # how it is called, as a format of itself
    keeps_count: ClassVar[bool] = True  # has as many elements as its input, unless ``cardinality`` says otherwise
    keeps_batches: ClassVar[bool] = True  # its elements are batches if its inputs' are
    splits_by_file: ClassVar[bool] = True  # over parts of the files it gives, together, the same elements
    only_buffers: ClassVar[bool] = False  # its elements are its input's, perhaps in another order

    def build(self, streams: list[Stream]) -> Stream:
        """Make this operation's nodes on top of its inputs'."""
        raise NotImplementedError

    def label(self) -> str:
        """Return the operation as it is called, without functions."""
        return self.form.format(self)

    def cardinality(self) -> int:
        """Return the number of elements, or a negative number if it is infinite or unknown."""
        return self.inputs[0].cardinality() if self.keeps_count else UNKNOWN_CARDINALITY

    @property
    def batch_size(self) -> int | None:
        """The size of the batches that the elements are."""
        sizes = {op.batch_size for op in self.inputs} if self.keeps_batches else set()
        return sizes.pop() if len(sizes) == 1 else None

    @property
    def num_files(self) -> int | None:
        """The number of files that can be shared out."""
        files = self.source_files()
        return None if files is None else len(files)

    def source_files(self) -> tuple[Any, ...] | None:
        """Return the files that can be shared out; ``None`` if there is no single source of files."""
        return self.inputs[0].source_files() if len(self.inputs) == 1 else None

    def with_part_of_files(self, num_shards: int, index: int) -> Op:  # noqa: ARG002 - for sources of files
        """Return the operation over every ``num_shards``-th of its own files."""
        return self

    def make(self, keys: Iterator[list[int]]) -> Stream:
        """Make the nodes of an iteration, from the keys of the random operations."""
        return self.build([source.make(keys) for source in self.inputs])

    def resolve(self, draws: Draws) -> list[list[int]]:
        """Return the keys of an iteration that begins."""
        return [key for source in self.inputs for key in source.resolve(draws)]

    def kept_keys(self) -> list[list[int]]:
        """Return the keys that all iterations share, those of caches, and ``[]`` for each other one."""
        return [key for source in self.inputs for key in source.kept_keys()]

    def adopt(self, keys: Sequence[list[int]]) -> None:
        """Take over the keys of a restored iteration."""
        remaining = iter(keys)
        for source in self.inputs:
            source.adopt(list(islice(remaining, len(source.random_ops()))))

    def random_ops(self) -> list[RandomOp]:
        """Return the random operations in the order of their keys."""
        return [op for op in self.tree() if isinstance(op, RandomOp)]

    def tree(self) -> list[Op]:
        """Return all operations, inputs first."""
        return [*(op for source in self.inputs for op in source.tree()), self]

    def transformed(self, change: Callable[[Op], Op], done: dict[int, Op] | None = None) -> Op:
        """Return a copy of the tree, with memories of its own, in which every operation was changed."""
        done = {} if done is None else done
        if id(self) not in done:  # one that is used twice stays one
            done[id(self)] = change(self.rebuilt(tuple(source.transformed(change, done) for source in self.inputs)))
        return done[id(self)]

    def rebuilt(self, inputs: tuple[Op, ...]) -> Op:
        """Return the operation on other inputs, with a memory of its own."""
        return dataclasses.replace(self, inputs=inputs)

    def describe(self) -> str:
        """Return the tree as it is written."""
        return f"{self.inputs[0].describe()}.{self.label()}" if len(self.inputs) == 1 else self.label()


@dataclass(frozen=True, eq=False)
class RandomOp(Op):
    """An operation whose nodes need a key."""

    memory: Memory = dataclasses.field(default_factory=Memory, kw_only=True)

    def draw_key(self, draws: Draws) -> list[int]:
        """Return the key of an iteration that begins."""
        raise NotImplementedError

    def build_random(self, stream: Stream, key: list[int]) -> Stream:
        """Make this operation's nodes."""
        raise NotImplementedError

    def make(self, keys: Iterator[list[int]]) -> Stream:
        """Make the nodes of an iteration."""
        stream = self.inputs[0].make(keys)
        return self.build_random(stream, next(keys))

    def resolve(self, draws: Draws) -> list[list[int]]:
        """Return the keys of an iteration that begins."""
        return [*super().resolve(draws), self.draw_key(draws)]

    def kept_keys(self) -> list[list[int]]:
        """Return the keys that all iterations share."""
        return [*super().kept_keys(), []]

    def rebuilt(self, inputs: tuple[Op, ...]) -> Op:
        """Return the operation on other inputs, with a memory of its own."""
        return dataclasses.replace(self, inputs=inputs, memory=copy.copy(self.memory))
