"""Times the epochs of this library's fit, for recipes/benchmarks/model_fit.py."""

from __future__ import annotations

from typing import Any

import torch
from fit_turns import ENDLESS, Turns, load_images, make_clock, make_loader, make_model, read_options

import torchstrategy as ts


def main() -> None:
    """Train until the benchmark ends."""
    options: dict[str, Any] = read_options()
    turns = Turns(f"torchstrategy {ts.__version__}, torch {torch.__version__}")
    model = ts.Model(make_model(options))
    model.compile(
        torch.optim.Adam(model.parameters(), lr=options["optimizer"]["lr"]),
        torch.nn.CrossEntropyLoss(),
        metrics=["accuracy"],
        tune=False,  # the settings of the benchmark are those of all ways
    )
    how = {"epochs": ENDLESS, "verbose": 0, "callbacks": [make_clock(ts.callbacks.Callback, turns)]}
    if options["input"] == "arrays":
        model.fit(*load_images(options).tensors, batch_size=options["batch_size"], **how)
    else:
        model.fit(make_loader(options), **how)


if __name__ == "__main__":
    main()
