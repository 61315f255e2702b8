"""Scheduled functions on their way: the queue, what is running, and the error that ends a round of them.

Everything here is a matter of one process: no messages, no threads of its own. The queue has one lock.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from torchstrategy.base.log import logger
from torchstrategy.errors import CancelledError
from torchstrategy.ps.coordinator.per_worker import WAKE_UP_S, Idle, RemoteValue
from torchstrategy.ps.transport.messages import Message

__all__ = ["Closure", "ClosureQueue"]

#: As many as tf's queue holds before ``schedule`` waits.
MAX_QUEUED = 256 * 1024
#: ``schedule`` also waits while the arguments of queued functions take more memory than this.
MAX_QUEUED_BYTES = 1 << 30


class Closure:
    """A function with its arguments, pickled, and where its result goes.

    Args:
        number: its id, in the order of scheduling.
        name: the function's, for messages.
        function_key: which definition it calls.
        definitions: messages with all definitions that a worker must have first.
        blob: the pickled arguments.
        result: what the user holds; without a reference to it, the result is dropped.
        resources: ids of the per-worker values among the arguments.
        kept: objects that must live until it ends, such as those that the arguments refer to.
    """

    __slots__ = (
        *("blob", "definitions", "function_key", "kept", "name", "num_losses", "num_ps_failures", "number"),
        *("resources", "result", "since", "start_number"),
    )

    def __init__(
        self,
        number: int,
        name: str,
        function_key: str,
        definitions: Sequence[Message],
        blob: bytes,
        result: RemoteValue,
        *,
        resources: Sequence[int] = (),
        kept: Any = None,
    ) -> None:
        self.number = number
        self.name = name
        self.function_key = function_key
        self.definitions = definitions
        self.blob = blob
        self.resources = resources
        self.kept = kept
        self.result = weakref.ref(result)
        self.num_losses = 0
        self.num_ps_failures = 0
        self.start_number = 0
        self.since = 0.0

    def message(self, num_failures: int) -> Message:
        """Return the message that makes a worker run it, unless more functions than this have failed there."""
        fields = {"closure": self.number, "function": self.function_key, "failures": num_failures}
        return Message("run", fields, blobs=(self.blob,))

    def has_definition(self, key: str) -> bool:
        """Say whether it needs a definition."""
        return any(definition.fields["key"] == key for definition in self.definitions)

    def settle(self, load: Callable[[], Any] | None = None, error: Exception | None = None) -> None:
        """Give the result, or the error, to who waits for it."""
        self.kept = None
        result = self.result()
        if result is not None:
            result._settle(load, error)


class ClosureQueue:
    """Closures that wait and closures that run; the first error cancels those that wait.

    ``schedule``, ``join`` and ``done`` call ``put``, ``join`` and ``is_done``; whatever runs closures calls the others.

    Args:
        idle: called while a thread waits.
        max_queued: ``put`` waits while so many closures are queued.
        max_queued_bytes: ``put`` waits while their arguments take so much memory.
    """

    def __init__(self, idle: Idle, *, max_queued: int = MAX_QUEUED, max_queued_bytes: int = MAX_QUEUED_BYTES) -> None:
        self._idle = idle
        self._max_queued = max_queued
        self._max_queued_bytes = max_queued_bytes
        self._lock = threading.Lock()
        self._has_room = threading.Condition(self._lock)
        self._has_ended = threading.Condition(self._lock)  # nothing queued or running, or an error
        self._queued: deque[Closure] = deque()
        self._num_bytes = 0
        self._num_running = 0
        self._error: Exception | None = None
        self._final_error: Exception | None = None
        self.num_finished = 0

    def __len__(self) -> int:
        return len(self._queued)

    @property
    def num_running(self) -> int:
        """How many closures were taken and have not ended."""
        return self._num_running

    @property
    def is_cancelling(self) -> bool:
        """Whether an error waits to be raised; until then closures are cancelled, not run again."""
        return self._error is not None or self._final_error is not None

    @property
    def pending_error(self) -> Exception | None:
        """The error of a closure that the next call of the user raises."""
        return self._error

    # --- the user's threads

    def put(self, closure: Closure) -> None:
        """Add a closure at the end; wait while the queue is full.

        Raises:
            Exception: the pending error of another closure, which is no longer pending then.
        """

        def may_put() -> bool:
            return self._may_raise() if self.is_cancelling else self._fits(closure)

        self._when(self._has_room, may_put, lambda: self._append(closure))

    def join(self) -> None:
        """Wait until nothing is queued or running.

        Raises:
            Exception: the pending error, which is no longer pending then.
        """
        self._when(self._has_ended, lambda: self._may_raise() or self._is_empty(), lambda: None)

    def is_done(self) -> bool:
        """Say whether nothing is queued or running, without waiting.

        Raises:
            Exception: the pending error, once nothing runs any more.
        """
        with self._lock:
            if self._may_raise():
                self._raise_error()
            return self._is_empty() and not self.is_cancelling

    def raise_error(self) -> None:
        """Raise the pending error, if there is one, once nothing runs any more."""
        if self.is_cancelling:
            self._when(self._has_ended, lambda: self._may_raise() or not self.is_cancelling, lambda: None)

    # --- who runs closures

    def take(self) -> Closure | None:
        """Return the first closure, which runs from now on; ``None`` if there is none."""
        with self._lock:
            if not self._queued:
                return None
            closure = self._queued.popleft()
            self._num_bytes -= len(closure.blob)
            self._num_running += 1
            self._has_room.notify()
            return closure

    def put_back(self, closures: Iterable[Closure]) -> None:
        """Put closures that were not run to their end back to the front, in their order; cancel them after an error."""
        with self._lock:
            for closure in reversed(list(closures)):
                self._num_running -= 1
                self._queued.appendleft(closure)
                self._num_bytes += len(closure.blob)
            if self.is_cancelling:
                self._cancel_queued()
            self._notice_end()

    def finish(self, closure: Closure, load: Callable[[], Any]) -> None:
        """Note that a closure has ended well; ``load`` makes its value from what came back."""
        closure.settle(load)
        with self._lock:
            self._num_running -= 1
            self.num_finished += 1
            self._notice_end()

    def fail(self, closure: Closure, error: Exception) -> None:
        """Note that a closure raised an error: the next ``put``, ``join`` or ``is_done`` raises it."""
        closure.settle(error=error)
        with self._lock:
            self._num_running -= 1
            self.num_finished += 1
            self._set_error(error)

    def report(self, error: Exception) -> None:
        """Let the next call of the user raise an error, and cancel what is queued. Only the first one counts."""
        with self._lock:
            self._set_error(error)

    def close(self, error: Exception) -> None:
        """Let every call raise an error from now on, and cancel what is queued."""
        with self._lock:
            if self._final_error is None:
                self._final_error = error
            self._cancel_queued()
            self._has_ended.notify_all()

    # --- under the lock

    def _fits(self, closure: Closure) -> bool:
        if not self._queued:
            return True  # however large it is
        return len(self._queued) < self._max_queued and self._num_bytes + len(closure.blob) <= self._max_queued_bytes

    def _is_empty(self) -> bool:
        return not self._queued and not self._num_running

    def _append(self, closure: Closure) -> None:
        self._queued.append(closure)
        self._num_bytes += len(closure.blob)

    def _notice_end(self) -> None:
        if not self._num_running and not self._queued:
            self._has_ended.notify_all()
            self._has_room.notify_all()

    def _may_raise(self) -> bool:
        """Say whether an error can be raised: nothing of its round may still change a parameter afterwards."""
        return self._final_error is not None or (self._error is not None and not self._num_running)

    def _raise_error(self) -> None:
        if self._final_error is not None:
            raise self._final_error.with_traceback(None)
        error, self._error = self._error, None
        if error is not None:  # another thread may have raised it meanwhile
            raise error.with_traceback(None)

    def _when(self, condition: threading.Condition, is_met: Callable[[], bool], then: Callable[[], None]) -> None:
        """Wait until something is so, then raise the pending error or do something, all under the lock."""
        start = time.monotonic()
        while True:
            with self._lock:
                if condition.wait_for(is_met, WAKE_UP_S):
                    self._raise_error()
                    then()
                    return
            self._idle(time.monotonic() - start)

    def _set_error(self, error: Exception) -> None:
        if self._error is None:
            self._error = error
        self._cancel_queued()
        self._notice_end()

    def _cancel_queued(self) -> None:
        closures, self._queued = self._queued, deque()
        self._num_bytes = 0
        self._has_room.notify_all()
        if not closures:
            return
        reason = self._final_error or self._error
        logger.info("%d scheduled functions are cancelled: %r", len(closures), reason)
        for closure in closures:
            why = "" if self._final_error is not None else "because a function failed: "
            text = f"{closure.name} was cancelled, {why}{type(reason).__name__}: {reason}"
            error = CancelledError(text)
            error.__cause__ = reason  # a lost parameter server can be told from a function's own failure
            closure.settle(error=error)
