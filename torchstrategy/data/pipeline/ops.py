"""The operations behind the methods of ``ts.data.Dataset``.

While items are positions of a source with random access, an operation that only reorders or leaves out works on the
positions, and a map function waits until its element leaves the pipeline.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, ClassVar

from typing_extensions import override

from torchstrategy.data.pipeline import element_nodes, nodes
from torchstrategy.data.pipeline.access import CachedAccess, MappedAccess
from torchstrategy.data.pipeline.element_nodes import CacheMemory
from torchstrategy.data.pipeline.elements import collate, to_element
from torchstrategy.data.pipeline.failures import call_noted
from torchstrategy.data.pipeline.node import Node, Stream
from torchstrategy.data.pipeline.op import INFINITE_CARDINALITY, SHARD_HINT, UNKNOWN_CARDINALITY, Op, RandomOp
from torchstrategy.data.pipeline.parallel import ParallelMap, Prefetch
from torchstrategy.data.pipeline.randomness import Draws
from torchstrategy.data.pipeline.shuffle import Shuffle, ShuffleElements

__all__ = [
    "BatchOp",
    "CacheOp",
    "EnumerateOp",
    "FilterOp",
    "MapOp",
    "PrefetchOp",
    "RepeatOp",
    "ShardOp",
    "ShuffleOp",
    "SkipOp",
    "TakeOp",
    "UnbatchOp",
    "elements_of",
]


@dataclass(frozen=True, eq=False)
class MapOp(Op):
    """``map``."""

    fn: Callable[..., Any]
    num_parallel_calls: int

    @override
    def build(self, streams: list[Stream]) -> Stream:
        (stream,) = streams
        if stream.access is not None:
            return Stream(stream.node, MappedAccess(stream.access, self.fn, self.num_parallel_calls))
        if self.num_parallel_calls > 1:
            numbered = nodes.Number(stream.node)
            return Stream(ParallelMap(numbered, _NumberedCall(self.fn), self.num_parallel_calls))
        return Stream(element_nodes.Map(stream.node, self.fn))

    @override
    def label(self) -> str:
        return "map()"


@dataclass(frozen=True, eq=False)
class FilterOp(Op):
    """``filter``."""

    predicate: Callable[..., Any]

    @override
    def build(self, streams: list[Stream]) -> Stream:
        return Stream(element_nodes.Filter(elements_of(streams[0]), self.predicate))

    @override
    def cardinality(self) -> int:
        return UNKNOWN_CARDINALITY

    @override
    def label(self) -> str:
        return "filter()"


@dataclass(frozen=True, eq=False)
class BatchOp(Op):
    """``batch`` and ``padded_batch``."""

    size: int
    drop_remainder: bool
    stack: Callable[[list[Any], int], Any] = collate

    @property
    @override
    def batch_size(self) -> int | None:
        return self.size

    @override
    def build(self, streams: list[Stream]) -> Stream:
        node, access = streams[0]
        if access is not None and not access.num_parallel_calls and self.stack is collate:
            return Stream(element_nodes.Gather(node, access, self.size, drop_remainder=self.drop_remainder))
        source = elements_of(streams[0])
        return Stream(element_nodes.Batch(source, self.size, drop_remainder=self.drop_remainder, stack=self.stack))

    @override
    def cardinality(self) -> int:
        number = self.inputs[0].cardinality()
        if number < 0:
            return number
        return number // self.size if self.drop_remainder else -(-number // self.size)

    @override
    def label(self) -> str:
        name = "batch" if self.stack is collate else "padded_batch"
        return f"{name}({self.size}{', drop_remainder=True' if self.drop_remainder else ''})"


@dataclass(frozen=True, eq=False)
class UnbatchOp(Op):
    """``unbatch``."""

    keeps_batches: ClassVar[bool] = False

    @override
    def build(self, streams: list[Stream]) -> Stream:
        return Stream(element_nodes.Unbatch(elements_of(streams[0])))

    @override
    def cardinality(self) -> int:
        return UNKNOWN_CARDINALITY

    @override
    def label(self) -> str:
        return "unbatch()"


@dataclass(frozen=True, eq=False)
class ShuffleOp(RandomOp):
    """``shuffle``."""

    buffer_size: int
    seed: int | None
    reshuffles: bool

    only_buffers: ClassVar[bool] = True

    @override
    def build_random(self, stream: Stream, key: list[int]) -> Stream:
        node, access = stream
        kind = ShuffleElements if access is None else Shuffle
        return Stream(kind(node, self.buffer_size, key, reshuffles=self.reshuffles), access)

    @override
    def label(self) -> str:
        return f"shuffle({self.buffer_size})"

    @override
    def draw_key(self, draws: Draws) -> list[int]:
        iteration = draws.iteration(self.memory)
        if self.seed is None:
            return [draws.seed() if self.reshuffles else draws.fixed_seed(self.memory)]
        return [self.seed, *iteration] if self.reshuffles else [self.seed]


@dataclass(frozen=True, eq=False)
class RepeatOp(Op):
    """``repeat``; ``count`` is ``None`` for ever."""

    count: int | None

    @override
    def build(self, streams: list[Stream]) -> Stream:
        return Stream(nodes.Repeat(streams[0].node, self.count), streams[0].access)

    @override
    def cardinality(self) -> int:
        number = self.inputs[0].cardinality()
        if self.count == 0 or number == 0:
            return 0
        if self.count is None:
            return INFINITE_CARDINALITY
        return number if number < 0 else number * self.count

    @override
    def label(self) -> str:
        return f"repeat({'' if self.count is None else self.count})"


@dataclass(frozen=True, eq=False)
class TakeOp(Op):
    """``take``."""

    count: int

    splits_by_file: ClassVar[bool] = False

    @override
    def build(self, streams: list[Stream]) -> Stream:
        return Stream(nodes.Take(streams[0].node, self.count), streams[0].access)

    @override
    def cardinality(self) -> int:
        number = self.inputs[0].cardinality()
        if number == INFINITE_CARDINALITY or self.count == 0:
            return self.count
        return number if number < 0 else min(number, self.count)

    @override
    def label(self) -> str:
        return f"take({self.count})"


@dataclass(frozen=True, eq=False)
class SkipOp(Op):
    """``skip``."""

    count: int

    splits_by_file: ClassVar[bool] = False

    @override
    def build(self, streams: list[Stream]) -> Stream:
        return Stream(nodes.Skip(streams[0].node, self.count), streams[0].access)

    @override
    def cardinality(self) -> int:
        number = self.inputs[0].cardinality()
        return number if number < 0 else max(0, number - self.count)

    @override
    def label(self) -> str:
        return f"skip({self.count})"


@dataclass(frozen=True, eq=False)
class ShardOp(Op):
    """``shard``; both numbers are ``SHARD_HINT`` where a strategy chooses them."""

    num_shards: int
    index: int

    splits_by_file: ClassVar[bool] = False

    @property
    def is_hint(self) -> bool:
        """A strategy chooses the numbers."""
        return self.num_shards == SHARD_HINT

    @override
    def build(self, streams: list[Stream]) -> Stream:
        node, access = streams[0]
        return streams[0] if self.is_hint else Stream(nodes.Shard(node, self.num_shards, self.index), access)

    @override
    def cardinality(self) -> int:
        number = self.inputs[0].cardinality()
        return number if number < 0 or self.is_hint else max(0, -(-(number - self.index) // self.num_shards))

    @override
    def label(self) -> str:
        return f"shard({self.num_shards}, {self.index})"


@dataclass(frozen=True, eq=False)
class PrefetchOp(Op):
    """``prefetch``."""

    buffer_size: int

    only_buffers: ClassVar[bool] = True

    @override
    def build(self, streams: list[Stream]) -> Stream:
        return Stream(Prefetch(elements_of(streams[0]), self.buffer_size))

    @override
    def label(self) -> str:
        return f"prefetch({self.buffer_size})"


@dataclass(frozen=True, eq=False)
class EnumerateOp(Op):
    """``enumerate``."""

    start: int

    splits_by_file: ClassVar[bool] = False
    keeps_batches: ClassVar[bool] = False  # the number has no batch dimension

    @override
    def build(self, streams: list[Stream]) -> Stream:
        return Stream(nodes.Enumerate(elements_of(streams[0]), self.start))

    @override
    def label(self) -> str:
        return f"enumerate({self.start})"


@dataclass(frozen=True, eq=False)
class CacheOp(Op):
    """``cache``: its memory lives as long as the dataset, and so do the keys of what is below it."""

    memory: CacheMemory = field(default_factory=CacheMemory)

    only_buffers: ClassVar[bool] = True

    @override
    def make(self, keys: Iterator[list[int]]) -> Stream:
        (source,) = self.inputs
        own = list(islice(keys, len(source.random_ops())))
        stream = source.make(iter(own))
        if stream.access is not None and not own:
            return Stream(stream.node, CachedAccess(stream.access, self.memory.by_position))
        return Stream(element_nodes.Cache(lambda: elements_of(source.make(iter(own))), self.memory))

    @override
    def resolve(self, draws: Draws) -> list[list[int]]:
        if self.memory.keys is None:
            self.memory.keys = super().resolve(draws)
        return self.memory.keys

    @override
    def adopt(self, keys: Sequence[list[int]]) -> None:
        if self.memory.keys != list(keys):
            self.memory.forget()
        self.memory.keys = list(keys)
        super().adopt(keys)

    @override
    def rebuilt(self, inputs: tuple[Op, ...]) -> Op:
        return CacheOp(inputs)

    @override
    def label(self) -> str:
        return "cache()"


def elements_of(stream: Stream) -> Node:
    """Return a node of elements."""
    node, access = stream
    if access is None:
        return node
    if access.num_parallel_calls > 1:
        return ParallelMap(node, access.get, access.num_parallel_calls)
    return element_nodes.Lookup(node, access)


class _NumberedCall:
    """Calls a user's function on numbered elements."""

    def __init__(self, fn: Callable[..., Any]) -> None:
        self._fn = fn

    def __call__(self, item: tuple[int, Any]) -> Any:
        number, element = item
        return to_element(call_noted("map", self._fn, element, f"element {number}"))
