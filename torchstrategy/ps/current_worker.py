"""Which worker runs the closure that is running here."""

from __future__ import annotations

from contextlib import AbstractContextManager
from contextvars import ContextVar

from torchstrategy.base.context import set_within

__all__ = ["as_worker", "current_worker_index", "experimental_get_current_worker_index"]


def experimental_get_current_worker_index() -> int:
    """Return the index of the worker that runs this function. Only inside a function given to ``schedule``.

    Returns:
        The worker's task index, from 0.

    Raises:
        RuntimeError: called outside such a function.

    Example:
        >>> ts.coordinator.experimental_get_current_worker_index()
        Traceback (most recent call last):
        ...
        RuntimeError: Cannot retrieve the worker index outside a function that a worker runs. ...
    """
    index = current_worker_index()
    if index is None:
        raise RuntimeError(
            "Cannot retrieve the worker index outside a function that a worker runs. Call "
            "experimental_get_current_worker_index() inside a function given to ClusterCoordinator.schedule."
        )
    return index


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
