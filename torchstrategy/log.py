"""The library's logger: prefixed with the process's rank, silent on ranks other than the chief below WARNING.

Importing installs nothing. The first strategy gives the logger a handler if neither it nor the root logger has one,
so that the INFO lines of the tf guides appear without a logging set-up.
"""

from __future__ import annotations

import contextlib
import logging
import sys
import threading
import warnings
from collections.abc import Callable

__all__ = ["guard_lines", "info_once", "logger", "set_rank", "show_info", "warn_once", "warning_once"]

logger = logging.getLogger("torchstrategy")

_said: set[str] = set()
_said_lock = threading.Lock()
_guard: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext


class _RankFormatter(logging.Formatter):
    rank: int | None = None

    def format(self, record: logging.LogRecord) -> str:
        rank = "" if self.rank is None else f"[rank {self.rank}] "
        return f"{record.levelname}:torchstrategy:{rank}{record.getMessage()}"


class _StderrHandler(logging.StreamHandler):  # type: ignore[type-arg]
    """Writes to the ``sys.stderr`` of the moment, as redirections and notebooks expect."""

    @property
    def stream(self) -> object:
        return sys.stderr

    @stream.setter
    def stream(self, value: object) -> None:
        pass

    def emit(self, record: logging.LogRecord) -> None:
        with _guard():
            super().emit(record)


def guard_lines(guard: Callable[[], contextlib.AbstractContextManager[None]]) -> None:
    """Enter what a function returns around each line, such as one that takes progress bars out of its way."""
    global _guard
    _guard = guard


def show_info() -> None:
    """Let INFO lines through unless the user has configured logging."""
    if logger.handlers or logging.getLogger().handlers:
        return
    handler = _StderrHandler()
    handler.setFormatter(_RankFormatter())
    logger.addHandler(handler)
    logger.propagate = False
    if logger.level == logging.NOTSET:
        logger.setLevel(logging.INFO)


def set_rank(rank: int) -> None:
    """Prefix lines with the rank; ranks other than 0 say warnings and errors only."""
    _RankFormatter.rank = rank
    if rank != 0 and logger.level in (logging.NOTSET, logging.INFO):
        logger.setLevel(logging.WARNING)


def info_once(message: str) -> None:
    """Log a line the first time this process says it."""
    if _is_new(message):
        logger.info(message)


def warning_once(message: str) -> None:
    """Log a line at level WARNING the first time this process says it: a program may well mean what it does."""
    if _is_new(message):
        logger.warning(message)


def warn_once(message: str, stacklevel: int = 3) -> None:
    """Issue a ``UserWarning`` the first time this process says it."""
    if _is_new(message):
        warnings.warn(message, UserWarning, stacklevel=stacklevel)


def _is_new(message: str) -> bool:
    """Say whether this process says a message for the first time."""
    with _said_lock:  # replicas may run at the same time
        is_new = message not in _said
        _said.add(message)
    return is_new
