"""Threads that read ahead or call functions; errors are passed on as they were raised, or ignored."""

from __future__ import annotations

import atexit
import queue
import threading
import weakref
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple

import torch
from typing_extensions import override

from torchstrategy.base.log import logger
from torchstrategy.data.pipeline.op import Node, SourcedNode, State

__all__ = ["IgnoreErrors", "ParallelMap", "Prefetch"]

_FAILURES_IN_A_ROW = 1000  # after which a source must have moved on
_CALLS_PER_THREAD = 2  # that are waiting or running
_setting_threads = threading.Lock()
#: How long whoever stops a thread waits for the item that it is reading, in seconds.
_WAIT_S = 0.5
_WAIT_AT_EXIT_S = 5.0
#: What positions held when torchdata read ahead.
_STATE_OF_TORCHDATA = {"snapshot", "steps_since_snapshot"}
_NOT_BEGUN = "The dataset could not begin, as an earlier error has said. Iterate over it anew."


class _Read(NamedTuple):
    """What a thread has read: an item and the state after it, an error, or none of both at the end."""

    item: Any = None
    state: State | None = None
    error: BaseException | None = None


class _Reader:
    """Reads ahead in a thread until there is nothing more to read, or it is stopped.

    Args:
        source: what is read.
        buffer_size: how many items wait at most.
        lock: held while the source is used.
    """

    def __init__(self, source: Node, buffer_size: int, lock: threading.Lock) -> None:
        self._source = source
        self._lock = lock
        self._is_stopped = False
        self._free = threading.Semaphore(buffer_size)
        self._found: queue.SimpleQueue[_Read] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._read_all, name="ts.data.prefetch", daemon=True)
        self._thread.start()
        _readers.add(self)

    def take(self) -> _Read:
        """Return what was read next; it waits for it."""
        found = self._found.get()
        self._free.release()
        return found

    def stop(self, wait_s: float = _WAIT_S) -> None:
        """Let the thread end after the item that it is reading, and wait for that, but not for long."""
        self._is_stopped = True
        self._free.release()
        if threading.current_thread() is not self._thread:  # which may be the one that collects garbage
            self._thread.join(wait_s)

    def _read_all(self) -> None:
        found = _Read(state={})
        while found.state is not None:
            self._free.acquire()
            with self._lock:
                if self._is_stopped:
                    return
                found = self._read()
            self._found.put(found)

    def _read(self) -> _Read:
        try:
            return _Read(next(self._source), self._source.state_dict())
        except StopIteration:
            return _Read()
        except BaseException as error:  # noqa: BLE001 - raised again by whoever takes it
            return _Read(error=error)


#: Those whose threads may be reading.
_readers: weakref.WeakSet[_Reader] = weakref.WeakSet()


@atexit.register
def _stop_all() -> None:
    """End threads with the program: one that is inside of torch then would abort it."""
    for reader in list(_readers):
        reader.stop(_WAIT_AT_EXIT_S)


class Prefetch(Node):
    """Items that a thread reads ahead.

    Args:
        source: of the items.
        buffer_size: how many wait at most.
    """

    def __init__(self, source: Node, buffer_size: int) -> None:
        self._source = source
        self._buffer_size = buffer_size
        self._lock = threading.Lock()  # a thread that was stopped may be reading yet
        self._reader: _Reader | None = None
        self._given: State | None = None
        self._is_at_end = False

    @override
    def start(self, state: State | None) -> None:
        self._stop()
        self._given, self._is_at_end = None, False
        ahead = None if state is None else state["ahead"]
        if ahead is not None and ahead.keys() == _STATE_OF_TORCHDATA and not ahead["steps_since_snapshot"]:
            ahead = ahead["snapshot"]
        with self._lock:
            self._source.reset(ahead)
            self._given = self._source.state_dict()  # the source's state after the last item that was given
        self._reader = _Reader(self._source, self._buffer_size, self._lock)

    @override
    def next(self) -> Any:
        if self._is_at_end:
            raise StopIteration
        if self._reader is None and self._given is None:
            raise RuntimeError(_NOT_BEGUN)
        if self._reader is None:  # which ended with an error
            self._reader = _Reader(self._source, self._buffer_size, self._lock)
        item, state, error = self._reader.take()
        if error is not None:
            self._stop()
            self._given = self._source.state_dict()
            raise error
        if state is None:
            self._stop()
            self._is_at_end = True
            raise StopIteration
        self._given = state
        return item

    @override
    def get_state(self) -> State:
        if self._given is None:
            raise RuntimeError(_NOT_BEGUN)
        return {"ahead": self._given}

    def __del__(self) -> None:
        self._stop()

    def _stop(self) -> None:
        if self._reader is not None:
            self._reader.stop()
            self._reader = None


class ParallelMap(Node):
    """Items after a function that several threads call; they keep their order.

    Args:
        source: of the items.
        fn: the function.
        num_threads: how many threads.
    """

    def __init__(self, source: Node, fn: Callable[[Any], Any], num_threads: int) -> None:
        self._source = source
        self._fn = fn
        self._num_threads = num_threads
        self._pool: ThreadPoolExecutor | None = None

    @override
    def start(self, state: State | None) -> None:
        self._stop()
        self._source.reset(None if state is None else state["source"])
        self._given = self._source.state_dict()  # the source's state after the last item that was given
        self._calls: deque[tuple[Future[Any], Any, State]] = deque()  # with what was given to them
        self._is_ended = False
        self._pool = _start_threads(self._num_threads)

    @override
    def next(self) -> Any:
        if self._pool is None and (self._calls or not self._is_ended):
            self._begin_anew()
        while not self._is_ended and len(self._calls) < _CALLS_PER_THREAD * self._num_threads:
            self._begin_call(self._pool)
        if not self._calls:
            self._stop()
            raise StopIteration
        call, _, self._given = self._calls.popleft()
        try:
            return call.result()
        except Exception:
            self._stop()  # whoever keeps the error keeps this node alive
            raise

    @override
    def get_state(self) -> State:
        return {"source": self._given}

    def __del__(self) -> None:
        self._stop()

    def _begin_call(self, pool: Any) -> None:
        try:
            item = next(self._source)
        except StopIteration:
            self._is_ended = True
        except Exception as error:  # noqa: BLE001 - raised in its turn, after the items before it
            failed: Future[Any] = Future()
            failed.set_exception(error)
            self._calls.append((failed, None, self._source.state_dict()))
        else:
            self._calls.append((pool.submit(self._fn, item), item, self._source.state_dict()))

    def _begin_anew(self) -> None:
        """Go on after an error: call the functions that were not called because of it."""
        self._pool = pool = _start_threads(self._num_threads)
        for _ in range(len(self._calls)):
            call, item, state = self._calls.popleft()
            self._calls.append((pool.submit(self._fn, item) if call.cancelled() else call, item, state))

    def _stop(self) -> None:
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)
            self._pool = None


class IgnoreErrors(SourcedNode):
    """The elements of a source without those that raise an error.

    Args:
        source: of the elements.
        warns: say in the log what is left out.
    """

    def __init__(self, source: Node, *, warns: bool) -> None:
        super().__init__(source)
        self._warns = warns
        source.read_singly()

    @override
    def next(self) -> Any:
        num_failed, before = 0, ""
        while True:
            try:
                found = self._source.read(1)
            except Exception as error:
                if self._warns:
                    logger.warning("ignore_errors() leaves out an element: %r", error)
                num_failed += 1
                if num_failed % _FAILURES_IN_A_ROW == 0:
                    now = repr(self._source.state_dict())
                    if now == before:  # it does not move on, so this would be for ever
                        raise
                    before = now
            else:
                if not found:
                    raise StopIteration
                return found[0]


def _start_threads(number: int) -> ThreadPoolExecutor:
    """Return a pool whose threads have all begun, so that torch's number of threads is not touched later."""
    pool = ThreadPoolExecutor(number, "ts.data.map", _use_one_core)
    all_here = threading.Barrier(number)
    for call in [pool.submit(all_here.wait) for _ in range(number)]:
        call.result()
    return pool


def _use_one_core() -> None:
    """Let torch use one core in this thread; there are others."""
    with _setting_threads:
        number = torch.get_num_threads()
        torch.set_num_threads(1)  # of this thread, and of every thread that begins to use torch from now on
        others = threading.Thread(target=torch.set_num_threads, args=(number,))
        others.start()
        others.join()
