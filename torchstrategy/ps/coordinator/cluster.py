"""Gives the queue's closures to the workers, and decides what a failure means.

``Worker`` objects handle what comes from the workers, one queue holds what is to be done, and this is between them. All
but the few methods that say otherwise run on the control loop's thread.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Protocol

from torchstrategy.base.log import logger
from torchstrategy.errors import UnavailableError
from torchstrategy.ps.coordinator.closures import Closure, ClosureQueue
from torchstrategy.ps.coordinator.per_worker import Resource, Resources
from torchstrategy.ps.coordinator.worker import Worker, add_note
from torchstrategy.ps.states import WorkerState
from torchstrategy.ps.transport.messages import Message

__all__ = ["Backend", "Cluster"]

#: Closures that a worker has at most: one that runs and one that can begin at once when that ends.
_MAX_IN_FLIGHT = 2
#: How long a closure waits behind a slow one before an idle worker gets it.
_STEAL_AFTER_S = 0.1
_SAY_EVERY_S = 30.0
_PAUSE_S = 0.1
_MAX_PAUSE_S = 10.0


class Backend(Protocol):
    """What the cluster needs of the strategy."""

    def configuration(self, index: int) -> Message:
        """Return the first message to a worker."""

    def absorb(self, reply: Message) -> None:
        """Take in what a closure gave beside its value, such as what metrics accumulated."""

    def unneeded(self, keys: Iterable[str]) -> list[str]:
        """Return those definitions that nothing in the program stands for any more."""

    def lost_ps(self, index: int | None) -> UnavailableError | None:
        """Return why a parameter server is gone for good: the given one, or any; ``None`` if it is there."""

    def is_ps_away(self, index: int | None) -> bool:
        """Say whether a parameter server, the given one or any, is out of reach and may be back in time."""

    def ask_ps(self, index: int) -> None:
        """Ask whether a parameter server is there that a worker could not reach; it is away until it has answered."""

    @property
    def is_closed(self) -> bool:
        """Whether the program has closed the strategy."""


class Cluster:
    """The workers and what they run.

    Args:
        backend: the strategy.
        addresses: the workers'.
        call_soon: runs a function on the loop's thread; from any thread.
        call_later: calls a function after some seconds, on another thread.
        max_staleness: no closure starts while one runs that started more than so many before it; ``None`` for any.
        max_ps_failures: how often a closure is run again after a parameter server, which is there, did not answer it.
    """

    def __init__(
        self,
        backend: Backend,
        addresses: Sequence[str],
        call_soon: Callable[[Callable[[], None]], None],
        call_later: Callable[[float, Callable[[], None]], None],
        *,
        max_staleness: int | None = None,
        max_ps_failures: int = 3,
    ) -> None:
        self._backend = backend
        self._call_soon = call_soon
        self._call_later = call_later
        self._max_staleness = max_staleness
        self._max_ps_failures = max_ps_failures
        self.queue = ClosureQueue(self.idle)
        self.resources = Resources()
        self._new_resources: deque[Resource] = deque()
        self.workers = [Worker(self, index, address) for index, address in enumerate(addresses)]
        self.configuration = backend.configuration
        self.absorb = backend.absorb
        self.unneeded = backend.unneeded
        # Workers that can run a closure now, by how many they have; dictionaries for their order: who waited longest.
        self._by_load: tuple[dict[Worker, None], ...] = tuple({} for _ in range(_MAX_IN_FLIGHT))
        self._ready: set[Worker] = set()
        self._num_started = 0
        self._pump_is_due = False
        self._look_is_due = False
        self._say_lock = threading.Lock()
        self._said = time.monotonic()

    # --- from any thread

    @property
    def is_closed(self) -> bool:
        """Whether the program has closed the strategy."""
        return self._backend.is_closed

    def submit(self, closure: Closure) -> bool:
        """Queue a closure and see to it that a free worker gets it.

        Returns:
            Whether a worker is free.

        Raises:
            UnavailableError: the strategy is closed.
            Exception: the pending error of another closure.
        """
        if self._backend.is_closed:
            self._close()
        self.queue.put(closure)
        if not self._has_room() or self._pump_is_due:
            return False
        self._pump_is_due = True
        self._soon(self.pump)
        return True

    def idle(self, waited_s: float) -> None:
        """Say what a waiting thread waits for, every half minute. Called every second."""
        if self._backend.is_closed:
            self._close()
        elif len(self.queue) and self._has_room():  # Ctrl-C may have come in the middle of submit
            self._soon(self.pump)
        with self._say_lock:
            now = time.monotonic()
            if waited_s < _SAY_EVERY_S or now - self._said < _SAY_EVERY_S:
                return
            self._said = now
        if self.queue.is_cancelling and self.queue.num_running:
            logger.info("An error is raised as soon as what still runs has ended. %s", self.describe_running())
        elif not any(worker.can_run or worker.in_flight for worker in self.workers):
            states = "; ".join(worker.describe() for worker in self.workers)
            logger.warning("No worker is there. Waiting for one of: %s", states)

    def describe_running(self) -> str:
        """Say which closures run where, and for how long."""
        now = time.monotonic()
        lines = [
            f"{closure.name} on {worker.name} for {now - closure.since:.1f} s"
            for worker in self.workers
            for closure in list(worker.in_flight.values())[:1]
        ]
        return f"Running: {'; '.join(lines) or 'nothing'}."

    def add(self, resource: Resource) -> None:
        """Make a per-worker value on all workers that are there, and on others when they come."""
        self._new_resources.append(resource)  # pump makes it before it gives out a closure that was queued later
        self._soon(self.pump)

    # --- dispatch

    def pump(self) -> None:
        """Give closures to workers as long as there are both."""
        self._pump_is_due = False
        self._update_resources()
        while (worker := self._next_worker()) is not None and (closure := self.queue.take()) is not None:
            self._num_started += 1
            closure.start_number = self._num_started
            worker.run(closure)
            self._note(worker)
        self._watch_for_waiting()

    def changed(self, worker: Worker) -> None:
        """Note that a worker can take more, or less, than before."""
        self._note(worker)
        self.pump()

    def call_later(self, seconds: float, fn: Callable[[], None]) -> None:
        """Call a function on the loop's thread after a while."""
        self._call_later(seconds, lambda: self._soon(fn))

    # --- what failures mean

    def failed(self, closure: Closure, error: Exception) -> None:
        """End a closure, and the round with it."""
        self.queue.fail(closure, error)
        self._cancel_waiting()

    def queue_error(self, error: Exception) -> None:
        """Let the next call of the program raise an error that no closure raised."""
        self.queue.report(error)
        self._cancel_waiting()

    def ps_failed(self, worker: Worker, closure: Closure, ps: int, error: Exception) -> None:
        """Run a closure again for which a parameter server did not answer, unless that is gone."""
        lost = self._backend.lost_ps(ps)
        if lost is not None:
            add_note(lost, f"{closure.name}, which {worker.name} ran, needs it.")
            self.failed(closure, lost)
        elif self._backend.is_ps_away(ps):
            logger.info("%s waits with %s for a parameter server: %s", worker.name, closure.name, error)
            worker.pause_while(partial(self._backend.is_ps_away, ps))
            self.queue.put_back([closure])
        elif closure.num_ps_failures >= self._max_ps_failures:
            self.failed(closure, error)
        else:
            closure.num_ps_failures += 1
            logger.warning("%s could not run %s and will try again: %s", worker.name, closure.name, error)
            worker.pause(min(_PAUSE_S * 2.0**closure.num_ps_failures, _MAX_PAUSE_S))
            self.queue.put_back([closure])
            self._backend.ask_ps(ps)  # a worker may notice before this process that it is silent

    def may_pass(self, worker: Worker, error: Exception) -> bool:
        """Say whether an error of a worker that is there may be gone at the next try."""
        if not isinstance(error, UnavailableError) or self._backend.lost_ps(None) is not None:
            return False
        if self._backend.is_ps_away(None):
            return True
        worker.num_retries += 1
        return worker.num_retries <= self._max_ps_failures

    def not_prepared(self, worker: Worker, error: Exception, *, was_told: bool) -> bool:
        """Note that a worker could not be configured, and say whether the program was told; it is tried again."""
        lost = self._backend.lost_ps(None)
        if was_told:
            logger.warning("%s could not be prepared: %s", worker.name, error)
        elif lost is not None:
            add_note(lost, f"{worker.name}, which has just connected, needs it.")
            self.queue_error(lost)
        elif isinstance(error, UnavailableError):
            logger.warning("%s could not be prepared and will try again: %s", worker.name, error)
            return False
        else:
            self.queue_error(error)
        return True

    def refused(self, worker: Worker, reason: str, *, is_final: bool = False) -> None:
        """Tell the program, as it can't get better by waiting; ``is_final`` if other workers will do the same."""
        error = UnavailableError(f"{worker.name} refused this coordinator: {reason}")
        self.queue_error(error)
        if is_final or all(other.state is WorkerState.REFUSED for other in self.workers):
            self.queue.close(error)
        self.changed(worker)

    # --- details

    def _soon(self, fn: Callable[[], None]) -> None:
        try:
            self._call_soon(fn)
        except RuntimeError:  # of a loop that is closed
            self._close()

    def _close(self) -> None:
        self.queue.close(UnavailableError("The strategy was closed: `strategy.close()` was called."))

    def _update_resources(self) -> None:
        while self._new_resources:
            resource = self._new_resources.popleft()
            self.resources.add(resource)
            for worker in self.workers:
                worker.make(resource)
                self._note(worker)
        dropped = self.resources.take_dropped()
        if dropped:
            for worker in self.workers:
                worker.forget(dropped)

    def _note(self, worker: Worker) -> None:
        for workers in self._by_load:
            workers.pop(worker, None)
        load = len(worker.in_flight)
        if worker.can_run and load < (_MAX_IN_FLIGHT if self._max_staleness is None else 1):
            self._by_load[load][worker] = None
        if worker.can_run:
            self._ready.add(worker)
        else:
            self._ready.discard(worker)

    def _next_worker(self) -> Worker | None:
        if not self._has_room():
            return None
        if self._max_staleness is not None:
            running = [c.start_number for worker in self.workers for c in worker.in_flight.values()]
            if running and self._num_started + 1 - min(running) > self._max_staleness:
                return None
        return next(iter(self._by_load[0] or self._by_load[1]))

    def _has_room(self) -> bool:
        """Say whether a worker can take one of the queue's closures; from any thread.

        A second closure goes to a worker only where the queue is long enough to keep all others busy, too.
        """
        return bool(self._by_load[0]) or (bool(self._by_load[1]) and len(self.queue) >= len(self._ready))

    def _cancel_waiting(self) -> None:
        """Take back what workers have not begun, after an error."""
        for worker in self.workers:
            if worker.in_flight:
                worker.cancel(list(worker.in_flight))

    def _watch_for_waiting(self) -> None:
        """Look again soon, if a closure waits behind another one while a worker is idle."""
        if not self._look_is_due and self._waiting():
            self._look_is_due = True
            self.call_later(_STEAL_AFTER_S, self._take_back_waiting)

    def _take_back_waiting(self) -> None:
        self._look_is_due = False
        now = time.monotonic()
        for worker in self._waiting()[: len(self._by_load[0])]:
            first, *others = worker.in_flight.values()
            if now - first.since >= _STEAL_AFTER_S:
                worker.cancel([closure.number for closure in others])
        self._watch_for_waiting()

    def _waiting(self) -> list[Worker]:
        """Return the workers that have closures which an idle worker could run."""
        if not self._by_load[0] or len(self.queue) or self.queue.is_cancelling:
            return []
        return [worker for worker in self.workers if len(worker.in_flight) > 1]
