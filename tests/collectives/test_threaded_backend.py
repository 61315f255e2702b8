import gc
import threading
import weakref

import pytest
import torch

from torchstrategy.collectives import threaded_backend
from torchstrategy.collectives.threaded_backend import ThreadedBackend


def no_check():
    pass


class Backend:
    """Adds 1 when the test says so; waits as backends do."""

    route = "the test"

    def __init__(self):
        self.go_on = threading.Semaphore(0)
        self.threads = []

    def start_sum(self, tensor):
        def wait(check):
            check()
            self.threads.append((threading.current_thread().name, torch.get_num_threads()))
            while not self.go_on.acquire(timeout=0.01):
                check()
            if tensor.numel() == 0:
                raise ConnectionError("the other rank is gone")
            tensor.add_(1)

        return wait


def test_sums_go_on_in_a_thread_in_the_order_of_their_start():
    backend = Backend()
    threaded = ThreadedBackend(backend)
    num_threads = torch.get_num_threads()
    tensors = [torch.zeros(2), torch.ones(3)]
    waits = [threaded.start_sum(tensor) for tensor in tensors]
    backend.go_on.release(2)
    waits[1](no_check)
    waits[0](no_check)
    assert [tensor.tolist() for tensor in tensors] == [[1, 1], [2, 2, 2]]
    assert backend.threads == [("torchstrategy-sums", 1)] * 2
    assert torch.get_num_threads() == num_threads
    assert threaded.route == "the test, during backward"


def test_an_error_reaches_whoever_waits_and_ends_what_follows():
    backend = Backend()
    threaded = ThreadedBackend(backend)
    waits = [threaded.start_sum(torch.zeros(size)) for size in (0, 2)]
    backend.go_on.release(2)
    with pytest.raises(ConnectionError, match="the other rank is gone"):
        waits[0](no_check)
    later = threaded.start_sum(torch.zeros(2))
    for wait in (waits[1], later):
        with pytest.raises(ConnectionError, match="was given up"):
            wait(no_check)


def test_a_wait_that_is_given_up_ends_the_sum():
    backend = Backend()
    threaded = ThreadedBackend(backend)
    wait = threaded.start_sum(torch.zeros(2))

    def fail():
        raise InterruptedError("enough")

    with pytest.raises(InterruptedError):
        wait(fail)
    with pytest.raises(ConnectionError, match="was given up"):
        wait(no_check)


def test_sums_after_the_end_of_the_thread_fail_where_they_are_waited_for():
    backend = Backend()
    threaded = ThreadedBackend(backend)
    backend.go_on.release(2)
    threaded.start_sum(torch.zeros(2))(no_check)
    threaded_backend._end(threaded._jobs, threaded._ended, threaded._thread)  # as when the program ends
    for _ in range(2):
        wait = threaded.start_sum(torch.zeros(2))
        with pytest.raises(ConnectionError, match="the thread that sums gradients has ended"):
            wait(no_check)
    assert len(backend.threads) == 1


def test_a_thread_that_can_not_start_leaves_no_sum_that_waits(monkeypatch):
    def refuse(thread):
        raise RuntimeError("can't start new thread")

    threaded = ThreadedBackend(Backend())
    monkeypatch.setattr(threading.Thread, "start", refuse)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="can't start new thread"):
            threaded.start_sum(torch.zeros(2))


def test_a_dropped_backend_ends_its_thread():
    backend = Backend()
    threaded = ThreadedBackend(backend)
    threaded.start_sum(torch.zeros(2))
    thread, reference = threaded._thread, weakref.ref(backend)
    del threaded, backend
    gc.collect()
    thread.join(timeout=20)
    assert not thread.is_alive()
    assert reference() is None
