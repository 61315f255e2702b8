"""What each fault does to a process, to its messages and to its clock."""

import datetime
import socket
import threading
import time

import pytest

import torchstrategy as ts
from torchstrategy.testing import faults
from torchstrategy.testing.faults import Fault, clock_jump, message_fault


def five_steps(fault):
    for step in range(5):
        fault.strike(0, step)
    return step


@pytest.mark.parametrize(("kind", "text"), [("kill", "exit code -9"), ("exit", "exit code 0"), ("error", "injected")])
def test_a_fault_ends_the_call(kind, text):
    with ts.testing.ProcessPool(1) as pool:
        (outcome,) = pool.outcomes(five_steps, Fault(kind, 0, 3))
    assert text in str(outcome.error)
    assert isinstance(outcome.error, OSError) == (kind == "error")


@pytest.mark.parametrize("kind", ["stop", "hang"])
def test_a_silent_process_does_not_answer_and_is_ended(kind):
    with ts.testing.ProcessPool(1) as pool:
        (outcome,) = pool.outcomes(five_steps, Fault(kind, 0, 3), timeout_s=0.5)
        assert isinstance(outcome.error, TimeoutError)
        assert pool.run(five_steps, Fault(kind, 1, 3)) == [4]


def longest_silence(fault):
    """Return for how long, at most, another thread of the process did not run while the fault struck."""
    seconds, ended = [], threading.Event()

    def look():
        last, is_over = time.monotonic(), False
        while not is_over:
            is_over = ended.wait(0.01)
            now = time.monotonic()
            seconds.append(now - last)
            last = now

    thread = threading.Thread(target=look)
    thread.start()
    while not seconds:
        time.sleep(0.01)
    five_steps(fault)
    ended.set()
    thread.join()
    return max(seconds)


@pytest.mark.parametrize("kind", ["pause", "stall"])
def test_no_thread_runs_for_a_while(kind):
    with ts.testing.ProcessPool(1) as pool:
        (silence,) = pool.run(longest_silence, Fault(kind, 0, 3, seconds=1.5))
    assert silence > 1


def test_each_later_step_is_slower(monkeypatch):
    slept = []
    monkeypatch.setitem(faults._STRIKES, "slow", slept.append)
    assert five_steps(Fault("slow", 0, 2, seconds=0.25)) == 4
    assert slept == [0.25] * 3
    assert five_steps(Fault("slow", 1, 2, seconds=0.25)) == 4
    assert len(slept) == 3


@pytest.mark.parametrize("elsewhere", [Fault("kill", 1, 3), Fault("kill", 0, 5)])
def test_other_ranks_and_steps_are_spared(elsewhere):
    assert five_steps(elsewhere) == 4


@pytest.mark.parametrize("hours", [5, -5])
def test_the_wall_clock_jumps_and_the_monotonic_one_does_not(hours):
    functions = time.time, time.time_ns, time.monotonic
    seen = []
    with clock_jump(3600 * hours):
        assert time.monotonic is functions[2]
        thread = threading.Thread(target=lambda: seen.extend([time.time(), time.time_ns() / 1e9]))
        thread.start()
        thread.join()
    for there in seen:
        assert there - time.time() == pytest.approx(3600 * hours, abs=600)
    assert (time.time, time.time_ns, time.monotonic) == functions


def hours_ahead(fault):
    five_steps(fault)
    return round((time.time() - datetime.datetime.now().timestamp()) / 3600)


def test_a_clock_that_has_jumped_stays_so():
    with ts.testing.ProcessPool(1) as pool:
        assert pool.run(hours_ahead, Fault("jump", 0, 3, seconds=3600 * 7)) == [7]


@pytest.fixture
def pair():
    here, there = socket.socketpair()
    with here, there:
        yield here, there


def send(connection):
    connection.sendall(b"abcd")
    sent = connection.send(b"efgh")
    connection.sendmsg([b"ij", b"kl"])
    return sent


@pytest.mark.parametrize(("at", "left"), [(1, b"efghijkl"), (2, b"abcdijkl"), (3, b"abcdefgh"), (4, b"abcdefghijkl")])
def test_one_message_is_lost_and_its_sender_is_not_told(pair, at, left):
    with message_fault("lost", at) as sizes:
        assert send(pair[0]) == 4
    assert sizes == [4, 4, 4]
    assert pair[1].recv(100) == left


def test_half_of_a_message_arrives_before_the_end(pair):
    with message_fault("torn", 2), pytest.raises(BrokenPipeError):
        send(pair[0])
    assert pair[1].recv(100) == b"abcdef"
    assert pair[1].recv(100) == b""


def test_all_of_a_message_arrives_and_no_answer_to_it(pair):
    with message_fault("unanswered", 1):
        assert pair[0].sendmsg([b"ab", b"cd"]) == 4
    assert pair[1].recv(100) == b"abcd"
    assert pair[1].recv(100) == b""
    with pytest.raises(BrokenPipeError):
        pair[1].sendall(b"answer")
    assert pair[0].recv(100) == b""


def test_messages_of_other_threads_are_spared(pair):
    with message_fault("lost", 1) as sizes:
        thread = threading.Thread(target=send, args=pair[:1])
        thread.start()
        thread.join()
    assert pair[1].recv(100) == b"abcdefghijkl"
    assert sizes == []
    assert "send" not in vars(socket.socket)  # all is what it was
