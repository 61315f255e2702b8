import atexit
import json
import os
import signal
import socket
import threading
import time

import pytest

import torchstrategy as ts
from tests.testing.networks import network_or_skip


def environment():
    return {name: os.environ[name] for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}, os.getpid()


def fail_on(rank):
    if int(os.environ["RANK"]) == rank:
        raise KeyError("lost")
    return rank


def sleep():
    time.sleep(60)


def unpicklable():
    return lambda: None


def leave():
    os._exit(5)


def crash():
    os.kill(os.getpid(), signal.SIGSEGV)


def test_processes_are_ranks_and_are_reused(process_pool):
    first = process_pool(2).run(environment)
    assert [row[0]["RANK"] for row in first] == ["0", "1"]
    assert {row[0]["WORLD_SIZE"] for row in first} == {"2"}
    assert [row[1] for row in process_pool(2).run(environment)] == [row[1] for row in first]


@pytest.mark.slow
def test_errors_carry_rank_and_traceback():
    with ts.testing.ProcessPool(2) as pool:
        before = pool.run(environment)
        with pytest.raises(ts.testing.RemoteError, match="rank 1") as caught:
            pool.run(fail_on, 1)
        assert isinstance(caught.value.errors[1], KeyError)
        assert "fail_on" in caught.value.tracebacks[1]
        assert list(caught.value.errors) == [1]
        assert pool.run(environment)[0][1] != before[0][1]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("program", "message"),
    [
        (sleep, "no answer"),
        (unpicklable, "can't be pickled"),
        (leave, "exit code 5$"),
        (crash, "exit code -11\nFatal Python error: Segmentation fault(?s:.*) in crash"),
    ],
)
def test_what_can_go_wrong_ends_the_call(program, message):
    with ts.testing.ProcessPool(1) as pool, pytest.raises(ts.testing.RemoteError, match=message):
        pool.run(program, timeout_s=3)


def test_size_is_checked():
    with pytest.raises(ValueError, match="at least 1"):
        ts.testing.ProcessPool(0)


class NeedsTwoError(Exception):
    def __init__(self, first, second):
        super().__init__(f"{first} {second}")


def fail_oddly():
    raise NeedsTwoError("not", "picklable")


def fail_on_one_and_sleep_on_the_other():
    fail_on(1)
    time.sleep(100)


def test_an_error_that_cannot_travel_arrives_as_text():
    with ts.testing.ProcessPool(1) as pool, pytest.raises(ts.testing.RemoteError, match="not picklable") as caught:
        pool.run(fail_oddly)
    assert "fail_oddly" in caught.value.tracebacks[0]


@pytest.mark.slow
def test_nobody_waits_long_for_a_rank_after_the_error_of_another():
    start = time.monotonic()
    with ts.testing.ProcessPool(2) as pool, pytest.raises(ts.testing.RemoteError) as caught:
        pool.run(fail_on_one_and_sleep_on_the_other)
    assert time.monotonic() - start < 50
    assert isinstance(caught.value.errors[0], TimeoutError)
    assert isinstance(caught.value.errors[1], KeyError)


def tasks():
    config = json.loads(os.environ["TF_CONFIG"])
    return config["task"], config["cluster"]["worker"], "WORLD_SIZE" in os.environ


def test_processes_can_be_the_workers_of_a_cluster():
    with ts.testing.ProcessPool(3, launcher="TF_CONFIG") as pool:
        found = pool.run(tasks)
    assert [row[0] for row in found] == [{"type": "worker", "index": index} for index in range(3)]
    assert len(set(found[0][1])) == 3
    assert all(row[1:] == (found[0][1], False) for row in found)


def place():
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect(("10.77.0.99", 9))
        return probe.getsockname()[0], os.environ["LOCAL_RANK"], os.environ["MASTER_ADDR"]


@pytest.mark.slow
def test_processes_run_on_the_hosts_of_a_network():
    with network_or_skip(2) as network, ts.testing.ProcessPool(3, network=network) as pool:
        found = pool.run(place)
    assert found == [("10.77.0.1", str(rank), "10.77.0.1") for rank in range(2)] + [("10.77.0.2", "0", "10.77.0.1")]


def test_outcomes_come_from_every_rank():
    with ts.testing.ProcessPool(2) as pool:
        good, bad = pool.outcomes(fail_on, 1)
        assert (good.value, good.error, good.traceback) == (1, None, "")
        assert isinstance(bad.error, KeyError)
        assert "fail_on" in bad.traceback


def test_silent_ranks_are_not_waited_for():
    start = time.monotonic()
    with ts.testing.ProcessPool(2) as pool:
        with pytest.raises(RuntimeError, match="no processes yet"):
            pool.send_signal(1, signal.SIGSTOP)
        pool.run(environment)
        threading.Timer(0.1, pool.send_signal, [1, signal.SIGSTOP]).start()
        other, stopped = pool.outcomes(nap, silent=[1])
    assert other.value == 1
    assert isinstance(stopped.error, TimeoutError)
    assert time.monotonic() - start < 50


def nap():
    time.sleep(1)
    return 1


def own_variable():
    return os.environ.get("OF_THE_PARENT")


def test_processes_get_the_variables_of_the_moment(monkeypatch):
    for value in ("first", "second"):
        monkeypatch.setenv("OF_THE_PARENT", value)
        assert ts.testing.run_in_processes(own_variable, 1) == [value]


def leave_word(path):
    atexit.register(path.write_text, "good bye")


def test_what_a_program_leaves_for_its_end_is_done(tmp_path):
    ts.testing.run_in_processes(leave_word, 1, tmp_path / "word")
    assert (tmp_path / "word").read_text() == "good bye"


def test_the_launcher_is_checked():
    with pytest.raises(ValueError, match="'torchrun' or 'TF_CONFIG'"):
        ts.testing.ProcessPool(1, launcher="mpirun")
