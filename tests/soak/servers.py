"""Runs of a job on parameter servers whose servers are hit, each to the weights that plain arithmetic gives.

Workers compute parts of gradients and change nothing, the coordinator adds these up in order. So a function that ran
twice, because its worker was lost, leaves every bit as it was.
"""

from __future__ import annotations

import collections
import contextlib
import random
import shutil
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import torchstrategy as ts
from tests.ps.faults.jobs import wait_until
from tests.soak.attempts import Failure, Times
from torchstrategy.ps.states import WorkerState
from torchstrategy.testing.faults import clock_jump

NUM_STEPS, NUM_PARTS = 24, 4
NUM_WORKERS, NUM_PS = 3, 2
KINDS = {"worker killed": 6, "worker stopped": 2, "worker paused": 2, "server killed": 2, "coordinator's clock": 2}


class Run:
    """One job, with a coordinator in this process.

    Args:
        cluster: its cluster, on which others have run before.
        folder: for its checkpoints.
        seed: says what goes wrong and when.
        heartbeat_s: the cluster's.
    """

    def __init__(self, cluster: Any, folder: Path, seed: int, heartbeat_s: float) -> None:
        self.times: list[Times] = []
        self.num_struck: collections.Counter[str] = collections.Counter()
        self._cluster = cluster
        self._folder = folder
        self._draw = random.Random(seed)
        self._heartbeat_s = heartbeat_s
        self._server_killed_at: float | None = None
        self._noticed: tuple[float, float] | None = None  # when a server was killed, and what it took to notice
        generator = torch.Generator().manual_seed(seed)
        self._x = torch.randn(NUM_PARTS, 8, 3, generator=generator, dtype=torch.float64)
        shutil.rmtree(folder, ignore_errors=True)

    def run(self) -> None:
        """Train to the end.

        Raises:
            Failure: the weights are wrong, or something ended though nothing had happened that ends it.
        """
        self._cluster.start()
        while True:
            try:
                weights = self._attempt()
                break
            except ts.errors.UnavailableError as error:
                if self._server_killed_at is None:
                    raise Failure(f"a server is said to be gone that is there: {error}") from error
                self._noticed = self._server_killed_at, time.monotonic() - self._server_killed_at
                self._cluster.start()
        if not torch.equal(weights, self._expected()):
            raise Failure(f"other weights: {weights} instead of {self._expected()}")

    def _expected(self) -> Tensor:
        weights = torch.zeros(3, dtype=torch.float64)
        for _ in range(NUM_STEPS):
            weights = weights - 0.01 * sum(part_of_gradient(weights, x) for x in self._x)
        return weights

    def _attempt(self) -> Tensor:
        self._server_killed_at = None
        strategy = ts.ParameterServerStrategy(self._cluster.resolver())
        try:
            coordinator = ts.coordinator.ClusterCoordinator(strategy)
            with strategy.scope():
                weights = ts.Variable(torch.zeros(3, dtype=torch.float64), trainable=False)
                made = ts.Variable(0, trainable=False)
            checkpoint = ts.train.Checkpoint(weights=weights, made=made)
            manager = ts.train.CheckpointManager(checkpoint, self._folder, max_to_keep=2)
            manager.restore_or_initialize()
            workers = coordinator._cluster.workers
            wait_until(lambda: all(worker.can_run for worker in workers), what="all workers")

            def part(number: int, x: Tensor) -> tuple[int, Tensor]:
                time.sleep(0.01)
                return number, part_of_gradient(weights + 0, x)

            for step in range(int(made), NUM_STEPS):
                with contextlib.ExitStack() as stack:
                    results = [coordinator.schedule(part, args=(n, x)) for n, x in enumerate(self._x)]
                    if self._draw.random() < 0.4:
                        time.sleep(self._draw.uniform(0.0, 0.03))
                        self._hit(workers, stack)
                    coordinator.join()
                parts = [result.fetch() for result in results]
                if [number for number, _ in parts] != list(range(NUM_PARTS)):
                    raise Failure(f"the results of step {step} are those of {[number for number, _ in parts]}")
                weights.assign_sub(0.01 * sum(gradient for _, gradient in parts))
                made.assign_add(1)
                manager.save()
                if self._noticed is not None:
                    begin, notice = self._noticed
                    self.times.append(Times("server killed", notice, time.monotonic() - begin))
                    self._noticed = None
            return weights + 0
        finally:
            strategy.close()

    def _hit(self, workers: Any, stack: contextlib.ExitStack) -> None:
        (kind,) = self._draw.choices(list(KINDS), list(KINDS.values()))
        index = self._draw.randrange(NUM_WORKERS)
        worker, begin = workers[index], time.monotonic()
        self.num_struck[kind] += 1
        if kind == "worker killed":
            self._cluster.kill("worker", index)
            notice = self._wait_until_lost(worker, begin)
            self._cluster.restart("worker", index)
        elif kind == "worker stopped":
            self._cluster.stop_signal("worker", index)
            notice = self._wait_until_lost(worker, begin)
            self._cluster.cont("worker", index)
        elif kind == "worker paused":
            self._cluster.stop_signal("worker", index)
            time.sleep(self._heartbeat_s * self._draw.uniform(0.1, 0.3))
            self._cluster.cont("worker", index)
            if worker.state is WorkerState.LOST:
                raise Failure("a worker counts as lost that was stopped for less than the heartbeat")
            return
        elif kind == "coordinator's clock":
            stack.enter_context(clock_jump(self._draw.choice([-1, 1]) * self._draw.uniform(1, 12) * 3600))
            return
        else:
            self._server_killed_at = begin
            self._cluster.kill("ps", self._draw.randrange(NUM_PS))
            return
        wait_until(lambda: worker.can_run, what=f"worker {index}")
        self.times.append(Times(kind, notice, time.monotonic() - begin))

    @staticmethod
    def _wait_until_lost(worker: Any, begin: float) -> float:
        wait_until(lambda: worker.state is WorkerState.LOST, what="the loss of a worker")
        return time.monotonic() - begin


def part_of_gradient(weights: Tensor, x: Tensor) -> Tensor:
    """Return the gradient of a part of the examples."""
    return x.T @ (x @ weights - x.sin().sum(dim=1))
