"""The examples of tf's guide for distributed training with Keras, whose printed numbers come out for any replicas.

The guide starts from random weights, which it does not tell; those here are the ones that give its first number.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jobs
import numpy as np
import profiles
import torch
from hydra.core.hydra_config import HydraConfig
from hydra.utils import instantiate
from omegaconf import DictConfig
from torch import nn

import torchstrategy as ts

REPLICAS = (1, 2, 4)  # in one process
ROWS = ("fit, epoch 1", "fit, epoch 2", "evaluate", "fit on NumPy arrays, epoch 1", "fit on NumPy arrays, epoch 2")
PRINTED = {  # in the guide of the year
    "2021": ("2.4687", "1.0912", "0.67764", "0.4823", "0.2132"),
    "2024": ("1.0416e-04", "1.0196e-04", "1.0130e-04", "1.0099e-04", "1.0056e-04"),
}
STEPS_AT_ONCE = {"2024": {"skip": 1, "record": 1}}  # its two epochs are two executions of ten steps: one is recorded


def show(config: DictConfig) -> None:
    """Print the guide's numbers, and those of each number of replicas."""
    run_path = Path(HydraConfig.get().runtime.output_dir)
    torch.set_default_dtype(torch.float64)  # no digit that is printed depends on rounding
    if jobs.world_size() > 1:
        strategies = [instantiate(config.strategy, _convert_="all")]
        jobs.check_strategy(strategies[0])
    else:
        strategies = [ts.MirroredStrategy([f"cpu:{i}" for i in range(n)]) for n in REPLICAS]
    for year, make in {"2021": make_model_2021, "2024": make_model_2024}.items():
        columns = []
        for strategy in strategies:
            folder = profiles.case_path(run_path, year, f"{strategy.num_replicas_in_sync} replicas")
            profile = {"profile": config.profile, "profile_steps": STEPS_AT_ONCE.get(year, config.profile_steps)}
            columns.append(train(strategy, make, profiles.Profile(profile, folder, strategy)))
        if not strategies[0].is_chief:
            continue
        heads = [f"{strategy.num_replicas_in_sync} replica(s)" for strategy in strategies]
        print(f"{'guide of ' + year + ', loss':30}{'it prints':>14}" + "".join(f"{head:>14}" for head in heads))
        for row, printed, *found in zip(ROWS, PRINTED[year], *columns, strict=True):
            print(f"{row:30}{printed:>14}" + "".join(f"{with_digits_of(printed, value):>14}" for value in found))


def train(strategy: ts.Strategy, make_model: Callable[[], ts.Model], profile: profiles.Profile) -> list[float]:
    """Run the guide's cells; return the losses that they print."""
    with strategy.scope():
        model = make_model()

    dataset = ts.data.Dataset.from_tensors((torch.ones(1), torch.ones(1))).repeat(100).batch(10)
    with profile:
        callbacks = [profiles.ProfileCallback(profile)]
        losses: list[Any] = model.fit(dataset, epochs=2, verbose=0, callbacks=callbacks).history["loss"]
    losses.append(model.evaluate(dataset, verbose=0))

    inputs, targets = np.ones((100, 1)), np.ones((100, 1))
    return losses + model.fit(inputs, targets, epochs=2, batch_size=10, verbose=0).history["loss"]


def with_digits_of(text: str, value: float) -> str:
    """Return a number with as many digits as another one was printed with."""
    return f"{value:.4e}" if "e" in text else f"{value:.{len(text.partition('.')[2])}f}"


def make_model_2021() -> ts.Model:
    """Build a regression with ``mse`` and ``sgd``."""
    model = ts.Model(linear(weight=1 - 1.862413))
    model.compile(loss="mse", optimizer="sgd")
    return model


def make_model_2024() -> ts.Model:
    """Build one with a regularizer, and with ten steps in each execution."""
    layer = linear(weight=1.0022993619)
    ts.regularize(layer, "weight", ts.regularizers.L2(1e-4))
    model = ts.Model(layer)
    model.compile(loss="mse", optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.01), steps_per_execution=10)
    return model


def linear(weight: float) -> nn.Linear:
    """Build a layer with a given weight and no bias to begin with."""
    layer = nn.Linear(1, 1)
    nn.init.constant_(layer.weight, weight)
    nn.init.zeros_(layer.bias)
    return layer
