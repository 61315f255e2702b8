"""Coordinators' programs in processes of their own, which can be killed and stopped."""

from __future__ import annotations

import os
import signal
import time

import torch
from torch import nn

import torchstrategy as ts
from tests.ps.faults.jobs import Diary
from torchstrategy.testing.processes import process_context


class Program:
    """A process that calls a function with ``(resolver, diary, *args)``; how it ends stands in the diary.

    Args:
        fn: of a module's top level.
        cluster: its cluster.
        diary: where it writes.
        args: further arguments.
    """

    def __init__(self, fn, cluster, diary: Diary, *args) -> None:
        variables = {name: value for name, value in os.environ.items() if name.startswith("TORCHSTRATEGY_")}
        self._process = process_context().Process(target=_run, args=(fn, cluster.resolver(), diary, variables, *args))
        self._process.start()

    def send_signal(self, number: int) -> None:
        """Send a signal."""
        os.kill(self._process.pid, number)

    def kill(self) -> None:
        """End it at once (SIGKILL)."""
        self._process.kill()
        self._process.join()

    def wait(self, timeout_s: float = 40.0) -> int:
        """Wait for its end and return its exit status."""
        self._process.join(timeout_s)
        assert not self._process.is_alive(), f"The program has not ended after {timeout_s:g} s."
        return self._process.exitcode


def _run(fn, resolver, diary, variables, *args):
    os.environ.update(variables)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    torch.set_num_threads(1)
    try:
        fn(resolver, diary, *args)
    except BaseException as error:
        names = [cls.__name__ for cls in type(error).__mro__]
        diary.note(f"ends with {' '.join(names)}: {error}".replace("\n", " "))
        raise
    diary.note("ends well")


def train(resolver, diary, folder, num_steps, save_every):
    """Train for so many steps, from the last checkpoint on."""
    strategy = ts.ParameterServerStrategy(resolver)
    coordinator = ts.coordinator.ClusterCoordinator(strategy)
    with strategy.scope():
        torch.manual_seed(0)
        net = nn.Linear(4, 1)
        optimizer = torch.optim.SGD(net.parameters(), 0.01, momentum=0.9)
        iterations = ts.Variable(0, trainable=False)
    checkpoint = ts.train.Checkpoint(net=net, optimizer=optimizer, iterations=iterations)
    manager = ts.train.CheckpointManager(checkpoint, folder, max_to_keep=2)
    if manager.latest_checkpoint:
        checkpoint.restore(manager.latest_checkpoint)
    begin = int(iterations)
    diary.note(f"begins at {begin}")

    def step(number):
        optimizer.zero_grad()
        loss = (net(torch.ones(2, 4)) - 1).square().mean()
        loss.backward()
        optimizer.step()
        iterations.assign_add(1)
        time.sleep(0.005)
        return number

    for first in range(begin, num_steps, save_every):
        results = [coordinator.schedule(step, args=(first + number,)) for number in range(save_every)]
        coordinator.join()
        assert [result.fetch() for result in results] == list(range(first, first + save_every))
        manager.save()
        diary.note(f"saved at {int(iterations)}")
    diary.note(f"has trained {int(iterations)}")
    strategy.close()


def stream(resolver, diary):
    """Schedule functions until the gate ``end`` is open, then check that each has given its result."""
    strategy = ts.ParameterServerStrategy(resolver)
    coordinator = ts.coordinator.ClusterCoordinator(strategy)
    with strategy.scope():
        v = ts.Variable(0, trainable=False)

    def add(number):
        v.assign_add(1)
        time.sleep(0.005)
        return number

    results = []
    while not diary.is_open("end"):
        results.append(coordinator.schedule(add, args=(len(results),)))
        if len(results) == 20:
            coordinator.join()
            diary.note("streams")
        time.sleep(0.005)
    coordinator.join()
    assert [result.fetch() for result in results] == list(range(len(results)))
    assert int(v) >= len(results)
    strategy.close()


def run_without_end(resolver, diary):
    """Have all workers add to a variable for ever."""
    strategy = ts.ParameterServerStrategy(resolver)
    coordinator = ts.coordinator.ClusterCoordinator(strategy)
    with strategy.scope():
        v = ts.Variable(0, trainable=False)

    def add():
        diary.note(f"worker {ts.coordinator.experimental_get_current_worker_index()} adds")
        try:
            while True:
                v.assign_add(1)
                time.sleep(0.005)
        except ts.errors.UnavailableError:
            diary.note(f"worker {ts.coordinator.experimental_get_current_worker_index()} is refused")
            raise

    for _ in range(4):
        coordinator.schedule(add)
    coordinator.join()
