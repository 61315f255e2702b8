"""The thread-local stack that says which strategy is current, and which replica (or none: cross-replica).

It knows nothing of strategies, so every layer above can ask it. A new thread starts with an empty stack.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any, NamedTuple, TypeVar

__all__ = [
    "Frame",
    "current_frame",
    "current_replica_context",
    "get_replica_context",
    "get_strategy",
    "has_strategy",
    "in_cross_replica_context",
    "is_updating",
    "pop_frame",
    "push_frame",
    "raise_failures",
    "raise_in_next_run",
    "reporting_failures",
    "set_base_frame",
    "set_default",
    "set_within",
    "updating",
]

_Value = TypeVar("_Value")


class Frame(NamedTuple):
    """One entry of the stack: in cross-replica context ``replica_context`` is ``None``."""

    strategy: Any
    replica_context: Any


class _Stack(threading.local):
    def __init__(self) -> None:
        self.base: Frame | None = None  # experimental_set_strategy
        self.frames: list[Frame] = []
        self.is_updating = False


_stack = _Stack()
#: The strategy outside of all scopes, once it is needed; and what makes it.
_default: Any = None
_make_default: Callable[[], Any]
_making = threading.RLock()


def current_frame() -> Frame | None:
    """Return the innermost frame, or ``None`` outside any scope."""
    frames = _stack.frames
    return frames[-1] if frames else _stack.base


def current_replica_context() -> Any:
    """Return the innermost frame's replica context, or ``None``."""
    frames = _stack.frames
    return frames[-1].replica_context if frames else None


def get_strategy() -> Any:
    """Return the innermost frame's strategy; outside of all scopes, the default one."""
    frame = current_frame()
    return _default_strategy() if frame is None else frame.strategy


def get_replica_context() -> Any:
    """Return the innermost frame's replica context; outside of all scopes, the default strategy's."""
    frame = current_frame()
    return _default_strategy().context if frame is None else frame.replica_context


def has_strategy() -> bool:
    """Say whether another strategy than the default one is current.

    Returns:
        ``True`` inside its scope and its replica functions.

    Example:
        >>> ts.has_strategy()
        False
    """
    frame = current_frame()
    return frame is not None and frame.strategy is not _default


def in_cross_replica_context() -> bool:
    """Say whether the program is inside a scope, but outside replica functions.

    Returns:
        ``True`` in a scope and in the function of a ``merge_call``.

    Example:
        >>> with ts.MirroredStrategy(["cpu:0"]).scope():
        ...     ts.in_cross_replica_context()
        True
    """
    frame = current_frame()
    return frame is not None and frame.replica_context is None


def set_default(make: Callable[[], Any]) -> None:
    """Say what makes the strategy outside of all scopes."""
    global _make_default
    _make_default = make


def _default_strategy() -> Any:
    global _default
    if _default is None:
        with _making:
            if _default is None:
                _default = _make_default()
    return _default


def push_frame(frame: Frame) -> None:
    """Make ``frame`` the innermost one."""
    _stack.frames.append(frame)


def pop_frame(frame: Frame) -> None:
    """Remove ``frame``, which must be the innermost one.

    Raises:
        RuntimeError: it is not: scopes were left in another order than entered, or twice.
    """
    if not _stack.frames or _stack.frames[-1] != frame:
        raise RuntimeError(
            "Strategy scope nesting error: a scope was left twice, or scopes were left in another order than they "
            "were entered. Use `with strategy.scope():`."
        )
    _stack.frames.pop()


def set_base_frame(frame: Frame | None) -> None:
    """Set what lies below all scopes of this thread.

    Raises:
        RuntimeError: a scope or replica function is active.
    """
    if _stack.frames:
        raise RuntimeError(
            "experimental_set_strategy must not be called inside a strategy's scope or replica function. "
            "Call it at the top level of the program."
        )
    _stack.base = frame


def is_updating() -> bool:
    """Say whether this thread is in an optimizer's step on the host, where nothing is summed."""
    return _stack.is_updating


@contextlib.contextmanager
def updating() -> Iterator[None]:
    """Carry out an optimizer's step on the host."""
    _stack.is_updating = True
    try:
        yield
    finally:
        _stack.is_updating = False


def raise_in_next_run(raise_error: Callable[[], None]) -> None:
    """Let the next ``run`` of any strategy raise what went wrong in a thread meanwhile.

    Args:
        raise_error: raises it; unless it was told already.
    """
    _failures.append(raise_error)


def raise_failures() -> None:
    """Raise what went wrong in threads."""
    while _failures:
        _failures.pop()()


_failures: list[Callable[[], None]] = []


@contextlib.contextmanager
def reporting_failures(strategy: Any, operation: str) -> Iterator[None]:
    """Tell the processes that step together of an error that this one may have alone, before they wait for it."""
    try:
        yield
    except Exception as error:
        if strategy.workers is not None:
            strategy.workers.report_failure(operation, error)
        raise


@contextlib.contextmanager
def set_within(variable: ContextVar[_Value], value: _Value) -> Iterator[None]:
    """Give a context variable a value for the length of a ``with`` block."""
    token = variable.set(value)
    try:
        yield
    finally:
        variable.reset(token)
