"""What every dataset is: iterated, resumed, described, and divided by a strategy."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import IterableDataset
from typing_extensions import Self

from torchstrategy.data.batch import TensorSpec
from torchstrategy.data.pipeline import dataset_sources
from torchstrategy.data.pipeline.dataset_options import Options, check_callable, check_shard
from torchstrategy.data.pipeline.elements import map_leaves, to_element
from torchstrategy.data.pipeline.iteration import (
    Iterations,
    PipelineIterator,
    has_hint,
    shard_by_hint,
    shard_files,
    splits_by_file,
    without_buffers,
)
from torchstrategy.data.pipeline.op import INFINITE_CARDINALITY, Op
from torchstrategy.data.pipeline.randomness import Memories
from torchstrategy.errors import InvalidArgumentError

__all__ = ["Pipeline"]


class Pipeline(IterableDataset[Any]):
    """A pipeline of operations that can be iterated again and again, and resumed anywhere.

    Args:
        op: the last operation.
        options: those of ``with_options``.
    """

    def __init__(self, op: Op, options: Options | None = None) -> None:
        self._op = op
        self._options = options or Options()
        self._position = Iterations(op)
        self._element_spec: Any = None

    def __iter__(self) -> PipelineIterator:
        if self.has_shard_hint:
            raise RuntimeError(
                "shard(SHARD_HINT, SHARD_HINT) has a meaning only in experimental_distribute_dataset with "
                "AutoShardPolicy.HINT. Elsewhere give shard() its numbers."
            )
        return self._position.iterate()

    def __len__(self) -> int:
        cardinality = self.cardinality()
        if cardinality < 0:
            kind = "infinite" if cardinality == INFINITE_CARDINALITY else "not known before it is read"
            raise TypeError(f"The length of this dataset is {kind}: {self!r}")
        return cardinality

    def __bool__(self) -> bool:
        return True

    def __repr__(self) -> str:
        return f"{type(self).__name__}.{self._op.describe()}"

    def __getstate__(self) -> dict[str, Any]:
        # A copy begins anew: iterators, with their threads and open files, stay behind.
        return {**self.__dict__, "_position": self._position.copy()}

    def state_dict(self) -> dict[str, Any]:
        """Return the position of the latest iterator, after the last element that it gave.

        A state is plain data: numbers, strings, ``None`` and small integer tensors in dicts and lists. It is cheap to
        take and holds no elements.

        Returns:
            A state for ``load_state_dict`` of a dataset that was built in the same way.

        Raises:
            RuntimeError: the latest iteration ended with an error.

        Example:
            >>> dataset = ts.data.Dataset.range(10).shuffle(4, seed=1).batch(2)
            >>> elements = iter(dataset)
            >>> first, state = next(elements), dataset.state_dict()
            >>> resumed = ts.data.Dataset.range(10).shuffle(4, seed=1).batch(2)
            >>> resumed.load_state_dict(state)
            >>> [list(e) for e in resumed] == [list(e) for e in elements]
            True
        """
        return self._position.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Let the next iteration continue where a state was taken.

        The iterations after it follow in the same order as they would have then; those of a shuffle without a seed
        draw from torch's random stream again. Elements that only a shuffle's buffer or a generator can give are read
        again; map functions are called for those again.

        Args:
            state_dict: what ``state_dict`` returned.

        Raises:
            TypeError: it is no state of a dataset.
            InvalidArgumentError: it belongs to another pipeline; nothing has changed.
        """
        self._position.load_state_dict(state_dict)

    def _check_state(self, state: dict[str, Any]) -> None:
        self._position.check(state)

    def _memories(self) -> Memories | None:
        """Return what decides the next iteration's order beside torch's default generator, if anything does."""
        memories = [op.memory for op in self._op.random_ops()]
        return Memories(memories) if memories else None

    def cardinality(self) -> int:
        """Return the number of elements, as far as it is known without reading them.

        Returns:
            The number, or ``INFINITE_CARDINALITY`` (-1), or ``UNKNOWN_CARDINALITY`` (-2).

        Example:
            >>> ts.data.Dataset.range(10).batch(4).cardinality()
            3
            >>> ts.data.Dataset.range(10).repeat().cardinality() == ts.data.INFINITE_CARDINALITY
            True
        """
        return self._op.cardinality()

    def as_numpy_iterator(self) -> Iterator[Any]:
        """Iterate over the elements with numpy arrays and numbers in place of tensors.

        Example:
            >>> [int(number) for number in ts.data.Dataset.range(3).as_numpy_iterator()]
            [0, 1, 2]
        """
        for element in self:
            yield map_leaves(lambda leaf: leaf.numpy()[()] if isinstance(leaf, Tensor) else leaf, element)

    def reduce(self, initial_state: Any, reduce_func: Callable[[Any, Any], Any]) -> Any:
        """Combine all elements into one value.

        Args:
            initial_state: the value before the first element.
            reduce_func: takes the value so far and an element, and returns the new value.

        Returns:
            The last value.

        Raises:
            TypeError: ``reduce_func`` is no function.

        Example:
            >>> ts.data.Dataset.range(5).reduce(0, lambda total, number: total + number)
            tensor(10)
        """
        check_callable("reduce_func", reduce_func)
        value = to_element(initial_state)
        for element in self:
            value = to_element(reduce_func(value, element))
        return value

    def get_single_element(self) -> Any:
        """Return the only element.

        Raises:
            InvalidArgumentError: there are none or several.

        Example:
            >>> ts.data.Dataset.range(3).batch(3).get_single_element()
            tensor([0, 1, 2])
        """
        elements = list(islice(self, 2))
        if len(elements) != 1:
            raise InvalidArgumentError(
                f"Expected one element, but the dataset has {['none', 'several'][len(elements) // 2]}."
            )
        return elements[0]

    def apply(self, transformation_func: Callable[[Self], Any]) -> Any:
        """Return what a function makes of this dataset.

        Args:
            transformation_func: takes a dataset and returns one.

        Raises:
            TypeError: it is no function, or returned no dataset.

        Example:
            >>> list(ts.data.Dataset.range(3).apply(lambda dataset: dataset.skip(2)))
            [tensor(2)]
        """
        result = check_callable("transformation_func", transformation_func)(self)
        if not isinstance(result, Pipeline):
            raise TypeError(f"The function of apply() must return a ts.data.Dataset. Received: {result!r}")
        return result

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write all elements to files, which ``ts.data.Dataset.load`` reads.

        It is complete or not there: a dataset that was saved there before is replaced at the end. Of several processes
        one saves.

        Args:
            path: a folder, which is made.

        Raises:
            InvalidArgumentError: there is something else, or an element has a container other than tuples and dicts.

        Example:
            >>> import tempfile
            >>> folder = tempfile.TemporaryDirectory()
            >>> ts.data.Dataset.range(3).map(lambda x: (x, 0.5)).save(f"{folder.name}/pairs")
            >>> len(ts.data.Dataset.load(f"{folder.name}/pairs"))
            3
            >>> folder.cleanup()
        """
        dataset_sources.save_elements(path, self)

    def options(self) -> Options:
        """Return the options that were set by ``with_options``.

        Example:
            >>> ts.data.Dataset.range(3).options()
            Options(auto_shard_policy=AUTO, deterministic=None)
        """
        return self._options.merge(Options())

    def with_options(self, options: Options) -> Self:
        """Set options; those that were set before and are not set in these stay.

        Args:
            options: they are copied.

        Raises:
            TypeError: ``options`` is no ``ts.data.Options``.

        Example:
            >>> options = ts.data.Options()
            >>> options.experimental_distribute.auto_shard_policy = ts.data.AutoShardPolicy.OFF
            >>> ts.data.Dataset.range(3).with_options(options).options().experimental_distribute.auto_shard_policy
            <AutoShardPolicy.OFF: -1>
        """
        if not isinstance(options, Options):
            raise TypeError(f"with_options() takes a ts.data.Options. Received: {options!r}")
        return self._with(self._op, self._options.merge(copy.deepcopy(options)))

    def peek(self) -> Any:
        """Return an element, to see what elements are like: not necessarily the first one.

        It does not count as an iteration and leaves torch's random state and the dataset's as they are.

        Raises:
            ValueError: the dataset is empty.

        Example:
            >>> ts.data.Dataset.range(10).batch(4).peek()
            tensor([0, 1, 2, 3])
        """
        with torch.random.fork_rng(devices=[]):
            for element in Iterations(without_buffers(self._op)).iterate():
                return element
        raise ValueError(f"The dataset is empty, so the structure of its elements is not known: {self!r}")

    @property
    def element_spec(self) -> Any:
        """The structure of the elements, with a ``TensorSpec`` for each tensor; the first use reads one element.

        The batch dimension is ``None``, because the last batch may be smaller.

        Example:
            >>> ts.data.Dataset.range(10).batch(4).element_spec
            TensorSpec(shape=(None,), dtype=torch.int64)
        """
        if self._element_spec is None:
            is_batch = self.batch_size is not None
            self._element_spec = map_leaves(lambda leaf: _leaf_spec(leaf, is_batch=is_batch), self.peek())
        return self._element_spec

    @property
    def batch_size(self) -> int | None:
        """The size of the batches that the elements are; ``None`` if they are none.

        Example:
            >>> ts.data.Dataset.range(10).batch(4).prefetch(1).batch_size
            4
        """
        return self._op.batch_size

    @property
    def num_files(self) -> int | None:
        """The number of files that the dataset reads and that can be shared out; ``None`` if it reads no files.

        Example:
            >>> ts.data.Dataset.from_files(["a.txt", "b.txt"], ts.data.readers.text_lines).num_files
            2
        """
        return self._op.num_files

    @property
    def files(self) -> tuple[Any, ...] | None:
        """The files that ``num_files`` counts, in order; ``None`` if it reads none.

        Example:
            >>> ts.data.Dataset.from_files(["a.txt", "b.txt"], ts.data.readers.text_lines).files
            ('a.txt', 'b.txt')
        """
        return self._op.source_files()

    @property
    def splits_by_file(self) -> bool:
        """Whether the examples over parts of the files are, together, those over all files.

        ``take``, ``take_while``, ``skip``, ``shard``, ``enumerate``, ``scan``, ``unique``, ``window``,
        ``group_by_window``, ``zip``, ``concatenate`` and ``drop_remainder=True`` prevent it.

        Example:
            >>> lines = ts.data.Dataset.from_files(["a.txt", "b.txt"], ts.data.readers.text_lines)
            >>> lines.shuffle(100).batch(8).splits_by_file, lines.take(100).splits_by_file
            (True, False)
        """
        return splits_by_file(self._op)

    @property
    def has_shard_hint(self) -> bool:
        """Whether the pipeline has a ``shard(SHARD_HINT, SHARD_HINT)``.

        Example:
            >>> ts.data.Dataset.range(4).shard(ts.data.SHARD_HINT, ts.data.SHARD_HINT).has_shard_hint
            True
        """
        return has_hint(self._op)

    def _with(self, op: Op, options: Options | None = None) -> Self:
        raise NotImplementedError

    def shard_files(self, num_shards: int, index: int) -> Self:
        """Return the same pipeline over the files ``index``, ``index + num_shards``, ...

        Args:
            num_shards: how many parts the files have.
            index: which one to keep.

        Raises:
            InvalidArgumentError: the dataset reads no files, or ``index`` is out of range.

        Example:
            >>> dataset = ts.data.Dataset.from_files(["a.txt", "b.txt", "c.txt"], ts.data.readers.text_lines)
            >>> dataset.shard_files(2, 0).num_files
            2
        """
        check_shard(num_shards, index)
        if self.num_files is None:
            raise InvalidArgumentError(
                f"This dataset has no single source of files to share out: {self!r}. Begin it with from_files or "
                "list_files."
            )
        return self._with(shard_files(self._op, num_shards, index))

    def shard_by_hint(self, num_shards: int, index: int) -> Self:
        """Return the pipeline with numbers in place of each ``SHARD_HINT``.

        Args:
            num_shards: how many shards there are.
            index: which one to keep.

        Raises:
            InvalidArgumentError: ``index`` is out of range.

        Example:
            >>> dataset = ts.data.Dataset.range(5).shard(ts.data.SHARD_HINT, ts.data.SHARD_HINT)
            >>> [int(number) for number in dataset.shard_by_hint(2, 1)]
            [1, 3]
        """
        check_shard(num_shards, index)
        return self._with(shard_by_hint(self._op, num_shards, index))


def _leaf_spec(leaf: Any, *, is_batch: bool) -> Any:
    if leaf is None:
        return None
    if isinstance(leaf, Tensor):
        shape = tuple(leaf.shape)
        return TensorSpec((None, *shape[1:]) if is_batch and shape else shape, leaf.dtype)
    if isinstance(leaf, list):
        return TensorSpec((None,) if is_batch else (len(leaf),), str)
    return TensorSpec((), type(leaf))
