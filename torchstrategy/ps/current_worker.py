"""Which worker runs the closure that is running here."""

from __future__ import annotations

from contextlib import AbstractContextManager
from contextvars import ContextVar

from torchstrategy.base.context import set_within

__all__ = ["as_worker", "current_worker_index"]

_index: ContextVar[int | None] = ContextVar("torchstrategy_worker_index", default=None)


def current_worker_index() -> int | None:
    """Return the index of the worker that runs the calling closure, ``None`` outside closures.

    Example:
        >>> from torchstrategy.ps.current_worker import as_worker, current_worker_index
        >>> with as_worker(3):
        ...     current_worker_index()
        3
        >>> current_worker_index() is None
        True
    """
    return _index.get()


def as_worker(index: int) -> AbstractContextManager[None]:
    """Let this thread, and threads that take over its context variables, be those of a worker.

    Args:
        index: the worker's.
    """
    return set_within(_index, index)
