"""Times the epochs of this library's fit, for recipes/benchmark_fit.py."""

from __future__ import annotations

from typing import Any

import torch
from fit_turns import Turns, load_images, make_loader, make_model, read_options

import torchstrategy as ts

ENDLESS = 10**9


class Clock(ts.callbacks.Callback):
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
    turns = Turns(f"torchstrategy {ts.__version__}, torch {torch.__version__}")
    model = ts.Model(make_model(options))
    model.compile(
        torch.optim.Adam(model.parameters(), lr=options["learning_rate"]),
        torch.nn.CrossEntropyLoss(),
        metrics=["accuracy"],
    )
    how = {"epochs": ENDLESS, "verbose": 0, "callbacks": [Clock(turns)]}
    if options["input"] == "arrays":
        model.fit(*load_images(options).tensors, batch_size=options["batch_size"], **how)
    else:
        model.fit(make_loader(options), **how)


if __name__ == "__main__":
    main()
