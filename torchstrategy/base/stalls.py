"""Saying that nothing goes on, long before a deadline: a line about who waits where, and all stacks in a file.

Also at any time when somebody asks: each process of a job listens at a Unix socket with an abstract name, which leaves
no file behind. The kernel says whose process is at the other end; only those of the same user, and root's, get answers.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import re
import secrets
import socket
import struct
import sys
import tempfile
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from torchstrategy.base.log import logger

__all__ = [
    "Process",
    "Requests",
    "Stall",
    "Waiting",
    "ask_for_report",
    "find_processes",
    "stack_of_program",
    "stacks_of_others",
    "stacks_of_threads",
    "stall_seconds",
    "watch_for_stalls",
]

_DEFAULT_S = 60.0
#: Something that happens for the first time may compile, read or download before.
_FIRST = 5.0
_LONGEST_SLEEP_S = 5.0
_MAX_FRAMES = 12
_MAX_LINE = 300
_MAX_CHARS = 100_000
# Threads of this name run replicas; between their turns they wait in that module.
_REPLICA_THREADS, _REPLICA_WAITS = "torchstrategy-replica-", os.path.join("torchstrategy", "replicas", "runner.py")
# What faulthandler writes of a thread, of a frame, and for a character that is not ASCII.
_THREAD = re.compile(r"(?:Thread|Current thread) 0x([0-9a-f]+)")
_FRAME = re.compile(r'  File "(.*)", line (\d+) in (.*)')
_ESCAPED = re.compile(r"\\(?:x([0-9a-f]{2})|u([0-9a-f]{4})|U([0-9a-f]{8}))")


def stall_seconds() -> float:
    """Return after how many seconds without progress that is said; infinity means never.

    Returns:
        ``TORCHSTRATEGY_STALL_S``, by default 60; 0 means never.

    Raises:
        ValueError: the variable is no number from 0.
    """
    text = os.environ.get("TORCHSTRATEGY_STALL_S", str(_DEFAULT_S))
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not seconds >= 0:
        raise ValueError(f"TORCHSTRATEGY_STALL_S must be a number of seconds, or 0 for never. Received: {text!r}")
    return seconds or float("inf")


class Stall(NamedTuple):
    """What there is to say of a stall.

    Args:
        line: who waits where for whom.
        stacks: of all that take part, for the file.
    """

    line: str
    stacks: Sequence[str]


class Waiting:
    """Something that may not go on.

    Args:
        describe: called in a thread of its own when nothing went on for long; ``None`` if another process says it.
    """

    def __init__(self, describe: Callable[[float], Stall | None]) -> None:
        self.describe = describe
        self._since: float | None = None
        self._is_first = False
        self._said: float | None = None
        self._patience = 1.0

    def begin(self, *, is_first: bool = False) -> None:
        """Note that something is waited for from now on.

        Args:
            is_first: whether it may take longer, because it happens for the first time.
        """
        self._is_first = is_first
        self._since = time.monotonic()

    def end(self) -> None:
        """Note that it came."""
        self._since = None

    def check(self, limit_s: float) -> None:
        """Say that nothing went on for long, once.

        Args:
            limit_s: how long is long.
        """
        since = self._since
        if since is None or since == self._said:
            return
        seconds = time.monotonic() - since
        if seconds < limit_s * self._patience * (_FIRST if self._is_first else 1.0):
            return
        self._said = since
        self._patience *= 2  # where it goes on after all, it is said less often
        stall = self.describe(seconds)
        if stall is None or self._since != since:
            return
        where = _write(stall)
        logger.warning("%s %s (TORCHSTRATEGY_STALL_S sets after how long this is said.)", stall.line, where)


def _write(stall: Stall) -> str:
    """Write a stall into a file that only this user can read, and return where it is."""
    path = os.path.join(tempfile.gettempdir(), f"torchstrategy-stall-{os.getpid()}-{time.time_ns()}.txt")
    try:
        with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8") as file:
            file.write("\n".join([stall.line, *stall.stacks, ""]))
    except OSError as error:
        return f"(The stacks could not be written: {error})"
    return f"Stacks: {path}"


def watch_for_stalls(waiting: Waiting) -> None:
    """Watch something until it is collected."""
    limit_s = stall_seconds()
    if limit_s == float("inf"):
        return
    with _lock:
        if _state.get("pid") != os.getpid():  # the first one, or in a forked process, which has no such thread
            _state["pid"] = os.getpid()
            _all.clear()
            threading.Thread(target=_watch, args=(limit_s,), name="torchstrategy stalls", daemon=True).start()
        _all.add(waiting)


def stacks_of_threads(threads: Sequence[threading.Thread]) -> list[str]:
    """Return where threads are, innermost call last."""
    stacks = _stacks()
    lines = []
    for thread in threads:
        if stack := stacks.get(thread.ident or 0):
            lines += [f"--- {thread.name}", *(line.rstrip() for line in traceback.format_list(stack))]
    return lines


def stacks_of_others() -> str:
    """Return the stack of every thread of this process but the calling one, innermost call last; what fits a message.

    Also of threads that ``threading`` does not know.
    """
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    text = "\n".join(
        sorted(
            f"Thread {names.get(ident, ident)}:\n{''.join(traceback.format_list(stack))}"
            for ident, stack in _stacks().items()
            if ident != threading.get_ident()
        )
    )
    return text if len(text) <= _MAX_CHARS else f"{text[:_MAX_CHARS]}\n[...]"


def stack_of_program(main_thread: int) -> list[str]:
    """Return where a program is, and each replica that runs in a thread of its own; short, innermost call last.

    Args:
        main_thread: the identifier of the thread that runs the program.
    """
    stacks = _stacks()
    shown = {main_thread: ""}
    for thread in threading.enumerate():
        if thread.name.startswith(_REPLICA_THREADS) and thread.ident is not None:
            shown[thread.ident] = f"in the thread {thread.name}:"
    lines = []
    for ident, title in shown.items():
        stack = stacks.get(ident)
        if not stack or (title and stack[-1].filename.endswith(_REPLICA_WAITS)):
            continue
        lines += [title] if title else []
        for entry in stack[-_MAX_FRAMES:]:
            lines.append(f"{entry.filename}:{entry.lineno} in {entry.name}: {entry.line}"[:_MAX_LINE])
    return lines


def _stacks() -> dict[int, list[traceback.FrameSummary]]:
    """Return where the newest 100 threads of this process are, innermost call last.

    Python code must not read the frames of another thread, as ``traceback`` does: the thread may leave them between two
    steps, and Python 3.11 then crashes, once in some 14,000 times. ``faulthandler`` reads all while no thread can run.
    """
    try:
        with tempfile.TemporaryFile("w+", encoding="ascii") as file:
            faulthandler.dump_traceback(file)
            file.seek(0)
            text = _ESCAPED.sub(lambda code: chr(int(code[1] or code[2] or code[3], 16)), file.read())
    except OSError as error:
        logger.debug("No stacks can be read: %s", error)
        return {}
    stacks: dict[int, list[traceback.FrameSummary]] = {}
    stack: list[traceback.FrameSummary] = []
    for line in text.split("\n"):
        if thread := _THREAD.match(line):
            stack = stacks[int(thread[1], 16)] = []
        elif frame := _FRAME.match(line):
            stack.insert(0, traceback.FrameSummary(frame[1], int(frame[2]), frame[3], lookup_line=False))
    return stacks


_lock = threading.Lock()
_all: weakref.WeakSet[Waiting] = weakref.WeakSet()
_state: dict[str, int] = {}
_requests: weakref.WeakSet[Requests] = weakref.WeakSet()


def _watch(limit_s: float) -> None:
    while True:
        time.sleep(min(limit_s / 4, _LONGEST_SLEEP_S))
        with _lock:
            every = list(_all)
        while every:
            one = every.pop()
            try:
                one.check(limit_s)
            except Exception:  # noqa: BLE001 - a report must not end the watch
                logger.debug("A stall could not be described.", exc_info=True)
            del one  # which must not live until the next look


def _after_fork() -> None:
    global _lock  # another thread of the parent may have had it
    _lock = threading.Lock()
    for requests in list(_requests):
        requests.listener.close()  # nobody answers in this process


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


_NAME = "torchstrategy-job-"
_LISTENS = "00010000"  # a flag in the kernel's list of sockets
_ASK_S = 2.0
_REPORT_S = 10.0  # ranks have two seconds to answer
_MAX_QUESTION = 64


class Requests:
    """Answers those who want to know where the ranks of a job are.

    Args:
        listener: where it is asked.
        about: what it says of itself.
        describe: called in a thread of its own.
    """

    def __init__(self, listener: socket.socket, about: dict[str, Any], describe: Callable[[], Stall]) -> None:
        self.listener = listener
        self._about = about
        self._describe = describe
        self._thread = threading.Thread(target=self._serve, name="torchstrategy-requests", daemon=True)
        _requests.add(self)
        self._thread.start()

    @classmethod
    def answer(cls, about: dict[str, Any], describe: Callable[[], Stall]) -> Requests | None:
        """Begin to answer; ``None`` where there are no abstract names."""
        if sys.platform != "linux":
            return None
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            listener.bind(f"\0{_NAME}{os.getpid()}-{secrets.token_hex(4)}")
            listener.listen()
        except OSError as error:
            logger.debug("Nobody can ask where this process is: %s", error)
            listener.close()
            return None
        return cls(listener, about, describe)

    def close(self) -> None:
        """Answer no more."""
        _requests.discard(self)
        with contextlib.suppress(OSError):
            self.listener.shutdown(socket.SHUT_RDWR)  # wakes the thread
        self.listener.close()

    def _serve(self) -> None:
        while True:
            try:
                connection = self.listener.accept()[0]
            except OSError:
                return
            with connection:
                try:
                    self._reply(connection)
                except Exception:  # noqa: BLE001 - a question must not end the answers
                    logger.debug("Somebody who asked where this process is got no answer.", exc_info=True)

    def _reply(self, connection: socket.socket) -> None:
        if _user_of(connection)[1] not in (os.geteuid(), 0):
            return
        connection.settimeout(_ASK_S)
        answer = self._about
        if connection.recv(_MAX_QUESTION) == b"report":
            stall = self._describe()
            answer = {"line": stall.line, "where": _write(stall)}
        connection.sendall(json.dumps(answer).encode())


class Process(NamedTuple):
    """A process of a running job.

    Args:
        name: of its socket.
        pid: its id.
        about: what it says of itself; ``None`` if it does not answer.
    """

    name: str
    pid: int
    about: dict[str, Any] | None


def find_processes() -> list[Process]:
    """Return this user's processes of running jobs, of this host and network namespace."""
    found = []
    with contextlib.suppress(OSError):
        for line in Path("/proc/net/unix").read_text(encoding="utf-8", errors="replace").splitlines():
            *_, flags, _, _, _, name = [""] * 4 + line.split()
            if flags != _LISTENS or not name.startswith(f"@{_NAME}"):
                continue
            with contextlib.suppress(OSError):  # it has just ended, is another user's, or answers nobody
                found.append(Process(name, *_ask(name, "who", _ASK_S)))
    return sorted(found, key=lambda process: process.pid)


def ask_for_report(process: Process) -> tuple[str, str] | None:
    """Return where all ranks of a process's job are, in a line, and where their stacks are; ``None`` without answer."""
    try:
        _, answer = _ask(process.name, "report", _REPORT_S)
    except OSError:  # it has ended
        return None
    return None if answer is None else (str(answer["line"]), str(answer["where"]))


def _ask(name: str, question: str, timeout_s: float) -> tuple[int, dict[str, Any] | None]:
    """Return a process's id and answer.

    Raises:
        PermissionError: it is another user's.
        ConnectionError: there is none.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(timeout_s)
        connection.connect(f"\0{name[1:]}")
        pid, user = _user_of(connection)
        if user != os.geteuid() and os.geteuid() != 0:
            raise PermissionError(f"process {pid} is another user's")
        answer = b""
        try:
            connection.sendall(question.encode())
            while part := connection.recv(1 << 16):
                answer += part
            return pid, dict(json.loads(answer))
        except (OSError, ValueError):
            return pid, None


def _user_of(connection: socket.socket) -> tuple[int, int]:
    """Return the id of the process at the other end, and its user's."""
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    pid, user, _ = struct.unpack("3i", credentials)
    return pid, user
