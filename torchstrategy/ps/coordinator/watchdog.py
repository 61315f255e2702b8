"""Says what everybody is doing when nothing has ended for a long time; and one thread that calls functions later."""

from __future__ import annotations

import heapq
import itertools
import threading
import time
from collections.abc import Callable
from functools import partial

from torchstrategy.base.log import logger
from torchstrategy.base.stalls import stacks_of_others
from torchstrategy.ps.coordinator.cluster import Cluster

__all__ = ["Timers", "Watchdog"]


class Timers:
    """Calls functions after a delay, on a daemon thread that lives as long as there are any."""

    def __init__(self) -> None:
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._is_closed = False

    def call_later(self, delay_s: float, fn: Callable[[], None]) -> None:
        """Call a function, which must be quick, once the delay is over; not after ``close``."""
        with self._changed:
            if self._is_closed:
                return
            heapq.heappush(self._due, (time.monotonic() + delay_s, next(self._numbers), fn))
            if self._thread is None:
                self._thread = threading.Thread(target=self._serve, name="torchstrategy-timers", daemon=True)
                self._thread.start()
            self._changed.notify()

    def close(self) -> None:
        """Forget all calls and end the thread."""
        with self._changed:
            self._is_closed = True
            self._due.clear()
            self._changed.notify()

    def _serve(self) -> None:
        while True:
            with self._changed:
                while self._due and (wait_s := self._due[0][0] - time.monotonic()) > 0:
                    self._changed.wait(wait_s)
                if not self._due:
                    self._thread = None
                    return
                fn = heapq.heappop(self._due)[2]
            try:
                fn()
            except Exception:  # noqa: BLE001 - the other calls are still due
                logger.exception("A timer of the cluster coordinator failed.")


class Watchdog:
    """Logs the stacks of this process and of busy workers while closures are there but none ends.

    Args:
        cluster: whose closures it looks at.
        stuck_after_s: how long none may end; 0 for no watchdog.
    """

    def __init__(self, cluster: Cluster, stuck_after_s: float) -> None:
        self._cluster = cluster
        self._stuck_after_s = stuck_after_s
        self._lock = threading.Lock()
        self._is_watching = False
        self._num_finished = 0
        self._since = 0.0
        self._wait_s = stuck_after_s

    def watch(self) -> None:
        """Watch until nothing is left to do. Called with every closure, by any thread."""
        if not self._stuck_after_s:
            return
        with self._lock:
            was_watching, self._is_watching = self._is_watching, True
        if not was_watching:
            self._notice()
            self._cluster.call_later(self._stuck_after_s, self._look)

    def _look(self) -> None:
        queue = self._cluster.queue
        with self._lock:
            self._is_watching = bool(len(queue) or queue.num_running)
            if not self._is_watching:
                return
        if self._num_finished != queue.num_finished:
            self._notice()
        elif time.monotonic() - self._since >= self._wait_s:
            self._bark()
            self._wait_s *= 2  # a function may well take hours
        wait_s = self._wait_s - (time.monotonic() - self._since)
        self._cluster.call_later(max(wait_s, 0.01), self._look)

    def _notice(self) -> None:
        self._num_finished = self._cluster.queue.num_finished
        self._since = time.monotonic()
        self._wait_s = self._stuck_after_s

    def _bark(self) -> None:
        queue = self._cluster.queue
        logger.warning(
            "No scheduled function has ended for %.0f s; %d are queued. %s\nThreads of the coordinator:\n%s",
            time.monotonic() - self._since,
            len(queue),
            self._cluster.describe_running(),
            stacks_of_others(),
        )
        for worker in self._cluster.workers:
            if worker.in_flight:
                worker.ask_for_stacks(partial(logger.warning, "Threads of %s:\n%s", worker.name))
            elif not worker.can_run:
                logger.warning("%s", worker.describe())
