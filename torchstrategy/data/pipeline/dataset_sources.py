"""Where the elements of ``ts.data.Dataset`` come from: functions behind its class methods."""

from __future__ import annotations

import dataclasses
import glob
import json
import os
import sys
import tempfile
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor
from typing_extensions import override

from torchstrategy.data.batch import TensorSpec
from torchstrategy.data.pipeline.access import RAW, Access, CachedAccess, Columns, Progression
from torchstrategy.data.pipeline.dataset_options import check_callable, check_int
from torchstrategy.data.pipeline.elements import describe, map_leaves, parts, rebuild, to_element, to_raw
from torchstrategy.data.pipeline.nested import Files, Generate
from torchstrategy.data.pipeline.nodes import Positions
from torchstrategy.data.pipeline.op import INFINITE_CARDINALITY, UNKNOWN_CARDINALITY, Op, RandomOp, Stream
from torchstrategy.data.pipeline.randomness import Draws, random_key
from torchstrategy.data.pipeline.shuffle import RandomNumbers
from torchstrategy.errors import InvalidArgumentError, NotFoundError

__all__ = [
    "counter",
    "files_source",
    "generator_source",
    "kept_elements",
    "matching_files",
    "one_element",
    "progression",
    "random_numbers",
    "save_elements",
    "saved_elements",
    "slices",
]

_INDEX, _FILE = "elements.json", "elements-{:05}.pt"
_BYTES_PER_FILE = 64 * 2**20


@dataclass(frozen=True, eq=False)
class PositionsOp(Op):
    """A source with random access; ``files`` if its elements are the names of files, no ``size`` if it is endless."""

    access: Access
    size: int | None
    name: str
    files: tuple[str, ...] | None = None

    @override
    def build(self, streams: list[Stream]) -> Stream:
        return Stream(Positions(sys.maxsize if self.size is None else self.size), self.access)

    @override
    def cardinality(self) -> int:
        return INFINITE_CARDINALITY if self.size is None else self.size

    @override
    def label(self) -> str:
        return f"{self.name}({'' if self.size is None else self.size})"

    @override
    def source_files(self) -> tuple[Any, ...] | None:
        return self.files

    @override
    def with_part_of_files(self, num_shards: int, index: int) -> Op:
        return self if self.files is None else file_names(self.files[index::num_shards])


@dataclass(frozen=True, eq=False)
class RandomNumbersOp(RandomOp):
    """A source of random numbers."""

    form: ClassVar[str] = "random()"

    seed: int | None
    rerandomizes: bool

    @override
    def make(self, keys: Iterator[list[int]]) -> Stream:
        return Stream(RandomNumbers(next(keys), rerandomizes=self.rerandomizes), RAW)

    @override
    def draw_key(self, draws: Draws) -> list[int]:
        return random_key(draws, self.memory, self.seed, changes=self.rerandomizes)

    @override
    def cardinality(self) -> int:
        return INFINITE_CARDINALITY


@dataclass(frozen=True, eq=False)
class GeneratorOp(Op):
    """A source that a function iterates over."""

    keeps_count: ClassVar[bool] = False
    form: ClassVar[str] = "from_generator()"

    generate: Callable[[], Any]
    convert: Callable[[Any], Any]
    fn: Callable[..., Any]

    @override
    def build(self, streams: list[Stream]) -> Stream:
        return Stream(Generate(self.generate, self.convert, self.fn), RAW)


@dataclass(frozen=True, eq=False)
class FilesOp(Op):
    """A source that reads files."""

    files: tuple[Any, ...]
    reader: Callable[..., Any]

    @override
    def build(self, streams: list[Stream]) -> Stream:
        return Stream(Files(self.files, self.reader), RAW)

    @override
    def cardinality(self) -> int:
        return UNKNOWN_CARDINALITY if self.files else 0

    @override
    def label(self) -> str:
        return f"from_files({len(self.files)} files)"

    @override
    def source_files(self) -> tuple[Any, ...] | None:
        return self.files

    @override
    def with_part_of_files(self, num_shards: int, index: int) -> Op:
        return dataclasses.replace(self, files=self.files[index::num_shards])


@dataclass(frozen=True, eq=False)
class SavedOp(FilesOp):
    """A source that reads what ``save`` wrote."""

    counts: tuple[int, ...]  # elements of each file

    @override
    def cardinality(self) -> int:
        return sum(self.counts)

    @override
    def label(self) -> str:
        return f"load({len(self.files)} files)"

    @override
    def with_part_of_files(self, num_shards: int, index: int) -> Op:
        part = slice(index, None, num_shards)
        return dataclasses.replace(self, files=self.files[part], counts=self.counts[part])


def slices(tensors: Any) -> PositionsOp:
    """Return the source of ``from_tensor_slices``."""
    columns = Columns(tensors)
    return PositionsOp((), columns, columns.length, "from_tensor_slices")


def one_element(tensors: Any) -> PositionsOp:
    """Return the source of ``from_tensors``."""
    return PositionsOp((), Columns.of_one(tensors), 1, "from_tensors")


def progression(arguments: Sequence[Any], dtype: torch.dtype) -> PositionsOp:
    """Return the source of ``range``."""
    if not 1 <= len(arguments) <= 3:
        raise InvalidArgumentError(f"range() takes 1 to 3 numbers: stop, or start, stop, step. Received: {arguments}")
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"output_type must be a torch.dtype. Received: {dtype!r}")
    numbers = [check_int("each argument of range()", argument) for argument in arguments]
    if len(numbers) == 3 and numbers[2] == 0:
        raise InvalidArgumentError("The step of range() must not be 0.")
    values = range(*numbers)
    if not (dtype.is_floating_point or dtype.is_complex or dtype is torch.bool):
        limits = torch.iinfo(dtype)
        if any(not limits.min <= value <= limits.max for value in (*values[:1], *values[-1:])):
            raise InvalidArgumentError(f"Numbers from {values[0]} to {values[-1]} don't fit into {dtype}.")
    return PositionsOp((), Progression(values.start, values.step, dtype), len(values), "range")


def counter(start: Any, step: Any, dtype: torch.dtype) -> PositionsOp:
    """Return the source of ``counter``."""
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"dtype must be a torch.dtype. Received: {dtype!r}")
    first, distance = (x if isinstance(x, float) else check_int("start or step", x) for x in (start, step))
    return PositionsOp((), Progression(first, distance, dtype), None, "counter")


def random_numbers(seed: Any, rerandomizes: Any) -> RandomNumbersOp:
    """Return the source of ``random``."""
    return RandomNumbersOp((), None if seed is None else check_int("seed", seed), bool(rerandomizes))


def kept_elements(elements: Sequence[Any]) -> PositionsOp:
    """Return a source of elements that are in memory."""
    return PositionsOp((), CachedAccess(RAW, dict(enumerate(elements))), len(elements), "window")


def files_source(files: Any, reader: Any) -> FilesOp:
    """Return the source of ``from_files``."""
    check_callable("reader", reader)
    if isinstance(files, (str, bytes, os.PathLike)):
        files = [files]
    if not isinstance(files, Iterable) or isinstance(files, Iterator):
        raise TypeError(f"files must be a list of file names. Received: {files!r}")
    return FilesOp((), tuple(map(_file, files)), reader)


def matching_files(pattern: Any) -> PositionsOp:
    """Return the source of ``list_files``: the sorted names of the files that match."""
    patterns = [pattern] if isinstance(pattern, (str, os.PathLike)) else pattern
    if not isinstance(patterns, Iterable):
        raise TypeError(
            f"file_pattern must be a pattern such as 'data/*.txt', or a list of them. Received: {pattern!r}"
        )
    names = sorted({name for one in patterns for name in glob.glob(os.fspath(one)) if not os.path.isdir(name)})
    if not names:
        raise InvalidArgumentError(f"No files match the pattern {pattern!r} in {os.getcwd()}.")
    return file_names(names)


def generator_source(generator: Any, args: Sequence[Any], output_signature: Any) -> GeneratorOp:
    """Return the source of ``from_generator``."""
    if isinstance(generator, Iterator):
        raise TypeError(
            f"A {type(generator).__name__} can be iterated only once, so there would be one epoch. Pass the function "
            "that makes it: from_generator(make_examples), not from_generator(make_examples())."
        )
    check_callable("generator", generator)
    convert = to_raw if output_signature is None else _Conform(output_signature)
    return GeneratorOp((), _Restarted(generator, tuple(args)), convert, generator)


def file_names(files: Sequence[str]) -> PositionsOp:
    """Return a source of the names of files; perhaps of none, where there are more shards than files."""
    access: Access = Columns(list(files)) if files else Progression(0, 1, torch.int64)
    return PositionsOp((), access, len(files), "list_files", tuple(files))


def saved_elements(path: Any) -> SavedOp:
    """Return the source of ``load``."""
    index = Path(path, _INDEX)
    if not index.is_file():
        raise NotFoundError(f"There is no dataset that Dataset.save() wrote in {os.fspath(path)}.")
    counts = tuple(json.loads(index.read_text(encoding="utf-8"))["elements"])
    return SavedOp((), tuple(str(Path(path, _FILE.format(i))) for i in range(len(counts))), _read_saved, counts)


def save_elements(path: Any, elements: Iterable[Any]) -> None:
    """Write elements to a folder, where a dataset that was saved before is replaced."""
    folder = Path(path)
    if folder.exists() and not (folder / _INDEX).is_file():
        raise InvalidArgumentError(f"{folder} is there and holds no saved dataset. Give save() another path.")
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}-") as scratch:
        new = Path(scratch, "new")
        new.mkdir()
        counts: list[int] = []
        part: list[Any] = []
        num_bytes = 0
        for element in elements:
            num_bytes += sum(leaf.nbytes if isinstance(leaf, Tensor) else 1 for leaf in _plain_leaves(element))
            # A slice would bring along what it is a slice of.
            part.append(map_leaves(lambda leaf: leaf.clone() if isinstance(leaf, Tensor) else leaf, element))
            if num_bytes >= _BYTES_PER_FILE:
                _write_part(new, part, counts)
                part, num_bytes = [], 0
        if part:
            _write_part(new, part, counts)
        (new / _INDEX).write_text(json.dumps({"elements": counts}), encoding="utf-8")
        if folder.exists():
            folder.rename(Path(scratch, "old"))
        new.rename(folder)


def _write_part(folder: Path, elements: list[Any], counts: list[int]) -> None:
    torch.save(elements, folder / _FILE.format(len(counts)))
    counts.append(len(elements))


def _read_saved(path: str, start: int = 0) -> Iterable[Any]:
    return torch.load(path, weights_only=True)[start:]  # type: ignore[no-any-return]


def _plain_leaves(element: Any) -> list[Any]:
    """Return the leaves of an element, all of whose containers are plain.

    Raises:
        InvalidArgumentError: one is not, so that it could not be read without running code.
    """
    found = parts(element)
    if found is None:
        return [element]
    if type(element) not in (tuple, dict):
        raise InvalidArgumentError(
            f"save() takes elements of tuples and dicts. Received: {describe(element)}. Make a dict of it with map()."
        )
    return [leaf for part in found[1] for leaf in _plain_leaves(part)]


class _Restarted:
    """Calls the user's function, and notices if it returns the same iterator again."""

    def __init__(self, generator: Callable[..., Iterable[Any]], args: tuple[Any, ...]) -> None:
        self._generator = generator
        self._args = args
        self._latest: Any = None

    def __call__(self) -> Iterator[Any]:
        iterable = self._generator(*self._args)
        if not isinstance(iterable, Iterable):
            raise TypeError(f"The function of from_generator must return an iterable. Received: {iterable!r}")
        iterator = iter(iterable)
        if self._latest is not None and self._latest() is iterator:
            raise TypeError(
                "The function of from_generator returned the same iterator again, which is used up. It must make a new "
                "one each time it is called."
            )
        try:
            self._latest = weakref.ref(iterator)
        except TypeError:  # iterators of lists and the like
            self._latest = None
        return iterator

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_latest": None}


class _Conform:
    """Makes an element of an item and holds it against a signature.

    Args:
        signature: the elements' structure with a ``TensorSpec`` for each tensor.
    """

    def __init__(self, signature: Any) -> None:
        _check_signature(signature)
        self._signature = signature

    def __call__(self, item: Any) -> Any:
        return self._conform(item, self._signature)

    def _conform(self, item: Any, signature: Any) -> Any:
        if isinstance(signature, TensorSpec):
            return self._conform_leaf(item, signature)
        expected, found = parts(signature), parts(item)
        if expected is None or found is None or set(expected[0]) != set(found[0]):
            raise self._error(item)
        values = dict(zip(*found, strict=True))
        rows = zip(expected[0], expected[1], strict=True)
        return rebuild(signature, [self._conform(values[key], spec) for key, spec in rows])

    def _conform_leaf(self, item: Any, spec: TensorSpec) -> Any:
        if not isinstance(spec.dtype, torch.dtype):
            if not isinstance(item, spec.dtype):
                raise self._error(item)
            return item
        value = to_element(list(item) if isinstance(item, tuple) else item)
        fits = isinstance(value, Tensor) and len(spec.shape) == value.dim()
        if not fits or any(size not in (None, real) for size, real in zip(spec.shape, value.shape, strict=True)):
            raise self._error(value)
        return value.to(spec.dtype)

    def _error(self, item: Any) -> InvalidArgumentError:
        return InvalidArgumentError(
            f"The generator gave {describe(item)}, which does not fit its output_signature {self._signature!r}."
        )


def _check_signature(signature: Any) -> None:
    if isinstance(signature, TensorSpec):
        return
    found = parts(signature)
    if found is None:
        raise TypeError(f"output_signature must hold a ts.data.TensorSpec for each tensor. Received: {signature!r}")
    for part in found[1]:
        _check_signature(part)


def _file(file: Any) -> Any:
    if isinstance(file, tuple):
        return tuple(map(_file, file))
    try:
        return os.fspath(file)
    except TypeError:
        raise TypeError(f"Each file must be a path, or a tuple of paths. Received: {file!r}") from None
