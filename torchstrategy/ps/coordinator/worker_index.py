"""Which worker a scheduled function runs on."""

from __future__ import annotations

from torchstrategy.ps.current_worker import current_worker_index

__all__ = ["experimental_get_current_worker_index"]


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
