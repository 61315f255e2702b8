"""One thread that calls functions later: retries, the look for stuck functions. It ends when nothing is due."""

from __future__ import annotations

import heapq
import itertools
import threading
import time
from collections.abc import Callable

from torchstrategy.base.log import logger

__all__ = ["Timers"]


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
