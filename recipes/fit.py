"""Images of clothes by `compile` and `fit`: tf's tutorial for Keras. Commands: conf/fit.yaml."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from pathlib import Path

import hydra  # pip install hydra-core
import numpy as np
import torch
from hydra.core.hydra_config import HydraConfig
from hydra.utils import instantiate
from omegaconf import DictConfig
from torch import nn
from torch.utils.data import TensorDataset

import torchstrategy as ts

IMAGES = Path(__file__).parent / "data" / "fashion_mnist_slice.npz"
CONF = "." if Path(__file__).with_name("fit.yaml").exists() else "../conf"  # a copy has it beside itself


@hydra.main(config_path=CONF, config_name="fit", version_base="1.3")
def main(config: DictConfig) -> None:
    """Train, restore the best weights, test, save, and load the saved model without a strategy."""
    folder = Path(HydraConfig.get().runtime.output_dir)
    torch.set_default_dtype(getattr(torch, config.dtype))  # of the data and the weights
    strategy = instantiate(config.strategy, _convert_="all")
    say = print if strategy.is_chief else lambda _: None
    say(f"Number of replicas: {strategy.num_replicas_in_sync}")
    train_data, test_data = (load_images(config.data, part) for part in ("train", "test"))

    ts.utils.set_random_seed(config.seed)
    with strategy.scope():
        model = ts.Model(make_model())
    rate_of = functools.partial(learning_rate, config.learning_rates)
    model.compile(
        optimizer=functools.partial(instantiate(config.optimizer, _convert_="all"), lr=rate_of(0)),
        loss=nn.CrossEntropyLoss(),
        metrics=["accuracy"],
        steps_per_execution=config.steps_per_execution,
        jit_compile=config.jit_compile,
        gradient_accumulation_steps=config.gradient_accumulation_steps,
        amp="bf16" if config.bf16 else None,
        tune=config.tune,
    )
    if config.tune:  # convolutions, too
        ts.utils.tune(model, example=torch.zeros(2, 1, 28, 28))

    # The batch that is split between the replicas grows with their number, unless its size is given.
    batch_size = config.global_batch_size or config.batch_size_per_replica * strategy.num_replicas_in_sync
    best = folder / "checkpoints" / "best"
    model.fit(
        train_data,
        batch_size=batch_size,
        epochs=config.epochs,
        validation_data=test_data,
        callbacks=[
            ts.callbacks.LearningRateScheduler(rate_of),
            ts.callbacks.TensorBoard(folder / "logs", profile_batch=config.profile_batches),
            ts.callbacks.CSVLogger(folder / "history.csv"),
            ts.callbacks.ModelCheckpoint(best, monitor="val_accuracy", save_best_only=True),
            # A start after a crash or SIGTERM, with the same folder, goes on where the last one ended.
            ts.callbacks.BackupAndRestore(folder / "backup", config.save_every, save_before_preemption=True),
        ],
    )
    model.save(folder / "model.pt")
    model.load_weights(best)
    say(f"The best weights: {test(model, test_data)}")
    with strategy.scope():
        loaded = ts.models.load_model(folder / "model.pt", trust=True)
    say(f"The saved model, loaded in the scope: {test(loaded, test_data)}")
    if ts.cluster_resolver.find_job() is None:  # one of several processes would do it alone
        loaded = ts.models.load_model(folder / "model.pt", trust=True)
        say(f"The saved model, loaded without a strategy: {test(loaded, test_data)}")
    say(f"Files: {folder}")


def learning_rate(table: Mapping[int, float], epoch: int) -> float:
    """Return the rate of an epoch, from a table of the rates and the epochs that they begin with."""
    return table[max(first for first in table if first <= epoch)]


def test(model: ts.Model, data: TensorDataset) -> str:
    """Return loss and accuracy as text."""
    figures = model.evaluate(data, batch_size=1000, verbose=0, return_dict=True)
    return f"loss {figures['loss']:.4f}, accuracy {figures['accuracy']:.4f}"


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
