"""The same training under several strategies, side by side: N replicas = 1 replica. Commands: conf/compare.yaml."""

from __future__ import annotations

import logging
import time
from pathlib import Path
from typing import Any

import hydra  # pip install hydra-core
import numpy as np
import torch
from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf
from torch import nn
from torch.utils.data import TensorDataset

import torchstrategy as ts

IMAGES = Path(__file__).parent / "data" / "fashion_mnist_slice.npz"
CONF = "." if Path(__file__).with_name("compare.yaml").exists() else "../conf"  # a copy has it beside itself


@hydra.main(config_path=CONF, config_name="compare", version_base="1.3")
def main(config: DictConfig) -> None:
    """Train under each strategy, and print the figures and how far the weights are from those of the first one."""
    options: dict[str, Any] = OmegaConf.to_container(config, resolve=True)
    print(f"{config.epochs} epochs, global batch {config.global_batch_size}, {config.dtype}; test figures have val_")
    expected: dict[str, torch.Tensor] = {}
    for name in config.compare:
        started = time.perf_counter()
        layout = options["layouts"][name]
        with ts.testing.ProcessPool(layout["processes"]) as pool:
            replicas, found, weights = pool.run(train, layout["strategy"], options, timeout_s=24 * 3600.0)[0]
        if not expected:
            expected = weights
            print(f"{'':20}{'replicas':>9}" + "".join(f"{k:>14}" for k in found) + f"{'weights differ':>16}{'s':>7}")
        difference = max(float((weights[key] - expected[key]).abs().max()) for key in weights)
        row = "".join(f"{value:14.6f}" for value in found.values())
        print(f"{name:20}{replicas:9}{row}{difference:16.1e}{time.perf_counter() - started:7.1f}", flush=True)


def train(strategy_config: dict[str, Any], config: dict[str, Any]) -> tuple[int, dict[str, float], dict[str, Any]]:
    """Train in this process, or as one of several; return the number of replicas, the last figures and the weights."""
    logging.getLogger("torchstrategy").setLevel(logging.WARNING)
    torch.set_default_dtype(getattr(torch, config["dtype"]))
    train_data, test_data = (load_images(config["data"], part) for part in ("train", "test"))
    strategy = instantiate(strategy_config, _convert_="all")
    ts.utils.set_random_seed(config["seed"])
    with strategy.scope():
        model = ts.Model(make_model())
    model.compile(instantiate(config["optimizer"], _convert_="all"), nn.CrossEntropyLoss(), metrics=["accuracy"])
    how = {"batch_size": config["global_batch_size"], "epochs": config["epochs"], "verbose": 0}
    history = model.fit(train_data, validation_data=test_data, **how).history
    figures = {name: values[-1] for name, values in history.items()}
    return strategy.num_replicas_in_sync, figures, model.state_dict()


def make_model() -> nn.Sequential:
    """Build the tutorial's network, from images `[batch, 1, 28, 28]` to logits `[batch, 10]`."""
    convolutions = [nn.Conv2d(1, 32, 3), nn.MaxPool2d(2), nn.ReLU(), nn.Conv2d(32, 64, 3), nn.MaxPool2d(2), nn.ReLU()]
    return nn.Sequential(*convolutions, nn.Flatten(), nn.Linear(64 * 5 * 5, 64), nn.ReLU(), nn.Linear(64, 10))


def load_images(file: str | None, part: str) -> TensorDataset:
    """Return images `[1, 28, 28]` in [0, 1] and labels, to "train" or "test" with; made up where there is no file."""
    if file or IMAGES.exists():
        arrays = np.load(file or IMAGES)
        images, labels = arrays[f"{part}_images"], arrays[f"{part}_labels"]
    else:
        print(f"Made up images to {part} with, because {IMAGES} is not there. data=FILE.npz reads yours.")
        labels = np.arange(2000) % 10
        images = np.random.default_rng(len(part)).integers(128, size=(2000, 28, 28)) + 12 * labels[:, None, None]
    return TensorDataset(torch.tensor(images[:, None]) / 255, torch.tensor(labels).long())


if __name__ == "__main__":
    main()
