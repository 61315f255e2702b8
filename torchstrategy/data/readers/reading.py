"""What all readers share: how a file is opened, how a read begins in the middle, what errors say.

Whatever goes wrong with a file is raised with the file's name and the example's number, never taken for its end.
"""

from __future__ import annotations

import gzip
import importlib
import inspect
import io
import os
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, BinaryIO

import numpy as np
import torch

from torchstrategy.base import how_to_install
from torchstrategy.errors import DataLossError, InvalidArgumentError, NotFoundError

__all__ = [
    "READ_ERRORS",
    "FilePath",
    "check_start",
    "choose",
    "file_name",
    "import_optional",
    "open_binary",
    "open_plain",
    "read_from",
    "reading_error",
    "to_value",
]

FilePath = str | os.PathLike[str]

#: What reading a damaged file raises, whatever its format.
READ_ERRORS = (EOFError, OSError, zlib.error, zipfile.BadZipFile)

_BUFFER_BYTES = 1 << 16
_GZIP_SUFFIXES = (".gz", ".tgz")
_GZIP_MAGIC = b"\x1f\x8b"
_END = object()


def read_from(reader: Callable[..., Iterable[Any]], file: Any, start: int = 0) -> Iterator[Any]:
    """Read a file's examples from a position on.

    A reader that has an argument ``start`` is called as ``reader(file, start=start)`` and begins there. What another
    one reads before that position is thrown away.

    Args:
        reader: a function of ``ts.data.readers``, or any that returns an iterable of examples.
        file: what the reader takes: a path, or a tuple of paths.
        start: number of examples to skip.

    Returns:
        An iterator of the remaining examples.

    Raises:
        TypeError: the reader does not return an iterable.
        DataLossError: the file has fewer than ``start`` examples.

    Example:
        >>> list(ts.data.readers.read_from(lambda path: path.split("/"), "a/b/c", start=1))
        ['b', 'c']
    """
    begins_there = start > 0 and _takes_start(reader)
    examples = reader(file, start=start) if begins_there else reader(file)
    try:
        iterator = iter(examples)
    except TypeError:
        raise TypeError(
            f"A reader must return an iterable of the file's examples, for example by `yield`. "
            f"{_reader_name(reader)} returned {type(examples).__name__} for {file!r}."
        ) from None
    return iterator if begins_there or start == 0 else _skip(iterator, file, start)


def _skip(examples: Iterator[Any], file: Any, start: int) -> Iterator[Any]:
    for number in range(start):
        if next(examples, _END) is _END:
            check_start(start, number, file)
    yield from examples


def _takes_start(reader: Callable[..., Any]) -> bool:
    try:
        return "start" in inspect.signature(reader).parameters
    except (TypeError, ValueError):  # some functions written in C don't tell
        return False


def _reader_name(reader: Callable[..., Any]) -> str:
    return getattr(reader, "__qualname__", repr(reader))


def check_start(start: int, num_examples: int, file: Any) -> None:
    """Raise if a file has too few examples to begin at ``start``.

    Raises:
        InvalidArgumentError: ``start`` is negative.
        DataLossError: it has.
    """
    if start < 0:
        raise InvalidArgumentError(f"start must be 0 or more: the number of examples to skip. Received: {start}")
    if start > num_examples:
        raise DataLossError(
            f"{file} has {num_examples} examples, but reading was to go on after {start}. It has changed since that "
            "position was saved: put the old file back, or start the epoch anew."
        )


def choose(names: list[str], wanted: Sequence[str] | None, path: str, kind: str, option: str) -> list[str]:
    """Return those of a file's names that a reader shall read.

    Args:
        names: what the file has.
        wanted: the reader's argument; ``None`` means all.
        path: of the file.
        kind: what the names are of.
        option: name of the reader's argument.

    Raises:
        TypeError: ``wanted`` is a single name.
        InvalidArgumentError: the file lacks one of them, or there are none.
    """
    if isinstance(wanted, str):
        raise TypeError(f"{option} must be a list of names, such as [{wanted!r}]. Received: {wanted!r}")
    chosen = list(names if wanted is None else wanted)
    missing = [name for name in chosen if name not in names]
    if missing or not chosen:
        raise InvalidArgumentError(
            f"{path} has no {kind} {missing}, only {names}. Choose some of them by `{option}`."
            if missing
            else f"There are no {kind} to read from {path}, which has {names}. Choose some by `{option}`."
        )
    return chosen


def file_name(file: Any, reader: str) -> str:
    """Return the path as text.

    Raises:
        TypeError: it is no path.
    """
    try:
        return os.fsdecode(file)
    except TypeError:
        raise TypeError(
            f"ts.data.readers.{reader} reads one file: expected its path. Received: {type(file).__name__} {file!r}"
        ) from None


def open_plain(path: str) -> BinaryIO:
    """Open a file as it is.

    Raises:
        NotFoundError: there is none.
        OSError: it can't be opened.
    """
    try:
        return open(path, "rb", buffering=_BUFFER_BYTES)
    except FileNotFoundError:
        raise NotFoundError(
            f"There is no file {path}. Every process needs the files that it reads: check the list given to "
            "from_files, and that the folder is shared."
        ) from None


def open_binary(path: str) -> BinaryIO:
    """Open a file, unpacking it if its name ends in ``.gz`` or ``.tgz``.

    Raises:
        NotFoundError: there is none.
        DataLossError: its name says that it is packed, but it is not.
        OSError: it can't be opened.
    """
    file = open_plain(path)
    if not path.endswith(_GZIP_SUFFIXES):
        return file
    with file:  # GzipFile would take a file of no bytes for a packed file without content
        magic = file.read(2)
    if magic != _GZIP_MAGIC:
        raise DataLossError(
            f"{path} is no gzip file: it begins with {magic!r}. Make it again, or rename it if it is not packed."
        )
    return io.BufferedReader(gzip.open(path, "rb"), _BUFFER_BYTES)


def reading_error(error: Exception, path: str, number: int) -> Exception:
    """Return what to raise when reading the file's example ``number`` raised ``error``."""
    if type(error) is not gzip.BadGzipFile and isinstance(error, OSError) and error.errno is not None:
        return OSError(error.errno, f"Reading example {number} failed: {error.strerror}", path)
    reason = str(error).rstrip(".") or type(error).__name__
    return DataLossError(
        f"{path} is damaged at or soon after example {number} (the first is 0), or of another format: {reason}. "
        "Make or fetch the file again, and choose the reader of its format."
    )


def to_value(row: np.ndarray[Any, Any]) -> Any:
    """Return an array of one example as a tensor of its own, strings as ``str`` or ``bytes``."""
    if row.dtype.kind in "US":
        return row.tolist()
    return torch.from_numpy(row if row.dtype.isnative else row.astype(row.dtype.newbyteorder("=")))


def import_optional(module: str, reader: str) -> Any:
    """Import what only one reader needs.

    Raises:
        ImportError: it is not installed.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        package = module.partition(".")[0]
        raise ImportError(f"ts.data.readers.{reader} needs {package}: {how_to_install('files')}") from error
