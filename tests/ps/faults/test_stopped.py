"""Processes that are halted (SIGSTOP): their connections stay open, so that only the silence tells."""

import threading
import time

import pytest
import torch
from torch import nn

import torchstrategy as ts
from tests.ps.faults.conftest import HEARTBEAT_S
from tests.ps.faults.jobs import wait_until
from torchstrategy.base.log import logger

pytestmark = pytest.mark.timeout(60)

#: All who talked with a stopped process have given it up by then.
ALL_HAVE_NOTICED_S = 1.5 * HEARTBEAT_S


@pytest.fixture
def job(quick_cluster, make_job):
    job = make_job(quick_cluster)
    job.wait_until_ready()
    yield job
    quick_cluster.start()  # lets all go on


def begin_adding(job):
    """Have a function run that will add to a variable; return the variable, its result and the worker's index."""
    with job.strategy.scope():
        v = ts.Variable(0, trainable=False)
    diary = job.diary

    def add():
        diary.note(f"worker {ts.coordinator.experimental_get_current_worker_index()} begins")
        diary.pass_gate("add")
        v.assign_add(1)
        diary.note(f"worker {ts.coordinator.experimental_get_current_worker_index()} has added")
        return ts.coordinator.experimental_get_current_worker_index()

    result = job.coordinator.schedule(add)
    index = int(wait_until(diary.lines)[0].split()[1])
    return v, result, index


@pytest.mark.slow
def test_stopped_worker_is_lost_and_its_late_changes_are_refused(job):
    """Its function runs elsewhere. Continued, it pushes and returns in vain, and works again."""
    v, result, stopped = begin_adding(job)
    start = time.monotonic()
    job.cluster.stop_signal("worker", stopped)
    job.diary.wait_for(f"worker {1 - stopped} begins")
    seconds = time.monotonic() - start
    logger.info("The function of a stopped worker began elsewhere after %.2f heartbeats.", seconds / HEARTBEAT_S)
    assert HEARTBEAT_S / 2 < seconds < 10 * HEARTBEAT_S
    time.sleep(max(0.0, ALL_HAVE_NOTICED_S - seconds))
    job.diary.open_gate("add")
    job.coordinator.join()
    assert (int(v), result.fetch()) == (1, 1 - stopped)

    job.cluster.cont("worker", stopped)
    job.wait_until_ready(stopped)
    time.sleep(0.2)  # its old function is past the gate
    assert (int(v), result.fetch()) == (1, 1 - stopped)
    assert f"worker {stopped} has added" not in job.diary.lines()
    job.train_without_end(6)
    job.finish()
    assert int(v) == 1


def test_worker_stopped_for_a_moment_is_not_lost(job):
    v, result, stopped = begin_adding(job)
    job.cluster.stop_signal("worker", stopped)
    time.sleep(HEARTBEAT_S / 8)
    job.cluster.cont("worker", stopped)
    job.diary.open_gate("add")
    assert result.fetch() == stopped
    job.coordinator.join()
    assert job.diary.lines() == [f"worker {stopped} begins", f"worker {stopped} has added"]
    assert int(v) == 1


def test_all_workers_stopped(job):
    """Nothing is lost: the program waits until one goes on."""
    job.train_without_end(6)
    for index in range(2):
        job.cluster.stop_signal("worker", index)
    for index in range(2):
        job.wait_until_lost(index)
    assert not job.coordinator.done()
    job.cluster.cont("worker", 1)
    job.finish()
    job.cluster.cont("worker", 0)
    job.wait_until_ready()


@pytest.mark.end_to_end
def test_stopped_worker_is_killed_and_started_again(job):
    job.train_without_end(6)
    job.cluster.stop_signal("worker", 0)
    job.wait_until_lost(0)
    job.cluster.restart("worker", 0)
    job.wait_until_ready()
    job.finish()


def stop_and_continue(job, *indices, heartbeats=2.5):
    """Stop parameter servers for as long, whoever waits for them meanwhile; return a thread to join."""
    for index in indices:
        job.cluster.stop_signal("ps", index)

    def go_on():
        time.sleep(heartbeats * HEARTBEAT_S)
        for index in indices:
            job.cluster.cont("ps", index)

    thread = threading.Thread(target=go_on)
    thread.start()
    return thread


@pytest.mark.parametrize("indices", [(1,), (0, 1)])
def test_stopped_ps(job, indices, caplog):
    """It is waited for, as it still has all variables, and the program notices nothing."""
    job.train_without_end(4)
    thread = stop_and_continue(job, *indices)
    job.train(20)
    wait_until(lambda: job.strategy._servers[indices[-1]].is_away, what="the loss of the parameter server")
    assert job.strategy._ps_failure(indices[-1]) is None
    assert not job.coordinator.done()
    job.goes_on.assign(False)  # waits for server 0
    job.coordinator.join()
    thread.join()
    job.check_results()
    assert 24 <= int(job.iterations) <= 24 + 2  # what a worker ran when it lost the server runs again
    for index in indices:
        assert any(line.startswith(f"/job:ps/task:{index}") and " is back after " in line for line in caplog.messages)


def test_coordinator_that_uses_a_stopped_ps(job):
    """It gets values, and what it changes is changed once."""
    with job.strategy.scope():
        parameters = nn.ParameterList([nn.Parameter(torch.zeros(4)) for _ in range(2)])
        optimizer = torch.optim.SGD(parameters.parameters(), lr=1.0)
    thread = stop_and_continue(job, 0, 1)
    num_steps = 0
    while thread.is_alive():
        for parameter in parameters:
            parameter.grad = -torch.ones(4)
        optimizer.step()
        job.iterations.assign_add(1)
        num_steps += 1
        assert int(job.iterations) == num_steps
    assert all(parameter.tolist() == [num_steps] * 4 for parameter in parameters)


def test_ps_stopped_for_too_long(quick_cluster, make_job):
    """It is an error that says so. As it still has all variables, the program can go on when it does."""
    job = make_job(quick_cluster, ps_grace_s=HEARTBEAT_S)
    job.wait_until_ready()
    try:
        job.train_without_end(4)
        start = time.monotonic()
        job.cluster.stop_signal("ps", 1)
        with pytest.raises(ts.errors.UnavailableError, match=r"/job:ps/task:1 .* in vain for 2 seconds"):
            job.coordinator.join()
        seconds = time.monotonic() - start
        logger.info("A stopped parameter server was an error after %.2f heartbeats.", seconds / HEARTBEAT_S)
        assert HEARTBEAT_S * 3 / 2 < seconds < 10 * HEARTBEAT_S
        with pytest.raises(ts.errors.UnavailableError, match="/job:ps/task:1"):
            job.iterations.read_value()

        job.cluster.cont("ps", 1)
        wait_until(lambda: job.strategy._ps_failure(1) is None, what="the parameter server")
        assert int(job.iterations.read_value()) >= 0
        job.results.clear()  # an error or cancelled
        job.iterations.assign(0)
        job.train(4)
        job.finish()
        assert int(job.iterations) == 4
    finally:
        quick_cluster.start()


def test_stopped_ps_that_is_killed(job):
    """It is not waited for any longer."""
    job.train_without_end(4)
    job.cluster.stop_signal("ps", 1)
    wait_until(lambda: job.strategy._servers[1].is_away, what="the loss of the parameter server")
    start = time.monotonic()
    job.cluster.kill("ps", 1)
    with pytest.raises(ts.errors.UnavailableError, match="/job:ps/task:1"):
        job.coordinator.join()
    assert time.monotonic() - start < 5


def test_ps_stopped_for_a_moment_is_not_lost(job):
    job.train_without_end(4)
    job.cluster.stop_signal("ps", 1)
    time.sleep(HEARTBEAT_S / 8)
    job.cluster.cont("ps", 1)
    job.finish()
    assert int(job.iterations) == 4


def test_program_that_reads_from_a_stopped_ps(quick_cluster, make_job):
    """Without a grace time it waits for the deadline and no longer."""
    job = make_job(quick_cluster, ps_grace_s=0)
    quick_cluster.stop_signal("ps", 1)
    try:
        with pytest.raises(ts.errors.UnavailableError, match="/job:ps/task:1"):
            [job.iterations.read_value() for _ in range(1000)]  # the signal takes a moment
    finally:
        quick_cluster.start()
