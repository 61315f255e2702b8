"""Times the epochs of Keras' fit on torch, for recipes/benchmark_fit.py; runs where Keras is installed."""

from __future__ import annotations

import os
from typing import Any

os.environ["KERAS_BACKEND"] = "torch"
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")

import keras
import torch
from fit_turns import Turns, load_images, make_loader, make_model, read_options

ENDLESS = 10**9


class Clock(keras.callbacks.Callback):
    """Begins an epoch when it is this side's turn."""

    def __init__(self, turns: Turns) -> None:
        super().__init__()
        self.turns = turns

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Wait for the turn."""
        del epoch, logs
        self.turns.begin()

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Tell the time."""
        del epoch
        self.turns.end((logs or {})["loss"])


def main() -> None:
    """Train until the benchmark ends."""
    options: dict[str, Any] = read_options()
    turns = Turns(f"Keras {keras.__version__}, torch {torch.__version__}")
    # Keras' own layers take 5 to 15 % longer here than torch's module in Keras' wrapper.
    model = keras.Sequential([keras.Input((1, 28, 28)), keras.layers.TorchModuleWrapper(make_model(options))])
    model.compile(
        keras.optimizers.Adam(options["learning_rate"]),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    how = {"epochs": ENDLESS, "verbose": 0, "callbacks": [Clock(turns)]}
    if options["input"] == "arrays":
        images, labels = (tensor.numpy() for tensor in load_images(options).tensors)
        model.fit(images, labels, batch_size=options["batch_size"], **how)
    else:
        model.fit(make_loader(options), **how)


if __name__ == "__main__":
    main()
