"""How long training stands still for a save: asynchronous over synchronous, and plain ``torch.save`` beside them."""

from __future__ import annotations

import os
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
from comparisons import ratio_cell
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig

import torchstrategy as ts

ASYNC = ts.train.CheckpointOptions(enable_async=True)


@hydra.main(config_path="../../conf/benchmarks", config_name="checkpoints", version_base="1.3")
def main(config: DictConfig) -> None:
    """Measure everything in one run; print a table."""
    checks.integers(config, "pairs")
    checks.lists_of_integers(config, "widths")
    checks.profile(config)
    run_path = Path(HydraConfig.get().runtime.output_dir)
    print("| MB | synchronous, ms | async over synchronous (95 % interval) | torch.save and fsync over synchronous |")
    print("| --- | --- | --- | --- |")
    for width in config.widths:
        with (
            tempfile.TemporaryDirectory(dir=config.folder or run_path) as folder,
            profiles.make(config, run_path, name=str(width)) as profile,
        ):
            print(measure(width, config.pairs, folder, profile), flush=True)


def measure(width: int, pairs: int, folder: str, profile: ts.profiler.Profile) -> str:
    """Return a row of the table."""
    model = torch.nn.Linear(width, width)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model(torch.ones(1, width)).sum().backward()
    optimizer.step()
    manager = ts.train.CheckpointManager(ts.train.Checkpoint(model=model, optimizer=optimizer), folder, 2)
    plain = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    times: dict[str, list[float]] = {"sync": [], "async": [], "torch": []}
    for turn in range(pairs + 1):
        took = {"sync": seconds(manager.save), "async": seconds(lambda: manager.save(options=ASYNC))}
        manager.sync()
        took["torch"] = seconds(lambda: save_plain(plain, f"{folder}/plain"))
        profile.step()
        for name, value in took.items():
            if turn:  # the first finds the memory
                times[name].append(value)
    size = os.path.getsize(f"{manager.latest_checkpoint}.pt") / 1e6
    return (
        f"| {size:.1f} | {statistics.median(times['sync']) * 1e3:.1f} | {ratio_cell(times['async'], times['sync'])} | "
        f"{ratio_cell(times['torch'], times['sync'])} |"
    )


def save_plain(content: Any, path: str) -> None:
    """Do what a program without the library does: write a file beside, and put it on the disk."""
    with open(f"{path}.new", "wb") as file:
        torch.save(content, file)
        file.flush()
        os.fsync(file.fileno())
    os.replace(f"{path}.new", path)


def seconds(function: Callable[[], Any]) -> float:
    """Return how long a call takes."""
    begin = time.perf_counter()
    function()
    return time.perf_counter() - begin


if __name__ == "__main__":
    main()
