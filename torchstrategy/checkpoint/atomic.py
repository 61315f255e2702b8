"""Files that are complete or not there, and that are known to be whole when they are read.

A checkpoint is the zip archive that ``torch.save`` writes: its checksums find damage, and its directory stands at the
end, so that a truncated file can't pass. It holds tensors and plain values only and is never unpickled freely.
"""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import uuid
import zipfile
import zlib
from collections.abc import Callable
from typing import IO, Any, NamedTuple

import torch

from torchstrategy import errors

__all__ = [
    "SUFFIX",
    "Index",
    "checkpoint_file",
    "index_path",
    "read_archive",
    "read_checkpoint",
    "read_index",
    "write_checkpoint",
    "write_file",
    "write_index",
]

SUFFIX = ".pt"

_FORMAT = "torchstrategy.checkpoint"
_VERSION = 1
_INDEX_NAME = "checkpoint"


class Index(NamedTuple):
    """What the file ``checkpoint`` says about its directory.

    Args:
        written: when each checkpoint was written, by its name (without folder and suffix), the latest last.
        last_preserved: when the latest of those that are kept for good was written.
    """

    written: dict[str, float]
    last_preserved: float | None = None

    @property
    def latest(self) -> str:
        """Name of the latest checkpoint."""
        return list(self.written)[-1]


def write_checkpoint(path: str, content: dict[str, Any]) -> None:
    """Write a checkpoint file.

    Raises:
        OSError: the file can't be written; what was there before is unchanged.
    """
    write_file(path, lambda file: torch.save({"format": _FORMAT, "version": _VERSION, **content}, file))


def read_checkpoint(path: str, *, mapped: bool = False) -> dict[str, Any]:
    """Return what ``write_checkpoint`` was given, with all tensors on the CPU.

    Args:
        path: the file.
        mapped: whether tensors are read from the file when they are used; it must not be overwritten in place then.

    Raises:
        DataLossError: the file is damaged or not a checkpoint of this library.
    """
    content = read_archive(path, mapped=mapped, what="a checkpoint", remedy=_REMEDY)
    if not isinstance(content, dict) or content.get("format") != _FORMAT:
        raise errors.DataLossError(f"{path} was not written by ts.train.Checkpoint. {_REMEDY}")
    if content["version"] > _VERSION:
        raise errors.DataLossError(
            f"{path} has the format version {content['version']}; this release reads up to {_VERSION}. Upgrade it."
        )
    return content


def read_archive(path: str, *, what: str, remedy: str, mapped: bool = False, may_be_old: bool = False) -> Any:
    """Return what ``torch.save`` wrote: tensors, which are on the CPU then, and plain values only.

    Args:
        path: the file.
        what: what the file should be, for error messages.
        remedy: what to do if it is damaged.
        mapped: whether tensors are read from the file when they are used; it must not be overwritten in place then.
        may_be_old: whether files are read that torch wrote before 1.6, which have no checksums.

    Raises:
        DataLossError: the file is damaged or no such file.
    """
    try:
        if may_be_old and _is_old(path):
            return torch.load(path, map_location="cpu", weights_only=True)
        with zipfile.ZipFile(path) as archive:
            damaged = archive.testzip()
        content = None if damaged else torch.load(path, map_location="cpu", weights_only=True, mmap=mapped)
    except _SIGNS_OF_DAMAGE as error:
        raise errors.DataLossError(f"{path} is damaged or not {what}: {error}. {remedy}") from error
    if damaged:
        raise errors.DataLossError(f"{path} is damaged: the checksum of its part {damaged!r} does not fit. {remedy}")
    return content


def _is_old(path: str) -> bool:
    with open(path, "rb") as file:
        return file.read(len(_OLD)) == _OLD


#: With what ``torch.save(..., _use_new_zipfile_serialization=False)`` begins: its magic number, pickled.
_OLD = pickle.dumps(torch.serialization.MAGIC_NUMBER, protocol=2)
_REMEDY = "Restore another checkpoint."
_SIGNS_OF_DAMAGE = (
    zipfile.BadZipFile, zlib.error, pickle.UnpicklingError, EOFError, RuntimeError, ValueError, KeyError
)  # fmt: skip


def checkpoint_file(path: str) -> str:
    """Return the file of a checkpoint path as ``save`` returned it; the suffix may be there already.

    Raises:
        NotFoundError: it is not there.
        DataLossError: it is a directory.
    """
    for candidate in (path + SUFFIX, path):
        if os.path.isfile(candidate):
            return candidate
    if os.path.isdir(path):
        raise errors.DataLossError(
            f"{path} is a directory, not a checkpoint. Pass ts.train.latest_checkpoint({path!r}) to restore its latest."
        )
    raise errors.NotFoundError(f"There is no checkpoint {path}: no file {path + SUFFIX}.")


def index_path(directory: str, filename: str | None = None) -> str:
    """Return the path of the file that names a directory's checkpoints."""
    return os.path.join(directory, filename or _INDEX_NAME)


def write_index(directory: str, written: dict[str, float], last_preserved: float | None = None) -> None:
    """Write the file that names a directory's checkpoints; the arguments are an index's."""
    index = {"latest": list(written)[-1], "written": written, "last_preserved": last_preserved}
    text = json.dumps(index, indent=1).encode()
    write_file(index_path(directory), lambda file: file.write(text))


def read_index(directory: str, filename: str | None = None) -> Index | None:
    """Return what names a directory's checkpoints, or ``None`` if nothing does.

    Raises:
        DataLossError: the file is not what ``write_index`` wrote, or names files outside the directory.
    """
    path = index_path(directory, filename)
    try:
        with open(path, "rb") as file:
            content = json.loads(file.read())
            index = Index({str(name): float(t) for name, t in content["written"].items()}, content["last_preserved"])
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (ValueError, TypeError, LookupError, AttributeError) as error:
        raise errors.DataLossError(
            f"{path} is damaged: it should be the JSON file that names the directory's checkpoints. Delete it and "
            "restore a checkpoint by its path."
        ) from error
    # What it names is read, and deleted when it is old: files of this directory only.
    foreign = [name for name in index.written if name in ("", ".", "..") or os.path.basename(name) != name]
    if foreign:
        raise errors.DataLossError(
            f"{path} names {foreign[0]!r}, which is no checkpoint of its directory. Was it written by somebody else? "
            "Take the name out, or delete the file and restore a checkpoint by its path."
        )
    return index


def write_file(path: str, write: Callable[[IO[bytes]], Any]) -> None:
    """Write a file under another name, put it on the disk, and only then give it its name.

    Args:
        path: where to; its directory is made if need be.
        write: called with the open file.

    Raises:
        OSError: the file can't be written; what was there before is unchanged.
    """
    directory, name = os.path.split(os.path.abspath(path))
    os.makedirs(directory, exist_ok=True)
    temporary = os.path.join(directory, f".{name}.{uuid.uuid4().hex}.tmp")
    try:
        with open(temporary, "wb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException as error:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        cause = error.__context__
        if isinstance(error, RuntimeError) and isinstance(cause, OSError):  # torch.save hides that the disk is full
            raise OSError(cause.errno, cause.strerror, path) from error
        # A write or a flush does not name the file.
        if isinstance(error, OSError) and error.errno is not None and error.filename is None:
            error.filename = path
        raise
    if os.name == "posix":  # the new name itself must survive a power cut
        descriptor = os.open(directory, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
