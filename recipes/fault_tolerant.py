"""Training that outlives the loss of a process: all of them start again, and go on from the latest checkpoint.

It ends with the weights of a run that lost none, bit for bit on the same replicas. The commands that run it are at the
head of conf/fault_tolerant.yaml.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import checks
import hydra
import jobs
import profiles
import torch
from custom_loop import get_dtype
from hydra.core.hydra_config import HydraConfig
from hydra.utils import instantiate
from omegaconf import DictConfig
from torch import Tensor, nn
from torch.utils.data import DataLoader
from tqdm import tqdm

import torchstrategy as ts


@hydra.main(config_path="../conf", config_name="fault_tolerant", version_base="1.3")
@jobs.launched
def main(config: DictConfig) -> None:
    """Train, saving all that the next step depends on every few steps; begin with the latest save if there is one."""
    checks.integers(config, "global_batch_size", "epochs", "save_every")
    checks.profile(config)
    run_path = Path(HydraConfig.get().runtime.output_dir)
    dtype = get_dtype(config.precision)
    torch.set_default_dtype(torch.float64 if dtype == torch.float64 else torch.float32)  # of the data and the weights
    train_data, test_data = instantiate(config.data, _convert_="all")
    strategy = instantiate(config.strategy, _convert_="all")
    jobs.check_strategy(strategy)

    # The order of the examples has a generator of its own, which dropout does not move.
    order = torch.Generator().manual_seed(config.seed)
    loader = DataLoader(train_data, batch_size=config.global_batch_size, shuffle=True, generator=order)
    batches = strategy.experimental_distribute_dataset(loader)
    test_batches = strategy.experimental_distribute_dataset(test_data, batch_size=config.global_batch_size)

    ts.utils.set_random_seed(config.seed)
    with strategy.scope():
        training = Training(config, dtype)
    checkpoint = ts.train.Checkpoint(dataset=batches, **training.state)
    manager = ts.train.CheckpointManager(checkpoint, run_path / "checkpoints", max_to_keep=2)

    def begin_random_numbers() -> None:
        # Each replica draws its own from here: no state of a generator needs to be saved.
        ts.utils.set_random_seed(config.seed + 1 + int(training.steps))

    def save() -> None:
        manager.save()
        begin_random_numbers()

    def say(message: str) -> None:
        if strategy.is_chief:
            tqdm.write(message)

    if manager.restore_or_initialize():
        begin_random_numbers()
        say(f"Going on with epoch {int(training.epochs) + 1} after step {int(training.steps)}.")

    with profiles.Profile(config, run_path, strategy) as profile:
        while int(training.epochs) < config.epochs:
            training.model.train()
            title, num_done = f"Epoch {int(training.epochs) + 1}", int(training.steps) % len(loader)
            hidden = None if strategy.is_chief else True  # None hides the bar where stderr is no terminal
            steps = profile.steps(batches)
            for batch in tqdm(steps, title, len(loader), initial=num_done, leave=False, disable=hidden, unit="step"):
                strategy.run(training.train_step, args=batch)
                training.steps.assign_add(1)
                if int(training.steps) % config.save_every == 0:
                    save()
                kill_if_asked_to(config, strategy, int(training.steps))
            accuracy = test(strategy, training, test_batches)
            say(f"{title}, Loss: {float(training.loss.result()):.4f}, Test Accuracy: {100 * accuracy:.2f}")
            training.loss.reset_state()
            training.epochs.assign_add(1)
            save()
    say(f"Trained for {config.epochs} epochs, {int(training.steps)} steps. Files: {run_path}")


class Training:
    """The model, and all else that a step changes; made in a strategy's scope.

    Args:
        config: the recipe's.
        dtype: what the forward pass computes in.
    """

    def __init__(self, config: DictConfig, dtype: torch.dtype) -> None:
        rate = instantiate(config.learning_rate, global_batch_size=config.global_batch_size, _convert_="all")
        self.model: nn.Module = instantiate(config.model)
        self.optimizer = instantiate(config.optimizer, _convert_="all")(self.model.parameters(), lr=rate.rate)
        if config.tune:
            ts.utils.tune(self.model, self.optimizer, torch.zeros(2, 1, 28, 28))
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(self.optimizer, rate.factor)
        self.dtype = dtype
        self.device_type = next(self.model.parameters()).device.type
        self.scaler = torch.amp.GradScaler(self.device_type, enabled=dtype == torch.float16)
        self.loss = ts.metrics.Mean(name="loss")
        self.accuracy = ts.metrics.SparseCategoricalAccuracy(name="accuracy")
        self.epochs = ts.Variable(0, trainable=False, name="epochs")
        self.steps = ts.Variable(0, trainable=False, name="steps")

    @property
    def state(self) -> dict[str, Any]:
        """What a checkpoint must hold."""
        names = ("model", "optimizer", "scheduler", "scaler", "loss", "epochs", "steps")
        return {name: getattr(self, name) for name in names}

    def predict(self, images: Tensor) -> Tensor:
        """Return the logits."""
        with torch.autocast(self.device_type, self.dtype, enabled=self.dtype in (torch.bfloat16, torch.float16)):
            return self.model(images).to(torch.get_default_dtype())

    def train_step(self, images: Tensor, labels: Tensor) -> None:
        """Make one step on a replica's share of a batch."""
        self.optimizer.zero_grad()
        per_example_loss = nn.functional.cross_entropy(self.predict(images), labels, reduction="none")
        self.scaler.scale(ts.nn.compute_average_loss(per_example_loss, global_batch_size="actual")).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.scheduler.step()
        self.loss.update_state(per_example_loss)

    def test_step(self, images: Tensor, labels: Tensor) -> None:
        """Count the right predictions for a replica's share of a batch."""
        self.accuracy.update_state(labels, self.predict(images))


def test(strategy: ts.Strategy, training: Training, batches: Iterable[Any]) -> float:
    """Return the accuracy."""
    training.model.eval()
    training.accuracy.reset_state()
    with torch.no_grad():
        for batch in batches:
            strategy.run(training.test_step, args=batch)
    return float(training.accuracy.result())


def kill_if_asked_to(config: DictConfig, strategy: ts.Strategy, step: int) -> None:
    """End this process as a crash or the kernel does, without a word."""
    rank = 0 if strategy.workers is None else strategy.workers.rank
    if step == config.kill.step and rank == config.kill.rank and jobs.attempt() == 0:
        os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    main()
