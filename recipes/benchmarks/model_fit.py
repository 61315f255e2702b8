"""What `fit` costs over a loop written by hand, and its throughput next to Lightning's Trainer and Keras' fit on torch.

All sides take turns epoch by epoch in one run, so that a slow moment of the machine meets all of them. `fit` and the
loop do so inside the same processes; Lightning and Keras run in environments of their own, where they are asked for one
epoch at a time.
"""

from __future__ import annotations

import functools
import json
import logging
import os
import sys
import time
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import checks
import hydra  # pip install hydra-core
import numpy as np
import profiles
import torch
from comparisons import bootstrap_median_ratio
from fit_turns import make_loader, make_model
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf
from peers import Peer, launch
from torch import Tensor, distributed, nn

import torchstrategy as ts

MODELS = ("conv_net", "mlp")
FIT, LOOP, PLAIN = "fit", "loop", "plain PyTorch"
LAYOUTS = {"1 replica": 1, "2 replicas in 1 process": 2, "2 processes": 2}  # and the number of replicas
OURS = "this library"
PEERS = {  # program, and what it reads
    "this library, loader": ("fit_times.py", "loader"),
    "Lightning, loader": ("lightning_fit.py", "loader"),
    "Keras, loader": ("keras_fit.py", "loader"),
    "this library, arrays": ("fit_times.py", "arrays"),
    "Keras, arrays": ("keras_fit.py", "arrays"),
}
Seconds = dict[str, list[float]]


@hydra.main(config_path="../../conf/benchmarks", config_name="model_fit", version_base="1.3")
def main(config: DictConfig) -> None:
    """Time everything, print two tables and write all figures to results.json."""
    options = OmegaConf.to_container(config)
    checks.choices(options, "models", MODELS)
    checks.choices(options, "layouts", LAYOUTS)
    checks.integers(options, "starts", "pairs", "examples", "batch_size", "threads")
    checks.flags(options, "quick")
    checks.profile(options)
    run_path = Path(HydraConfig.get().runtime.output_dir)
    if config.quick:
        options |= {"starts": 1, "pairs": 3}
    torch.set_num_threads(config.threads)
    load = os.getloadavg()[0]
    results: dict[str, Any] = {"options": options, "load_before": load, "overhead": {}, "throughput": {}}
    print(
        f"Epochs of {config.examples} images in turns, {options['pairs']} of each side in each of {options['starts']} "
        f"starts; threads: {config.threads}; other programs' load before: {load:.1f} of {os.cpu_count()} cores"
    )
    print(f"\n{'fit over a loop by hand':38}{'fit, ms/step':>14}{'loop':>9}{'plain':>9}{'overhead':>11}  95 % interval")
    for layout in config.layouts:
        starts = [
            launch(
                2 if layout == "2 processes" else 1,
                time_overhead,
                {**options, "layout": layout, "number": number, "folder": str(run_path.absolute())},
            )
            for number in range(options["starts"])
        ]
        for model in config.models:
            results["overhead"][f"{model}, {layout}"] = found = [start[model] for start in starts]
            print_overhead(f"{model}, {layout}", found, -(-config.examples // (config.batch_size * LAYOUTS[layout])))
    pythons = {OURS: sys.executable, "Lightning": config.lightning, "Keras": config.keras}
    for model in config.models:
        starts = [time_peers(pythons, {**options, "model": model}, run_path) for _ in range(options["starts"])]
        results["throughput"][model] = starts
        print_throughput(model, starts, config.examples)
    for name in ("lightning", "keras"):
        if not config[name]:
            print(f"{name.title()}: not run; {name}=/path/to/python names one that has it.")
    (run_path / "results.json").write_text(json.dumps(results, indent=1))
    print(f"Wrote {run_path / 'results.json'}")


def time_overhead(options: dict[str, Any]) -> dict[str, Seconds]:
    """Return, for each model, the seconds of the epochs of `fit`, of a loop and, with one replica, of plain torch."""
    logging.disable(logging.INFO)
    torch.set_num_threads(options["threads"])
    torch.manual_seed(options["seed"])
    layout = options["layout"]
    wait: Callable[[], object] = lambda: None  # noqa: E731
    if layout == "2 processes":
        distributed.init_process_group("gloo")
        strategy: ts.Strategy = ts.MirroredStrategy(["cpu:0"])
        wait = distributed.barrier
    elif layout == "1 replica":
        strategy = ts.OneDeviceStrategy("cpu:0")
    else:
        strategy = ts.MirroredStrategy(["cpu:0", "cpu:1"])
    found = {}
    for model in options["models"]:
        case = {**options, "model": model, "batch_size": options["batch_size"] * LAYOUTS[layout]}
        makers: dict[str, Callable[[], Callable[..., object]]] = {
            FIT: functools.partial(fit_epoch, strategy, case),
            LOOP: functools.partial(loop_epoch, strategy, case),
        }
        if layout == "1 replica":
            makers[PLAIN] = functools.partial(plain_epoch, case)
        # Where in memory a side's tensors lie is worth some percent, so that also goes in turns.
        order = list(makers) if options["number"] % 2 else list(reversed(makers))
        sides = {name: makers[name]() for name in order}
        found[model] = take_turns(sides, options["pairs"], wait)
        if options["profile"] and options["number"] == 0:  # apart from what is timed
            folder = profiles.case_path(Path(options["folder"]), model, layout)
            with profiles.make(options, folder, strategy) as profile:
                sides[FIT](callbacks=[profiles.ProfileCallback(profile)])
    if layout == "2 processes":
        distributed.destroy_process_group()
    return found


def take_turns(sides: dict[str, Callable[[], object]], pairs: int, wait: Callable[[], object]) -> Seconds:
    """Return the seconds of each call but the first, the warm-up."""
    seconds: Seconds = {name: [] for name in sides}
    for pair in range(-1, pairs):
        for name in sides if pair % 2 else reversed(sides):
            wait()
            started = time.perf_counter()
            sides[name]()
            if pair >= 0:
                seconds[name].append(time.perf_counter() - started)
    return seconds


def fit_epoch(strategy: ts.Strategy, case: dict[str, Any]) -> Callable[..., object]:
    """Return a call of `fit` for one epoch, all that belongs to a call included; it may be given callbacks."""
    with strategy.scope():
        model = ts.Model(make_model(case))
    model.compile(
        torch.optim.Adam(model.parameters(), lr=case["optimizer"]["lr"]),
        nn.CrossEntropyLoss(),
        metrics=["accuracy"],
        tune=False,  # the settings of the benchmark are those of all ways
    )
    loader = make_loader(case)
    return lambda callbacks=(): model.fit(loader, epochs=1, verbose=0, callbacks=list(callbacks))


def loop_epoch(strategy: ts.Strategy, case: dict[str, Any]) -> Callable[[], object]:
    """Return the leanest loop that tells the same: exact mean loss and accuracy of the epoch."""
    with strategy.scope():
        model = make_model(case)
        optimizer = torch.optim.Adam(model.parameters(), lr=case["optimizer"]["lr"])
        mean_loss = ts.metrics.Mean()
        accuracy = ts.metrics.SparseCategoricalAccuracy()
    dataset = strategy.experimental_distribute_dataset(make_loader(case))

    def train_step(images: Tensor, labels: Tensor) -> None:
        optimizer.zero_grad()
        logits = model(images)
        losses = nn.functional.cross_entropy(logits, labels, reduction="none")
        ts.nn.compute_average_loss(losses, global_batch_size="actual").backward()
        optimizer.step()
        mean_loss.update_state(losses.detach())
        accuracy.update_state(labels, logits.detach())

    def epoch() -> dict[str, float]:
        mean_loss.reset_state()
        accuracy.reset_state()
        for batch in dataset:
            strategy.run(train_step, args=batch)
        return {"loss": float(mean_loss.result()), "accuracy": float(accuracy.result())}

    return epoch


def plain_epoch(case: dict[str, Any]) -> Callable[[], object]:
    """Return the same in PyTorch's own words."""
    model = make_model(case)
    optimizer = torch.optim.Adam(model.parameters(), lr=case["optimizer"]["lr"])
    loader = make_loader(case)

    def epoch() -> dict[str, float]:
        total, right, number = torch.zeros(()), torch.zeros((), dtype=torch.int64), 0
        for images, labels in loader:
            optimizer.zero_grad()
            logits = model(images)
            loss = nn.functional.cross_entropy(logits, labels)
            loss.backward()
            optimizer.step()
            total += loss.detach() * len(labels)
            right += (logits.detach().argmax(1) == labels).sum()
            number += len(labels)
        return {"loss": float(total) / number, "accuracy": float(right) / number}

    return epoch


def time_peers(pythons: dict[str, str | None], options: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Return version, seconds and losses of the epochs of each side that there is a Python for."""
    with ExitStack() as stack:
        peers = {
            side: stack.enter_context(Peer(python, program, {**options, "input": kind}, folder / f"{side}.log"))
            for side, (program, kind) in PEERS.items()
            if (python := pythons[side.partition(",")[0]])
        }
        found = {side: {"version": peer.read(), "seconds": [], "loss": []} for side, peer in peers.items()}
        for pair in range(-1, options["pairs"]):  # pair -1 is the warm-up
            for side in peers if pair % 2 else reversed(peers):
                epoch = peers[side].ask()
                found[side]["loss"].append(epoch["loss"])
                if pair >= 0:
                    found[side]["seconds"].append(epoch["seconds"])
    return found


def print_overhead(title: str, starts: list[Seconds], num_steps: int) -> None:
    """Print a line of the first table."""
    ratio = bootstrap_median_ratio(*(medians(starts, name) for name in (FIT, LOOP)))
    low, overhead, high = (f"{100 * (ratio[part] - 1):+.1f}" for part in ("low", "median", "high"))
    cells = {name: f"{1000 * np.median(medians(starts, name)) / num_steps:.3f}" for name in starts[0]}
    print(f"{title:38}{cells[FIT]:>14}{cells[LOOP]:>9}{cells.get(PLAIN, ''):>9}{overhead:>9} %  {low} to {high} %")


def print_throughput(model: str, starts: list[dict[str, Any]], num_examples: int) -> None:
    """Print the second table: examples a second, and this library's over each other's that reads the same way."""
    print(f"\n{model + ', 1 replica':34}{'examples/s':>12}{'10 %':>9}{'90 %':>9}{'ours over it':>14}  95 % interval")
    for side in starts[0]:
        rates = num_examples / np.concatenate([start[side]["seconds"] for start in starts])
        numbers = "".join(f"{value:{width},.0f}" for value, width in zip(percentiles(rates), (12, 9, 9), strict=True))
        ours = f"{OURS},{side.partition(',')[2]}"
        comparison = ""
        if ours != side:
            seconds = [[{"s": start[name]["seconds"]} for start in starts] for name in (side, ours)]
            ratio = bootstrap_median_ratio(*(medians(each, "s") for each in seconds))
            comparison = f"{ratio['median']:>14.2f}  {ratio['low']:.2f} to {ratio['high']:.2f}"
        print(f"{side:34}{numbers}{comparison}")
    print("; ".join(dict.fromkeys(figures["version"] for figures in starts[0].values())))
    losses = ", ".join(f"{side} {figures['loss'][-1]:.3f}" for side, figures in starts[0].items())
    print(f"Loss of the last epoch: {losses}")


def medians(starts: list[Seconds], name: str) -> list[float]:
    """Return the median of each start."""
    return [float(np.median(start[name])) for start in starts]


def percentiles(values: Iterable[float]) -> tuple[float, ...]:
    """Return the median, and what a tenth of the values is below and above."""
    return tuple(float(value) for value in np.percentile(list(values), (50, 10, 90)))


if __name__ == "__main__":
    main()
