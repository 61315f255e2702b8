"""The operations that read several datasets."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

from typing_extensions import override

from torchstrategy.data.pipeline import nodes
from torchstrategy.data.pipeline.nested import Interleave
from torchstrategy.data.pipeline.node import Node, Stream
from torchstrategy.data.pipeline.op import INFINITE_CARDINALITY, UNKNOWN_CARDINALITY, Op, RandomOp
from torchstrategy.data.pipeline.ops import elements_of
from torchstrategy.data.pipeline.randomness import Draws, KeyedDraws
from torchstrategy.data.pipeline.user_functions import call_noted, function_name

__all__ = ["ConcatenateOp", "InterleaveOp", "ZipOp"]


@dataclass(frozen=True, eq=False)
class ZipOp(Op):
    """``zip``; ``structure`` says how the inputs' elements are nested, by number."""

    structure: Any

    splits_by_file: ClassVar[bool] = False

    @override
    def build(self, streams: list[Stream]) -> Stream:
        return Stream(nodes.Zip([elements_of(stream) for stream in streams], self.structure))

    @override
    def cardinality(self) -> int:
        numbers = [op.cardinality() for op in self.inputs]
        if UNKNOWN_CARDINALITY in numbers:
            return UNKNOWN_CARDINALITY
        return min((number for number in numbers if number >= 0), default=INFINITE_CARDINALITY)

    @override
    def label(self) -> str:
        return f"zip({', '.join(map(Op.describe, self.inputs))})"


@dataclass(frozen=True, eq=False)
class ConcatenateOp(Op):
    """``concatenate``."""

    splits_by_file: ClassVar[bool] = False

    @override
    def build(self, streams: list[Stream]) -> Stream:
        return Stream(nodes.Concatenate(*map(elements_of, streams)))

    @override
    def cardinality(self) -> int:
        numbers = [op.cardinality() for op in self.inputs]
        if INFINITE_CARDINALITY in numbers:
            return INFINITE_CARDINALITY
        return UNKNOWN_CARDINALITY if UNKNOWN_CARDINALITY in numbers else sum(numbers)

    @override
    def label(self) -> str:
        return f"concatenate({', '.join(map(Op.describe, self.inputs))})"


@dataclass(frozen=True, eq=False)
class InterleaveOp(RandomOp):
    """``interleave``, and ``flat_map`` with one dataset at a time."""

    keeps_count: ClassVar[bool] = False
    form: ClassVar[str] = "interleave({0.cycle_length}, {0.block_length})"
    keeps_batches: ClassVar[bool] = False

    fn: Callable[..., Any]
    cycle_length: int
    block_length: int

    @override
    def build_random(self, stream: Stream, key: list[int]) -> Stream:
        opener = _OpenInner(self.fn, key)
        return Stream(Interleave(elements_of(stream), opener, self.cycle_length, self.block_length))

    @override
    def draw_key(self, draws: Draws) -> list[int]:
        return [draws.silent_seed(), *draws.iteration(self.memory)]


class _OpenInner:
    """Makes the nodes of the dataset that a user's function returns for an element."""

    def __init__(self, fn: Callable[..., Any], key: list[int]) -> None:
        self._fn = fn
        self._key = key

    def __call__(self, element: Any, repetition: int, number: int) -> Node:
        dataset = call_noted("flat_map or interleave", self._fn, element, f"element {number}")
        op = getattr(dataset, "_op", None)
        if not isinstance(op, Op):
            raise TypeError(
                f"The function {function_name(self._fn)} of flat_map or interleave must return a ts.data.Dataset. "
                f"Received: {type(dataset).__name__}"
            )
        return elements_of(op.make(iter(op.resolve(KeyedDraws(self._key, [repetition, number])))))
