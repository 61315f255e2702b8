"""The same training under several strategies, each in processes of its own, with the figures side by side."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import checks
import jobs
import profiles
import torch
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig

import torchstrategy as ts

RECIPE = Path(__file__).with_name("fit.py")
FIGURES = ("loss", "accuracy", "val_loss", "val_accuracy")


def compare(config: DictConfig) -> None:
    """Run the recipe once for each layout; print a line for each one, and write all to comparison.json.

    Raises:
        ValueError: a layout is not known, or a launcher has started several processes.
        RuntimeError: a run failed.
    """
    if jobs.world_size() > 1:
        raise ValueError("compare=true starts the processes that it needs: run it with plain `python`.")
    if config.compare is not True:
        checks.choices(config, "compare", config.layouts)
    names = list(config.layouts if config.compare is True else config.compare)
    run_path = Path(HydraConfig.get().runtime.output_dir)
    print(f"{config.epochs} epochs, global batch {config.global_batch_size or config.batch_size_per_replica}, "
          f"{config.precision}; test figures have val_")  # fmt: skip
    print(
        f"{'':22}{'replicas':>10}" + "".join(f"{name:>14}" for name in FIGURES) + f"{'weights differ':>16}{'fit, s':>9}"
    )
    results: dict[str, dict[str, Any]] = {}
    weights: dict[str, torch.Tensor] = {}
    for name in names:
        folder = run_path / name
        train(folder, [*given_options(), *fixed_batch(config), *config.layouts[name]])
        found = json.loads((folder / "results.json").read_text())
        state = ts.models.load_model(folder / "model.pt", compile=False).state_dict()
        weights = weights or state
        found["difference"] = max(float((state[key] - weights[key]).abs().max()) for key in weights)
        results[name] = found
        figures = "".join(f"{found['last'][key]:14.6f}" for key in FIGURES)
        print(f"{name:22}{found['replicas']:10}{figures}{found['difference']:16.1e}{found['seconds']:9.1f}", flush=True)
    print("weights differ: the largest difference of any weight from the first line's, which rounding makes")
    (run_path / "comparison.json").write_text(json.dumps(results, indent=1))
    if config.profile:
        for name in names:
            print(f"\n{name}")
            profiles.tell_of_traces(run_path / name)
    print(f"Files: {run_path}")


def given_options() -> list[str]:
    """Return what the user wrote on the command line, but for what the comparison decides."""
    own = ("compare", "layouts", "+layouts", "strategy", "launcher", "global_batch_size")
    return [text for text in HydraConfig.get().overrides.task if not text.startswith(own)]


def fixed_batch(config: DictConfig) -> list[str]:
    """Return the option that gives all layouts the same global batches."""
    return [f"global_batch_size={config.global_batch_size or config.batch_size_per_replica}"]


def train(folder: Path, options: list[str]) -> None:
    """Run the recipe in processes of its own; what they print goes into a file."""
    folder.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, str(RECIPE), *options, f"hydra.run.dir={folder}"]
    log_path = folder / "output.txt"
    with log_path.open("w") as log:
        status = subprocess.run(command, stdout=log, stderr=subprocess.STDOUT, check=False).returncode
    if status != 0:
        raise RuntimeError(f"{' '.join(command)} failed:\n{log_path.read_text()[-3000:]}")
