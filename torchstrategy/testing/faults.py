"""What can go wrong on one rank of a job, for tests of what the others then do; with files, messages and the clock."""

from __future__ import annotations

import builtins
import contextlib
import ctypes
import errno
import io
import math
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, Literal, NamedTuple

import torch

from torchstrategy.checkpoint.archive import named_tensors

__all__ = ["Fault", "clock_jump", "file_fault", "flip_byte_of", "message_fault"]


class Fault(NamedTuple):
    """Something that goes wrong on one rank at one step; can be pickled.

    Args:
        kind: ``"kill"`` ends the process at once, as the system does when memory runs out (SIGKILL); ``"stop"`` halts
            it (SIGSTOP); ``"hang"`` lets the calling thread wait for ever; ``"exit"`` ends the program in the regular
            way; ``"error"`` raises ``OSError("injected")``. After others the rank goes on: ``"pause"`` halts the
            process and lets it go on again (SIGSTOP and SIGCONT); ``"stall"`` keeps all its threads from running
            Python, as native code does that holds the interpreter's lock; ``"slow"`` makes this step and all later
            ones of the rank take longer; ``"jump"`` sets its wall clock, as ``clock_jump`` does, to the end of the
            process; ``"lost"`` drops the calling thread's next message, and ``"torn"`` one half of it, as
            ``message_fault`` does.
        rank: where.
        step: when.
        seconds: how long a pause or a stall lasts, by how much each step is slower, or how far the clock jumps.

    Example:
        >>> from torchstrategy.testing.faults import Fault
        >>> fault = Fault("error", rank=1, step=3)
        >>> fault.strike(rank=0, step=3)
        >>> fault.strike(rank=1, step=3)
        Traceback (most recent call last):
        ...
        OSError: injected
    """

    kind: Literal["kill", "stop", "hang", "exit", "error", "pause", "stall", "slow", "jump", "lost", "torn"]
    rank: int
    step: int
    seconds: float = 0.0

    def strike(self, rank: int, step: int) -> None:
        """Let it happen if it is this rank's turn; a training loop calls this at each step.

        Args:
            rank: the calling process's id.
            step: number of the step.

        Raises:
            OSError: the fault is an error.
            SystemExit: the fault is an exit.
        """
        is_due = step >= self.step if self.kind == "slow" else step == self.step
        if rank == self.rank and is_due:
            _STRIKES[self.kind](self.seconds)


def _fail(_: float) -> None:
    raise OSError("injected")


def _pause(seconds: float) -> None:
    """Halt this process; a shell, which is not halted, lets it go on."""
    own = os.getpid()
    command = ["/bin/sh", "-c", f"kill -STOP {own}; sleep {seconds:f}; kill -CONT {own}"]
    subprocess.run(command, check=True, start_new_session=True)


def _stall(seconds: float) -> None:
    """Sleep in a C function that was called without giving the interpreter's lock away."""
    wait = ctypes.PyDLL(None).poll  # for no file; other functions that wait take less than a second on some systems
    end = time.monotonic() + seconds
    while (rest := end - time.monotonic()) > 0:  # a signal ends it early
        wait(None, 0, math.ceil(rest * 1e3))


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
    builtins.open, io.open = faults.open, faults.open
    try:
        with _replaced([(module, name) for module, name in _CHANGING if hasattr(module, name)], faults.wrap):
            yield faults.calls
    finally:
        builtins.open, io.open = faults.plain_open, faults.plain_open


@contextlib.contextmanager
def message_fault(kind: Literal["lost", "torn", "unanswered"] | None, at: int) -> Iterator[list[int]]:
    """Let something go wrong when the calling thread sends to another process, within a ``with`` block.

    Messages are what Python sends over a socket: for the library the records in which ranks say what they bring to a
    collective, small tensors, and the signs for larger ones in shared memory. What gloo and NCCL send is not seen.

    Args:
        kind: ``"lost"`` drops a message, though the sender is told that it was sent; of a ``"torn"`` one half arrives
            before the connection is shut down, of an ``"unanswered"`` one all, so that only what it is answered is
            lost. ``None`` only counts.
        at: which message of this thread, from 1.

    Yields:
        A list of the sizes of the messages so far, in bytes.

    Example:
        >>> import socket
        >>> from torchstrategy.testing.faults import message_fault
        >>> here, there = socket.socketpair()
        >>> with message_fault("lost", at=2) as sizes:
        ...     for text in (b"one", b"two", b"three"):
        ...         here.sendall(text)
        >>> there.recv(20), sizes
        (b'onethree', [3, 3, 5])
        >>> here.close(), there.close()
        (None, None)
    """
    sizes: list[int] = []
    thread = threading.get_ident()

    def wrap(name: str, plain: Callable[..., Any]) -> Callable[..., Any]:
        def send(connection: socket.socket, data: Any, *args: Any) -> int | None:
            if threading.get_ident() != thread:
                return plain(connection, data, *args)  # type: ignore[no-any-return]
            content = b"".join(data) if name == "sendmsg" else bytes(data)
            sizes.append(len(content))
            if kind is None or len(sizes) != at:
                return plain(connection, data, *args)  # type: ignore[no-any-return]
            if kind != "lost":
                super(socket.socket, connection).sendall(content[: len(content) // 2] if kind == "torn" else content)
                connection.shutdown(socket.SHUT_RDWR)
            return None if name == "sendall" else len(content)

        return send

    with _replaced([(socket.socket, name) for name in ("send", "sendall", "sendmsg")], wrap):
        yield sizes


@contextlib.contextmanager
def clock_jump(seconds: float) -> Iterator[None]:
    """Let the wall clock jump within a ``with`` block, as it does when somebody sets it.

    It does so for all threads of the process that ask ``time.time`` or ``time.time_ns``. Monotonic clocks go on as
    before, and so do ``datetime`` and the times of files.

    Args:
        seconds: how far; a negative number is back.

    Example:
        >>> import time
        >>> from torchstrategy.testing.faults import clock_jump
        >>> before = time.time()
        >>> with clock_jump(-3600):
        ...     time.time() < before
        True
    """

    def wrap(name: str, plain: Callable[[], Any]) -> Callable[[], Any]:
        jump = seconds if name == "time" else int(seconds * 1e9)
        return lambda: plain() + jump

    with _replaced([(time, "time"), (time, "time_ns")], wrap):
        yield


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


@contextlib.contextmanager
def _replaced(
    places: list[tuple[Any, str]], wrap: Callable[[str, Callable[..., Any]], Callable[..., Any]]
) -> Iterator[None]:
    """Put what ``wrap`` makes of a name and a function at the function's place, within a ``with`` block."""
    with contextlib.ExitStack() as undo:
        for owner, name in places:
            plain = getattr(owner, name)
            undo.callback(*((setattr, owner, name, plain) if name in vars(owner) else (delattr, owner, name)))
            setattr(owner, name, wrap(name, plain))
        yield


#: What is done to this process for as long as it lives.
_to_the_end = contextlib.ExitStack()
_STRIKES: dict[str, Callable[[float], Any]] = {
    "kill": lambda _: os.kill(os.getpid(), signal.SIGKILL),
    "stop": lambda _: os.kill(os.getpid(), signal.SIGSTOP),
    "hang": lambda _: threading.Event().wait(),
    "exit": lambda _: sys.exit(0),
    "error": _fail,
    "pause": _pause,
    "stall": _stall,
    "slow": time.sleep,
    "jump": lambda seconds: _to_the_end.enter_context(clock_jump(seconds)),
    "lost": lambda _: _to_the_end.enter_context(message_fault("lost", at=1)),
    "torn": lambda _: _to_the_end.enter_context(message_fault("torn", at=1)),
}

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
