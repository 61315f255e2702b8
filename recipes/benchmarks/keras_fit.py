"""Times the epochs of Keras' fit on torch, for recipes/benchmarks/model_fit.py; runs where Keras is installed."""

from __future__ import annotations

import os
from typing import Any

os.environ["KERAS_BACKEND"] = "torch"
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")

import keras
import torch
from fit_turns import ENDLESS, Turns, load_images, make_clock, make_loader, make_model, read_options


def main() -> None:
    """Train until the benchmark ends."""
    options: dict[str, Any] = read_options()
    turns = Turns(f"Keras {keras.__version__}, torch {torch.__version__}")
    # Keras' own layers take 5 to 15 % longer here than torch's module in Keras' wrapper.
    model = keras.Sequential([keras.Input((1, 28, 28)), keras.layers.TorchModuleWrapper(make_model(options))])
    model.compile(
        keras.optimizers.Adam(options["optimizer"]["lr"]),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    how = {"epochs": ENDLESS, "verbose": 0, "callbacks": [make_clock(keras.callbacks.Callback, turns)]}
    if options["input"] == "arrays":
        images, labels = (tensor.numpy() for tensor in load_images(options).tensors)
        model.fit(images, labels, batch_size=options["batch_size"], **how)
    else:
        model.fit(make_loader(options), **how)


if __name__ == "__main__":
    main()
