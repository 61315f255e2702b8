"""The thread-local stack that says which strategy is current, and which replica (or none: cross-replica).

It knows nothing of strategies, so every layer above can ask it. A new thread starts with an empty stack.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any, NamedTuple, TypeVar

__all__ = [
    "Frame",
    "current_frame",
    "current_replica_context",
    "pop_frame",
    "push_frame",
    "set_base_frame",
    "set_within",
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


_stack = _Stack()


def current_frame() -> Frame | None:
    """Return the innermost frame, or ``None`` outside any scope."""
    frames = _stack.frames
    return frames[-1] if frames else _stack.base


def current_replica_context() -> Any:
    """Return the innermost frame's replica context, or ``None``."""
    frames = _stack.frames
    return frames[-1].replica_context if frames else None


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


@contextlib.contextmanager
def set_within(variable: ContextVar[_Value], value: _Value) -> Iterator[None]:
    """Give a context variable a value for the length of a ``with`` block."""
    token = variable.set(value)
    try:
        yield
    finally:
        variable.reset(token)
