"""``ts.data.Dataset``."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from functools import reduce
from typing import Any

import torch
from typing_extensions import Self, override

from torchstrategy.base.later import explains_absent, explains_arguments
from torchstrategy.data.pipeline import dataset_sources
from torchstrategy.data.pipeline.dataset_options import AUTOTUNE, Options, check_weights
from torchstrategy.data.pipeline.elements import map_leaves
from torchstrategy.data.pipeline.nested import SelectOp, ZipOp
from torchstrategy.data.pipeline.op import Op
from torchstrategy.data.pipeline.randomness import Weighted
from torchstrategy.data.pipeline.regrouping import Regrouping
from torchstrategy.data.pipeline.transformations import Transformations
from torchstrategy.data.readers.formats import text_lines
from torchstrategy.errors import InvalidArgumentError

__all__ = ["AUTOTUNE", "Dataset", "TextLineDataset"]


@explains_absent("data.Dataset")
class Dataset(Regrouping, Transformations):
    """A pipeline of data under the names of ``tf.data.Dataset``.

    A dataset is made by one of the class methods ``from_tensor_slices``, ``from_tensors``, ``range``,
    ``from_generator``, ``from_files``, ``list_files`` and ``zip``. Its methods return new datasets and change nothing.
    It is a torch ``IterableDataset``: a loop, a ``DataLoader`` and ``experimental_distribute_dataset`` take it, and it
    can be resumed anywhere by ``state_dict`` and ``load_state_dict``.

    Elements are tensors, or nested tuples, dicts and dataclasses of tensors. As in tf, numbers, arrays and lists
    become tensors, and the arrays of a source are not copied. Strings stay Python strings; a batch of them is a list.

    Example:
        >>> images, labels = torch.rand(10, 28, 28), torch.arange(10)
        >>> dataset = ts.data.Dataset.from_tensor_slices((images, labels)).shuffle(10).batch(4)
        >>> [tuple(x.shape) for x, y in dataset]
        [(4, 28, 28), (4, 28, 28), (2, 28, 28)]
    """

    @override
    def _with(self, op: Op, options: Options | None = None) -> Self:
        made: Any = Dataset._of(op, options or self._options)  # also of a subclass, such as one of lines, as in tf
        return made  # type: ignore[no-any-return]

    @staticmethod
    def _of(op: Op, options: Options | None = None) -> Dataset:
        result = Dataset.__new__(Dataset)
        Transformations.__init__(result, op, options)
        return result

    @staticmethod
    def _of_several(datasets: Sequence[Dataset], make: Callable[[tuple[Op, ...]], Op]) -> Dataset:
        options = reduce(Options.merge, [dataset._options for dataset in datasets])
        return datasets[0]._with(make(tuple(dataset._op for dataset in datasets)), options)

    @staticmethod
    def _of_elements(elements: Sequence[Any]) -> Dataset:
        return Dataset._of(dataset_sources.kept_elements(elements))

    @staticmethod
    def from_tensor_slices(tensors: Any) -> Dataset:
        """Make a dataset of the slices of tensors along their first dimension.

        Args:
            tensors: arrays, tensors or lists of one length ``n``, or a nested structure of them. Arrays are not copied,
                so a ``np.memmap`` is read where it is needed only.

        Returns:
            A dataset of ``n`` elements.

        Raises:
            InvalidArgumentError: the lengths differ, or a component is a scalar.
            TypeError: a component can't be sliced.

        Example:
            >>> dataset = ts.data.Dataset.from_tensor_slices({"x": [[1, 2], [3, 4]], "y": ["a", "b"]})
            >>> list(dataset)
            [{'x': tensor([1, 2]), 'y': 'a'}, {'x': tensor([3, 4]), 'y': 'b'}]
        """
        return Dataset._of(dataset_sources.slices(tensors))

    @staticmethod
    def from_tensors(tensors: Any) -> Dataset:
        """Make a dataset of one element.

        Args:
            tensors: the element; numbers, arrays and lists in it become tensors.

        Raises:
            InvalidArgumentError: a list can't become a tensor.

        Example:
            >>> dataset = ts.data.Dataset.from_tensors(([1.], [1.])).repeat(100).batch(10)
            >>> dataset.cardinality(), [tuple(leaf.shape) for leaf in next(iter(dataset))]
            (10, [(10, 1), (10, 1)])
        """
        return Dataset._of(dataset_sources.one_element(tensors))

    @staticmethod
    def range(*args: int, output_type: torch.dtype = torch.int64) -> Dataset:
        """Make a dataset of equally spaced integers.

        Args:
            *args: as of Python's ``range``: stop, or start and stop, or start, stop and step.
            output_type: dtype of the elements.

        Raises:
            InvalidArgumentError: there are no or too many arguments, the step is 0, or the numbers don't fit the dtype.
            TypeError: an argument is no integer, or ``output_type`` is no dtype.

        Example:
            >>> list(ts.data.Dataset.range(1, 6, 2))
            [tensor(1), tensor(3), tensor(5)]
        """
        return Dataset._of(dataset_sources.progression(args, output_type))

    @staticmethod
    def counter(start: float = 0, step: float = 1, dtype: torch.dtype = torch.int64) -> Dataset:
        """Make a dataset that counts for ever.

        Args:
            start: the first number.
            step: what is added to each.
            dtype: of the elements; integers that do not fit begin anew from the other end, as in tf.

        Raises:
            TypeError: ``start`` or ``step`` is no number, or ``dtype`` no dtype.

        Example:
            >>> list(ts.data.Dataset.counter(start=10, step=-2).take(3))
            [tensor(10), tensor(8), tensor(6)]
        """
        return Dataset._of(dataset_sources.counter(start, step, dtype))

    @staticmethod
    def random(
        seed: int | None = None,
        rerandomize_each_iteration: bool | None = None,  # noqa: FBT001 - tf's signature
    ) -> Dataset:
        """Make an endless dataset of random integers, ``int64`` from 0 to ``2**32 - 1``.

        Args:
            seed: decides the numbers. ``None`` takes one from torch's random stream when the first element is read.
            rerandomize_each_iteration: other numbers in each iteration and in each repetition by ``repeat``; ``None``
                means no.

        Raises:
            TypeError: ``seed`` is no integer.

        Example:
            >>> numbers = ts.data.Dataset.random(seed=4).take(2)
            >>> list(numbers) == list(numbers)
            True
        """
        return Dataset._of(dataset_sources.random_numbers(seed, rerandomize_each_iteration))

    @staticmethod
    @explains_arguments(
        "Elements are taken as they come, so leave `output_types` and `output_shapes` out; `output_signature`, of "
        "`ts.data.TensorSpec`, converts and checks them."
    )
    def from_generator(
        generator: Callable[..., Any], *, args: Sequence[Any] = (), output_signature: Any = None
    ) -> Dataset:
        """Make a dataset of what a function generates.

        The function is called for each iteration. A generator can't seek: resuming calls it anew and reads over what
        was read before, so it must generate the same again.

        Args:
            generator: returns an iterable of elements, for example by ``yield``.
            args: arguments that it is called with.
            output_signature: the elements' structure, with a ``ts.data.TensorSpec`` for each tensor. Elements are
                converted to its dtypes, and one that does not fit is an error. ``None`` takes elements as they come.

        Raises:
            TypeError: ``generator`` is no function, such as an iterator, which can be read once only.

        Example:
            >>> def count(stop):
            ...     for i in range(stop):
            ...         yield i, [float(i)]
            >>> list(ts.data.Dataset.from_generator(count, args=(2,)))
            [(tensor(0), tensor([0.])), (tensor(1), tensor([1.]))]
        """
        return Dataset._of(dataset_sources.generator_source(generator, args, output_signature))

    @staticmethod
    def from_files(files: Sequence[Any], reader: Callable[..., Any]) -> Dataset:
        """Make a dataset of the examples in files, one file after another.

        With ``AutoShardPolicy.FILE`` every process reads files of its own. Resuming opens the file that was being read,
        and starts there if the reader has an argument ``start``; otherwise it reads over its first examples.

        Args:
            files: their paths, or tuples of paths that belong together.
            reader: called with a path, returns an iterable of the file's examples. ``ts.data.readers`` has some.

        Raises:
            TypeError: a file is no path, or ``reader`` no function.

        Example:
            >>> import pathlib, tempfile
            >>> folder = tempfile.TemporaryDirectory()
            >>> paths = [pathlib.Path(folder.name, f"{i}.txt") for i in range(2)]
            >>> _ = [path.write_text(f"one of {path.name}") for path in paths]
            >>> list(ts.data.Dataset.from_files(paths, ts.data.readers.text_lines))
            ['one of 0.txt', 'one of 1.txt']
            >>> folder.cleanup()
        """
        return Dataset._of(dataset_sources.files_source(files, reader))

    @staticmethod
    def load(path: str | os.PathLike[str]) -> Dataset:
        """Make a dataset of what ``save`` wrote.

        With ``AutoShardPolicy.FILE`` every process reads files of its own, as of ``from_files``.

        Args:
            path: the folder.

        Raises:
            NotFoundError: there is no saved dataset.

        Example:
            >>> import tempfile
            >>> folder = tempfile.TemporaryDirectory()
            >>> ts.data.Dataset.range(3).save(f"{folder.name}/numbers")
            >>> list(ts.data.Dataset.load(f"{folder.name}/numbers"))
            [tensor(0), tensor(1), tensor(2)]
            >>> folder.cleanup()
        """
        return Dataset._of(dataset_sources.saved_elements(path))

    @staticmethod
    def list_files(
        file_pattern: Any,
        shuffle: bool | None = None,  # noqa: FBT001 - tf's signature
        seed: int | None = None,
    ) -> Dataset:
        """Make a dataset of the names of the files that match a pattern.

        The names are looked up now. They can be shared out over processes as the files of ``from_files`` can.

        Args:
            file_pattern: a pattern as of ``glob``, or a list of patterns.
            shuffle: shuffle the names in each iteration; ``None`` means yes. Otherwise they are sorted.
            seed: of the shuffling, see ``shuffle``.

        Raises:
            InvalidArgumentError: no file matches.

        Example:
            >>> import pathlib, tempfile
            >>> folder = tempfile.TemporaryDirectory()
            >>> _ = [pathlib.Path(folder.name, name).write_text(name) for name in ("a.txt", "b.txt")]
            >>> files = ts.data.Dataset.list_files(f"{folder.name}/*.txt", shuffle=False)
            >>> list(files.flat_map(ts.data.TextLineDataset))
            ['a.txt', 'b.txt']
            >>> folder.cleanup()
        """
        op = dataset_sources.matching_files(file_pattern)
        names = Dataset._of(op)
        return names if shuffle is False else names.shuffle(len(names), seed)

    @staticmethod
    def zip(*args: Any, datasets: Any = None) -> Dataset:
        """Make a dataset of one element of each of several datasets; it ends with the shortest.

        Args:
            *args: datasets, whose elements become a tuple, or one nested structure of datasets.
            datasets: the same as one structure.

        Raises:
            TypeError: there is something else than datasets.

        Example:
            >>> a, b = ts.data.Dataset.range(1, 4), ts.data.Dataset.range(4, 6)
            >>> list(ts.data.Dataset.zip(a, b))
            [(tensor(1), tensor(4)), (tensor(2), tensor(5))]
        """
        if bool(args) == (datasets is not None):
            raise TypeError("zip() takes datasets, or datasets=, and not both.")
        structure = datasets if datasets is not None else args[0] if len(args) == 1 else args
        found: list[Dataset] = []

        def number(leaf: Any) -> int:
            if not isinstance(leaf, Dataset):
                raise TypeError(f"zip() takes datasets, in tuples or dicts. Received: {leaf!r}")
            found.append(leaf)
            return len(found) - 1

        numbers = map_leaves(number, structure)
        if not found:
            raise TypeError("zip() needs at least one dataset.")
        return Dataset._of_several(found, lambda inputs: ZipOp(inputs, numbers))

    @staticmethod
    def sample_from_datasets(
        datasets: Sequence[Dataset],
        weights: Sequence[float] | None = None,
        seed: int | None = None,
        stop_on_empty_dataset: bool = False,  # noqa: FBT001, FBT002 - tf's signature
        rerandomize_each_iteration: bool | None = None,  # noqa: FBT001 - tf's signature
    ) -> Dataset:
        """Make a dataset whose elements come from several datasets at random.

        Args:
            datasets: what is drawn from.
            weights: one number for each dataset, how often it is drawn relative to the others; ``None`` means equally
                often.
            seed: decides what is drawn. ``None`` takes one from torch's random stream when the first element is read.
            stop_on_empty_dataset: end when a dataset is drawn that has no more elements; otherwise draw from the rest.
            rerandomize_each_iteration: draw anew in each iteration and repetition; ``None`` means no.

        Raises:
            TypeError: there is something else than datasets.
            InvalidArgumentError: there are none, or the weights are not one number of at least 0 for each, not all 0.

        Example:
            >>> zeros, ones = ts.data.Dataset.counter(0, 0), ts.data.Dataset.counter(1, 0)
            >>> mixed = ts.data.Dataset.sample_from_datasets([zeros, ones], weights=[0.1, 0.9], seed=1)
            >>> int(sum(mixed.take(1000))) > 850
            True
        """
        if not datasets:
            raise InvalidArgumentError("datasets must not be empty.")
        weights = check_weights("weights", [1.0] * len(datasets) if weights is None else weights, len(datasets))
        drawn = [dataset for dataset, weight in zip(datasets, weights, strict=True) if weight]
        numbers = Dataset.random(seed, rerandomize_each_iteration).map(Weighted([w for w in weights if w]))
        return Dataset.choose_from_datasets(drawn, numbers, stop_on_empty_dataset)

    @staticmethod
    def choose_from_datasets(
        datasets: Sequence[Dataset],
        choice_dataset: Dataset,
        stop_on_empty_dataset: bool = True,  # noqa: FBT001, FBT002 - tf's signature
    ) -> Dataset:
        """Make a dataset whose elements come from several datasets, as another dataset chooses.

        Args:
            datasets: what is chosen from.
            choice_dataset: its elements are the numbers of datasets, integers from 0; ends this one with it.
            stop_on_empty_dataset: end when a dataset is chosen that has no more elements; otherwise pass over it.

        Raises:
            TypeError: there is something else than datasets.
            InvalidArgumentError: there are none; while iterating: a choice is not the number of a dataset.

        Example:
            >>> a, b = ts.data.Dataset.range(3), ts.data.Dataset.range(10, 13)
            >>> choices = ts.data.Dataset.from_tensor_slices([0, 1, 1])
            >>> [int(number) for number in ts.data.Dataset.choose_from_datasets([a, b], choices)]
            [0, 10, 11]
        """
        found = [*datasets, choice_dataset]
        if len(found) == 1:
            raise InvalidArgumentError("datasets must not be empty.")
        for dataset in found:
            if not isinstance(dataset, Dataset):
                raise TypeError(f"datasets and choice_dataset must be ts.data.Datasets. Received: {dataset!r}")
        return Dataset._of_several(found, lambda inputs: SelectOp(inputs, bool(stop_on_empty_dataset)))


class TextLineDataset(Dataset):
    r"""A dataset of the lines of text files, without their ends.

    Args:
        filenames: a path, a list of paths, or a dataset of paths; files ending in ``.gz`` are unpacked.

    Raises:
        TypeError: ``filenames`` is something else.

    Example:
        >>> import pathlib, tempfile
        >>> folder = tempfile.TemporaryDirectory()
        >>> _ = pathlib.Path(folder.name, "lines.txt").write_text("one\ntwo\nthree")
        >>> list(ts.data.TextLineDataset(f"{folder.name}/lines.txt").batch(2))
        [['one', 'two'], ['three']]
        >>> folder.cleanup()
    """

    def __init__(self, filenames: Any) -> None:
        if isinstance(filenames, Dataset):
            super().__init__(filenames.flat_map(TextLineDataset)._op, filenames._options)
        else:
            super().__init__(dataset_sources.files_source(filenames, text_lines))
