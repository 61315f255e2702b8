"""Step time of one training program in plain PyTorch, under DDP and under strategies, and the cost of collectives.

DDP and ours are timed in turns inside the same two worker processes, so that a slow moment of the machine meets both.
"""

from __future__ import annotations

import json
import timeit
import uuid
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import hydra
import jobs  # noqa: F401 (gives the configuration ${start_time:})
import numpy as np
import torch
from collective_times import print_collectives, time_collectives, without_records
from hydra.core.hydra_config import HydraConfig
from hydra.utils import instantiate
from omegaconf import DictConfig
from torch import Tensor, distributed, nn
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

import torchstrategy as ts

Step = Callable[[], Any]
NUM_REPLICAS = 2
DDP, OURS = "DDP, 2 processes of 1 thread", "ours, 2 processes of 1 thread"
UNCHECKED = "ours, 2 processes of 1 thread, without records"


@hydra.main(config_path="../conf", config_name="benchmark", version_base="1.3")
def main(config: DictConfig) -> None:
    """Time every way in one run; print a table and write it to results.json."""
    times = launch(NUM_REPLICAS, time_in_worker, config)
    devices = [f"cpu:{i}" for i in range(NUM_REPLICAS)]
    turns, concurrent = ts.MirroredStrategy(devices), ts.MirroredStrategy(devices, concurrent=True)
    torch.set_num_threads(NUM_REPLICAS)
    plain = torch_step(instantiate(config.model), first_batch(config), config)
    times |= time_blocks({"plain PyTorch, 1 process of 2 threads": plain}, config)
    times |= time_blocks({"ours, 1 process of 2 threads, 2 replicas in turns": our_step(turns, config)}, config)
    torch.set_num_threads(1)
    times |= time_blocks({"ours, 1 process, 2 concurrent replicas of 1 thread": our_step(concurrent, config)}, config)
    ratio = bootstrap_median_ratio(times[OURS], times[DDP])
    price = bootstrap_median_ratio(times[OURS], times[UNCHECKED])
    collectives = {n: launch(n, time_collectives, config) for n in config.collective_processes}
    costs = {"default": cost_of_run(ts.get_strategy(), config.calls), "2 replicas": cost_of_run(turns, config.calls)}

    num_steps = config.pairs * config.steps_per_block
    print(f"Step time in ms, global batch {NUM_REPLICAS * config.batch_size_per_replica}, {num_steps} steps each")
    print(f"{'':52}{'median':>9}{'10 %':>9}{'90 %':>9}")
    for name, values in times.items():
        print(f"{name:52}" + "".join(f"{1e3 * np.percentile(values, p):9.2f}" for p in (50, 10, 90)))
    for name, found in {"ours / DDP": ratio, "with / without the records before sums of gradients": price}.items():
        interval = f"95 % bootstrap interval {found['low']:.3f} to {found['high']:.3f}"
        print(f"{name}, 2 processes, median of {config.pairs} pairs: {found['median']:.3f} ({interval})")
    for name, cost in costs.items():
        print(f"run of an empty function over a bare call, {name}: {1e6 * cost:.2f} µs")
    for num_processes, by_way in collectives.items():
        print_collectives(num_processes, by_way)
    results_path = Path(HydraConfig.get().runtime.output_dir) / "results.json"
    ratios = {"ours_over_ddp": ratio, "with_over_without_records": price}
    results = {"step_s": times, **ratios, "run_s": costs, "collective_s": collectives}
    results_path.write_text(json.dumps(results, indent=1))
    print(f"Wrote {results_path}")


def launch(num_processes: int, fn: Callable[[DictConfig], Any], config: DictConfig) -> Any:
    """Call a function in processes that torch's launcher starts; return rank 0's result."""
    address = {"rdzv_backend": "c10d", "rdzv_endpoint": "127.0.0.1:0", "local_addr": "127.0.0.1"}
    how = LaunchConfig(1, 1, num_processes, run_id=uuid.uuid4().hex, **address)
    return elastic_launch(how, fn)(config)[0]


def time_in_worker(config: DictConfig) -> dict[str, list[float]]:
    """Time DDP and ours in one of two processes that torch's launcher started."""
    torch.set_num_threads(1)
    distributed.init_process_group("gloo", timeout=timedelta(minutes=2))
    share = [part.chunk(NUM_REPLICAS)[distributed.get_rank()] for part in first_batch(config)]
    ddp = torch_step(nn.parallel.DistributedDataParallel(instantiate(config.model)), share, config)
    strategy = ts.MirroredStrategy(["cpu:0"])
    ours = our_step(strategy, config)
    steps = {DDP: ddp, OURS: ours, UNCHECKED: without_records(strategy, ours)}
    times = time_blocks(steps, config, wait_for_others=distributed.barrier)
    distributed.destroy_process_group()
    return times


def torch_step(model: nn.Module, batch: Sequence[Tensor], config: DictConfig) -> Step:
    """Build the program in PyTorch's own words."""
    images, labels = batch
    optimizer = instantiate(config.optimizer)(model.parameters(), lr=config.learning_rate)

    def step() -> Tensor:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


def our_step(strategy: ts.Strategy, config: DictConfig) -> Step:
    """Build the program under a strategy."""
    dataset = torch.utils.data.TensorDataset(*first_batch(config))
    batch = next(iter(strategy.experimental_distribute_dataset(dataset, batch_size=len(dataset))))
    with strategy.scope():
        model = instantiate(config.model)
        optimizer = instantiate(config.optimizer)(model.parameters(), lr=config.learning_rate)

    def replica_step(images: Tensor, labels: Tensor) -> Tensor:
        optimizer.zero_grad()
        losses = nn.functional.cross_entropy(model(images), labels, reduction="none")
        loss = ts.nn.compute_average_loss(losses, global_batch_size="actual")
        loss.backward()
        optimizer.step()
        return loss.detach()

    return lambda: strategy.run(replica_step, args=tuple(batch))


def first_batch(config: DictConfig) -> tuple[Tensor, ...]:
    """Return the images and labels of one global batch."""
    train_data, _ = instantiate(config.data, _convert_="all")
    return train_data[: NUM_REPLICAS * config.batch_size_per_replica]


def time_blocks(
    steps: dict[str, Step], config: DictConfig, wait_for_others: Callable[[], object] = lambda: None
) -> dict[str, list[float]]:
    """Return the seconds per step of each block of steps, for each of the step functions, which take turns."""
    times: dict[str, list[float]] = {name: [] for name in steps}
    for pair in range(-1, config.pairs):  # pair -1 is the warm-up
        for name in steps if pair % 2 else reversed(steps):
            wait_for_others()
            seconds = timeit.timeit(steps[name], number=config.steps_per_block) / config.steps_per_block
            if pair >= 0:
                times[name].append(seconds)
    return times


def bootstrap_median_ratio(first: list[float], second: list[float]) -> dict[str, float]:
    """Return the median of the pairs' ratios and the ends of its 95 % bootstrap interval."""
    ratios = np.array(first) / np.array(second)
    draws = np.random.default_rng(0).choice(ratios, (10_000, len(ratios)))
    low, high = np.percentile(np.median(draws, axis=1), (2.5, 97.5))
    return {"low": float(low), "median": float(np.median(ratios)), "high": float(high)}


def cost_of_run(strategy: ts.Strategy, num_calls: int) -> float:
    """Return the seconds that ``strategy.run`` of an empty function costs over calling it."""

    def empty() -> None:
        return None

    with_run = min(timeit.repeat(lambda: strategy.run(empty), number=num_calls))  # the least of five
    return (with_run - min(timeit.repeat(lambda: empty(), number=num_calls))) / num_calls


if __name__ == "__main__":
    main()
