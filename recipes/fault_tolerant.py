"""Training that outlives the loss of a process: all start again, and go on, to the same weights bit for bit.

Commands: conf/fault_tolerant.yaml.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path

import hydra  # pip install hydra-core
import numpy as np
import torch
from hydra.core.hydra_config import HydraConfig
from hydra.utils import instantiate
from omegaconf import DictConfig
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from tqdm import tqdm

import torchstrategy as ts

IMAGES = Path(__file__).parent / "data" / "fashion_mnist_slice.npz"
CONF = "." if Path(__file__).with_name("fault_tolerant.yaml").exists() else "../conf"  # a copy has it beside itself


@hydra.main(config_path=CONF, config_name="fault_tolerant", version_base="1.3")
def main(config: DictConfig) -> None:
    """Train, saving all that the next step depends on every few steps; begin with the latest save if there is one."""
    folder = Path(HydraConfig.get().runtime.output_dir)
    torch.set_default_dtype(getattr(torch, config.dtype))  # of the data and the weights
    strategy = instantiate(config.strategy, _convert_="all")
    say = tqdm.write if strategy.is_chief else lambda _: None
    hidden = not strategy.is_chief or None  # None hides the bar where stderr is no terminal

    # The order of the examples has a generator of its own, which dropout does not move.
    order = torch.Generator().manual_seed(config.seed)
    train_data, test_data = (load_images(config.data, part) for part in ("train", "test"))
    loader = DataLoader(train_data, batch_size=config.global_batch_size, shuffle=True, generator=order)
    batches = strategy.experimental_distribute_dataset(loader)
    test_batches = strategy.experimental_distribute_dataset(test_data, batch_size=config.global_batch_size)
    ts.utils.set_random_seed(config.seed)
    with strategy.scope():
        layers = [nn.Linear(28 * 28, 32), nn.ReLU(), nn.Dropout(config.dropout), nn.Linear(32, 10)]
        model = nn.Sequential(nn.Flatten(), *layers)
        optimizer = instantiate(config.optimizer, _convert_="all")(model.parameters())
        warm_up = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1, (step + 1) / config.warmup_steps))
        loss, accuracy = ts.metrics.Mean(), ts.metrics.SparseCategoricalAccuracy()
        epochs = ts.Variable(0, trainable=False, name="epochs")
    state = {"model": model, "optimizer": optimizer, "warm_up": warm_up, "loss": loss, "epochs": epochs}
    checkpoint = ts.train.Checkpoint(dataset=batches, **state)
    manager = ts.train.CheckpointManager(checkpoint, folder / "checkpoints", max_to_keep=2)

    def train_step(images: Tensor, labels: Tensor) -> None:
        optimizer.zero_grad()
        per_example_loss = nn.functional.cross_entropy(model(images), labels, reduction="none")
        ts.nn.compute_average_loss(per_example_loss, global_batch_size="actual").backward()
        optimizer.step()
        warm_up.step()
        loss.update_state(per_example_loss)

    @torch.no_grad()
    def test_step(images: Tensor, labels: Tensor) -> None:
        accuracy.update_state(labels, model(images))

    def begin_random_numbers() -> None:
        # Each replica draws its own from here: no state of a generator needs to be saved.
        ts.utils.set_random_seed(config.seed + 1 + handler.total_run_calls)

    def save() -> None:
        manager.save()
        begin_random_numbers()

    # Restores the latest checkpoint. When a process gets SIGTERM, all save after the same step, and end.
    handler = ts.experimental.PreemptionCheckpointHandler(None, manager)
    if restored := manager.latest_checkpoint:
        begin_random_numbers()
        say(f"Going on with epoch {int(epochs) + 1} after step {handler.total_run_calls}: {folder} was there already.")
    while int(epochs) < config.epochs:
        title, num_done = f"Epoch {int(epochs) + 1}", handler.total_run_calls % len(loader)
        model.train()
        for batch in tqdm(batches, title, len(loader), initial=num_done, leave=False, disable=hidden):
            handler.run(strategy.run, train_step, args=batch)
            if handler.total_run_calls % config.save_every == 0:
                save()
            kill_if_asked_to(config.kill, handler.total_run_calls, restored)
        model.eval()
        for batch in test_batches:
            strategy.run(test_step, args=batch)
        say(f"{title}, loss: {float(loss.result()):.4f}, test accuracy: {float(accuracy.result()):.4f}")
        loss.reset_state()
        accuracy.reset_state()
        epochs.assign_add(1)
        save()
    say(f"Trained for {config.epochs} epochs, {handler.total_run_calls} steps. The same folder goes on: {folder}")


def kill_if_asked_to(kill: DictConfig, step: int, restored: str | None) -> None:
    """End this process as a crash or the kernel does, without a word, but only in the first start."""
    job = ts.cluster_resolver.find_job() if step == kill.step else None
    rank, num_restarts = (job.rank, job.attempt) if job else (0, 0)
    if (rank, step, num_restarts, restored) == (kill.rank, kill.step, 0, None):
        os.kill(os.getpid(), signal.SIGKILL)


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
