"""Steps on their way to the workers of a cluster and back: a bounded number, whose results are taken in order."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, Protocol

__all__ = ["Coordinator", "ScheduledSteps"]

#: For each worker: one that runs, one that it has, and as many that wait.
_NUM_FOR_WORKER = 4


class RemoteResult(Protocol):
    """What stands for the result of a scheduled function."""

    def get(self) -> Any:
        """Wait for the result and return it, with tensors."""


class Coordinator(Protocol):
    """What schedules functions on a strategy's workers."""

    @property
    def strategy(self) -> Any:
        """The strategy whose workers run the functions."""

    def schedule(self, fn: Callable[..., Any], args: Any = None) -> RemoteResult:
        """Queue a function for the next free worker."""

    def join(self) -> None:
        """Wait for all functions, and raise what one of them raised."""

    def create_per_worker_dataset(self, dataset: Any) -> Any:
        """Let every worker make a dataset."""


class ScheduledSteps:
    """Schedules functions some way ahead of the results that the program takes.

    So a long epoch takes little memory, and what a callback changes acts soon. With ``max_staleness`` the program waits
    for a result as often as the workers do: with 0 it schedules a function when the one before has ended.

    Args:
        coordinator: the strategy's.
        is_training: whether staleness matters.
    """

    def __init__(self, coordinator: Coordinator, *, is_training: bool) -> None:
        strategy = coordinator.strategy
        limit = _NUM_FOR_WORKER * strategy.cluster_spec.num_tasks("worker")
        if is_training and strategy.max_staleness is not None:
            limit = min(limit, strategy.max_staleness + 1)
        self._limit = limit
        self._coordinator = coordinator
        self._waiting: deque[tuple[Any, RemoteResult]] = deque()

    def results(
        self, executions: Iterator[tuple[Any, Callable[..., Any], tuple[Any, ...]]], must_wait: Callable[[], bool]
    ) -> Iterator[tuple[Any, Any]]:
        """Schedule functions and yield their results in the same order, with tensors.

        Args:
            executions: gives a tag, a function and its arguments.
            must_wait: called while there are results to come: whether to take these before more is scheduled.

        Yields:
            A tag, and the function's result.

        Raises:
            Exception: what a function raised.
            UnavailableError: a parameter server was lost.
        """
        is_at_end = False
        while True:
            while not is_at_end and len(self._waiting) < self._limit and not (self._waiting and must_wait()):
                execution = next(executions, None)
                is_at_end = execution is None
                if execution is not None:
                    tag, fn, args = execution
                    self._waiting.append((tag, self._coordinator.schedule(fn, args)))
            if not self._waiting:
                return
            tag, value = self._waiting.popleft()
            try:
                result = value.get()
            except Exception:
                self._coordinator.join()  # raises what came first; the program can go on then
                raise
            yield tag, result

    def wait(self) -> None:
        """Wait for all functions that were scheduled.

        Raises:
            Exception: what a function raised.
        """
        self._coordinator.join()
