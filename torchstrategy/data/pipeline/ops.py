"""The operations behind the methods of ``ts.data.Dataset``.

While items are positions of a source with random access, an operation that only reorders or leaves out works on the
positions, and a map function waits until its element leaves the pipeline.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from typing import Any, ClassVar

from typing_extensions import override

from torchstrategy.data.pipeline import element_nodes, nodes
from torchstrategy.data.pipeline.access import RAW, CachedAccess, MappedAccess
from torchstrategy.data.pipeline.batches import collate
from torchstrategy.data.pipeline.element_nodes import CacheMemory
from torchstrategy.data.pipeline.elements import call_noted, to_element
from torchstrategy.data.pipeline.op import INFINITE_CARDINALITY, SHARD_HINT, Node, Op, RandomOp, Stream
from torchstrategy.data.pipeline.parallel import ParallelMap, Prefetch
from torchstrategy.data.pipeline.randomness import Draws, random_key
from torchstrategy.data.pipeline.shuffle import Shuffle, ShuffleElements

__all__ = [
    "BatchOp",
    "CacheOp",
    "EnumerateOp",
    "FilterOp",
    "MapOp",
    "PrefetchOp",
    "RepeatOp",
    "ScanOp",
    "ShardOp",
    "ShuffleOp",
    "SkipOp",
    "TakeOp",
    "TakeWhileOp",
    "UnbatchOp",
    "UniqueOp",
    "elements_of",
]


@dataclass(frozen=True, eq=False)
class MapOp(Op):
    """``map``."""

    form: ClassVar[str] = "map()"

    fn: Callable[..., Any]
    num_parallel_calls: int

    @override
    def build(self, streams: list[Stream]) -> Stream:
        (stream,) = streams
        if stream.access is not None and stream.access.by_position:
            return Stream(stream.node, MappedAccess(stream.access, self.fn, self.num_parallel_calls))
        if self.num_parallel_calls > 1:
            numbered = nodes.Number(elements_of(stream))
            return Stream(ParallelMap(numbered, partial(_call_numbered, self.fn), self.num_parallel_calls))
        return Stream(element_nodes.Map(elements_of(stream), self.fn), RAW)


@dataclass(frozen=True, eq=False)
class FilterOp(Op):
    """``filter``."""

    keeps_count: ClassVar[bool] = False
    form: ClassVar[str] = "filter()"

    predicate: Callable[..., Any]

    @override
    def build(self, streams: list[Stream]) -> Stream:
        return Stream(element_nodes.Filter(elements_of(streams[0]), self.predicate))


@dataclass(frozen=True, eq=False)
class TakeWhileOp(FilterOp):
    """``take_while``."""

    form: ClassVar[str] = "take_while()"
    splits_by_file: ClassVar[bool] = False

    @override
    def build(self, streams: list[Stream]) -> Stream:
        return Stream(element_nodes.TakeWhile(elements_of(streams[0]), self.predicate))


@dataclass(frozen=True, eq=False)
class ScanOp(Op):
    """``scan``."""

    form: ClassVar[str] = "scan()"
    splits_by_file: ClassVar[bool] = False

    initial: Any
    fn: Callable[..., Any]

    @override
    def build(self, streams: list[Stream]) -> Stream:
        return Stream(element_nodes.Scan(elements_of(streams[0]), self.initial, self.fn))


@dataclass(frozen=True, eq=False)
class UniqueOp(Op):
    """``unique``."""

    keeps_count: ClassVar[bool] = False
    form: ClassVar[str] = "unique()"
    splits_by_file: ClassVar[bool] = False

    @override
    def build(self, streams: list[Stream]) -> Stream:
        return Stream(element_nodes.Unique(elements_of(streams[0])))


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
        stack = self.stack
        if access is not None and not access.num_parallel_calls and stack is collate:
            stack = access.gather
        else:
            node = elements_of(streams[0])
        return Stream(element_nodes.Batch(node, self.size, stack, drop_remainder=self.drop_remainder))

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

    keeps_count: ClassVar[bool] = False
    form: ClassVar[str] = "unbatch()"
    keeps_batches: ClassVar[bool] = False

    @override
    def build(self, streams: list[Stream]) -> Stream:
        return Stream(element_nodes.Unbatch(elements_of(streams[0])))


@dataclass(frozen=True, eq=False)
class ShuffleOp(RandomOp):
    """``shuffle``."""

    form: ClassVar[str] = "shuffle({0.buffer_size})"
    only_buffers: ClassVar[bool] = True

    buffer_size: int
    seed: int | None
    reshuffles: bool

    @override
    def build_random(self, stream: Stream, key: list[int]) -> Stream:
        node, access = stream
        kind = Shuffle if access is not None and access.by_position else ShuffleElements
        return Stream(kind(node, self.buffer_size, key, reshuffles=self.reshuffles), access)

    @override
    def draw_key(self, draws: Draws) -> list[int]:
        return random_key(draws, self.memory, self.seed, changes=self.reshuffles)


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

    form: ClassVar[str] = "take({0.count})"
    splits_by_file: ClassVar[bool] = False

    count: int

    @override
    def build(self, streams: list[Stream]) -> Stream:
        return Stream(nodes.Take(streams[0].node, self.count), streams[0].access)

    @override
    def cardinality(self) -> int:
        number = self.inputs[0].cardinality()
        if number == INFINITE_CARDINALITY or self.count == 0:
            return self.count
        return number if number < 0 else min(number, self.count)


@dataclass(frozen=True, eq=False)
class SkipOp(Op):
    """``skip``."""

    form: ClassVar[str] = "skip({0.count})"
    splits_by_file: ClassVar[bool] = False

    count: int

    @override
    def build(self, streams: list[Stream]) -> Stream:
        return Stream(nodes.Skip(streams[0].node, self.count), streams[0].access)

    @override
    def cardinality(self) -> int:
        number = self.inputs[0].cardinality()
        return number if number < 0 else max(0, number - self.count)


@dataclass(frozen=True, eq=False)
class ShardOp(Op):
    """``shard``; both numbers are ``SHARD_HINT`` where a strategy chooses them."""

    form: ClassVar[str] = "shard({0.num_shards}, {0.index})"
    splits_by_file: ClassVar[bool] = False

    num_shards: int
    index: int

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


@dataclass(frozen=True, eq=False)
class PrefetchOp(Op):
    """``prefetch``."""

    form: ClassVar[str] = "prefetch({0.buffer_size})"
    only_buffers: ClassVar[bool] = True

    buffer_size: int

    @override
    def build(self, streams: list[Stream]) -> Stream:
        return Stream(Prefetch(elements_of(streams[0]), self.buffer_size))


@dataclass(frozen=True, eq=False)
class EnumerateOp(Op):
    """``enumerate``."""

    form: ClassVar[str] = "enumerate({0.start})"
    splits_by_file: ClassVar[bool] = False
    keeps_batches: ClassVar[bool] = False  # the number has no batch dimension

    start: int

    @override
    def build(self, streams: list[Stream]) -> Stream:
        return Stream(nodes.Enumerate(elements_of(streams[0]), self.start))


class _Cached:
    """What a ``cache()`` keeps, and the keys of what is below it, which decide the order.

    Args:
        first: the keys of the first iteration, once there are some. Copies share it: they may be parts of one split.
    """

    def __init__(self, first: list[list[list[int]]] | None = None) -> None:
        self.first = [] if first is None else first
        self.keys: list[list[int]] | None = None
        self.elements = CacheMemory()

    def of(self, keys: list[list[int]]) -> CacheMemory:
        """Return what is kept; nothing if the order is a new one. Iterators keep what they have."""
        if self.keys not in (None, keys):
            self.elements = CacheMemory()
        self.keys = keys
        return self.elements


@dataclass(frozen=True, eq=False)
class CacheOp(Op):
    """``cache``: its memory lives as long as the dataset."""

    form: ClassVar[str] = "cache()"
    only_buffers: ClassVar[bool] = True

    memory: _Cached = field(default_factory=_Cached)

    @override
    def make(self, keys: Iterator[list[int]]) -> Stream:
        (source,) = self.inputs
        own = list(islice(keys, len(source.random_ops())))
        kept = self.memory.of(own)
        stream = source.make(iter(own))
        is_repeated = any(isinstance(op, RepeatOp) for op in source.tree())  # elements of one position may differ
        if stream.access is not None and stream.access.by_position and not own and not is_repeated:
            return Stream(stream.node, CachedAccess(stream.access, kept.by_position))
        return Stream(element_nodes.Cache(lambda: elements_of(source.make(iter(own))), kept))

    @override
    def resolve(self, draws: Draws) -> list[list[int]]:
        own_draws = draws.for_cache(self.memory)
        if own_draws is not None:
            return super().resolve(own_draws)
        if not self.memory.first:
            self.memory.first.append(super().resolve(draws))
        return self.memory.first[0]

    @override
    def kept_keys(self) -> list[list[int]]:
        return self.memory.first[0] if self.memory.first else super().kept_keys()

    @override
    def adopt(self, keys: Sequence[list[int]]) -> None:
        if [] not in keys:
            self.memory.first[:] = [list(keys)]
        super().adopt(keys)

    @override
    def rebuilt(self, inputs: tuple[Op, ...]) -> Op:
        return CacheOp(inputs, _Cached(self.memory.first))


def elements_of(stream: Stream) -> Node:
    """Return a node of elements."""
    node, access = stream
    if access is None:
        return node
    if access.num_parallel_calls > 1:
        return ParallelMap(node, access.get, access.num_parallel_calls)
    return element_nodes.Lookup(node, access)


def _call_numbered(fn: Callable[..., Any], item: tuple[int, Any]) -> Any:
    number, element = item
    return to_element(call_noted("map", fn, element, f"element {number}"))
