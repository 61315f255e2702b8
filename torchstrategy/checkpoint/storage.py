"""Files that are complete or not there: on this host's file systems, or wherever fsspec finds a path with a scheme.

A file is written under another name, put on the disk, and only then given its own. Whoever writes holds a lock on the
unfinished file, so that one without a lock is known to be what a killed process left; the next writer deletes it.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import glob
import hashlib
import math
import os
import re
import shutil
import socket
import tempfile
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from contextvars import ContextVar
from typing import IO, Any

import torch
from torch import Tensor

from torchstrategy.base.context import set_within

try:
    import fcntl
except ImportError:  # without locks, what killed processes leave is not found
    fcntl = None  # type: ignore[assignment]

__all__ = [
    "absolute",
    "copy_file",
    "delete_directory",
    "delete_file",
    "delete_leftovers",
    "find_files",
    "is_directory",
    "is_file",
    "is_remote",
    "is_spilled",
    "list_directories",
    "list_files",
    "local_copy",
    "new_tensor",
    "open_file",
    "real_path",
    "spilled_to",
    "write_file",
]

_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+://")
#: Stores that show a file when it is complete, so that it needs no other name before.
_ATOMIC_STORES = {"s3", "s3a", "gs", "gcs", "az", "abfs", "abfss", "memory"}
_UNFINISHED = re.compile(r"\..+\.([0-9a-f]{8})[0-9a-f]{24}\.tmp")  # the first part says on which kernel
_LONG_AGO_S = 3600.0


def write_file(path: str, write: Callable[[IO[bytes]], Any], *, check: Callable[[], None] = lambda: None) -> None:
    """Write a file under another name, put it on the disk, and only then give it its name.

    Args:
        path: where to; its directory is made if need be.
        write: called with the open file.
        check: called when the file is complete; if it raises, the file does not get its name.

    Raises:
        OSError: the file can't be written; what was there before is unchanged.
    """
    if is_remote(path):
        _write_remote(path, write, check)
        return
    directory, name = os.path.split(os.path.abspath(path))
    _make_directory(directory)
    delete_leftovers(directory)
    file = _new_file(directory, name)
    try:
        with file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
            check()
            os.replace(file.name, path)  # while it is locked: unlocked, it would be taken for a leftover
    except BaseException as error:
        with contextlib.suppress(OSError):
            os.unlink(file.name)
        cause = error.__context__
        if isinstance(error, RuntimeError) and isinstance(cause, OSError):  # torch.save hides that the disk is full
            raise OSError(cause.errno, cause.strerror, path) from error
        # A write or a flush does not name the file.
        if isinstance(error, OSError) and error.errno is not None and error.filename is None:
            error.filename = path
        raise
    _sync_directory(directory)  # the new name itself must survive a power cut


def copy_file(source: str, path: str) -> None:
    """Write a file with the content of one on this host; see ``write_file``."""
    with open(source, "rb") as file:
        write_file(path, lambda target: shutil.copyfileobj(file, target, _CHUNK))


def delete_leftovers(directory: str) -> None:
    """Delete the unfinished files of processes that were killed while they wrote to a directory."""
    if fcntl is None or is_remote(directory):
        return
    with contextlib.suppress(OSError), os.scandir(directory or os.curdir) as entries:
        for entry in entries:
            found = _UNFINISHED.fullmatch(entry.name)
            if found is None:
                continue
            # Locks of another host's processes may not be seen here.
            if found[1] == _kernel() or _now_at(directory) - entry.stat().st_mtime > _LONG_AGO_S:
                _delete_if_unlocked(entry.path)


def _now_at(directory: str) -> float:
    """Return the time by the clock that dates a directory's files: this host's own may be hours ahead of it."""
    with tempfile.TemporaryFile(dir=directory) as file:
        return os.fstat(file.fileno()).st_mtime


def open_file(path: str) -> IO[bytes]:
    """Open a file for reading.

    Raises:
        FileNotFoundError: it is not there.
    """
    if is_remote(path):
        system, place = _remote(path)
        return system.open(place, "rb")  # type: ignore[no-any-return]
    return open(path, "rb")


@contextlib.contextmanager
def local_copy(path: str) -> Iterator[str]:
    """Yield the path of a file on this host with a file's content and name: the file's own if it is one."""
    if not is_remote(path):
        yield path
        return
    with tempfile.TemporaryDirectory(prefix="torchstrategy-") as folder:
        copy = os.path.join(folder, os.path.basename(path))
        with open_file(path) as source, open(copy, "wb") as target:
            shutil.copyfileobj(source, target, _CHUNK)
        yield copy


def is_file(path: str) -> bool:
    """Say whether there is a file."""
    if is_remote(path):
        system, place = _remote(path)
        return bool(system.isfile(place))
    return os.path.isfile(path)


def is_directory(path: str) -> bool:
    """Say whether there is a directory."""
    if is_remote(path):
        system, place = _remote(path)
        return bool(system.isdir(place))
    return os.path.isdir(path)


def list_files(directory: str) -> list[str]:
    """Return the names of the files in a directory; none if it is not there."""
    return [name for name, is_folder in _entries(directory) if not is_folder]


def list_directories(directory: str) -> list[str]:
    """Return the names of the directories in a directory; none if it is not there."""
    return [name for name, is_folder in _entries(directory) if is_folder]


def _entries(directory: str) -> list[tuple[str, bool]]:
    """Return the names in a directory, and whether each is a directory's."""
    if is_remote(directory):
        system, place = _remote(directory)
        try:
            found = system.ls(place, detail=True)
        except (FileNotFoundError, NotADirectoryError):
            return []
        # A store lists a file as its own content, and what stands for a directory in it.
        inside = [entry for entry in found if entry["name"].rstrip("/") != place.rstrip("/")]
        return [(os.path.basename(entry["name"].rstrip("/")), entry["type"] == "directory") for entry in inside]
    try:
        with os.scandir(directory or os.curdir) as entries:
            return [(entry.name, entry.is_dir()) for entry in entries if entry.is_dir() or entry.is_file()]
    except (FileNotFoundError, NotADirectoryError):
        return []


def find_files(directory: str, pattern: str) -> list[str]:
    """Return the paths of the files that a pattern, as ``glob`` takes it, names in a directory."""
    if is_remote(directory):
        system, place = _remote(directory)
        found = system.glob(f"{glob.escape(place)}/{pattern}")
        return [os.path.join(directory, path.removeprefix(place).lstrip("/")) for path in found]
    return [os.path.join(directory, name) for name in glob.glob(pattern, root_dir=directory)]


def delete_file(path: str) -> None:
    """Delete a file.

    Raises:
        FileNotFoundError: it is not there.
    """
    if is_remote(path):
        system, place = _remote(path)
        system.rm_file(place)
    else:
        os.unlink(path)


def delete_directory(path: str) -> None:
    """Delete a directory with all that is in it.

    Raises:
        FileNotFoundError: it is not there.
    """
    if is_remote(path):
        system, place = _remote(path)
        system.rm(place, recursive=True)
    else:
        shutil.rmtree(path)


def absolute(path: str) -> str:
    """Return a path that means the same in every folder, in one way of writing it."""
    return path.rstrip("/") if is_remote(path) else os.path.abspath(path)


def real_path(path: str) -> str:
    """Return a path without links: what to compare, to know whether two paths are of one place."""
    return absolute(path) if is_remote(path) else os.path.realpath(path)


def is_remote(path: str) -> bool:
    """Say whether a path is one of fsspec's, which has a scheme, and not one of this host's file systems."""
    return _SCHEME.match(path) is not None


def _remote(path: str) -> tuple[Any, str]:
    """Return the file system of a path with a scheme, and the path in it."""
    import fsspec  # type: ignore[import-untyped]  # noqa: PLC0415 - torch depends on it; an import costs what few need

    try:
        system, place = fsspec.core.url_to_fs(path)
    except (ImportError, ValueError) as error:
        raise type(error)(
            f"{path}: {error}. Install what fsspec needs for this scheme, or give a folder's path."
        ) from error
    system.invalidate_cache()  # other processes write as well
    return system, place


def _write_remote(path: str, write: Callable[[IO[bytes]], Any], check: Callable[[], None]) -> None:
    """Write a file on this host, and give it to the store when it is complete."""
    system, place = _remote(path)
    with (
        tempfile.TemporaryDirectory(prefix="torchstrategy-") as folder,
        open(os.path.join(folder, os.path.basename(path)), "xb") as file,
    ):
        write(file)
        file.flush()
        check()
        system.makedirs(os.path.dirname(place), exist_ok=True)
        protocols = {system.protocol} if isinstance(system.protocol, str) else set(system.protocol)
        if protocols & _ATOMIC_STORES:
            system.put_file(file.name, place)
            return
        directory, name = os.path.split(place)
        unfinished = f"{directory}/.{name}.{uuid.uuid4().hex}.tmp"
        try:
            system.put_file(file.name, unfinished)
            system.mv(unfinished, place)
        except BaseException:
            with contextlib.suppress(OSError):
                system.rm_file(unfinished)
            raise


def _new_file(directory: str, name: str) -> IO[bytes]:
    """Make an unfinished file, and lock it as long as it is open."""
    while True:
        number = _kernel() + uuid.uuid4().hex[8:]
        file = open(os.path.join(directory, f".{name}.{number}.tmp"), "xb")  # noqa: SIM115 - for the caller
        try:
            if fcntl is not None:
                with contextlib.suppress(OSError):  # a file system without locks
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.fstat(file.fileno()).st_nlink:
                return file
        except BaseException:
            file.close()
            raise
        file.close()  # another writer took it for a leftover before it was locked


def _delete_if_unlocked(path: str) -> None:
    with contextlib.suppress(OSError), open(path, "r+b") as file:  # OSError: locked, or gone. NFS wants to write
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.unlink(path)


@functools.cache
def _kernel() -> str:
    """Return eight digits that tell running kernels apart, whose processes see each other's locks."""
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            text = file.read()
    except OSError:
        text = socket.gethostname()
    return hashlib.sha256(text.encode()).hexdigest()[:8]


def _make_directory(directory: str) -> None:
    """Make a directory, so that its name survives a power cut."""
    if os.path.isdir(directory):
        return
    parent = os.path.dirname(directory)
    _make_directory(parent)
    with contextlib.suppress(FileExistsError):
        os.mkdir(directory)
        _sync_directory(parent)
    if not os.path.isdir(directory):
        raise NotADirectoryError(f"{directory} is a file, where a directory is needed.")


def _sync_directory(directory: str) -> None:
    if os.name != "posix":
        return
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


_CHUNK = 1 << 22

# --- large values in files instead of memory, for checkpoints of models that don't fit into the coordinator's memory

_SPILLED = ".spilled-by-torchstrategy"
#: Smaller tensors stay in memory.
_MIN_BYTES = 1 << 20
_directory: ContextVar[str | None] = ContextVar("directory", default=None)


def spilled_to(directory: str) -> AbstractContextManager[None]:
    """Let ``new_tensor`` make tensors in files without a name in a directory."""
    return set_within(_directory, tempfile.gettempdir() if is_remote(directory) else directory or os.curdir)


def is_spilled(storage: torch.UntypedStorage) -> bool:
    """Say whether ``new_tensor`` made a storage as a file's content."""
    return storage.filename is not None and os.path.basename(storage.filename).startswith(_SPILLED)


def new_tensor(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Return a tensor of zeros on the CPU.

    Within ``spilled_to`` a large one is a file's content, which the kernel may write out and drop from memory. The file
    has no name and is gone with the tensor.
    """
    size = math.prod(shape)
    directory = _directory.get()
    if directory is None or size * dtype.itemsize < _MIN_BYTES:
        return torch.zeros(tuple(shape), dtype=dtype)
    _make_directory(os.path.abspath(directory))
    with _new_file(directory, _SPILLED[1:]) as file:
        try:
            if hasattr(os, "posix_fallocate"):  # else a full disk ends the process at a write, by SIGBUS
                _reserve(file.fileno(), size * dtype.itemsize)
            return torch.from_file(file.name, shared=True, size=size, dtype=dtype).view(tuple(shape))
        finally:
            os.unlink(file.name)


def _reserve(descriptor: int, num_bytes: int) -> None:
    try:
        os.posix_fallocate(descriptor, 0, num_bytes)
    except OSError as error:
        if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL):  # of a file system that can't
            raise
