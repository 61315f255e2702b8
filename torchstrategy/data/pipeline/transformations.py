"""The methods of ``ts.data.Dataset`` that make a dataset of a dataset."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from typing_extensions import Self

from torchstrategy.data.pipeline import ops
from torchstrategy.data.pipeline.batches import PaddedStack
from torchstrategy.data.pipeline.dataset_base import Pipeline
from torchstrategy.data.pipeline.dataset_options import (
    AUTOTUNE,
    check_callable,
    check_int,
    check_shard,
    parallel_calls,
)
from torchstrategy.data.pipeline.nested import ConcatenateOp, InterleaveOp
from torchstrategy.data.pipeline.op import SHARD_HINT
from torchstrategy.errors import UnimplementedError

__all__ = ["Transformations"]

_AUTOTUNED_BUFFER, _AUTOTUNED_CYCLE = 2, 4


class Transformations(Pipeline):
    """A dataset with its fluent methods; each returns a new dataset."""

    def map(
        self,
        map_func: Callable[..., Any],
        num_parallel_calls: int | None = None,
        deterministic: bool | None = None,  # noqa: ARG002, FBT001 - tf's signature; the order is always kept
    ) -> Self:
        """Apply a function to every element.

        Where elements come from ``from_tensor_slices``, ``from_tensors`` or ``range`` and were only reordered,
        repeated or left out, the function is called when an element leaves those operations, whatever the order in
        which they were written. So a shuffle buffer never holds mapped elements, and skipped ones cost nothing.

        Args:
            map_func: takes an element; a plain tuple is unpacked into arguments. What it returns becomes an element:
                numbers, arrays and lists become tensors.
            num_parallel_calls: threads that call it; ``ts.data.AUTOTUNE`` lets the library choose, ``None`` means
                none. Elements keep their order. Random numbers that functions draw in threads come in an order that
                differs between runs: draw in a function without threads where runs must be equal.
            deterministic: accepted for tf's sake; the order is kept even with ``False``.

        Raises:
            TypeError: ``map_func`` is no function.
            InvalidArgumentError: ``num_parallel_calls`` is not positive.

        Example:
            >>> list(ts.data.Dataset.range(3).map(lambda x: x * 2))
            [tensor(0), tensor(2), tensor(4)]
        """
        check_callable("map_func", map_func)
        return self._with(ops.MapOp((self._op,), map_func, parallel_calls(num_parallel_calls)))

    def filter(self, predicate: Callable[..., Any]) -> Self:
        """Keep the elements for which a function is true.

        Args:
            predicate: takes an element, a plain tuple unpacked into arguments, and returns one truth value.

        Raises:
            TypeError: ``predicate`` is no function; while iterating: it returned something else, such as ``None``.

        Example:
            >>> list(ts.data.Dataset.range(5).filter(lambda x: x % 2 == 1))
            [tensor(1), tensor(3)]
        """
        check_callable("predicate", predicate)
        return self._with(ops.FilterOp((self._op,), predicate))

    def cache(self, filename: str = "") -> Self:
        """Keep the elements in memory, so that what comes before is done once.

        A shuffle before ``cache`` keeps its first order, as in tf. The memory belongs to the dataset and those derived
        from it. It is not part of a state: after resuming in a new process it is filled again.

        Args:
            filename: must be empty.

        Raises:
            UnimplementedError: ``filename`` is not empty.

        Example:
            >>> dataset = ts.data.Dataset.range(3).map(lambda x: x * 2).cache()
            >>> list(dataset) == list(dataset)
            True
        """
        if filename:
            raise UnimplementedError(
                "cache() keeps elements in memory only. To keep them in files, write them once with save(), and read "
                "them with ts.data.Dataset.load()."
            )
        return self._with(ops.CacheOp((self._op,)))

    def shuffle(
        self,
        buffer_size: int,
        seed: int | None = None,
        reshuffle_each_iteration: bool | None = None,  # noqa: FBT001 - tf's signature
    ) -> Self:
        """Shuffle the elements.

        A buffer is filled, and an element chosen from it at random is replaced by the next one. For a complete shuffle
        the buffer must hold all elements. It holds their positions only, not the elements, if they come from
        ``from_tensor_slices``, ``from_tensors`` or ``range`` and were at most mapped, reordered or left out.

        Args:
            buffer_size: elements to choose from.
            seed: with it the order depends on the seed, on how many iterations of this operation were begun before, and
                on the repetition by ``repeat``. Without it, each iteration takes a seed from torch's random stream when
                its first element is read, so ``torch.manual_seed`` makes it reproducible.
            reshuffle_each_iteration: have another order in each iteration and repetition; ``None`` means yes.

        Raises:
            TypeError: an argument is no integer.
            InvalidArgumentError: ``buffer_size`` is not positive.

        Example:
            >>> dataset = ts.data.Dataset.range(8).shuffle(8, seed=3)
            >>> sorted(map(int, dataset)) == list(range(8)), list(dataset) == list(dataset)
            (True, False)
        """
        size = check_int("buffer_size", buffer_size, 1)
        seed = None if seed is None else check_int("seed", seed)
        return self._with(ops.ShuffleOp((self._op,), size, seed, reshuffle_each_iteration is not False))

    def repeat(self, count: int | None = None) -> Self:
        """Repeat the dataset.

        Args:
            count: how many times; ``None`` or -1 for ever. A dataset that turns out to be empty is not repeated.

        Raises:
            TypeError: ``count`` is no integer.
            InvalidArgumentError: it is below -1.

        Example:
            >>> [int(x) for x in ts.data.Dataset.range(2).repeat(3)]
            [0, 1, 0, 1, 0, 1]
        """
        return self._with(ops.RepeatOp((self._op,), None if count is None else _count(count)))

    def batch(
        self,
        batch_size: int,
        drop_remainder: bool = False,  # noqa: FBT001, FBT002 - tf's signature
        num_parallel_calls: int | None = None,
        deterministic: bool | None = None,  # noqa: ARG002, FBT001 - tf's signature; the order is always kept
    ) -> Self:
        """Combine consecutive elements into batches.

        For a distributed dataset this is the *global* batch, over all replicas.

        Args:
            batch_size: elements of a batch.
            drop_remainder: leave out a last batch of fewer elements.
            num_parallel_calls: accepted for tf's sake; a batch is gathered by one operation, or in the thread of a
                ``prefetch`` that follows.
            deterministic: accepted for tf's sake.

        Raises:
            TypeError: ``batch_size`` is no integer.
            InvalidArgumentError: it is not positive. While iterating: elements differ in structure, shape or dtype.

        Example:
            >>> list(ts.data.Dataset.range(5).batch(2))
            [tensor([0, 1]), tensor([2, 3]), tensor([4])]
        """
        parallel_calls(num_parallel_calls)
        return self._with(ops.BatchOp((self._op,), check_int("batch_size", batch_size, 1), bool(drop_remainder)))

    def padded_batch(
        self,
        batch_size: int,
        padded_shapes: Any = None,
        padding_values: Any = None,
        drop_remainder: bool = False,  # noqa: FBT001, FBT002 - tf's signature
    ) -> Self:
        """Combine consecutive elements into batches, and pad tensors of different shapes to one shape.

        Args:
            batch_size: elements of a batch.
            padded_shapes: a shape for each component, as a list in which ``None`` or -1 means the longest of the batch;
                in the structure of the elements. ``None`` means the longest everywhere.
            padding_values: a number for all components, or one for each in the structure of the elements; ``None``
                means 0.
            drop_remainder: leave out a last batch of fewer elements.

        Raises:
            TypeError: ``batch_size`` is no integer.
            InvalidArgumentError: it is not positive. While iterating: an element does not fit its padded shape, or a
                padding value the dtype.

        Example:
            >>> dataset = ts.data.Dataset.range(1, 4).map(lambda n: torch.full((int(n),), int(n)))
            >>> list(dataset.padded_batch(2, padding_values=-1))
            [tensor([[ 1, -1],
                    [ 2,  2]]), tensor([[3, 3, 3]])]
        """
        size = check_int("batch_size", batch_size, 1)
        stack = PaddedStack(padded_shapes, padding_values)
        return self._with(ops.BatchOp((self._op,), size, bool(drop_remainder), stack))

    def unbatch(self) -> Self:
        """Split batches into their elements.

        Raises:
            InvalidArgumentError: while iterating: the components of a batch have no common first dimension.

        Example:
            >>> list(ts.data.Dataset.range(3).batch(2).unbatch())
            [tensor(0), tensor(1), tensor(2)]
        """
        return self._with(ops.UnbatchOp((self._op,)))

    def take(self, count: int) -> Self:
        """Keep the first elements.

        Args:
            count: how many; -1 for all.

        Raises:
            TypeError: ``count`` is no integer.
            InvalidArgumentError: it is below -1.

        Example:
            >>> list(ts.data.Dataset.range(10).take(2))
            [tensor(0), tensor(1)]
        """
        number = _count(count)
        return self._with(self._op if number is None else ops.TakeOp((self._op,), number))

    def skip(self, count: int) -> Self:
        """Leave out the first elements.

        Args:
            count: how many; -1 for all.

        Raises:
            TypeError: ``count`` is no integer.
            InvalidArgumentError: it is below -1.

        Example:
            >>> list(ts.data.Dataset.range(5).skip(3))
            [tensor(3), tensor(4)]
        """
        number = _count(count)
        op = ops.TakeOp((self._op,), 0) if number is None else ops.SkipOp((self._op,), number)
        return self._with(op)

    def shard(self, num_shards: int, index: int) -> Self:
        """Keep every ``num_shards``-th element, beginning with element ``index``.

        Args:
            num_shards: how many shards there are.
            index: which one to keep. Both may be ``ts.data.SHARD_HINT``: ``experimental_distribute_dataset`` with
                ``AutoShardPolicy.HINT`` then puts in the number of processes and the process's rank.

        Raises:
            TypeError: an argument is no integer.
            InvalidArgumentError: ``num_shards`` is not positive, or ``index`` is not in ``[0, num_shards)``.

        Example:
            >>> [int(x) for x in ts.data.Dataset.range(7).shard(3, 1)]
            [1, 4]
        """
        if not num_shards == index == SHARD_HINT:
            check_shard(num_shards, index)
        return self._with(ops.ShardOp((self._op,), int(num_shards), int(index)))

    def prefetch(self, buffer_size: int) -> Self:
        """Read ahead in a thread.

        A function before ``prefetch`` that draws from torch's, numpy's or Python's global random stream does so while
        the program draws too, in an order that differs between runs. Give it a generator of its own, or do without
        ``prefetch``, where runs must be equal. Shuffling is not affected.

        Args:
            buffer_size: elements that wait at most; ``ts.data.AUTOTUNE`` lets the library choose, 0 means none.

        Raises:
            TypeError: ``buffer_size`` is no integer.
            InvalidArgumentError: it is negative and not ``AUTOTUNE``.

        Example:
            >>> list(ts.data.Dataset.range(2).prefetch(ts.data.AUTOTUNE))
            [tensor(0), tensor(1)]
        """
        size = check_int("buffer_size", buffer_size, AUTOTUNE)
        size = _AUTOTUNED_BUFFER if size == AUTOTUNE else size
        return self._with(ops.PrefetchOp((self._op,), size) if size else self._op)

    def concatenate(self, dataset: Pipeline) -> Self:
        """Append another dataset.

        Args:
            dataset: what follows.

        Raises:
            TypeError: it is no dataset.

        Example:
            >>> list(ts.data.Dataset.range(2).concatenate(ts.data.Dataset.range(1)))
            [tensor(0), tensor(1), tensor(0)]
        """
        if not isinstance(dataset, Pipeline):
            raise TypeError(f"concatenate() takes a ts.data.Dataset. Received: {dataset!r}")
        return self._with(ConcatenateOp((self._op, dataset._op)), self._options.merge(dataset._options))

    def enumerate(self, start: int = 0) -> Self:
        """Number the elements.

        Args:
            start: the first number.

        Raises:
            TypeError: ``start`` is no integer.

        Example:
            >>> list(ts.data.Dataset.range(5, 7).enumerate())
            [(tensor(0), tensor(5)), (tensor(1), tensor(6))]
        """
        return self._with(ops.EnumerateOp((self._op,), check_int("start", start)))

    def flat_map(self, map_func: Callable[..., Any]) -> Self:
        """Make a dataset of every element, and give the elements of these datasets one after another.

        Args:
            map_func: takes an element and returns a ``ts.data.Dataset``.

        Raises:
            TypeError: ``map_func`` is no function; while iterating: it returned something else.

        Example:
            >>> dataset = ts.data.Dataset.range(1, 4).flat_map(lambda n: ts.data.Dataset.range(int(n)))
            >>> [int(x) for x in dataset]
            [0, 0, 1, 0, 1, 2]
        """
        check_callable("map_func", map_func)
        return self._with(InterleaveOp((self._op,), map_func, 1, 1))

    def interleave(
        self,
        map_func: Callable[..., Any],
        cycle_length: int | None = None,
        block_length: int | None = None,
        num_parallel_calls: int | None = None,
        deterministic: bool | None = None,  # noqa: ARG002, FBT001 - tf's signature; the order is always kept
    ) -> Self:
        """Make a dataset of every element, and give the elements of several of these datasets in turn.

        Args:
            map_func: takes an element and returns a ``ts.data.Dataset``.
            cycle_length: datasets that take turns; ``None`` or ``ts.data.AUTOTUNE`` means 4, whatever the machine.
            block_length: consecutive elements of one dataset; ``None`` means 1.
            num_parallel_calls: accepted for tf's sake; a ``prefetch`` that follows reads ahead.
            deterministic: accepted for tf's sake.

        Raises:
            TypeError: ``map_func`` is no function; while iterating: it returned something else.
            InvalidArgumentError: a length is not positive.

        Example:
            >>> dataset = ts.data.Dataset.range(1, 4)
            >>> repeated = dataset.interleave(lambda n: ts.data.Dataset.from_tensors(n).repeat(3), 2, 2)
            >>> [int(x) for x in repeated]
            [1, 1, 2, 2, 1, 2, 3, 3, 3]
        """
        check_callable("map_func", map_func)
        parallel_calls(num_parallel_calls)
        cycle = _AUTOTUNED_CYCLE if cycle_length in (None, AUTOTUNE) else check_int("cycle_length", cycle_length, 1)
        block = 1 if block_length is None else check_int("block_length", block_length, 1)
        return self._with(InterleaveOp((self._op,), map_func, cycle, block))


def _count(count: Any) -> int | None:
    number = check_int("count", count, -1)
    return None if number == -1 else number
