"""Threads that read ahead or call functions; errors are passed on as they were raised."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch
from torchdata.nodes import BaseNode, Prefetcher  # type: ignore[import-untyped]
from typing_extensions import override

from torchstrategy.data.pipeline.node import Node, State

__all__ = ["ParallelMap", "Prefetch"]

_CALLS_PER_THREAD = 2  # that are waiting or running
_setting_threads = threading.Lock()


class _Raised:
    """An error on its way through a queue; torchdata would raise a new one with another text."""

    def __init__(self, error: Exception) -> None:
        self.error = error


class _Guarded(BaseNode[Any]):  # type: ignore[misc]
    """Hands errors on as items."""

    def __init__(self, source: Node) -> None:
        super().__init__()
        self._source = source
        self._lock = threading.Lock()  # a thread that was stopped may be reading yet

    def reset(self, initial_state: State | None = None) -> None:
        super().reset(initial_state)
        with self._lock:
            self._source.reset(initial_state)
            self._has_failed = False

    def next(self) -> Any:
        with self._lock:
            if self._has_failed:
                raise StopIteration
            try:
                return next(self._source)
            except StopIteration:
                raise
            except Exception as error:  # noqa: BLE001 - raised again by the reader
                self._has_failed = True
                return _Raised(error)

    def get_state(self) -> State:
        # After an error the node is of no use, and neither may its state be.
        return {} if self._has_failed else self._source.state_dict()


class Prefetch(Node):
    """Items that a thread reads ahead.

    Args:
        source: of the items.
        buffer_size: how many wait at most.
    """

    def __init__(self, source: Node, buffer_size: int) -> None:
        super().__init__()
        self._inner = Prefetcher(_Guarded(source), buffer_size)

    @override
    def start(self, state: State | None) -> None:
        self._inner.reset(None if state is None else state["ahead"])

    @override
    def next(self) -> Any:
        item = next(self._inner)
        if isinstance(item, _Raised):
            raise item.error
        return item

    @override
    def get_state(self) -> State:
        return {"ahead": self._inner.state_dict()}


class ParallelMap(Node):
    """Items after a function that several threads call; they keep their order.

    torchdata's ``ParallelMapper`` would set torch's number of threads to 1 for every thread that begins later, such as
    those of replicas.

    Args:
        source: of the items.
        fn: the function.
        num_threads: how many threads.
    """

    def __init__(self, source: Node, fn: Callable[[Any], Any], num_threads: int) -> None:
        super().__init__()
        self._source = source
        self._fn = fn
        self._num_threads = num_threads
        self._pool: ThreadPoolExecutor | None = None

    @override
    def start(self, state: State | None) -> None:
        self._stop()
        self._source.reset(None if state is None else state["source"])
        self._given = self._source.state_dict()  # the source's state after the last item that was given
        self._calls: deque[tuple[Future[Any], State]] = deque()
        self._is_ended = False
        self._pool = _start_threads(self._num_threads)

    @override
    def next(self) -> Any:
        while not self._is_ended and len(self._calls) < _CALLS_PER_THREAD * self._num_threads:
            self._begin_call(self._pool)
        if not self._calls:
            self._stop()
            raise StopIteration
        call, state = self._calls.popleft()
        try:
            item = call.result()
        except Exception:
            self._stop()  # whoever keeps the error keeps this node alive
            raise
        self._given = state
        return item

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
            self._is_ended = True
            failed: Future[Any] = Future()
            failed.set_exception(error)
            self._calls.append((failed, self._given))
        else:
            self._calls.append((pool.submit(self._fn, item), self._source.state_dict()))

    def _stop(self) -> None:
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)
            self._pool = None


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
