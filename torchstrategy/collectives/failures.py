"""Who failed, who left and where each rank is: a watcher thread on each rank over the job's key-value store.

A rank that fails says so in the store before it raises. The watcher of every other rank sees it within a fraction of
a second, also while its main thread is blocked in a collective, which then raises an error that names the rank. Only
the watcher talks to the store, so that no other thread hangs with it.
"""

from __future__ import annotations

import atexit
import json
import queue
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import CancelledError, Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from types import TracebackType
from typing import Any

from torch.distributed import DistError, Store  # type: ignore[attr-defined]

from torchstrategy.errors import DisagreementError, ReplicaFailedError
from torchstrategy.log import logger

__all__ = ["FailureWatch", "describe"]

_POLL_S = 0.2
_ANSWER_S = 2.0
_STORE_S = 4.0
_LEFT = "has ended its program"
_SILENT = "does not answer (killed, stopped or cut off)"
_UNKNOWN = "can't be asked, because the job's store does not answer"


class FailureWatch:
    """Reports this rank's failure and learns of the others'; one for each process of a job.

    Args:
        store: a connection of the watcher's own; no other thread may use it.
        rank: this process's id.
        size: processes in the job.
        store_host: the rank that hosts the store; ``None`` if the launcher does.
    """

    def __init__(self, store: Store, rank: int, size: int, store_host: int | None = None) -> None:
        self._store = store
        self._store_host = store_host
        self._rank = rank
        self._size = size
        #: The first failure in the job that this rank knows of.
        self.failure: dict[str, Any] | None = None
        #: What this rank is doing, for the others' error messages.
        self.position = "start-up"
        #: How many collectives this rank has begun, in all groups.
        self.num_collectives = 0
        self._round = 0  # counts the failures that all ranks had in common, and outlived
        self._reported = False
        self._aware = False
        self._answered = 0
        self._stop = threading.Event()
        self._requests: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]]] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._watch, name="torchstrategy-failure-watch", daemon=True)
        self._thread.start()
        self._previous_hook = sys.excepthook
        sys.excepthook = self._on_uncaught
        atexit.register(self.close)

    def report(self, operation: str, error: BaseException, replica_id: int | None = None) -> None:
        """Tell the other ranks that this one failed, and wait until they know (at most 2 s)."""
        if self._reported or isinstance(error, (ReplicaFailedError, DisagreementError)):
            return  # the latter two are raised on every rank
        self._reported = True
        record = {
            "rank": self._rank,
            "replica": replica_id,
            "operation": operation,
            "error": f"{type(error).__name__}: {error}"[:2000],
            "num_collectives": self.num_collectives,
        }
        self.failure = self.failure or record
        if self._ask(lambda: self._publish(record)) is None:
            logger.warning("Could not tell the other ranks of the failure: the job's store is gone.")

    def recover(self) -> bool:
        """Go on after a failure that all ranks had at the same point, as when all raise the same error in ``run``.

        Returns:
            Whether the failure is over: no rank waits for another one.
        """
        return bool(self._ask(self._end_round))

    def wait_for_report(self, seconds: float) -> dict[str, Any] | None:
        """Return the failure that another rank reported, giving it a moment to arrive."""
        deadline = time.monotonic() + seconds
        while self.failure is None and time.monotonic() < deadline:
            time.sleep(0.02)
        return self.failure

    def where_is_everyone(self) -> str:
        """Ask every rank what it is doing.

        Returns:
            A sentence about the ranks that left or do not answer, if there are any, then one line for each rank.
        """
        places: list[str] | None = self._ask(self._locate)
        if places is None:
            places = [_SILENT if self._store_host == 0 and rank == 0 else _UNKNOWN for rank in range(self._size)]
            places[self._rank] = self.position
        headlines = [f"Rank {rank} {place}. " for rank, place in enumerate(places) if place in (_LEFT, _SILENT)]
        rows = [f"  rank {rank}: {place}" for rank, place in enumerate(places)]
        return "\n".join(["".join(headlines) + "Where each rank is:", *rows])

    def close(self) -> None:
        """Stop watching; the store then says that this rank left."""
        if self._stop.is_set():
            return
        if not self._reported:
            self._ask(lambda: self._store.set(f"left/{self._rank}", "1"))
        self._stop.set()
        atexit.unregister(self.close)
        # A bound method is made anew on each access, so compare what it is bound to.
        if getattr(sys.excepthook, "__self__", None) is self:
            sys.excepthook = self._previous_hook
        self._thread.join(timeout=2)

    def _ask(self, request: Callable[[], Any]) -> Any:
        """Let the watcher carry out a request; ``None`` if the store does not answer."""
        future: Future[Any] = Future()
        self._requests.put((future, request))
        if not self._thread.is_alive():
            return None
        try:
            return future.result(timeout=_STORE_S)
        except (FutureTimeoutError, CancelledError):
            return None

    def _watch(self) -> None:
        future: Future[Any] | None = None
        try:
            while not self._stop.is_set():
                try:
                    future, request = self._requests.get(timeout=_POLL_S)
                    future.set_result(request())
                except queue.Empty:
                    pass
                self._look()
        except (DistError, RuntimeError):
            logger.debug("The job's store is gone; no longer watching for failures.")
            if future is not None:
                future.cancel()

    def _look(self) -> None:
        """Learn of a failure; answer a rank that asks where everyone is."""
        if not self._aware and self._store.check([self._key("failure/1")]):
            self._learn()
        asked = self._store.add("where", 0)
        if asked > self._answered:
            self._answered = asked
            self._store.set(f"where/{asked}/{self._rank}", self.position)

    def _learn(self) -> None:
        record = json.loads(self._store.get(self._key("failure/1")))
        self._aware = True
        self._store.add(self._key("aware"), 1)
        if self.failure is None:
            self.failure = record
            logger.error(describe(record))

    def _publish(self, record: dict[str, Any]) -> bool:
        ticket = self._store.add(self._key("failures"), 1)
        self._store.set(self._key(f"failure/{ticket}"), json.dumps(record))
        self._until(lambda: self._store.add(self._key("aware"), 0) >= self._size)
        return True

    def _end_round(self) -> bool:
        if self._store.add(self._key("failures"), 0) < self._size:
            return False
        keys = [self._key(f"failure/{ticket}") for ticket in range(1, self._size + 1)]
        records = [json.loads(self._store.get(key)) for key in keys]
        if len({record["num_collectives"] for record in records}) > 1:
            return False
        self._round += 1
        self.failure, self._reported, self._aware = None, False, False
        return True

    def _locate(self) -> list[str]:
        ticket = self._store.add("where", 1)
        self._until(lambda: _SILENT not in [self._place(ticket, rank) for rank in range(self._size)])
        return [self._place(ticket, rank) for rank in range(self._size)]

    def _place(self, ticket: int, rank: int) -> str:
        key = f"where/{ticket}/{rank}"
        if self._store.check([key]):
            return str(self._store.get(key).decode())
        return _LEFT if self._store.check([f"left/{rank}"]) else _SILENT

    def _until(self, condition: Callable[[], bool]) -> None:
        """Wait for a condition, but not long; serve the other ranks meanwhile, which may wait for this one."""
        deadline = time.monotonic() + _ANSWER_S
        while True:
            self._look()
            if condition() or time.monotonic() > deadline:
                return
            time.sleep(0.02)

    def _key(self, name: str) -> str:
        return f"{self._round}/{name}"

    def _on_uncaught(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        # KeyboardInterrupt goes to all ranks of a terminal by itself.
        if isinstance(error, Exception):
            self.report(f"its program ({self.position})", error)
        self._previous_hook(kind, error, trace)


def describe(record: dict[str, Any]) -> str:
    """Return one sentence for a failure record."""
    replica = "" if record["replica"] is None else f" (replica {record['replica']})"
    return f"Rank {record['rank']}{replica} failed in {record['operation']}: {record['error']}"
