"""Tar archives with one group of members for each example, read by webdataset."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, BinaryIO

import numpy as np

from torchstrategy.data.readers.reading import (
    READ_ERRORS,
    FilePath,
    check_start,
    file_name,
    import_optional,
    open_binary,
    reading_error,
    to_value,
)
from torchstrategy.errors import DataLossError

__all__ = ["tar"]

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
