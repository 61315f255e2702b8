"""Fashion-MNIST by `compile` and `fit` under any strategy: tf's tutorial "Distributed training with Keras" in PyTorch.

The commands that run it are at the head of conf/fit.yaml.
"""

from __future__ import annotations

import functools
import json
import os
import signal
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import checks
import fit_comparison
import fit_guide
import hydra
import jobs
import profiles
import torch
from custom_loop import get_dtype
from hydra.core.hydra_config import HydraConfig
from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf
from torch import nn
from tqdm import tqdm

import torchstrategy as ts


@hydra.main(config_path="../conf", config_name="fit", version_base="1.3")
def main(config: DictConfig) -> None:
    """Train; with ``compare=true`` once under each of several strategies."""
    checks.integers(config, "batch_size_per_replica", "epochs", "save_every")
    checks.integers(config, "steps_per_execution", "gradient_accumulation_steps")
    checks.integers(config, "global_batch_size", may_be_null=True)
    checks.flags(config, "guide", "jit_compile")
    checks.profile(config)
    if config.compare:
        fit_comparison.compare(config)
    else:
        run(config)


@jobs.launched
def run(config: DictConfig) -> None:
    """Train, restore the best weights, test, save, and load the saved model without a strategy and in its scope."""
    if config.guide:
        fit_guide.show(config)
        return
    run_path = Path(HydraConfig.get().runtime.output_dir)
    dtype = get_dtype(config.precision)
    torch.set_default_dtype(torch.float64 if dtype == torch.float64 else torch.float32)  # of the data and the weights
    train_data, test_data = instantiate(config.data, _convert_="all")
    strategy = instantiate(config.strategy, _convert_="all")
    jobs.check_strategy(strategy)
    num_replicas = strategy.num_replicas_in_sync
    say = tqdm.write if strategy.is_chief else lambda _: None
    say(f"Number of replicas: {num_replicas}")

    ts.utils.set_random_seed(config.seed)
    with strategy.scope():
        model = ts.Model(instantiate(config.model))
    rate_of = functools.partial(learning_rate, OmegaConf.to_container(config.learning_rates))
    model.compile(
        optimizer=functools.partial(instantiate(config.optimizer, _convert_="all"), lr=rate_of(0)),
        loss=nn.CrossEntropyLoss(),
        metrics=["accuracy"],
        steps_per_execution=config.steps_per_execution,
        jit_compile=config.jit_compile,
        gradient_accumulation_steps=config.gradient_accumulation_steps,
        amp=config.precision if dtype in (torch.bfloat16, torch.float16) else None,
        tune=config.tune,
    )
    if config.tune:  # convolutions, too
        ts.utils.tune(model, example=torch.zeros(2, 1, 28, 28))

    profile = profiles.Profile(config, run_path, strategy)
    best_path = run_path / "checkpoints" / "best"
    callbacks = [
        ts.callbacks.LearningRateScheduler(rate_of),
        ts.callbacks.TensorBoard(run_path / "logs"),
        ts.callbacks.CSVLogger(run_path / "history.csv"),
        ts.callbacks.ModelCheckpoint(best_path, monitor="val_accuracy", save_best_only=True, save_weights_only=True),
        ts.callbacks.BackupAndRestore(run_path / "backup", save_freq=config.save_every),
        Kill(config),
        profiles.ProfileCallback(profile),
    ]
    # The batch that is split between the replicas grows with their number, unless its size is given.
    global_batch_size = config.global_batch_size or config.batch_size_per_replica * num_replicas
    started = time.perf_counter()
    with profile:
        history = model.fit(
            train_data,
            batch_size=global_batch_size,
            epochs=config.epochs,
            validation_data=test_data,
            callbacks=callbacks,
        )
    seconds = time.perf_counter() - started

    last = {name: values[-1] for name, values in history.history.items()}
    model.save(run_path / "model.pt")
    if strategy.is_chief:
        (run_path / "results.json").write_text(json.dumps({"last": last, "seconds": seconds, "replicas": num_replicas}))
    model.load_weights(best_path)
    how = {"batch_size": global_batch_size, "verbose": 0, "return_dict": True}
    say(f"The best weights: {tell(model.evaluate(test_data, **how))}")

    if jobs.world_size() == 1:  # one of several processes would do it alone
        plain = ts.models.load_model(run_path / "model.pt")
        say(f"The saved model, loaded without a strategy: {tell(plain.evaluate(test_data, **how))}")
    with strategy.scope():
        again = ts.models.load_model(run_path / "model.pt")
    say(f"The same, loaded in the scope: {tell(again.evaluate(test_data, **how))}")
    say(
        f"Test accuracy: {last['val_accuracy']:.4f} after {config.epochs} epochs with {num_replicas} replica(s) in "
        f"{seconds:.1f} s; files: {run_path}"
    )


def learning_rate(table: Mapping[int, float], epoch: int) -> float:
    """Return the rate of an epoch, from a table of the rates and the epochs that they begin with."""
    return table[max(first for first in table if first <= epoch)]


class Kill(ts.callbacks.Callback):
    """A callback of one's own: ends a process as a crash or the kernel does, without a word.

    Args:
        config: the recipe's.
    """

    def __init__(self, config: DictConfig) -> None:
        super().__init__()
        self.step = config.kill.step if jobs.attempt() == 0 else None
        self.rank = config.kill.rank

    def on_train_batch_end(self, batch: int, logs: Mapping[str, Any] | None = None) -> None:
        """Count the steps of this process."""
        del batch, logs
        if self.step is None:
            return
        self.step -= 1
        workers = self.model.distribute_strategy.workers
        if self.step == 0 and self.rank == (0 if workers is None else workers.rank):
            os.kill(os.getpid(), signal.SIGKILL)


def tell(figures: Mapping[str, float]) -> str:
    """Return the loss and the accuracy as text."""
    return f"loss {figures['loss']:.4f}, accuracy {100 * figures['accuracy']:.2f}"


if __name__ == "__main__":
    main()
