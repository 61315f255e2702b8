"""Who failed, who left and where each rank is: a watcher thread on each rank over the job's key-value store.

A rank that fails says so in the store before it raises. The watcher of every other rank sees it within a fraction of
a second, also while its main thread is blocked in a collective, which then raises an error that names the rank.
"""

from __future__ import annotations

import atexit
import json
import sys
import threading
import time
from types import TracebackType
from typing import Any

from torch.distributed import DistError, Store  # type: ignore[attr-defined]

from torchstrategy.log import logger

__all__ = ["FailureWatch"]

_POLL_S = 0.1
_ANSWER_S = 2.0


class FailureWatch:
    """Reports this rank's failure and learns of the others'.

    Args:
        store: a connection of the watcher's own; no other thread may use it.
        rank: this process's id.
        size: processes in the job.
    """

    def __init__(self, store: Store, rank: int, size: int) -> None:
        self._store = store
        self._lock = threading.Lock()  # one connection serves one request at a time
        self._rank = rank
        self._size = size
        self._stop = threading.Event()
        self._answered = 0
        self.failure: dict[str, Any] | None = None
        self.position = "start-up"
        self._thread = threading.Thread(target=self._watch, name="torchstrategy-failure-watch", daemon=True)
        self._thread.start()
        self._previous_hook = sys.excepthook
        sys.excepthook = self._on_uncaught
        atexit.register(self.close)

    def report(self, operation: str, error: BaseException, replica_id: int | None = None) -> None:
        """Tell the other ranks that this one failed, and wait until they know (at most 2 s)."""
        if self.failure is not None:
            return
        self.failure = {
            "rank": self._rank,
            "replica": replica_id,
            "operation": operation,
            "error": f"{type(error).__name__}: {error}"[:2000],
        }
        try:
            with self._lock:
                self._store.set("failure", json.dumps(self.failure))
            deadline = time.monotonic() + _ANSWER_S
            while time.monotonic() < deadline:
                with self._lock:
                    if self._store.add("failure_seen", 0) >= self._size - 1:
                        return
                time.sleep(0.02)
        except (DistError, RuntimeError):
            logger.warning("Could not tell the other ranks of the failure: the job's store is gone.")

    def wait_for_report(self, seconds: float) -> dict[str, Any] | None:
        """Return the failure that another rank reported, giving it a moment to arrive."""
        deadline = time.monotonic() + seconds
        while self.failure is None and time.monotonic() < deadline:
            time.sleep(0.02)
        return self.failure

    def where_is_everyone(self) -> list[str]:
        """Ask every rank what it is doing; one line a rank, also for those that left or do not answer."""
        try:
            with self._lock:
                ticket = self._store.add("where", 1)
            self._answer(ticket)
            deadline = time.monotonic() + _ANSWER_S
            keys = [f"where/{ticket}/{rank}" for rank in range(self._size)]
            while time.monotonic() < deadline:
                with self._lock:
                    if self._store.check(keys):
                        break
                time.sleep(0.05)
            return [self._line(rank, key) for rank, key in enumerate(keys)]
        except (DistError, RuntimeError):
            return ["The job's store is gone, so the other ranks can't be asked: its host ended."]

    def close(self) -> None:
        """Stop watching; the store then says that this rank left."""
        if self._stop.is_set():
            return
        self._stop.set()
        atexit.unregister(self.close)
        # A bound method is made anew on each access, so compare what it is bound to.
        if getattr(sys.excepthook, "__self__", None) is self:
            sys.excepthook = self._previous_hook
        self._thread.join(timeout=2)
        if self.failure is None:
            try:
                with self._lock:
                    self._store.set(f"left/{self._rank}", "1")
            except (DistError, RuntimeError):
                logger.debug("The job's store ended before this rank.")

    def _line(self, rank: int, key: str) -> str:
        with self._lock:
            if self._store.check([key]):
                return f"  rank {rank}: {self._store.get(key).decode()}"
            if self._store.check([f"left/{rank}"]):
                return f"  rank {rank}: has ended its program"
        return f"  rank {rank}: does not answer (killed, stopped or cut off)"

    def _answer(self, ticket: int) -> None:
        with self._lock:
            self._answered = ticket
            self._store.set(f"where/{ticket}/{self._rank}", self.position)

    def _watch(self) -> None:
        try:
            while not self._stop.wait(_POLL_S):
                with self._lock:
                    failed = self.failure is None and self._store.check(["failure"])
                    asked = self._store.add("where", 0)
                if failed:
                    self._learn()
                if asked > self._answered:
                    self._answer(asked)
        except (DistError, RuntimeError):
            logger.debug("The job's store is gone; no longer watching for failures.")

    def _learn(self) -> None:
        with self._lock:
            record = json.loads(self._store.get("failure"))
            self._store.add("failure_seen", 1)
        self.failure = record
        logger.error(describe(record))

    def _on_uncaught(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        # KeyboardInterrupt goes to all ranks of a terminal by itself.
        if isinstance(error, Exception):
            self.report(self.position, error)
        self._previous_hook(kind, error, trace)


def describe(record: dict[str, Any]) -> str:
    """Return one sentence for a failure record."""
    replica = "" if record["replica"] is None else f" (replica {record['replica']})"
    return f"Rank {record['rank']}{replica} failed in {record['operation']}: {record['error']}"
