"""A small training job on a cluster, with functions that can be caught in the middle."""

from __future__ import annotations

import os
import time
from pathlib import Path

import torch
from torch import nn

import torchstrategy as ts
from torchstrategy.ps.states import WorkerState

POLL_S = 0.005


def wait_until(is_met, timeout_s=30.0, what="it"):
    """Wait until a function returns something true, and return that."""
    deadline = time.monotonic() + timeout_s
    while not (value := is_met()):
        assert time.monotonic() < deadline, f"{what} did not come within {timeout_s:g} s"
        time.sleep(POLL_S)
    return value


class Diary:
    """What functions on workers note down, one line each, so that it is there also after they were killed."""

    def __init__(self, folder: Path) -> None:
        self._path = str(folder / "diary")
        self._gates = str(folder)
        Path(self._path).touch()

    def note(self, text: str) -> None:
        """Add a line; for any process."""
        file = os.open(self._path, os.O_WRONLY | os.O_APPEND)
        os.write(file, f"{text}\n".encode())
        os.close(file)

    def lines(self) -> list[str]:
        """Return all lines."""
        return Path(self._path).read_text().splitlines()

    def wait_for(self, text: str, count: int = 1) -> None:
        """Wait until a line is there so many times."""
        wait_until(lambda: self.lines().count(text) >= count, what=f"{text!r} {count} times, of {self.lines()},")

    def open_gate(self, name: str) -> None:
        """Let the functions go on that wait for it."""
        Path(self._gates, name).touch()

    def pass_gate(self, name: str) -> None:
        """Wait until the gate is open; for functions on workers."""
        while not self.is_open(name):
            time.sleep(POLL_S)

    def is_open(self, name: str) -> bool:
        """Say whether the gate is open."""
        return os.path.exists(os.path.join(self._gates, name))


class Job:
    """A strategy on a cluster with its coordinator, and a model that tf's fault tests could have.

    ``iterations`` counts how often the training function has ended, on the ps with index 1 (of two). While ``goes_on``
    is true the function does not end.
    """

    def __init__(self, cluster, tmp_path, **options) -> None:
        self.cluster = cluster
        self.diary = Diary(tmp_path)
        self.strategy = ts.ParameterServerStrategy(cluster.resolver(), **options)
        self.coordinator = ts.coordinator.ClusterCoordinator(self.strategy)
        with self.strategy.scope():
            self.goes_on = ts.Variable(False, trainable=False)
            self.iterations = ts.Variable(0, trainable=False)
            self.net = nn.Linear(4, 1)
            self.optimizer = torch.optim.SGD(self.net.parameters(), 0.01)
        self.results = []  # of training functions, with their numbers

    @property
    def workers(self):
        """What the coordinator knows of the workers."""
        return self.coordinator._cluster.workers

    def make_iterator(self, dataset=None):
        """Return an iterator on every worker."""
        return iter(self.coordinator.create_per_worker_dataset(make_dataset if dataset is None else dataset))

    def train(self, num_steps, iterator=None):
        """Schedule training functions."""
        step = make_step(self.net, self.optimizer, self.goes_on, self.iterations, self.diary)
        for number in range(len(self.results), len(self.results) + num_steps):
            self.results.append((number, self.coordinator.schedule(step, args=(number, iterator))))

    def train_without_end(self, num_steps):
        """Schedule training functions that don't end, and wait until every worker is inside one."""
        self.goes_on.assign(True)
        self.train(num_steps)
        for index in range(len(self.workers)):
            self.diary.wait_for(f"worker {index} begins")

    def finish(self):
        """Let all training functions end, and check that each has given its result."""
        self.goes_on.assign(False)
        self.coordinator.join()
        self.check_results()

    def check_results(self):
        """Check that each scheduled function has given its own result, and the count of all of them."""
        for number, result in self.results:
            own, loss = result.fetch()
            assert own == number
            assert float(loss) >= 0
        assert int(self.iterations) >= len(self.results)

    def wait_until_lost(self, index):
        """Wait until the coordinator has noticed that a worker is gone."""
        wait_until(lambda: self.workers[index].state is WorkerState.LOST, what=f"the loss of worker {index}")

    def wait_until_ready(self, *indices):
        """Wait until workers take functions."""
        for index in indices or range(len(self.workers)):
            wait_until(lambda index=index: self.workers[index].can_run, what=f"worker {index}")

    def close(self):
        """Leave the cluster."""
        self.strategy.close()


def make_step(net, optimizer, goes_on, iterations, diary):
    def step(number, iterator):
        diary.note(f"worker {ts.coordinator.experimental_get_current_worker_index()} begins")
        while True:
            x = torch.rand(8, 4) if iterator is None else next(iterator)
            optimizer.zero_grad()
            loss = net(x).square().mean()
            loss.backward()
            optimizer.step()
            if not bool(goes_on):
                break
            time.sleep(POLL_S)
        iterations.assign_add(1)
        return number, loss.detach()

    return step


def make_dataset():
    return [torch.rand(8, 4) for _ in range(1000)]
