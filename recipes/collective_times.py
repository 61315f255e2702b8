"""What collectives between processes of one host cost, over each way that data can take, in turns in one run."""

from __future__ import annotations

import functools
import itertools
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import numpy as np
import torch
from omegaconf import DictConfig
from torch import distributed

import torchstrategy as ts

GLOO, MESSAGE, SHARED, USERS = "gloo", "message", "shared memory", "a user's all_reduce"


def time_collectives(config: DictConfig) -> dict[str, dict[int, list[float]]]:
    """Return, by way and number of float32, the seconds of each all-reduce; runs in each of some processes."""
    torch.set_num_threads(1)
    distributed.init_process_group("gloo", timeout=timedelta(minutes=2))
    strategy = ts.MirroredStrategy(["cpu:0"])
    planes = {MESSAGE: strategy.workers.routes.small, SHARED: strategy.workers.routes.large}
    times: dict[str, dict[int, list[float]]] = {way: {} for way in (GLOO, *planes, USERS)}
    for size in config.collective_sizes:
        tensor = torch.zeros(size)
        ways: dict[str, Callable[[], object]] = {GLOO: functools.partial(distributed.all_reduce, tensor)}
        ways |= {way: functools.partial(_sum, plane, tensor) for way, plane in planes.items()}
        ways[USERS] = functools.partial(strategy.run, _users_all_reduce, (tensor,))
        if tensor.nbytes > config.largest_message:
            del ways[MESSAGE]
        num_rounds = max(config.fewest_collectives, min(config.most_collectives, config.floats_of_a_size // size))
        measured = _in_turns(ways, num_rounds, align=lambda: _sum(planes[MESSAGE], torch.zeros(1)))
        for way, seconds in measured.items():
            times[way][size] = seconds
    distributed.destroy_process_group()
    return times


def without_records(strategy: ts.Strategy, step: Callable[[], Any]) -> Callable[[], Any]:
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


def print_collectives(num_processes: int, times: dict[str, dict[int, list[float]]]) -> None:
    """Print the medians of one number of processes, and what they are to gloo's."""
    print(f"All-reduce of float32 between {num_processes} processes: median µs (and gloo's time over it)")
    print(f"{'bytes':>12}" + "".join(f"{way:>24}" for way in times))
    for size in times[GLOO]:
        cells = [_cell(times[GLOO][size], by_size.get(size)) for by_size in times.values()]
        print(f"{4 * size:12,}" + "".join(f"{cell:>24}" for cell in cells))


def median_ratio(first: Sequence[float], second: Sequence[float]) -> float:
    """Return the median of the ratios of what was measured side by side."""
    return float(np.median(np.array(first) / np.array(second)))


def _cell(gloo: Sequence[float], seconds: Sequence[float] | None) -> str:
    if seconds is None:
        return "-"
    return f"{1e6 * np.median(seconds):,.0f} ({median_ratio(gloo, seconds):.2f})"


def _users_all_reduce(tensor: torch.Tensor) -> torch.Tensor:
    return ts.get_replica_context().all_reduce("sum", tensor)


def _sum(plane: Any, tensor: torch.Tensor) -> None:
    plane.start_sum(tensor)(lambda: None)


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
