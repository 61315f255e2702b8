"""What can go wrong on one rank of a job, for tests of what the others then do; and with files, of what is left."""

from __future__ import annotations

import builtins
import contextlib
import errno
import io
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any, Literal, NamedTuple

import torch

from torchstrategy.checkpoint.archive import named_tensors

__all__ = ["Fault", "file_fault", "flip_byte_of"]


class Fault(NamedTuple):
    """Something that goes wrong on one rank at one step; can be pickled.

    Args:
        kind: ``"kill"`` ends the process at once, as the system does when memory runs out (SIGKILL); ``"stop"`` halts
            it (SIGSTOP); ``"hang"`` lets the calling thread wait for ever; ``"exit"`` ends the program in the regular
            way; ``"error"`` raises ``OSError("injected")``.
        rank: where.
        step: when.

    Example:
        >>> from torchstrategy.testing.faults import Fault
        >>> fault = Fault("error", rank=1, step=3)
        >>> fault.strike(rank=0, step=3)
        >>> fault.strike(rank=1, step=3)
        Traceback (most recent call last):
        ...
        OSError: injected
    """

    kind: Literal["kill", "stop", "hang", "exit", "error"]
    rank: int
    step: int

    def strike(self, rank: int, step: int) -> None:
        """Let it happen if it is this rank's turn; a training loop calls this at each step.

        Args:
            rank: the calling process's id.
            step: number of the step.

        Raises:
            OSError: the fault is an error.
            SystemExit: the fault is an exit.
        """
        if (rank, step) != (self.rank, self.step):
            return
        if self.kind == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        elif self.kind == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        elif self.kind == "hang":
            threading.Event().wait()
        elif self.kind == "exit":
            sys.exit(0)
        else:
            raise OSError("injected")


@contextlib.contextmanager
def file_fault(
    kind: Literal["kill", "stop", "full", "torn"] | None, at: int, folder: str | os.PathLike[str]
) -> Iterator[list[str]]:
    """Let something go wrong when the program changes files in a folder, within a ``with`` block.

    Calls that change files are those that open one for writing, write to it, put it on the disk (``fsync``), rename,
    link, shorten or delete it, and make or delete a folder. What libraries in other languages do to files by themselves
    is not seen.

    Args:
        kind: ``"kill"`` ends the process before the call (SIGKILL), ``"stop"`` halts it (SIGSTOP), ``"full"`` raises
            the ``OSError`` of a full disk, from that call on, for all that would need room; ``"torn"`` is for a write
            of which half arrives before the process is ended, and like ``"kill"`` for other calls. ``None`` only
            counts.
        at: which call, from 1.
        folder: calls for other files are not counted.

    Yields:
        A list of the names of the calls so far.

    Example:
        >>> import tempfile
        >>> from torchstrategy.testing.faults import file_fault
        >>> checkpoint = ts.train.Checkpoint(step=torch.tensor(1))
        >>> with tempfile.TemporaryDirectory() as folder, file_fault("full", at=2, folder=folder) as calls:
        ...     try:
        ...         checkpoint.save(f"{folder}/ckpt")
        ...     except OSError as error:
        ...         print(error.strerror)
        ...     calls[:2], ts.train.latest_checkpoint(folder)
        No space left on device
        (['open', 'write'], None)
    """
    faults = _FileFaults(kind, at, os.path.realpath(os.fspath(folder)))
    saved = [(module, name, getattr(module, name)) for module, name in _CHANGING if hasattr(module, name)]
    try:
        for module, name, function in saved:
            setattr(module, name, faults.wrap(name, function))
        builtins.open, io.open = faults.open, faults.open
        yield faults.calls
    finally:
        builtins.open, io.open = faults.plain_open, faults.plain_open
        for module, name, function in saved:
            setattr(module, name, function)


def flip_byte_of(path: str | os.PathLike[str], name: str = "") -> None:
    """Change one byte of a tensor in an archive, as a disk may; for tests of what notices it.

    Args:
        path: the file that ``torch.save``, ``ts.train.Checkpoint`` or a model's ``save`` wrote.
        name: the tensor's name, or the end of it, such as ``"weight"``; the first one that ends so, with more than one
            byte.

    Raises:
        ValueError: there is no such tensor.
    """
    with open(path, "r+b") as file:
        content = file.read()
        for found, tensor in named_tensors("", torch.load(path, map_location="cpu", weights_only=True)):
            if not found.endswith(name) or tensor.layout is not torch.strided or tensor.untyped_storage().nbytes() < 2:
                continue
            data = bytes(tensor.untyped_storage())
            place = content.find(data) + len(data) // 2
            file.seek(place)
            file.write(bytes([content[place] ^ 1]))
            return
    raise ValueError(f"{os.fspath(path)} holds no tensor whose name ends in {name!r}.")


#: Functions that change files, whose first argument is a path or a descriptor.
_CHANGING = [
    (os, name)
    for name in (
        "open", "fsync", "fdatasync", "replace", "rename", "link", "symlink", "unlink", "remove", "mkdir", "rmdir",
        "truncate", "ftruncate",
    )
]  # fmt: skip
_NEED_ROOM = {"open", "write", "fsync", "mkdir", "link", "symlink"}


class _FileFaults:
    """Counts calls, and lets one of them go wrong."""

    def __init__(self, kind: str | None, at: int, folder: str) -> None:
        self.calls: list[str] = []
        self.plain_open = builtins.open
        self._kind = kind
        self._at = at
        self._folder = folder

    def wrap(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function that counts its calls."""

        def call(path: Any, *args: Any, **kwargs: Any) -> Any:
            is_reading = name == "open" and not (args[0] if args else 0) & (os.O_WRONLY | os.O_RDWR)
            if not is_reading and self._is_within(path):
                self.note(name)
            return function(path, *args, **kwargs)

        return call

    def open(self, file: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
        """Do what ``open`` does."""
        if not set(mode) & set("wxa+") or not self._is_within(file):
            return self.plain_open(file, mode, *args, **kwargs)
        self.note("open")
        buffering, *others = args or (kwargs.pop("buffering", -1),)
        raw = _File(file, mode.replace("b", "").replace("t", ""), self)
        if "b" in mode and buffering == 0:
            return raw
        buffered = io.BufferedRandom(raw) if "+" in mode else io.BufferedWriter(raw)
        return buffered if "b" in mode else io.TextIOWrapper(buffered, *others, **kwargs)

    def note(self, name: str, half: Callable[[], Any] = lambda: None) -> None:
        """Count a call, which is about to be made."""
        self.calls.append(name)
        number = len(self.calls)
        if self._kind == "full" and number >= self._at and name in _NEED_ROOM:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        if number != self._at:
            return
        if self._kind == "torn":
            half()
        if self._kind in ("kill", "torn"):
            os.kill(os.getpid(), signal.SIGKILL)
        elif self._kind == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)

    def _is_within(self, path: Any) -> bool:
        if isinstance(path, int):
            try:
                path = os.readlink(f"/proc/self/fd/{path}")
            except OSError:
                return False
        absolute = os.path.realpath(os.fsdecode(path))
        return absolute == self._folder or absolute.startswith(self._folder + os.sep)


class _File(io.FileIO):
    """A file that is open for writing, whose writes to the system are counted."""

    def __init__(self, file: Any, mode: str, faults: _FileFaults) -> None:
        super().__init__(file, mode)
        self._faults = faults

    def write(self, data: Any) -> int:
        """Write, all or half."""
        self._faults.note("write", lambda: super(_File, self).write(memoryview(data)[: len(data) // 2]))
        return super().write(data)
