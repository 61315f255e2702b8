"""Workers are killed and stopped again and again, and parameter servers stopped, while functions stream."""

import collections
import multiprocessing
import os
import random
import threading
import time
from pathlib import Path

import pytest
import torch
from torch import nn

import torchstrategy as ts
from tests.ps.faults.conftest import HEARTBEAT_S
from tests.ps.faults.jobs import wait_until
from torchstrategy.base.log import logger

NUM_WORKERS = 3
NUM_PS = 2
MAX_PENDING = 100
MiB = 1 << 20


class Usage:
    """What a process uses."""

    def __init__(self, pid: int) -> None:
        self.num_files = len(os.listdir(f"/proc/{pid}/fd"))
        self.num_threads = len(os.listdir(f"/proc/{pid}/task"))
        self.num_bytes = int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    def __repr__(self) -> str:
        return f"{self.num_files} files, {self.num_threads} threads, {self.num_bytes / MiB:.0f} MiB"


class Chaos(threading.Thread):
    """Kills one or two random workers, or stops one or some parameter servers, until so many tasks were hit.

    All of them come back.
    """

    def __init__(self, cluster, strategy, workers, num_hits: int, seed: int) -> None:
        super().__init__(daemon=True)
        self._cluster = cluster
        self._strategy = strategy
        self._workers = workers
        self._random = random.Random(seed)
        self._num_hits = num_hits
        self.hits = collections.Counter()
        self.error = None

    @property
    def num_hits(self) -> int:
        return sum(self.hits.values())

    def run(self) -> None:
        try:
            while self.num_hits < self._num_hits:
                time.sleep(self._random.uniform(0.0, 0.3))
                kinds = {"kill": self._kill, "kill two": self._kill, "stop": self._halt, "stop ps": self._halt_ps}
                kind = self._random.choices(list(kinds), [0.7, 0.14, 0.09, 0.07])[0]
                if kind == "stop ps":
                    hit = self._random.sample(range(NUM_PS), self._random.randint(1, NUM_PS))
                else:
                    hit = self._random.sample(range(NUM_WORKERS), 2 if kind == "kill two" else 1)
                self.hits[kind] += len(hit)
                kinds[kind](hit)
        except BaseException as error:  # noqa: BLE001 - for the test's thread
            self.error = error

    def _kill(self, hit) -> None:
        for index in hit:
            self._cluster.kill("worker", index)
        time.sleep(self._random.uniform(0.0, 0.1))
        for index in hit:
            self._cluster.restart("worker", index)
        if self._random.random() < 0.5:  # else the next ones may go before these are back
            self._wait_for(hit)

    def _halt(self, hit, job="worker") -> None:
        for index in hit:
            self._cluster.stop_signal(job, index)
        time.sleep(self._random.uniform(0.2, 1.5) * HEARTBEAT_S)
        for index in hit:
            self._cluster.cont(job, index)
        if job == "worker":
            self._wait_for(hit)

    def _halt_ps(self, hit) -> None:
        self._halt(hit, "ps")
        for index in hit:
            wait_until(lambda index=index: not self._strategy._servers[index].is_away, what=f"parameter server {index}")

    def _wait_for(self, hit) -> None:
        for index in hit:
            wait_until(lambda index=index: self._workers[index].can_run, what=f"worker {index}")


@pytest.fixture
def cluster(monkeypatch):
    environment = {"TORCHSTRATEGY_HEARTBEAT_S": str(HEARTBEAT_S)}
    monkeypatch.setenv("TORCHSTRATEGY_HEARTBEAT_S", str(HEARTBEAT_S))
    with ts.testing.LocalCluster(NUM_WORKERS, NUM_PS, environment=environment) as cluster:
        yield cluster


def stream_through(cluster, num_hits, seed):
    """Stream functions while tasks are hit, check all results, and return how they were hit."""
    strategy = ts.ParameterServerStrategy(cluster.resolver())
    coordinator = ts.coordinator.ClusterCoordinator(strategy)
    with strategy.scope():
        net = nn.Linear(16, 16)
        optimizer = torch.optim.Adam(net.parameters(), 1e-4)
        count = ts.Variable(0, trainable=False)
        metric = ts.metrics.Sum()
    iterator = iter(coordinator.create_per_worker_dataset(lambda: [torch.rand(8, 16)] * 1_000_000))

    def step(number, batches):
        optimizer.zero_grad()
        loss = net(next(batches)).square().mean()
        loss.backward()
        optimizer.step()
        metric.update_state(1.0)
        count.assign_add(1)
        return number, loss.detach()

    def check(number, result):
        own, loss = result.fetch()
        assert own == number
        assert float(loss) >= 0

    workers = coordinator._cluster.workers
    wait_until(lambda: all(worker.can_run for worker in workers))
    pids = [os.getpid(), *(cluster.pid("ps", index) for index in range(NUM_PS))]
    num_children = len(multiprocessing.active_children())
    chaos = Chaos(cluster, strategy, workers, num_hits, seed)
    chaos.start()
    pending = collections.deque()
    number = 0
    before = None
    while chaos.is_alive():
        if before is None and chaos.num_hits >= 0.2 * num_hits:
            before = [Usage(pid) for pid in pids]
        pending.append((number, coordinator.schedule(step, args=(number, iterator))))
        number += 1
        while len(pending) > MAX_PENDING:
            check(*pending.popleft())
    coordinator.join()
    while pending:
        check(*pending.popleft())
    if chaos.error is not None:
        raise chaos.error
    wait_until(lambda: all(worker.can_run for worker in workers))

    after = [Usage(pid) for pid in pids]
    added = int(count)
    logger.info("%d functions; %d ran twice; hits: %s.", number, added - number, dict(chaos.hits))
    logger.info("Coordinator and parameter servers, after a fifth: %s; at the end: %s", before, after)
    # Of each worker one runs, and one may have just ended; all lose the one that runs without a parameter server.
    assert number <= added <= number + 2 * chaos.num_hits + NUM_WORKERS * chaos.hits["stop ps"]
    assert float(metric.result()) == number  # what came back counts once
    assert not coordinator._cluster.queue.num_running
    assert not any(worker.in_flight for worker in workers)
    for old, new in zip(before, after, strict=True):
        assert new.num_files <= old.num_files + 5
        assert new.num_threads <= old.num_threads + 5
        assert new.num_bytes <= old.num_bytes + 40 * MiB
    assert len(multiprocessing.active_children()) == num_children
    strategy.close()
    return chaos.hits


@pytest.mark.slow
@pytest.mark.timeout(90)
def test_tasks_are_hit_while_functions_stream(cluster):
    hits = stream_through(cluster, 10, seed=1)
    assert len(hits) == 4


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_60_kills(cluster):
    hits = stream_through(cluster, 100, seed=0)
    assert min(hits.values()) >= 2
    assert hits["kill"] + hits["kill two"] >= 60
