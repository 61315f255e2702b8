"""What the Estimator tutorial's advice brings: larger batches, half precision, another way for workers to communicate.

Two or more processes train the tutorial's conv net. All ways are in the same processes and take turns, so that what
else the machine does meets all of them.
"""

from __future__ import annotations

import json
import logging
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

import checks
import hydra  # pip install hydra-core
import profiles
import torch
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf
from torch import Tensor, nn

import torchstrategy as ts

PLAIN = "as in the tutorial"
HEADER = f"{'processes':>9} {'way':24}{'ms a step':>11}{'examples a second':>19}{'of the first':>14}"


class Way(NamedTuple):
    """A way to train.

    Args:
        batch_size: examples of one worker's batch.
        dtype: in which the module computes, such as ``"bfloat16"``.
        implementation: of the communication between workers, such as ``"RING"``.
    """

    batch_size: int
    dtype: str
    implementation: str


class ConvNet(nn.Sequential):
    """The tutorial's module.

    Args:
        dtype: in which it computes; its parameters are float32.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__(
            *(nn.Conv2d(1, 32, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()),
            *(nn.Linear(32 * 13 * 13, 64), nn.ReLU(), nn.Linear(64, 10)),
        )
        self._dtype = dtype

    def forward(self, images: Tensor) -> Tensor:
        """Return float32 ``[N, 10]`` for ``[N, 1, 28, 28]``."""
        with torch.autocast(images.device.type, self._dtype, enabled=self._dtype != torch.float32):
            logits: Tensor = super().forward(images)
        return logits.float()


class Stopwatch(ts.estimator.SessionRunHook):
    """Takes the time of the steps after the first ones, in which buffers are made.

    Args:
        skip: how many steps are not timed.
    """

    def __init__(self, skip: int) -> None:
        self.skip = skip
        self.num_steps = 0
        self.started = self.ended = 0.0

    def after_run(self, run_context: Any, run_values: Any) -> None:
        """Note the time."""
        del run_context, run_values
        self.num_steps += 1
        self.ended = time.perf_counter()
        if self.num_steps == self.skip:
            self.started = self.ended

    @property
    def ms(self) -> float:
        """Milliseconds of a step."""
        return 1000 * (self.ended - self.started) / (self.num_steps - self.skip)


class Recording(ts.estimator.SessionRunHook):
    """Records some steps.

    Args:
        profile: the recorder.
    """

    def __init__(self, profile: ts.profiler.Profile) -> None:
        self.profile = profile

    def after_run(self, run_context: Any, run_values: Any) -> None:
        """End a step."""
        del run_context, run_values
        self.profile.step()


@hydra.main(config_path="../../conf/benchmarks", config_name="estimator_steps", version_base="1.3")
def main(config: DictConfig) -> None:
    """Measure with each number of processes; print a table and write it to results.json."""
    options = OmegaConf.to_container(config)
    checks.integers(options, "batch_size", "skip", "steps", "rounds")
    checks.lists_of_integers(options, "other_batch_sizes")
    checks.lists_of_integers(options, "processes", least=2)
    checks.choice(options, "dtype", ["bfloat16", "float16"])
    checks.choice(options, "implementation", ["RING", "NCCL"])
    checks.profile(options)
    run_path = Path(HydraConfig.get().runtime.output_dir).absolute()
    print(f"The tutorial's conv net, {options['batch_size']} examples a worker; medians of {config.rounds} blocks")
    print(HEADER)
    results = []
    for number in config.processes:
        with ts.testing.ProcessPool(number) as pool:
            ranks = pool.run(measure, options, run_path / f"{number}_processes", timeout_s=1200)
        for name, way in ways_of(options).items():
            blocks = [max(times) for times in zip(*(rank[name] for rank in ranks), strict=True)]
            rates = [1000 * number * way.batch_size / ms for ms in blocks]
            plain = [max(times) for times in zip(*(rank[PLAIN] for rank in ranks), strict=True)]
            first = [1000 * number * options["batch_size"] / ms for ms in plain]
            ratio = statistics.median(own / other for own, other in zip(rates, first, strict=True))
            ms, rate = statistics.median(blocks), statistics.median(rates)
            results.append({"processes": number, "way": name, "ms": ms, "examples_a_second": rate, "ratio": ratio})
            print(f"{number:9} {name:24}{ms:11.1f}{rate:19,.0f}{ratio:14.2f}", flush=True)
    path = run_path / "results.json"
    path.write_text(json.dumps(results, indent=1))
    print(f"File: {path}")


def ways_of(options: Any) -> dict[str, Way]:
    """Return the tutorial's way, and it with each piece of advice followed alone."""
    plain = Way(options["batch_size"], "float32", "AUTO")
    return {
        PLAIN: plain,
        **{f"batches of {size}": plain._replace(batch_size=size) for size in options["other_batch_sizes"]},
        options["dtype"]: plain._replace(dtype=options["dtype"]),
        options["implementation"]: plain._replace(implementation=options["implementation"]),
    }


def measure(options: dict[str, Any], run_path: Path) -> dict[str, list[float]]:
    """Return for each way the milliseconds of a step in each block."""
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    ways = ways_of(options)
    communications = {way.implementation for way in ways.values()}
    strategies = {
        name: ts.MultiWorkerMirroredStrategy(
            communication_options=ts.experimental.CommunicationOptions(implementation=name)
        )
        for name in sorted(communications)
    }
    found: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(options["rounds"] + 1):  # the first one is not counted
        for name, way in ways.items():
            stopwatch = Stopwatch(options["skip"])
            train(strategies[way.implementation], way, options["skip"] + options["steps"], stopwatch)
            if number > 0:
                found[name].append(stopwatch.ms)
    if options["profile"]:  # apart from what is measured
        for name, way in ways.items():
            strategy = strategies[way.implementation]
            with profiles.make(options, profiles.case_path(run_path, name), strategy) as profile:
                steps = sum(options["profile_steps"].values())
                train(strategy, way, steps, Recording(profile))
    return found


def train(strategy: Any, way: Way, steps: int, hook: ts.estimator.SessionRunHook) -> None:
    """Train a new Estimator for some steps."""

    def model_fn(features: Any, labels: Any, mode: str) -> ts.estimator.EstimatorSpec:
        del features, labels
        model = ConvNet(getattr(torch, way.dtype))
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
        return ts.estimator.EstimatorSpec(mode, loss=loss, train_op=optimizer, module=model)

    def loss(logits: Tensor, labels: Tensor) -> Tensor:
        return nn.functional.cross_entropy(logits, labels, reduction="sum") / way.batch_size

    def input_fn() -> ts.data.Dataset:
        generator = torch.Generator().manual_seed(0)
        images = torch.rand(way.batch_size, 1, 28, 28, generator=generator)
        labels = torch.randint(0, 10, (way.batch_size,), generator=generator)
        return ts.data.Dataset.from_tensors((images, labels)).cache().repeat()

    config = ts.estimator.RunConfig(train_distribute=strategy, save_checkpoints_steps=None, save_checkpoints_secs=None)
    with tempfile.TemporaryDirectory() as folder:
        estimator = ts.estimator.Estimator(model_fn, model_dir=folder, config=config)
        estimator.train(input_fn, hooks=[hook], steps=steps)


if __name__ == "__main__":
    main()
