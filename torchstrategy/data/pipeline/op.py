"""An operation of a pipeline: an immutable tree, from which each iteration builds its nodes."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, ClassVar

from torchstrategy.data.pipeline.node import Stream
from torchstrategy.data.pipeline.randomness import Draws, Memory

__all__ = ["INFINITE_CARDINALITY", "SHARD_HINT", "UNKNOWN_CARDINALITY", "Op", "RandomOp"]

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
