"""Lines of text files."""

from __future__ import annotations

from collections.abc import Iterator

from torchstrategy.data.readers.reading import (
    READ_ERRORS,
    FilePath,
    check_start,
    file_name,
    open_binary,
    reading_error,
)
from torchstrategy.errors import DataLossError

__all__ = ["text_lines"]


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
