import threading

from torchstrategy.ps.coordinator.watchdog import Timers


def test_calls_come_in_the_order_of_their_time():
    timers, seen, ended = Timers(), [], threading.Event()
    timers.call_later(0.08, ended.set)
    timers.call_later(0.04, lambda: seen.append("second"))
    timers.call_later(0.0, lambda: seen.append("first"))
    assert ended.wait(10)
    assert seen == ["first", "second"]


def test_thread_ends_and_begins_again():
    timers = Timers()
    for _ in range(3):
        ended = threading.Event()
        timers.call_later(0.0, ended.set)
        assert ended.wait(10)
    thread = timers._thread
    if thread is not None:
        thread.join(10)
    assert timers._thread is None


def test_a_call_that_fails_does_not_stop_the_others(caplog):
    timers, ended = Timers(), threading.Event()
    timers.call_later(0.0, lambda: 1 / 0)
    timers.call_later(0.01, ended.set)
    assert ended.wait(10)
    assert "ZeroDivisionError" in caplog.text


def test_close_forgets_calls():
    timers, called = Timers(), threading.Event()
    timers.call_later(0.05, called.set)
    thread = timers._thread
    timers.close()
    thread.join(10)
    assert not thread.is_alive()
    timers.call_later(0.0, called.set)
    assert not called.wait(0.1)
