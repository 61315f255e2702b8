"""What parameter servers cost, next to what memory and loopback allow and to TensorFlow's own, in turns in one run."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import checks
import hydra  # pip install hydra-core
import numpy as np
import profiles
import torch
from hydra.core.hydra_config import HydraConfig
from limits import repeat, time_copy, time_there_and_back
from models import conv_net
from omegaconf import DictConfig, OmegaConf
from server_times import random_batch
from torch import nn

OURS, TENSORFLOW = "ours", "TF"
SCRIPTS = {OURS: "server_times.py", TENSORFLOW: "tensorflow_servers.py"}
WORK = {  # what is timed, and the limit that is printed beside it
    "empty_rate": ("empty closures a second", None),
    "empty_latency_ms": ("empty closure, schedule to value, ms", "there_and_back_1_ms"),
    "one_variable_rate": ("closures a second that add to a variable", None),
    "one_variable_latency_ms": ("one of them, schedule to value, ms", "there_and_back_1_ms"),
    "pull_push_ms": ("pull and push of {megabytes:.0f} MB, ms", "there_and_back_dense_ms"),
    "pull_negate_push_ms": ("the same with -x in between, ms", "there_and_back_dense_ms"),
    "rows_ms": ("look-up and change of {rows:,} rows, ms", "there_and_back_rows_ms"),
    "train_rate": ("steps of the conv net a second", "plain_train_rate"),
}
Figures = dict[str, list[float]]


@hydra.main(config_path="../../conf/benchmarks", config_name="servers", version_base="1.3")
def main(config: DictConfig) -> None:
    """Time every side in each round; print medians and write all figures to results.json."""
    options = OmegaConf.to_container(config)
    work = options["work"]
    checks.integers(options, "rounds", "ps", *(f"work.{name}" for name in work if name != "table"))
    checks.lists_of_integers(options, "workers", "work.table")
    if len(work["table"]) != 2:
        raise ValueError(f"work.table must be [rows, columns]. Received: {work['table']}")
    checks.profile(options)
    run_path = Path(HydraConfig.get().runtime.output_dir).absolute()
    pythons = {OURS: sys.executable} | ({TENSORFLOW: config.tensorflow} if config.tensorflow else {})
    runs = [(side, workers) for workers in config.workers for side in pythons]
    limits: list[Figures] = []
    figures: dict[tuple[str, int], list[Figures]] = {run: [] for run in runs}
    for number in range(config.rounds):
        limits.append(time_limits(work))
        for side, workers in runs if number % 2 else reversed(runs):
            options = {**work, "ps": config.ps, "workers": workers, "profile": False}
            figures[side, workers].append(run_script(pythons[side], SCRIPTS[side], options))
    print_table(work, config.ps, limits, figures)
    if config.profile:  # apart from what is timed
        options = {**work, "ps": config.ps, "workers": max(config.workers), "profile": True, "folder": str(run_path)}
        run_script(pythons[OURS], SCRIPTS[OURS], {**options, "profile_steps": dict(config.profile_steps)})
        profiles.tell_of_traces(run_path, "worker_*")
    if not config.tensorflow:
        print("TensorFlow's ParameterServerStrategy: not run; tensorflow=/path/to/python names one that has it.")
    results = {"limits": limits, **{f"{side}, {n} workers": rounds for (side, n), rounds in figures.items()}}
    path = run_path / "results.json"
    path.write_text(json.dumps({"work": work, "ps": config.ps, "rounds": results}, indent=1))
    print(f"Wrote {path}")


def run_script(python: str, name: str, options: dict[str, Any]) -> Figures:
    """Run a script that prints a line of JSON at its end.

    Raises:
        RuntimeError: it failed.
    """
    command = [python, str(Path(__file__).with_name(name)), json.dumps(options)]
    try:
        process = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError as error:
        raise RuntimeError(f"{python} can't be started: {error}") from error
    if process.returncode != 0:
        raise RuntimeError(f"{name} failed with {python}:\n{process.stderr[-3000:]}")
    return json.loads(process.stdout.splitlines()[-1])


def time_limits(work: dict[str, Any]) -> Figures:
    """Time what nothing over these sockets and this memory can go below: in milliseconds, except for a rate."""
    num_bytes = {"1": 1, "dense": 4 * work["floats"], "rows": 4 * work["rows"] * work["table"][1]}
    times = {"copy_dense_ms": time_copy(work["floats"])}
    for name, milliseconds in zip(num_bytes, time_there_and_back(list(num_bytes.values())), strict=True):
        times[f"there_and_back_{name}_ms"] = milliseconds
    times["plain_train_rate"] = [1000 / ms for ms in repeat(plain_step(work["batch_size"]), work["train_steps"])]
    return times


def plain_step(batch_size: int) -> Callable[[], object]:
    """Return a training step of the conv net in plain PyTorch, in this process."""
    model = conv_net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    images, labels = random_batch(batch_size)

    def step() -> None:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(images), labels).backward()
        optimizer.step()

    return step


def print_table(
    work: dict[str, Any], num_ps: int, limits: list[Figures], figures: dict[tuple[str, int], list[Figures]]
) -> None:
    """Print medians over all rounds, and what ours is to TF's: the median of the rounds' ratios."""
    dense_mb = 4e-6 * work["floats"]
    there_and_back = median_of(limits, "there_and_back_dense_ms")
    print(f"Medians of {len(limits)} rounds; {num_ps} parameter servers; conv net: batches of {work['batch_size']}")
    print(f"Loopback: {2 * dense_mb / there_and_back:.2f} GB/s over one socket, a byte there and back in "
          f"{median_of(limits, 'there_and_back_1_ms'):.3f} ms; copy of {dense_mb:.0f} MB in memory: "
          f"{median_of(limits, 'copy_dense_ms'):.1f} ms")  # fmt: skip
    workers = sorted({n for _, n in figures})
    columns = [run for n in workers for run in figures if run[1] == n]
    has_tf = any(side == TENSORFLOW for side, _ in columns)
    heads = [f"{side}, {n} w." for side, n in columns] + [f"ratio, {n} w." for n in workers if has_tf]
    print(f"{'':44}{'limit':>10}" + "".join(f"{head:>14}" for head in heads))
    for name, (title, limit) in WORK.items():
        cells = [f"{median_of(figures[run], name):,.2f}" if name in figures[run][0] else "-" for run in columns]
        if has_tf and "-" in cells:
            cells += ["-"] * len(workers)
        elif has_tf:
            cells += [f"{ratio(figures[OURS, n], figures[TENSORFLOW, n], name):.2f}" for n in workers]
        limit_cell = "" if limit is None else f"{median_of(limits, limit):,.2f}"
        title = title.format(megabytes=dense_mb, rows=work["rows"])
        print(f"{title:44}{limit_cell:>10}" + "".join(f"{cell:>14}" for cell in cells))
    if has_tf:
        print(
            "ratio: ours over TF's; of rates more is better, of milliseconds less. TF leaves the worker out of a mere"
        )
        print("pull and push, so there is no figure of it")
    print("limit: one socket there and back, and for the conv net plain PyTorch in one process")
    for first, last in itertools.pairwise(workers):
        scaling = ratio(figures[OURS, first], figures[OURS, last], "pull_push_ms")
        print(f"Pull and push, ours: {last} workers together have {scaling:.2f} of the throughput of {first}")


def median_of(rounds: list[Figures], name: str) -> float:
    """Return the median of a figure over all rounds."""
    return float(np.median(np.concatenate([figures[name] for figures in rounds])))


def ratio(first: list[Figures], second: list[Figures], name: str) -> float:
    """Return the median of the rounds' ratios of medians."""
    pairs = zip(first, second, strict=True)
    return float(np.median([np.median(one[name]) / np.median(other[name]) for one, other in pairs]))


if __name__ == "__main__":
    main()
