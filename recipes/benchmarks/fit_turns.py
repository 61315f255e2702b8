"""What the sides of recipes/benchmarks/model_fit.py have in common: images, and epochs that wait for their turn.

Each side is a program of its own, ``python SIDE.py '{"model": "conv_net", ...}'``, in an environment that may have
another framework than this library. So of all packages this imports torch and numpy only. A side says first what it
is, then waits for a line before each epoch and answers with a line of JSON after it.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import models
import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

ENDLESS = 10**9
SLICE = Path(__file__).parents[1] / "data" / "fashion_mnist_slice.npz"


def read_options() -> dict[str, Any]:
    """Return the options of the command line, with torch's threads and seed set to theirs."""
    options = json.loads(sys.argv[1])
    torch.set_num_threads(options["threads"])
    torch.manual_seed(options["seed"])
    return options


def make_model(options: dict[str, Any]) -> nn.Sequential:
    """Build the network that all sides train."""
    return models.conv_net() if options["model"] == "conv_net" else models.mlp(32, 0.0)


def load_images(options: dict[str, Any]) -> TensorDataset:
    """Return the examples of an epoch."""
    with np.load(SLICE) as arrays:
        images, labels = (arrays[f"train_{name}"][: options["examples"]] for name in ("images", "labels"))
    return TensorDataset(torch.tensor(images[:, None]) / 255, torch.tensor(labels).long())


def make_loader(options: dict[str, Any]) -> DataLoader[Any]:
    """Return the loader that all sides read."""
    return DataLoader(load_images(options), batch_size=options["batch_size"], shuffle=True)


class Turns:
    """The clock of a side: ``begin`` and ``end`` belong where an epoch begins and ends.

    Args:
        version: what the side is, for the benchmark to print.
    """

    def __init__(self, version: str) -> None:
        print(json.dumps(version), flush=True)
        self._started = 0.0

    def begin(self) -> None:
        """Wait for the turn; end the program where the benchmark has ended."""
        if not sys.stdin.readline():
            raise SystemExit
        self._started = time.perf_counter()

    def end(self, loss: float) -> None:
        """Tell the seconds since ``begin``, and the loss that the framework shows for the epoch."""
        print(json.dumps({"seconds": time.perf_counter() - self._started, "loss": float(loss)}), flush=True)


def make_clock(callback: type[Any], turns: Turns) -> Any:
    """Return a callback that keeps the turns, for this library's ``fit`` and for Keras', which call it in one way.

    Args:
        callback: the framework's base class of callbacks.
        turns: this side's.
    """

    class Clock(callback):  # type: ignore[misc]
        def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
            """Wait for the turn."""
            del epoch, logs
            turns.begin()

        def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
            """Tell the time."""
            del epoch
            turns.end((logs or {})["loss"])

    return Clock()
