"""Arrays in files: idx (the format of MNIST), npy and npz.

An example is a slice along the first dimension. Rows are read one after the other, packed or not, so memory holds a
buffer, never the file, and a file that is cut off ends in an error and not in a bus error, as a mapped one would.
"""

from __future__ import annotations

import contextlib
import io
import math
import zipfile
from collections.abc import Iterator, Sequence
from typing import Any, BinaryIO

import numpy as np

from torchstrategy.data.readers.reading import (
    READ_ERRORS,
    FilePath,
    check_start,
    choose,
    file_name,
    open_binary,
    open_plain,
    reading_error,
    to_value,
)
from torchstrategy.errors import DataLossError, InvalidArgumentError

__all__ = ["idx", "npy", "npz"]

_BUFFER_BYTES = 1 << 16
_IDX_DTYPES = {0x08: "u1", 0x09: "i1", 0x0B: ">i2", 0x0C: ">i4", 0x0D: ">f4", 0x0E: ">f8"}
_TENSOR_AND_STRING_KINDS = "biufcUS"


def idx(path: FilePath | tuple[FilePath, ...], start: int = 0) -> Iterator[Any]:
    """Read idx files, the format of MNIST and Fashion-MNIST.

    Args:
        path: one file, or a tuple of files with the parts of the same examples, such as ``(images, labels)``;
            those whose names end in ``.gz`` are unpacked.
        start: number of examples to skip.

    Returns:
        An iterator of tensors of the file's dtype; for a tuple of files, of tuples of tensors.

    Raises:
        NotFoundError: a file is not there.
        DataLossError: it is damaged, no idx file, or has fewer than ``start`` examples.
        InvalidArgumentError: the files hold different numbers of examples.

    Example:
        >>> import pathlib, tempfile
        >>> folder = tempfile.TemporaryDirectory()
        >>> labels = pathlib.Path(folder.name, "labels-idx1-ubyte")
        >>> _ = labels.write_bytes(bytes([0, 0, 8, 1, 0, 0, 0, 3, 5, 0, 4]))
        >>> list(ts.data.readers.idx(labels))
        [tensor(5, dtype=torch.uint8), tensor(0, dtype=torch.uint8), tensor(4, dtype=torch.uint8)]
        >>> folder.cleanup()
    """
    is_tuple = isinstance(path, (tuple, list))
    names = [file_name(one, "idx") for one in (path if isinstance(path, (tuple, list)) else [path])]
    with contextlib.ExitStack() as stack:
        columns = [_idx_column(name, stack.enter_context(open_binary(name))) for name in names]
        for row in _rows(columns, start, ", ".join(names)):
            yield tuple(row) if is_tuple else row[0]


def npy(path: FilePath, start: int = 0) -> Iterator[Any]:
    """Read the slices of an array that ``numpy.save`` wrote.

    Args:
        path: the file.
        start: number of slices to skip.

    Returns:
        An iterator of tensors of the array's dtype; strings are ``str`` or ``bytes``. An array in Fortran order is
        read into memory at once.

    Raises:
        NotFoundError: there is no such file.
        DataLossError: it is damaged, no npy file, or has fewer than ``start`` slices.
        InvalidArgumentError: it holds a scalar or something else than numbers and strings.

    Example:
        >>> import numpy, tempfile
        >>> folder = tempfile.TemporaryDirectory()
        >>> numpy.save(f"{folder.name}/squares.npy", numpy.array([[0, 0], [1, 1], [2, 4]]))
        >>> list(ts.data.readers.npy(f"{folder.name}/squares.npy", start=1))
        [tensor([1, 1]), tensor([2, 4])]
        >>> folder.cleanup()
    """
    name = file_name(path, "npy")
    with open_plain(name) as stream:
        for (value,) in _rows([_npy_column(name, "the array", stream)], start, name):
            yield value


def npz(path: FilePath, start: int = 0, *, keys: Sequence[str] | None = None) -> Iterator[dict[str, Any]]:
    """Read the slices of arrays that ``numpy.savez`` or ``savez_compressed`` wrote.

    Args:
        path: the file.
        start: number of examples to skip.
        keys: names of the arrays to read; ``None`` means all.

    Returns:
        An iterator of dicts, by the arrays' names, of tensors; strings are ``str`` or ``bytes``. An array in Fortran
        order is read into memory at once.

    Raises:
        NotFoundError: there is no such file.
        DataLossError: it is damaged, no npz file, or has fewer than ``start`` examples.
        InvalidArgumentError: it lacks one of the ``keys``, the arrays' first dimensions differ, or one is a scalar or
            holds something else than numbers and strings.

    Example:
        >>> import functools, numpy, tempfile
        >>> folder = tempfile.TemporaryDirectory()
        >>> numpy.savez(f"{folder.name}/0.npz", x=numpy.zeros((2, 3)), y=numpy.arange(2), name="all")
        >>> reader = functools.partial(ts.data.readers.npz, keys=["x", "y"])
        >>> for example in reader(f"{folder.name}/0.npz"):
        ...     print(example["x"].shape, example["y"])
        torch.Size([3]) tensor(0)
        torch.Size([3]) tensor(1)
        >>> folder.cleanup()
    """
    name = file_name(path, "npz")
    with open_plain(name) as file, _open_zip(file, name) as archive, contextlib.ExitStack() as stack:
        members = {member.removesuffix(".npy"): member for member in archive.namelist() if member.endswith(".npy")}
        chosen = choose(list(members), keys, name, "arrays", "keys")
        columns = []
        for key in chosen:
            try:
                stream = stack.enter_context(archive.open(members[key]))
            except READ_ERRORS as error:
                raise reading_error(error, name, 0) from error
            buffered = io.BufferedReader(stream, _BUFFER_BYTES)  # type: ignore[type-var]
            columns.append(_npy_column(name, f"array {key!r}", buffered))
        for row in _rows(columns, start, name):
            yield dict(zip(chosen, row, strict=True))


class _Column:
    """One array, read row by row.

    Args:
        name: its file.
        title: how messages call it.
        stream: stands at the first row.
        dtype: of the array.
        shape: ``[rows, ...]``.
    """

    def __init__(self, name: str, title: str, stream: BinaryIO, dtype: np.dtype[Any], shape: tuple[int, ...]) -> None:
        if dtype.kind not in _TENSOR_AND_STRING_KINDS:
            raise InvalidArgumentError(
                f"{title} of {name} has dtype {dtype}. Readers make tensors of numbers, and strings; choose other "
                "arrays by `keys`, or save this one as numbers."
            )
        if not shape:
            raise InvalidArgumentError(
                f"{title} of {name} is a scalar. An example is a slice along the first dimension; leave it out by "
                "`keys`, or give it one."
            )
        self.name = name
        self.title = title
        self.length = shape[0]
        self._stream = stream
        self._dtype = dtype
        self._shape = shape[1:]
        self._row_bytes = dtype.itemsize * math.prod(self._shape)

    def skip(self, num_rows: int) -> None:
        """Leave rows out."""
        try:
            self._stream.seek(num_rows * self._row_bytes, io.SEEK_CUR)
        except READ_ERRORS as error:
            raise reading_error(error, self.name, num_rows) from error

    def read(self, number: int) -> Any:
        """Return row ``number``, which is the next one."""
        row = np.empty(self._shape, self._dtype)
        try:
            num_bytes = self._stream.readinto(row.reshape(-1).view(np.uint8)) if self._row_bytes else 0  # type: ignore[attr-defined]
        except READ_ERRORS as error:
            raise reading_error(error, self.name, number) from error
        if num_bytes != self._row_bytes:
            raise reading_error(EOFError(f"it ends within {self.title} of {self.length} rows"), self.name, number)
        return to_value(row)

    def finish(self) -> None:
        """Check that nothing comes after the last row; packed files compare their checksums here."""
        try:
            rest = self._stream.read(1)
        except READ_ERRORS as error:
            raise reading_error(error, self.name, self.length) from error
        if rest:
            raise DataLossError(
                f"{self.name} goes on after the {self.length} rows that the header of {self.title} tells. Make the "
                "file again, with one array of the right shape."
            )


def _rows(columns: list[_Column], start: int, names: str) -> Iterator[list[Any]]:
    """Yield the rows of columns of equal length."""
    lengths = {f"{column.title} of {column.name}": column.length for column in columns}
    if len(set(lengths.values())) > 1:
        table = ", ".join(f"{length} in {title}" for title, length in lengths.items())
        raise InvalidArgumentError(
            f"The parts of the examples don't belong together: their numbers of examples are {table}. Choose those "
            "with equal first dimensions, or pair the files anew."
        )
    check_start(start, columns[0].length, names)
    for column in columns:
        column.skip(start)
    for number in range(start, columns[0].length):
        yield [column.read(number) for column in columns]
    for column in columns:
        column.finish()


def _idx_column(name: str, stream: BinaryIO) -> _Column:
    magic = _read_header(name, stream, 4)
    dtype = _IDX_DTYPES.get(magic[2])
    if magic[:2] != b"\0\0" or dtype is None:
        raise DataLossError(
            f"{name} is no idx file: it begins with {magic!r}, not with two zero bytes and a type. Give from_files idx "
            "files, and those that are packed a name that ends in .gz."
        )
    sizes = np.frombuffer(_read_header(name, stream, 4 * magic[3]), ">u4")
    return _Column(name, "the array", stream, np.dtype(dtype), tuple(sizes.tolist()))


def _read_header(name: str, stream: BinaryIO, num_bytes: int) -> bytes:
    try:
        content = stream.read(num_bytes)
    except READ_ERRORS as error:
        raise reading_error(error, name, 0) from error
    if len(content) < num_bytes:
        raise reading_error(EOFError("it ends within its header"), name, 0)
    return content


def _npy_column(name: str, title: str, stream: BinaryIO) -> _Column:
    try:
        version = np.lib.format.read_magic(stream)
        read_header = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        shape, is_fortran, dtype = read_header(stream)
        if is_fortran and not dtype.hasobject:
            array = np.frombuffer(stream.read(), dtype).reshape(shape, order="F")
            stream = io.BytesIO(array.tobytes())
    except (*READ_ERRORS, ValueError) as error:
        raise reading_error(error, name, 0) from error
    return _Column(name, title, stream, dtype, shape)


def _open_zip(file: BinaryIO, name: str) -> zipfile.ZipFile:
    try:
        return zipfile.ZipFile(file)
    except READ_ERRORS as error:
        raise reading_error(error, name, 0) from error
