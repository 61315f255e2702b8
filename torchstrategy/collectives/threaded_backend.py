"""Sums that go on while the caller computes, over backends that work only when they are waited for."""

from __future__ import annotations

import concurrent.futures
import functools
import threading
import weakref
from concurrent.futures import Future
from queue import SimpleQueue

import torch
from torch import Tensor

from torchstrategy.base.labels import label
from torchstrategy.collectives.backends import SumBackend, Wait, outlive_program, route_of
from torchstrategy.collectives.connections import Check

__all__ = ["ThreadedBackend"]

_POLL_S = 0.5
_END_S = 2.0

_Job = tuple[Tensor, "Future[None]"]


class ThreadedBackend:
    """Carries out a backend's sums in a thread, in the order in which they are started.

    The thread never decides by itself that a wait is over: whoever waits for a result does, and gives up all sums. It
    begins with the first sum, and ends when this object is dropped or the program ends. After one sum has failed, or
    the thread has ended, later ones fail where they are waited for: the ranks are no longer at the same one.

    Args:
        backend: what moves the data; nobody else may use it while a sum has not been waited for.
    """

    def __init__(self, backend: SumBackend) -> None:
        self._backend = backend
        self.route = f"{route_of(backend)}, during backward"
        self._jobs: SimpleQueue[_Job | None] = SimpleQueue()
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None

    def start_sum(self, tensor: Tensor) -> Wait:
        """See ``SumBackend``."""
        if self._thread is None:
            self._begin()
        result: Future[None] = Future()
        self._jobs.put((tensor, result))
        return functools.partial(self._wait, result)

    def outlive_program(self) -> None:
        """See ``C10dBackend``."""
        outlive_program(self._backend)

    def _begin(self) -> None:
        is_ready = threading.Event()
        arguments = (self._backend, self._jobs, self._ended, is_ready)
        thread = threading.Thread(target=_work, args=arguments, name="torchstrategy-sums", daemon=True)
        num_threads = torch.get_num_threads()
        thread.start()
        is_ready.wait()
        torch.set_num_threads(num_threads)  # what the thread has set for itself would count for later threads, too
        weakref.finalize(self, _end, self._jobs, self._ended, thread)
        self._thread = thread

    def _wait(self, result: Future[None], check: Check) -> None:
        try:
            while True:
                check()
                if concurrent.futures.wait([result], _POLL_S).done:
                    return result.result()
                if self._has_no_thread() and not result.done():
                    raise ConnectionError("the thread that sums gradients has ended, as it does with the program")
        except BaseException:
            self._ended.set()  # what has not been summed never will be
            raise

    def _has_no_thread(self) -> bool:
        """Say so after the program's end has begun, and in a process that was forked off."""
        return self._thread is None or not self._thread.is_alive()


def _work(
    backend: SumBackend, jobs: SimpleQueue[_Job | None], ended: threading.Event, is_ready: threading.Event
) -> None:
    torch.set_num_threads(1)  # the others compute meanwhile; and each thread would have a team of its own
    is_ready.set()

    def check() -> None:
        if ended.is_set():
            raise ConnectionError("a sum of gradients was given up")

    while (job := jobs.get()) is not None:
        tensor, result = job
        try:
            check()
            with label("move", "in the background:", tensor.nbytes, "bytes by", route_of(backend)):
                backend.start_sum(tensor)(check)
        except BaseException as error:  # noqa: BLE001 - whoever waits gets it
            ended.set()
            result.set_exception(error)
        else:
            result.set_result(None)
        del job, tensor, result  # the thread sleeps now, and must not keep the memory


def _end(jobs: SimpleQueue[_Job | None], ended: threading.Event, thread: threading.Thread) -> None:
    ended.set()
    jobs.put(None)
    if thread is not threading.current_thread():  # the garbage collector runs in any thread
        thread.join(_END_S)
