"""Memory of Adam's states and time of a step: whole states, split ones, and torch's ZeroRedundancyOptimizer with DDP.

All ways are in the same processes and take turns, so that what else the machine does meets all of them.
"""

from __future__ import annotations

import functools
import json
import logging
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import checks
import hydra  # pip install hydra-core
import profiles
import torch
import torch.distributed as dist
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import torchstrategy as ts

WAYS = {False: "whole", True: "split"}
PEER = "ZeroRedundancyOptimizer"
Steps = Callable[[int], None]
#: As long as the process lives: torch's group, when it is freed, may wait for threads that wait for Python.
_kept: list[Any] = []


@hydra.main(config_path="../../conf/benchmarks", config_name="optimizer_memory", version_base="1.3")
def main(config: DictConfig) -> None:
    """Measure with each number of processes; print a table and write it to results.json."""
    options = OmegaConf.to_container(config)
    checks.integers(options, "width", "layers", "batch_size", "steps", "rounds")
    checks.lists_of_integers(options, "processes", least=2)
    checks.choice(options, "implementation", ["RING", "AUTO"])
    checks.profile(options)
    run_path = Path(HydraConfig.get().runtime.output_dir).absolute()
    size = config.layers * (config.width**2 + config.width)
    print(f"Adam; the model has {size:,} parameters, {size * 4 / 1e6:.1f} MB; medians of {config.rounds} blocks")
    print(f"{'processes':>9} {'way':24}{'states of a process, MB':>28}{'ms a step':>11}{'of whole':>10}")
    results = []
    for number in config.processes:
        with ts.testing.ProcessPool(number) as pool, tempfile.TemporaryDirectory() as folder:
            ranks = pool.run(measure, options, f"{folder}/store", run_path / f"{number}_processes", timeout_s=1200)
        for way in ranks[0]:
            sizes = [rank[way]["bytes"] for rank in ranks]
            blocks = list(map(max, zip(*(rank[way]["ms"] for rank in ranks), strict=True)))
            whole = list(map(max, zip(*(rank["whole"]["ms"] for rank in ranks), strict=True)))
            ratio = statistics.median(own / other for own, other in zip(blocks, whole, strict=True))
            row = {"processes": number, "way": way, "bytes": sizes, "ms": statistics.median(blocks), "ratio": ratio}
            results.append(row)
            span = f"{min(sizes) / 1e6:.1f} to {max(sizes) / 1e6:.1f}"
            print(f"{number:9} {way:24}{span:>28}{row['ms']:11.1f}{ratio:10.2f}", flush=True)
    path = run_path / "results.json"
    path.write_text(json.dumps(results, indent=1))
    print(f"File: {path}")


def measure(options: dict[str, Any], store: str, run_path: Path) -> dict[str, dict[str, Any]]:
    """Return for each way the bytes of this process's states, and the milliseconds of a step in each block."""
    logging.disable(logging.INFO)
    torch.set_num_threads(1)
    made: dict[str, tuple[Any, Steps]] = {}
    _kept.append(made)
    strategies = {}
    for is_split, way in WAYS.items():
        strategies[way] = ts.MultiWorkerMirroredStrategy(
            communication_options=ts.experimental.CommunicationOptions(implementation=options["implementation"]),
            shard_optimizer_states=is_split,
        )
        made[way] = ours(strategies[way], options)
    workers = strategies["whole"].workers
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=workers.rank, world_size=workers.size)
    made[PEER] = torchs(workers.size, options)
    found: dict[str, dict[str, Any]] = {way: {"bytes": 0, "ms": []} for way in made}
    for number in range(options["rounds"] + 1):  # the first one is not counted
        for way, (_, run) in made.items():
            dist.barrier()
            start = time.perf_counter()
            run(options["steps"])
            if number > 0:
                found[way]["ms"].append((time.perf_counter() - start) * 1000 / options["steps"])
    for way, (optimizer, _) in made.items():
        states = [value for entry in optimizer.state.values() for value in entry.values()]
        found[way]["bytes"] = sum(value.nbytes for value in states if isinstance(value, Tensor))
    if options["profile"]:  # apart from what is measured
        for way, strategy in strategies.items():
            step = functools.partial(made[way][1], 1)
            profiles.record_calls(step, options["profile_steps"], profiles.case_path(run_path, way), strategy)
    return found


def make_model(options: dict[str, Any]) -> nn.Sequential:
    """Return layers that are equal on all processes."""
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(options["width"], options["width"]) for _ in range(options["layers"])))


def ours(strategy: Any, options: dict[str, Any]) -> tuple[Any, Steps]:
    """Return a strategy's optimizer, and what makes some steps with it."""
    with strategy.scope():
        model = make_model(options)
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-4)
    x = torch.ones(options["batch_size"] // strategy.num_replicas_in_sync, options["width"])

    def step() -> None:
        optimizer.zero_grad()
        (model(x).square().mean(1).sum() / options["batch_size"]).backward()
        optimizer.step()

    def run(number: int) -> None:
        for _ in range(number):
            strategy.run(step)

    return optimizer, run


def torchs(num_processes: int, options: dict[str, Any]) -> tuple[Any, Steps]:
    """Return torch's optimizer that is split over processes, with DDP, and what makes some steps with it."""
    from torch.distributed.optim import ZeroRedundancyOptimizer  # noqa: PLC0415 - it warns when it is imported

    model = DistributedDataParallel(make_model(options))
    optimizer = ZeroRedundancyOptimizer(model.parameters(), optimizer_class=torch.optim.Adam, lr=1e-4)
    x = torch.ones(options["batch_size"] // num_processes, options["width"])

    def run(number: int) -> None:
        for _ in range(number):
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()

    return optimizer.optim, run


if __name__ == "__main__":
    main()
