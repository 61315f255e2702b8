"""Runs of a job on parameter servers whose processes and messages are hit, each to the weights of plain arithmetic.

Workers compute parts of gradients and change nothing, the coordinator adds these up in order. So a function that ran
twice, because its worker was lost, leaves every bit as it was, and a change that was made twice does not.
"""

from __future__ import annotations

import collections
import contextlib
import logging
import os
import random
import re
import shutil
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

import torchstrategy as ts
from tests.ps.faults.jobs import wait_until
from tests.soak.attempts import Failure, Times
from torchstrategy.base.log import logger
from torchstrategy.ps.states import WorkerState
from torchstrategy.testing.faults import clock_jump, message_fault

NUM_STEPS, NUM_PARTS = 24, 4
NUM_WORKERS, NUM_PS = 3, 2
KINDS = {
    "worker killed": 6,
    "worker stopped": 2,
    "worker paused": 2,
    "server killed": 2,
    "server stopped": 2,
    "server paused": 2,
    "message torn": 2,
    "message lost": 1,
    "answer lost": 2,
    "coordinator's clock": 2,
}
#: The share of steps in which something goes wrong.
SHARE = 0.4
#: Of ``message_fault``.
MESSAGES = {"message torn": "torn", "answer lost": "unanswered", "message lost": "lost"}
Task = tuple[str, int]


class Losses(logging.Filter):
    """Who is said to be lost by whom; lets only errors through.

    Args:
        cluster: whose servers' logs are read.
    """

    _LOST = re.compile(r"/job:(\w+)/task:(\d+) at \S+ was lost|Lost /job:(\w+)/task:(\d+) at")

    def __init__(self, cluster: Any) -> None:
        super().__init__()
        self._cluster = cluster
        self._said: collections.deque[str] = collections.deque()
        self._num_chars: dict[Task, int] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        """Note what the coordinator says."""
        self._said.append(record.getMessage())
        return record.levelno >= logging.ERROR

    def take(self) -> list[tuple[Task, Task, str]]:
        """Return who says it, of whom, and the line, since the last call."""
        lines = [(("chief", 0), self._said.popleft()) for _ in range(len(self._said))]
        for task in self._cluster.tasks:
            log = self._cluster.log(*task)
            lines += [(task, line) for line in log[self._num_chars.get(task, 0) :].splitlines()]
            self._num_chars[task] = len(log)
        found = [(task, self._LOST.search(line), line) for task, line in lines]
        return [(task, (match[1] or match[3], int(match[2] or match[4])), line) for task, match, line in found if match]

    def check(self, hit: set[Task]) -> None:
        """Check that only those have been lost since the last call, or have lost others, that were hit.

        Raises:
            Failure: somebody was lost though nothing had happened that explains it.
        """
        for task, lost, line in self.take():
            if not hit & {task, lost}:
                raise Failure(f"a false death: {task} says {line!r}; hit were {sorted(hit) or 'none'}")


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
        self._losses = Losses(cluster)
        self._hit: set[Task] = set()  # in this step
        self._hit_before: set[Task] = set()  # in the last one, of which somebody may hear late
        self._server_killed: tuple[int, float] | None = None  # and when
        self._back: Future[None] | None = None  # when a server that was stopped is
        self._noticed: tuple[float, float] | None = None  # when a server was killed, and what it took to notice
        generator = torch.Generator().manual_seed(seed)
        self._x = torch.randn(NUM_PARTS, 8, 3, generator=generator, dtype=torch.float64)
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)

    def run(self) -> None:
        """Train to the end.

        Raises:
            Failure: the weights are wrong, or something ended or was lost though nothing had happened that ends it.
        """
        level = logger.level
        logger.setLevel(logging.WARNING)
        logger.addFilter(self._losses)
        try:
            weights = self._run()
        finally:
            logger.removeFilter(self._losses)
            logger.setLevel(level)
        if not torch.equal(weights, self._expected()):
            raise Failure(f"other weights: {weights} instead of {self._expected()}")

    def _run(self) -> Tensor:
        self._cluster.start()
        while True:
            try:
                return self._attempt()
            except ts.errors.UnavailableError as error:
                if self._server_killed is None:
                    raise Failure(f"a server is said to be gone that is there: {error}") from error
                index, at = self._server_killed
                if f"/job:ps/task:{index} " not in str(error):
                    raise Failure(f"parameter server {index} was killed, but the error is: {error}") from error
                self._losses.check(self._hit | self._hit_before)
                self._noticed = at, time.monotonic() - at
                self._cluster.start()

    def _expected(self) -> Tensor:
        weights = torch.zeros(3, dtype=torch.float64)
        for _ in range(NUM_STEPS):
            weights = weights - 0.01 * sum(part_of_gradient(weights, x) for x in self._x)
        return weights

    def _attempt(self) -> Tensor:
        self._server_killed = self._back = None
        strategy = ts.ParameterServerStrategy(self._cluster.resolver())
        try:
            program = _Program.begin(strategy, self._folder / "checkpoints")
            self._losses.take()  # of what was before
            self._hit = set()
            for step in range(int(program.made), NUM_STEPS):
                self._step(program, step)
                if self._noticed is not None:
                    begin, notice = self._noticed
                    self.times.append(Times("server killed", notice, time.monotonic() - begin))
                    self._noticed = None
            return program.weights + 0  # type: ignore[no-any-return]
        finally:
            strategy.close()

    def _step(self, program: _Program, step: int) -> None:
        self._hit_before, self._hit = self._hit, set()
        (kind,) = self._draw.choices(list(KINDS), list(KINDS.values()))
        kind = kind if self._draw.random() < SHARE else ""
        is_workers = kind in ("message torn", "answer lost") and self._draw.random() < 0.5
        gradient = self._compute(program, step, kind, is_workers=is_workers)
        self._change(program, gradient, "" if is_workers else kind)
        if int(program.made) != step + 1:
            raise Failure(
                f"after {step + 1} changes by 1 a variable is {int(program.made)}; the last fault was {kind!r}"
            )
        if self._back is not None:
            self._back.result()
            self._back = None
        self._losses.check(self._hit | self._hit_before)
        gone = [task for task in self._cluster.tasks if not self._cluster.is_alive(*task)]
        if gone:
            raise Failure(f"{gone} have ended by themselves")

    def _compute(self, program: _Program, step: int, kind: str, *, is_workers: bool) -> Tensor:
        """Return the gradient, of which workers compute parts, while a process or a worker's message is hit."""
        struck = self._folder / f"struck-{step}"
        told = (MESSAGES[kind], str(struck)) if is_workers else (None, "")
        results = [program.coordinator.schedule(program.part, args=(n, x, *told)) for n, x in enumerate(self._x)]
        with contextlib.ExitStack() as hour:
            if kind and kind not in MESSAGES:
                time.sleep(self._draw.uniform(0.0, 0.03))
                self._hit_task(program, kind, hour)
            program.coordinator.join()
        parts = [result.fetch() for result in results]
        if [number for number, _ in parts] != list(range(NUM_PARTS)):
            raise Failure(f"the results of step {step} are those of {[number for number, _ in parts]}")
        if is_workers and struck.exists() and int(struck.read_text()):
            self.num_struck[kind] += 1
        return sum(gradient for _, gradient in parts)

    def _change(self, program: _Program, gradient: Tensor, kind: str) -> None:
        """Make the step's changes and save, while a message of the coordinator is hit."""
        at = 1 if kind == "message lost" else self._draw.randint(1, 3)
        if (
            kind == "message lost"
        ):  # a connection that loses one is cut for some time; the first message is for server 0
            self._stop_server(program, kind, 0)
        with message_fault(MESSAGES.get(kind), at) as sizes:
            program.weights.assign_sub(0.01 * gradient)
            program.made.assign_add(1)
            program.manager.save()
        if kind in MESSAGES and len(sizes) >= at:
            self.num_struck[kind] += 1

    def _hit_task(self, program: _Program, kind: str, hour: contextlib.ExitStack) -> None:
        """Let something happen to a process; of a stopped server the program does not wait for the end."""
        if kind == "coordinator's clock":
            self.num_struck[kind] += 1
            hour.enter_context(clock_jump(self._draw.choice([-1, 1]) * self._draw.uniform(1, 12) * 3600))
            return
        job, what = "ps" if kind.startswith("server") else "worker", kind.partition(" ")[2]
        index = self._draw.randrange(NUM_PS if job == "ps" else NUM_WORKERS)
        if kind == "server stopped":
            self._stop_server(program, kind, index)
            return
        self.num_struck[kind] += 1
        begin = time.monotonic()
        if what == "paused":
            self._cluster.stop_signal(job, index)
            time.sleep(self._heartbeat_s * self._draw.uniform(0.1, 0.3))
            self._cluster.cont(job, index)  # it was not hit so that anybody may call it lost
            return
        self._hit.add((job, index))
        if kind == "server killed":
            self._server_killed = index, begin
            self._cluster.kill(job, index)
            return
        worker = program.coordinator._cluster.workers[index]
        self._cluster.kill(job, index) if what == "killed" else self._cluster.stop_signal(job, index)
        wait_until(lambda: worker.state is WorkerState.LOST, what="the loss of a worker")
        notice = time.monotonic() - begin
        self._cluster.restart(job, index) if what == "killed" else self._cluster.cont(job, index)
        wait_until(lambda: worker.can_run, what=f"worker {index}")
        self.times.append(Times(kind, notice, time.monotonic() - begin))

    def _stop_server(self, program: _Program, kind: str, index: int) -> None:
        """Stop a parameter server until that was noticed, and some time more; the program goes on meanwhile."""
        self._hit.add(("ps", index))
        if kind not in MESSAGES:
            self.num_struck[kind] += 1
        link, more_s = program.strategy._servers[index], self._draw.uniform(0.0, 0.5) * self._heartbeat_s
        begin = time.monotonic()
        self._cluster.stop_signal("ps", index)

        def go_on() -> None:
            try:
                wait_until(lambda: link.is_away, what=f"the loss of parameter server {index}")
                notice = time.monotonic() - begin
                time.sleep(more_s)
            finally:
                self._cluster.cont("ps", index)
            wait_until(lambda: not link.is_away, what=f"parameter server {index}")
            self.times.append(Times(kind, notice, time.monotonic() - begin))

        threads = ThreadPoolExecutor(1)
        self._back = threads.submit(go_on)
        threads.shutdown(wait=False)


class _Program(NamedTuple):
    """A coordinator's, with a variable on each server."""

    strategy: Any
    coordinator: Any
    weights: Any
    made: Any
    manager: Any
    part: Callable[..., Any]

    @classmethod
    def begin(cls, strategy: Any, folder: Path) -> _Program:
        """Restore the last checkpoint, and wait for the workers."""
        coordinator = ts.coordinator.ClusterCoordinator(strategy)
        with strategy.scope():
            weights = ts.Variable(torch.zeros(3, dtype=torch.float64), trainable=False)
            made = ts.Variable(0, trainable=False)
        checkpoint = ts.train.Checkpoint(weights=weights, made=made)
        manager = ts.train.CheckpointManager(checkpoint, folder, max_to_keep=2)
        manager.restore_or_initialize()
        workers = coordinator._cluster.workers
        wait_until(lambda: all(worker.can_run for worker in workers), what="all workers")

        def part(number: int, x: Tensor, kind: str | None, struck: str) -> tuple[int, Tensor]:
            time.sleep(0.01)
            with _first_time(kind, struck):
                values = weights + 0
            return number, part_of_gradient(values, x)

        return cls(strategy, coordinator, weights, made, manager, part)


@contextlib.contextmanager
def _first_time(kind: Any, struck: str) -> Iterator[None]:
    """Let a worker's first message of a ``with`` block go wrong, once for all workers; note how many it has sent."""
    try:
        file = None if kind is None else os.open(struck, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
    except FileExistsError:
        file = None
    with message_fault(None if file is None else kind, 1) as sizes:
        try:
            yield
        finally:
            if file is not None:
                os.write(file, str(len(sizes)).encode())
                os.close(file)


def part_of_gradient(weights: Tensor, x: Tensor) -> Tensor:
    """Return the gradient of a part of the examples."""
    return x.T @ (x @ weights - x.sin().sum(dim=1))
