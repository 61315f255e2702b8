"""Parquet files, read by pyarrow."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from torchstrategy.data.readers.reading import (
    READ_ERRORS,
    FilePath,
    check_start,
    choose,
    file_name,
    import_optional,
    open_plain,
    reading_error,
    to_value,
)
from torchstrategy.errors import InvalidArgumentError

__all__ = ["parquet"]

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
