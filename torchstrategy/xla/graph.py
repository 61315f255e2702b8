"""Where what was traced for XLA is cut into graphs: after the outermost ``ts.function``, or else after each ``run``."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import TypeVar

from torchstrategy.xla.runtime import TpuRuntime

__all__ = ["cut", "in_function", "name_of", "named", "number", "one_graph"]

_Function = TypeVar("_Function", bound=Callable[..., object])
_NAME = "_ts_program"


class _Thread(threading.local):
    depth = 0
    number = 0
    waiting: tuple[TpuRuntime, Callable[[], None]] | None = None


_thread = _Thread()


def in_function() -> bool:
    """Say whether what is traced here belongs to the graph of a function."""
    return _thread.depth > 0


def number() -> int:
    """Return which of this thread's functions runs, counted from 1, or ran last; functions in functions don't count."""
    return _thread.number


def named(fn: _Function, name: str) -> _Function:
    """Let compilations of a function, such as ``functools.partial`` makes, be counted and shown by a name."""
    setattr(fn, _NAME, name)
    return fn


def name_of(fn: Callable[..., object]) -> str | None:
    """Return the name that ``named`` gave."""
    return getattr(fn, _NAME, None)


def cut(runtime: TpuRuntime, after: Callable[[], None] = lambda: None) -> None:
    """Run what was traced so far; inside a function, when that ends.

    Args:
        runtime: the devices.
        after: called as soon as that runs; inside a function the last cut's.
    """
    if _thread.depth:
        _thread.waiting = runtime, after
    else:
        runtime.sync()
        after()


@contextlib.contextmanager
def one_graph() -> Iterator[None]:
    """Let what is traced inside be one graph, which runs at the end; a function that raises runs nothing."""
    if not _thread.depth:
        _thread.number += 1
    _thread.depth += 1
    try:
        yield
        waiting = _thread.waiting
        if _thread.depth == 1 and waiting is not None:
            _thread.waiting = None
            runtime, after = waiting
            runtime.sync()
            after()
    finally:
        _thread.depth -= 1
        if not _thread.depth:
            _thread.waiting = None
