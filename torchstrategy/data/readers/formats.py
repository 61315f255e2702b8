"""Files of examples: Parquet, lines of text, and tar archives."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, BinaryIO

import numpy as np

from torchstrategy.data.readers.reading import (
    READ_ERRORS,
    FilePath,
    check_start,
    choose,
    file_name,
    import_optional,
    open_binary,
    open_plain,
    reading_error,
    to_value,
)
from torchstrategy.errors import DataLossError, InvalidArgumentError, UnimplementedError

__all__ = ["parquet", "tar", "text_lines"]

_END_BYTES = 1024  # of zeros, which end an archive
_CHUNK_BYTES = 1 << 16
_UNPICKLED = (".pkl", ".pickle", ".pyd", ".pth")


def tar(
    path: FilePath, start: int = 0, *, decoder: str | Callable[[str, bytes], Any] | None = None
) -> Iterator[dict[str, Any]]:
    """Read the examples of a tar shard, through webdataset.

    Consecutive members with the same name up to the first dot, such as ``7.png`` and ``7.cls``, are one example. Parts
    are decoded by their extension: ``txt`` becomes a ``str``, ``cls``, ``id`` and ``index`` an ``int``, ``json``
    its content, ``npy`` a tensor; for images choose a ``decoder``. Other parts stay bytes, pickles among them, because
    unpickling runs whatever code the file holds.

    Args:
        path: the archive; unpacked if its name ends in ``.gz`` or ``.tgz``. A stream (``pipe:``) is not opened.
        start: number of examples to skip; they are not decoded.
        decoder: what webdataset's ``decode`` takes: the name of a kind of image, such as ``"torchrgb8"`` (needs
            Pillow), or a function of ``.extension`` and bytes that returns the value or ``None`` for what it leaves
            to the rules above.

    Returns:
        An iterator of dicts by the members' extensions, and the name as ``"__key__"``.

    Raises:
        ImportError: webdataset is not installed.
        NotFoundError: there is no such file.
        DataLossError: it is damaged, no tar archive, or has fewer than ``start`` examples, or a part of an example
            can't be decoded.
        ValueError: there is no kind of image of that name.

    Example:
        >>> import tempfile, webdataset
        >>> folder = tempfile.TemporaryDirectory()
        >>> with webdataset.TarWriter(f"{folder.name}/0.tar") as writer:
        ...     _ = writer.write({"__key__": "first", "txt": "one", "cls": 1})
        >>> list(ts.data.readers.tar(f"{folder.name}/0.tar"))
        [{'__key__': 'first', 'cls': 1, 'txt': 'one'}]
        >>> folder.cleanup()
    """
    tariterators = import_optional("webdataset.tariterators", "tar")
    decode = _make_decoder(decoder)
    name = file_name(path, "tar")
    check_start(start, max(start, 0), name)
    number = 0
    with open_binary(name) as file:
        stream = _Stream(file)
        members = tariterators.tar_file_expander([{"url": name, "stream": stream}])
        examples = tariterators.group_by_keys(members)
        while True:
            try:
                example = next(examples, None)
            except Exception as error:
                raise reading_error(_plain(error), name, number) from error
            if example is None:
                break
            if number >= start:
                yield _decoded(example, decode, name, number)
            number += 1
        try:
            stream.check_end(name)
        except READ_ERRORS as error:
            raise reading_error(error, name, number) from error
    check_start(start, number, name)


class _Stream:
    """A file that remembers how it ended: for tarfile one that is cut off between members is complete."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._last = b""

    def read(self, size: int = -1) -> bytes:
        data = self._file.read(size)
        self._last = (self._last + data)[-_END_BYTES:]
        return data

    def check_end(self, name: str) -> None:
        has_more = False
        while rest := self.read(_CHUNK_BYTES):
            has_more = has_more or any(rest)
        if has_more:
            raise DataLossError(f"{name} has members after the end of the archive. Write one archive into each file.")
        if self._last != bytes(_END_BYTES):
            raise DataLossError(
                f"{name} is cut off: an archive ends with {_END_BYTES} zero bytes. Make or fetch the file again; one "
                "that is packed needs a name that ends in .tar.gz or .tgz."
            )


def _make_decoder(decoder: str | Callable[[str, bytes], Any] | None) -> Callable[[dict[str, Any]], dict[str, Any]]:
    autodecode = import_optional("webdataset.autodecode", "tar")
    if decoder is not None and not callable(decoder) and not isinstance(decoder, str):
        raise TypeError(
            f"decoder must be the name of a kind of image, such as 'torchrgb8', or a function of extension and bytes. "
            f"Received: {decoder!r}"
        )

    def basic(key: str, data: bytes) -> Any:
        value = data if key.endswith(_UNPICKLED) else autodecode.basichandlers(key, data)
        return to_value(value) if isinstance(value, np.ndarray) and value.dtype.kind in "biufc" else value

    handlers = [] if decoder is None else [autodecode.imagehandler(decoder) if isinstance(decoder, str) else decoder]
    decode: Callable[[dict[str, Any]], dict[str, Any]] = autodecode.Decoder(handlers, post=[basic])
    return decode


def _decoded(
    example: dict[str, Any], decode: Callable[[dict[str, Any]], dict[str, Any]], name: str, number: int
) -> dict[str, Any]:
    del example["__url__"]
    try:
        return decode(example)
    except Exception as error:  # noqa: BLE001 - whatever a decoder raises
        cause = error.__cause__ or error
        raise DataLossError(
            f"Part {getattr(error, 'k', None)!r} of example {number} (the first is 0) of {name}, "
            f"{example['__key__']!r}, can't be decoded: {type(cause).__name__}: {cause}. Choose another `decoder`, or "
            "make the file again."
        ) from cause


def _plain(error: Exception) -> Exception:
    """Return the error without the arguments that webdataset put behind its own."""
    if isinstance(error, OSError) and error.errno is not None:
        return error
    return EOFError(f"{type(error).__name__}: {error.args[0] if error.args else error}")


def text_lines(path: FilePath, start: int = 0) -> Iterator[str]:
    r"""Read the lines of a text file in UTF-8.

    Args:
        path: the file; unpacked if its name ends in ``.gz``.
        start: number of lines to skip.

    Returns:
        An iterator of lines without their ends, ``\n`` or ``\r\n``. A file of no bytes has no lines.

    Raises:
        NotFoundError: there is no such file.
        DataLossError: it is damaged, not UTF-8, or has fewer than ``start`` lines.

    Example:
        >>> import pathlib, tempfile
        >>> folder = tempfile.TemporaryDirectory()
        >>> path = pathlib.Path(folder.name, "lines.txt")
        >>> _ = path.write_text("one\ntwo\nthree")
        >>> list(ts.data.readers.text_lines(path, start=1))
        ['two', 'three']
        >>> folder.cleanup()
    """
    name = file_name(path, "text_lines")
    check_start(start, max(start, 0), name)
    number = 0
    with open_binary(name) as stream:
        while True:
            try:
                line = stream.readline()
            except READ_ERRORS as error:
                raise reading_error(error, name, number) from error
            if not line:
                break
            if number >= start:
                yield _decode(line, name, number)
            number += 1
    check_start(start, number, name)


def _decode(line: bytes, name: str, number: int) -> str:
    try:
        return line.removesuffix(b"\n").removesuffix(b"\r").decode()
    except UnicodeDecodeError as error:
        raise DataLossError(
            f"Line {number} (the first is 0) of {name} is not UTF-8: {error}. Convert the file, or give from_files a "
            "function of your own that reads it."
        ) from error


_BUFFER_BYTES = 1 << 20


def parquet(
    path: FilePath, start: int = 0, *, columns: Sequence[str] | None = None, batch_rows: int = 256
) -> Iterator[dict[str, Any]]:
    """Read the rows of a parquet file, through pyarrow.

    Numbers and lists of numbers, of fixed or varying length, become tensors; missing ones are ``None``. Everything
    else is as pyarrow's ``to_pylist`` gives it. Row groups before ``start`` are not read.

    Args:
        path: the file.
        start: number of rows to skip.
        columns: names of the columns to read; ``None`` means all.
        batch_rows: how many rows are in memory at once.

    Returns:
        An iterator of dicts by the columns' names.

    Raises:
        ImportError: pyarrow is not installed.
        NotFoundError: there is no such file.
        DataLossError: it is damaged, no parquet file, or has fewer than ``start`` rows.
        InvalidArgumentError: it lacks one of the ``columns``, there are none, or ``batch_rows`` is not positive.
        UnimplementedError: pyarrow is older than 26, and some lists of a fixed length are missing.

    Example:
        >>> import pyarrow, pyarrow.parquet, tempfile
        >>> folder = tempfile.TemporaryDirectory()
        >>> table = pyarrow.table({"x": [[0.0, 1.0], [2.0, 3.0]], "name": ["a", "b"]})
        >>> pyarrow.parquet.write_table(table, f"{folder.name}/0.parquet")
        >>> list(ts.data.readers.parquet(f"{folder.name}/0.parquet", start=1))
        [{'x': tensor([2., 3.], dtype=torch.float64), 'name': 'b'}]
        >>> folder.cleanup()
    """
    arrow = import_optional("pyarrow", "parquet")
    arrow_parquet = import_optional("pyarrow.parquet", "parquet")
    name = file_name(path, "parquet")
    if batch_rows <= 0:
        raise InvalidArgumentError(f"batch_rows must be positive: the rows in memory at once. Received: {batch_rows}")
    errors = (*READ_ERRORS, arrow.ArrowException)
    number = start
    with open_plain(name) as stream:
        try:
            # Without buffer_size a whole row group is read at once, and with pre_buffer all of them.
            file = arrow_parquet.ParquetFile(stream, buffer_size=_BUFFER_BYTES, pre_buffer=False)
        except errors as error:
            raise reading_error(error, name, 0) from error
        chosen = choose(file.schema_arrow.names, columns, name, "columns", "columns")
        groups, to_skip = _groups_from(file.metadata, start, name)
        batches = file.iter_batches(batch_rows, groups, chosen, use_threads=False) if groups else iter(())
        while True:
            try:
                batch = next(batches, None)
            except errors as error:
                if "lists to be of size" in str(error):
                    text = (
                        f"{name} has lists of a fixed length of which some are missing, which pyarrow reads from 26 on."
                    )
                    raise UnimplementedError(f"{text} This is pyarrow {arrow.__version__}.") from error
                raise reading_error(error, name, number) from error
            if batch is None:
                break
            batch, to_skip = batch.slice(to_skip), max(0, to_skip - batch.num_rows)
            values = [_values(arrow, batch.column(key)) for key in chosen]
            for row in zip(*values, strict=True):
                yield dict(zip(chosen, row, strict=True))
            number += batch.num_rows
    if number != file.metadata.num_rows:
        raise reading_error(EOFError(f"{file.metadata.num_rows} rows were expected"), name, number)


def _groups_from(metadata: Any, start: int, path: str) -> tuple[list[int], int]:
    """Return the row groups from row ``start`` on, and how many rows of the first one come before it."""
    check_start(start, metadata.num_rows, path)
    first = 0
    while first < metadata.num_row_groups and start >= metadata.row_group(first).num_rows:
        start -= metadata.row_group(first).num_rows
        first += 1
    return list(range(first, metadata.num_row_groups)), start


def _values(arrow: Any, column: Any) -> list[Any]:
    """Return the values of a column of one batch, each in memory of its own."""
    if isinstance(column, arrow.ExtensionArray):
        if isinstance(column.type, arrow.FixedShapeTensorType) and column.null_count == 0:
            return [to_value(row.copy()) for row in column.to_numpy_ndarray()]
        column = column.storage
    if _is_number(arrow, column.type):
        rows = _fill(column).to_numpy(zero_copy_only=False)
        return _without_missing(column, [to_value(np.array(row)) for row in rows])
    if _is_list(arrow, column.type) and _is_number(arrow, column.type.value_type):
        elements = column.flatten()
        if elements.null_count == 0:
            compute = import_optional("pyarrow.compute", "parquet")
            lengths = _fill(compute.list_value_length(column)).to_numpy(zero_copy_only=False)
            rows = np.split(elements.to_numpy(zero_copy_only=False), np.cumsum(lengths))[:-1]
            return _without_missing(column, [to_value(row.copy()) for row in rows])
    return list(column.to_pylist())


def _fill(column: Any) -> Any:
    return column.fill_null(0) if column.null_count else column


def _without_missing(column: Any, values: list[Any]) -> list[Any]:
    if not column.null_count:
        return values
    return [value if is_valid else None for value, is_valid in zip(values, column.is_valid().to_pylist(), strict=True)]


def _is_number(arrow: Any, kind: Any) -> bool:
    return bool(arrow.types.is_integer(kind) or arrow.types.is_floating(kind) or arrow.types.is_boolean(kind))


def _is_list(arrow: Any, kind: Any) -> bool:
    types = arrow.types
    return bool(types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind))
