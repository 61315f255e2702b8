"""Servers that die, stop and come back under the coordinator, each a process of its own."""

import threading
import time

import pytest

import torchstrategy as ts
from torchstrategy.base.job import heartbeat_seconds
from torchstrategy.ps.states import WorkerState


@pytest.fixture
def coordinator(strategy):
    made = ts.coordinator.ClusterCoordinator(strategy)
    wait_until(lambda: all(worker.can_run for worker in made._cluster.workers))
    return made


def wait_until(condition, seconds=30):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def work(i, seconds):
    time.sleep(seconds)
    return i, ts.coordinator.experimental_get_current_worker_index()


def test_killed_worker_and_its_return(cluster, coordinator):
    iterator = iter(coordinator.create_per_worker_dataset(lambda: iter(range(10**6)) and range(10**6)))
    results = [coordinator.schedule(lambda it, i: (next(it), work(i, 0.02)), args=(iterator, i)) for i in range(40)]
    results[5].fetch()
    cluster.kill("worker", 1)
    # The closed connection tells, long before the heartbeat's deadline.
    wait_until(lambda: coordinator._cluster.workers[1].state is WorkerState.LOST, seconds=heartbeat_seconds() / 2)
    with pytest.raises(ts.errors.UnavailableError, match="/job:worker/task:1"):
        iterator._values[1].fetch()
    coordinator.join()
    assert [value[1][0] for value in coordinator.fetch(results)] == list(range(40))
    cluster.restart("worker", 1)
    wait_until(lambda: coordinator._cluster.workers[1].can_run)
    seen = coordinator.fetch(
        [coordinator.schedule(lambda it: (next(it), work(0, 0.05)), (iterator,)) for _ in range(8)]
    )
    assert {index for _, (_, index) in seen} == {0, 1}
    assert 0 in [element for element, (_, index) in seen if index == 1]  # its iterator begins anew


def test_all_workers_are_killed_and_one_comes_back(cluster, strategy, coordinator):
    with strategy.scope():
        count = ts.Variable(0.0)

    def add():
        time.sleep(0.05)
        count.assign_add(1.0)

    results = [coordinator.schedule(add) for _ in range(10)]
    for index in range(2):
        cluster.kill("worker", index)
    ended = threading.Event()
    thread = threading.Thread(target=lambda: (coordinator.join(), ended.set()))
    thread.start()
    assert not ended.wait(1.0)
    cluster.restart("worker", 1)
    assert ended.wait(30)
    thread.join()
    assert coordinator.fetch(results) == [None] * 10
    assert float(count) >= 10


def test_stopped_worker_is_lost_after_the_heartbeat(cluster, monkeypatch):
    monkeypatch.setenv("TORCHSTRATEGY_HEARTBEAT_S", "1")
    strategy = ts.ParameterServerStrategy(cluster.resolver())
    coordinator = ts.coordinator.ClusterCoordinator(strategy)
    wait_until(lambda: all(worker.can_run for worker in coordinator._cluster.workers))
    results = [coordinator.schedule(work, args=(i, 0.05)) for i in range(10)]
    cluster.stop_signal("worker", 0)
    coordinator.join()
    assert [i for i, _ in coordinator.fetch(results)] == list(range(10))
    cluster.cont("worker", 0)
    wait_until(lambda: coordinator._cluster.workers[0].can_run)
    again = coordinator.fetch([coordinator.schedule(work, args=(i, 0.05)) for i in range(10)])
    assert {index for _, index in again} == {0, 1}
    strategy.close()


def test_killed_ps(cluster, strategy, coordinator):
    with strategy.scope():
        kept, lost = ts.Variable(0.0), ts.Variable(0.0)  # on ps 0 and 1

    def add_to_kept():
        kept.assign_add(1.0)

    def add_to_lost():
        lost.assign_add(1.0)

    for _ in range(5):
        coordinator.schedule(add_to_kept)
        coordinator.schedule(add_to_lost)
    coordinator.join()
    cluster.kill("ps", 1)
    wait_until(lambda: strategy._ps_failure(1) is not None)
    for _ in range(5):
        coordinator.schedule(add_to_kept)
    coordinator.join()
    assert float(kept) == 10
    result = coordinator.schedule(add_to_lost)
    with pytest.raises(ts.errors.UnavailableError, match="/job:ps/task:1"):
        coordinator.join()
    with pytest.raises(ts.errors.UnavailableError, match="/job:ps/task:1"):
        result.fetch()
    cluster.restart("ps", 1)
    wait_until(lambda: "was restarted" in str(strategy._ps_failure(1)))
    coordinator.schedule(add_to_lost)
    with pytest.raises(ts.errors.UnavailableError, match="was restarted"):
        coordinator.join()


def test_ps_killed_while_functions_use_it(cluster, strategy, coordinator):
    with strategy.scope():
        v = ts.Variable(0.0)

    def add():
        for _ in range(20):
            v.assign_add(1.0)
            time.sleep(0.01)

    results = [coordinator.schedule(add) for _ in range(20)]
    results[1].fetch()
    cluster.kill("ps", 0)
    with pytest.raises(ts.errors.UnavailableError, match="/job:ps/task:0"):
        coordinator.join()
    with pytest.raises(ts.errors.CancelledError):
        results[-1].fetch()
    coordinator.join()


def test_newer_coordinator_takes_over(cluster, coordinator):
    slow = coordinator.schedule(work, args=(1, 1.0))
    newer = ts.ParameterServerStrategy(cluster.resolver())
    second = ts.coordinator.ClusterCoordinator(newer)
    assert second.schedule(work, args=(2, 0)).fetch()[0] == 2
    for _ in range(2):
        with pytest.raises(ts.errors.UnavailableError):
            wait_until(coordinator.done)
    with pytest.raises((ts.errors.UnavailableError, ts.errors.CancelledError)):
        slow.fetch()
    newer.close()
