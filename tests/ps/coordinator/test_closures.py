import gc
import signal
import threading
import time
import weakref

import numpy as np
import pytest
import torch

import torchstrategy as ts
from torchstrategy.ps.coordinator import per_worker
from torchstrategy.ps.coordinator.closures import Closure, ClosureQueue
from torchstrategy.ps.coordinator.per_worker import RemoteValue


def nothing(waited_s):
    pass


def closure(number=0, blob=b""):
    result = RemoteValue(f"fn{number}", nothing)
    made = Closure(number, f"fn{number}", "key", (), blob, result)
    return made, result


@pytest.fixture
def queue():
    return ClosureQueue(nothing)


def in_thread(fn):
    """Run a function beside the test; returns what waits for its result."""
    outcome = []

    def call():
        try:
            outcome.append(fn())
        except Exception as error:  # noqa: BLE001
            outcome.append(error)

    thread = threading.Thread(target=call)
    thread.start()

    def result(timeout=10):
        thread.join(timeout)
        assert not thread.is_alive()
        return outcome[0]

    result.is_alive = thread.is_alive
    return result


def test_order_and_end(queue):
    closures = [closure(i) for i in range(3)]
    for made, _ in closures:
        queue.put(made)
    assert len(queue) == 3
    assert not queue.is_done()
    assert [queue.take().number for _ in range(3)] == [0, 1, 2]
    assert queue.take() is None
    assert not queue.is_done()
    waiting = in_thread(queue.join)
    for made, _ in closures:
        assert waiting.is_alive()
        queue.finish(made, lambda made=made: made.number * 10)
    assert waiting() is None
    assert queue.is_done()
    assert [result.fetch() for _, result in closures] == [0, 10, 20]


def test_put_back_keeps_the_order(queue):
    for i in range(4):
        queue.put(closure(i)[0])
    first, second = queue.take(), queue.take()
    queue.put_back([first, second])
    assert [queue.take().number for _ in range(4)] == [0, 1, 2, 3]


def test_first_error_is_raised_once_and_cancels(queue):
    (bad, bad_result), (worse, worse_result), (_, waiting_result) = closures = [closure(i) for i in range(3)]
    for made, _ in closures:
        queue.put(made)
    queue.take(), queue.take()
    queue.fail(bad, KeyError("first"))
    queue.fail(worse, ValueError("second"))
    for _ in range(2):  # fetching changes nothing
        with pytest.raises(KeyError, match="first"):
            bad_result.fetch()
        with pytest.raises(ValueError, match="second"):
            worse_result.fetch()
        with pytest.raises(ts.errors.CancelledError, match=r"fn2 was cancelled, .* KeyError: 'first'") as caught:
            waiting_result.get()
        assert isinstance(caught.value.__cause__, KeyError)
    with pytest.raises(KeyError, match="first"):
        queue.join()
    queue.join()
    assert queue.is_done()
    made, result = closure(3)
    queue.put(made)
    queue.finish(queue.take(), lambda: "again")
    assert result.fetch() == "again"


@pytest.mark.parametrize("method", ["join", "is_done", "put", "raise_error"])
def test_who_raises_the_error(queue, method):
    made, _ = closure()
    queue.put(made)
    queue.fail(queue.take(), ZeroDivisionError("by zero"))
    arguments = (closure(1)[0],) if method == "put" else ()
    with pytest.raises(ZeroDivisionError):
        getattr(queue, method)(*arguments)
    assert len(queue) == 0
    assert queue.is_done()


def test_error_is_raised_when_nothing_runs_any_more(queue):
    (bad, _), (slow, slow_result) = closure(0), closure(1)
    queue.put(bad)
    queue.put(slow)
    queue.take(), queue.take()
    queue.fail(bad, ValueError("bad"))
    assert not queue.is_done()  # does not wait
    joining = in_thread(queue.join)
    time.sleep(0.05)
    assert joining.is_alive()
    queue.finish(slow, lambda: "slow")
    assert isinstance(joining(), ValueError)
    assert slow_result.fetch() == "slow"


def test_closure_of_a_lost_worker_is_cancelled_after_an_error(queue):
    (bad, _), (lost, lost_result) = closure(0), closure(1)
    queue.put(bad)
    queue.put(lost)
    queue.take(), queue.take()
    queue.fail(bad, ValueError("bad"))
    queue.put_back([lost])
    with pytest.raises(ts.errors.CancelledError):
        lost_result.fetch()
    with pytest.raises(ValueError, match="bad"):
        queue.join()
    assert queue.is_done()


def test_a_lost_cluster_is_the_cause_of_what_it_cancels(queue):
    made, result = closure()
    queue.put(made)
    queue.close(ts.errors.UnavailableError("lost"))
    with pytest.raises(ts.errors.CancelledError, match="UnavailableError: lost") as caught:
        result.fetch()
    assert isinstance(caught.value.__cause__, ts.errors.UnavailableError)


def test_report_and_close(queue):
    made, result = closure()
    queue.put(made)
    queue.report(RuntimeError("of a dataset"))
    with pytest.raises(ts.errors.CancelledError):
        result.fetch()
    with pytest.raises(RuntimeError, match="of a dataset"):
        queue.join()
    queue.put(closure(1)[0])
    queue.take()
    queue.close(ts.errors.UnavailableError("closed"))
    for _ in range(2):
        with pytest.raises(ts.errors.UnavailableError, match="closed"):
            queue.join()
        with pytest.raises(ts.errors.UnavailableError, match="closed"):
            queue.is_done()
        with pytest.raises(ts.errors.UnavailableError, match="closed"):
            queue.put(closure(2)[0])


@pytest.mark.parametrize("limits", [{"max_queued": 2}, {"max_queued_bytes": 20}])
def test_put_waits_while_full(limits):
    queue = ClosureQueue(nothing, **limits)
    queue.put(closure(0, b"x" * 10)[0])
    queue.put(closure(1, b"x" * 10)[0])
    putting = in_thread(lambda: queue.put(closure(2, b"x" * 10)[0]))
    time.sleep(0.05)
    assert putting.is_alive()
    queue.take()
    assert putting() is None
    assert len(queue) == 2


def test_full_queue_raises_an_error_that_comes():
    queue = ClosureQueue(nothing, max_queued=1)
    queue.put(closure(0)[0])
    bad = queue.take()
    queue.put(closure(1)[0])
    putting = in_thread(lambda: queue.put(closure(2)[0]))
    queue.fail(bad, ValueError("bad"))
    assert isinstance(putting(), ValueError)
    assert len(queue) == 0


def test_one_large_closure_fits_an_empty_queue():
    queue = ClosureQueue(nothing, max_queued_bytes=10)
    queue.put(closure(0, b"x" * 100)[0])
    assert len(queue) == 1


def test_result_of_a_dropped_value_is_dropped(queue):
    made, result = closure()
    queue.put(made)
    queue.take()
    del result
    value = torch.ones(3)
    queue.finish(made, lambda value=value: value)
    reference = weakref.ref(value)
    del value
    gc.collect()
    assert reference() is None


def test_what_a_closure_keeps_alive():
    class Kept:
        pass

    kept = Kept()
    reference = weakref.ref(kept)
    result = RemoteValue("fn", nothing)
    made = Closure(0, "fn", "key", (), b"", result, kept=kept)
    del kept
    assert reference() is not None
    made.settle(lambda: 1)
    assert reference() is None


def test_value_waits_for_its_function(queue):
    made, result = closure()
    assert repr(result) == "RemoteValue(fn0: not computed yet)"
    first, second = in_thread(result.fetch), in_thread(result.get)
    time.sleep(0.05)
    assert first.is_alive()
    assert second.is_alive()
    made.settle(lambda: [1, None])
    assert first() == second() == [1, None]
    assert repr(result) == "RemoteValue(fn0: computed)"


def test_fetch_gives_arrays_and_get_tensors():
    made, result = closure()
    value = {
        "loss": torch.tensor(0.5, requires_grad=True),
        "rows": np.arange(3),
        "n": 2,
        "half": torch.ones(2).bfloat16(),
    }
    made.settle(lambda: value)
    fetched, got = result.fetch(), result.get()
    assert type(fetched["loss"]) is np.float32
    assert isinstance(fetched["rows"], np.ndarray)
    assert fetched["half"].dtype == np.float32
    assert fetched["n"] == got["n"] == 2
    assert got["loss"] == 0.5
    assert torch.equal(got["rows"], torch.arange(3))
    assert got["half"].dtype == torch.bfloat16


def test_value_is_decoded_once(queue):
    made, result = closure()
    calls = []
    made.settle(lambda: calls.append(1))
    result.fetch(), result.get()
    assert calls == [1]


def test_value_is_no_argument_mark():
    assert RemoteValue._ts_is_remote_value is True


def test_waiting_threads_say_what_for(monkeypatch):
    monkeypatch.setattr("torchstrategy.ps.coordinator.closures.WAKE_UP_S", 0.01)
    monkeypatch.setattr(per_worker, "WAKE_UP_S", 0.01)
    said = threading.Event()
    queue = ClosureQueue(lambda waited_s: said.set())
    queue.put(closure()[0])
    made = queue.take()
    joining = in_thread(queue.join)
    assert said.wait(5)
    queue.finish(made, lambda: None)
    joining()
    said.clear()
    result = RemoteValue("fn", lambda waited_s: said.set())
    fetching = in_thread(result.fetch)
    assert said.wait(5)
    result._settle(lambda: 3)
    assert fetching() == 3


@pytest.mark.parametrize("wait", ["join", "fetch", "put"])
def test_ctrl_c_ends_the_wait(wait):
    queue = ClosureQueue(nothing, max_queued=1)
    made, result = closure()
    queue.put(made)
    calls = {"join": queue.join, "fetch": result.fetch, "put": lambda: queue.put(closure(1)[0])}
    timer = threading.Timer(0.1, lambda: signal.pthread_kill(threading.main_thread().ident, signal.SIGINT))
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        calls[wait]()
    timer.join()
    assert queue.take() is made  # and the queue is as it was
    queue.finish(made, lambda: 1)
    queue.join()


def test_many_threads(queue):
    """Every closure ends exactly once, whoever queues, runs, loses and waits."""
    num, stop = 500, threading.Event()
    results = [[] for _ in range(3)]

    def schedule(own):
        for i in range(num):
            made, result = closure(i)
            queue.put(made)
            own.append(result)

    def work():
        loses = 0
        while not stop.is_set():
            made = queue.take()
            if made is None:
                time.sleep(0)
            elif loses % 3 == 0 and made.num_losses == 0:
                made.num_losses = 1
                queue.put_back([made])
            else:
                queue.finish(made, lambda made=made: made.number)
            loses += 1

    workers = [threading.Thread(target=work) for _ in range(2)]
    users = [threading.Thread(target=schedule, args=(own,)) for own in results]
    for thread in workers + users:
        thread.start()
    for thread in users:
        thread.join()
    queue.join()
    stop.set()
    for thread in workers:
        thread.join()
    assert queue.num_finished == 3 * num
    assert all([result.fetch() for result in own] == list(range(num)) for own in results)
