"""The tf.distribute tutorial: a training loop of your own under a strategy. Commands: conf/custom_loop.yaml."""

from __future__ import annotations

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
CONF = "." if Path(__file__).with_name("custom_loop.yaml").exists() else "../conf"  # a copy has it beside itself


@hydra.main(config_path=CONF, config_name="custom_loop", version_base="1.3")
def main(config: DictConfig) -> None:
    """Train, test and save after every epoch; then restore without a strategy and test again."""
    folder = Path(HydraConfig.get().runtime.output_dir)
    torch.set_default_dtype(getattr(torch, config.dtype))  # of the data and the weights
    strategy = instantiate(config.strategy, _convert_="all")
    say = tqdm.write if strategy.is_chief else lambda _: None
    say(f"Number of replicas: {strategy.num_replicas_in_sync}")

    # Unless its size is given, the batch that is split between the replicas grows with their number.
    batch_size = config.global_batch_size or config.batch_size_per_replica * strategy.num_replicas_in_sync
    train_data, test_data = (load_images(config.data, part) for part in ("train", "test"))
    torch.manual_seed(config.seed)
    train_batches = strategy.experimental_distribute_dataset(DataLoader(train_data, batch_size, shuffle=True))
    test_batches = strategy.experimental_distribute_dataset(DataLoader(test_data, batch_size))

    # All that has state is made in the scope, so that every replica gets its copy.
    with strategy.scope():
        model = make_model()
        optimizer = instantiate(config.optimizer, _convert_="all")(model.parameters())
        metrics = {name: ts.metrics.SparseCategoricalAccuracy() for name in ("accuracy", "test accuracy")}
        metrics["test loss"] = ts.metrics.Mean()
        checkpoint = ts.train.Checkpoint(model=model, optimizer=optimizer)
    if config.tune:
        ts.utils.tune(model, optimizer, torch.zeros(2, 1, 28, 28))

    def train_step(images: Tensor, labels: Tensor) -> Tensor:
        optimizer.zero_grad()
        with torch.autocast(images.device.type, torch.bfloat16, enabled=config.bf16):
            logits = model(images).to(torch.get_default_dtype())
        # This replica's share of the global mean: the replicas' gradients are summed.
        per_example_loss = nn.functional.cross_entropy(logits, labels, reduction="none")
        loss = ts.nn.compute_average_loss(per_example_loss, global_batch_size="actual")
        loss.backward()
        ts.get_replica_context().sum_gradients(optimizer)  # before the clipping, which needs the summed gradients
        nn.utils.clip_grad_norm_(model.parameters(), config.clip_norm)
        optimizer.step()
        metrics["accuracy"].update_state(labels, logits)
        return loss.detach()

    @torch.no_grad()
    def test_step(images: Tensor, labels: Tensor) -> None:
        with torch.autocast(images.device.type, torch.bfloat16, enabled=config.bf16):
            logits = model(images).to(torch.get_default_dtype())
        metrics["test loss"].update_state(nn.functional.cross_entropy(logits, labels, reduction="none"))
        metrics["test accuracy"].update_state(labels, logits)

    # On a TPU all that happens in such a function is one program; elsewhere it runs as it is.
    @ts.function(jit_compile=False)
    def distributed_train_step(batch: tuple[Tensor, Tensor]) -> Tensor:
        return strategy.reduce("SUM", strategy.run(train_step, args=batch), axis=None)

    hidden = not strategy.is_chief or None  # None hides the bar where stderr is no terminal
    profile = ts.profiler.Profile(folder / "profile", strategy, record=config.profile_steps)
    with ts.summary.create_file_writer(folder).as_default(), profile:
        for epoch in range(1, config.epochs + 1):
            bar = tqdm(profile.steps(train_batches), f"Epoch {epoch}", leave=False, disable=hidden)
            model.train()
            losses = [distributed_train_step(batch) for batch in bar]  # are read when the epoch ends: reading waits
            model.eval()
            for batch in test_batches:
                strategy.run(test_step, args=batch)
            checkpoint.save(folder / "checkpoints" / "ckpt")
            figures = {"loss": sum(map(float, losses)) / len(losses)}
            for name, metric in metrics.items():
                figures[name] = float(metric.result())
                metric.reset_state()
            say(f"Epoch {epoch}, " + ", ".join(f"{name}: {value:.4f}" for name, value in figures.items()))
            for name, value in figures.items():
                ts.summary.scalar(name, value, step=epoch)

    if strategy.is_chief:
        restored = make_model().requires_grad_(requires_grad=False)
        ts.train.Checkpoint(model=restored).restore(ts.train.latest_checkpoint(folder / "checkpoints"))
        right = sum(int((restored(x).argmax(1) == y).sum()) for x, y in DataLoader(test_data, 1000)) / len(test_data)
        say(f"Test accuracy of the saved model, restored without a strategy: {right:.4f}; files: {folder}")


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
