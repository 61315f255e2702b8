"""Saying that nothing goes on, long before a deadline: a line about who waits where, and all stacks in a file."""

from __future__ import annotations

import os
import sys
import tempfile
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Sequence
from typing import NamedTuple

from torchstrategy.base.log import logger

__all__ = ["Stall", "Waiting", "stacks_of_threads", "stall_seconds", "watch_for_stalls"]

_DEFAULT_S = 60.0
#: Something that happens for the first time may compile, read or download before.
_FIRST = 5.0
_LONGEST_SLEEP_S = 5.0


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
        path = os.path.join(tempfile.gettempdir(), f"torchstrategy-stall-{os.getpid()}-{time.time_ns()}.txt")
        try:
            with open(path, "x", encoding="utf-8") as file:
                file.write("\n".join([stall.line, *stall.stacks, ""]))
            where = f"Stacks: {path}"
        except OSError as error:
            where = f"(The stacks could not be written: {error})"
        logger.warning("%s %s (TORCHSTRATEGY_STALL_S sets after how long this is said.)", stall.line, where)


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
    frames = sys._current_frames()
    lines = []
    for thread in threads:
        frame = frames.get(thread.ident or 0)
        if frame is not None:
            lines += [f"--- {thread.name}", *(line.rstrip() for line in traceback.format_stack(frame))]
    return lines


_lock = threading.Lock()
_all: weakref.WeakSet[Waiting] = weakref.WeakSet()
_state: dict[str, int] = {}


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


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
