"""What collectives and records between processes of one host cost, over each way that data can take, in turns."""

from __future__ import annotations

import functools
import itertools
import logging
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
from step_times import make_work
from torch import distributed
from training_steps import ours

import torchstrategy as ts

GLOO, MESSAGE, SHARED, USERS = "gloo", "message", "shared memory", "a user's all_reduce"


def time_collectives(options: dict[str, Any]) -> dict[str, dict[int, list[float]]]:
    """Return, by way and number of float32, the seconds of each all-reduce; runs in each of some processes.

    Args:
        options: as ``collectives`` in conf/benchmarks/training.yaml.
    """
    logging.disable(logging.INFO)
    torch.set_num_threads(1)
    distributed.init_process_group("gloo", timeout=timedelta(minutes=2))
    strategy = ts.MirroredStrategy(["cpu:0"])
    backends = {MESSAGE: strategy.workers.routes.small, SHARED: strategy.workers.routes.large}
    times: dict[str, dict[int, list[float]]] = {way: {} for way in (GLOO, *backends, USERS)}
    for size in options["sizes"]:
        tensor = torch.zeros(size)
        ways: dict[str, Callable[[], object]] = {GLOO: functools.partial(distributed.all_reduce, tensor)}
        ways |= {way: functools.partial(_sum, backend, tensor) for way, backend in backends.items()}
        ways[USERS] = functools.partial(strategy.run, _users_all_reduce, (tensor,))
        if tensor.nbytes > options["largest_message"]:
            del ways[MESSAGE]
        num_rounds = max(options["fewest"], min(options["most"], options["floats_of_a_size"] // size))
        measured = _in_turns(ways, num_rounds, align=lambda: _sum(backends[MESSAGE], torch.zeros(1)))
        for way, seconds in measured.items():
            times[way][size] = seconds
    distributed.destroy_process_group()
    return times


def price_of_records(options: dict[str, Any]) -> dict[str, list[float]]:
    """Return the seconds of each step with and without the records that ranks compare; runs in each of some processes.

    Args:
        options: as ``step_times.make_work`` takes them, with the number of ``steps`` and torch's ``threads``.
    """
    logging.disable(logging.INFO)
    torch.set_num_threads(options["threads"])
    strategy = ts.MirroredStrategy(["cpu:0"])
    step = ours(make_work(options), strategy).step
    ways = {"with": step, "without": _without_records(strategy, step)}
    return _in_turns(ways, options["steps"], align=lambda: _sum(strategy.workers.routes.small, torch.zeros(1)))


def _without_records(strategy: ts.Strategy, step: Callable[[], Any]) -> Callable[[], Any]:
    """Return a step in which the ranks exchange no records, as if all of them were sure to agree."""
    workers = strategy.workers
    exchange = workers.exchange

    def run() -> Any:
        workers.exchange = lambda _, payload: [payload] * workers.size
        try:
            return step()
        finally:
            workers.exchange = exchange

    return run


def _users_all_reduce(tensor: torch.Tensor) -> torch.Tensor:
    return ts.get_replica_context().all_reduce("sum", tensor)


def _sum(backend: Any, tensor: torch.Tensor) -> None:
    backend.start_sum(tensor)(lambda: None)


def _in_turns(
    ways: dict[str, Callable[[], object]], num_rounds: int, align: Callable[[], object]
) -> dict[str, list[float]]:
    """Return the seconds of each call; each round calls every way once, and begins with another one."""
    times: dict[str, list[float]] = {way: [] for way in ways}
    for number in range(-3, num_rounds):  # the first three are the warm-up
        for way in itertools.islice(itertools.cycle(ways), number % len(ways), number % len(ways) + len(ways)):
            align()
            start = time.perf_counter()
            ways[way]()
            if number >= 0:
                times[way].append(time.perf_counter() - start)
    return times
