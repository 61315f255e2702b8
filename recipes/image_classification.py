"""A small ResNet, augmented images, SyncBatchNorm; a second start goes on. Commands: conf/image_classification.yaml."""

from __future__ import annotations

from pathlib import Path

import hydra  # pip install hydra-core
import numpy as np
import torch
from hydra.core.hydra_config import HydraConfig
from hydra.utils import instantiate
from omegaconf import DictConfig
from torch import Tensor, nn
from tqdm import tqdm

import torchstrategy as ts

IMAGES = Path(__file__).parent / "data" / "fashion_mnist_slice.npz"
CONF = "." if Path(__file__).with_suffix(".yaml").exists() else "../conf"  # a copy has it beside itself


@hydra.main(config_path=CONF, config_name="image_classification", version_base="1.3")
def main(config: DictConfig) -> None:
    """Train and test; after every epoch save all that the next one depends on, the order of the data as well."""
    folder = Path(HydraConfig.get().runtime.output_dir)
    torch.set_default_dtype(getattr(torch, config.dtype))  # of the data and the weights
    strategy = instantiate(config.strategy, _convert_="all")
    say = tqdm.write if strategy.is_chief else lambda _: None
    train_data, test_data = (load_images(config.data, part) for part in ("train", "test"))
    # Each example comes with a number that decides how it is augmented: the same in all processes and after a restart.
    numbers = ts.data.Dataset.random(config.seed, rerandomize_each_iteration=True)
    train_data = ts.data.Dataset.zip(train_data.shuffle(len(train_data), config.seed), numbers).map(augment)
    batches = strategy.experimental_distribute_dataset(train_data.batch(config.global_batch_size).prefetch(2))
    test_batches = strategy.experimental_distribute_dataset(test_data.batch(config.global_batch_size))
    torch.manual_seed(config.seed)
    with strategy.scope():
        model = make_model(config.depth, config.width)
        if config.sync_batch_norm:  # statistics of the global batch, not of each replica's share
            model = ts.nn.SyncBatchNorm.convert_sync_batchnorm(model)
        optimizer = instantiate(config.optimizer, _convert_="all")(model.parameters())
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, config.epochs * len(batches))
        loss, accuracy = ts.metrics.Mean(), ts.metrics.SparseCategoricalAccuracy()
        epochs = ts.Variable(0, trainable=False, name="epochs")
    state = {"model": model, "optimizer": optimizer, "schedule": schedule, "dataset": batches, "epochs": epochs}
    manager = ts.train.CheckpointManager(ts.train.Checkpoint(**state), folder / "checkpoints", max_to_keep=2)

    def train_step(images: Tensor, labels: Tensor) -> None:
        optimizer.zero_grad()
        per_example_loss = nn.functional.cross_entropy(model(images), labels, reduction="none")
        ts.nn.compute_average_loss(per_example_loss, global_batch_size="actual").backward()
        optimizer.step()
        schedule.step()
        loss.update_state(per_example_loss)

    @torch.no_grad()
    def test_step(images: Tensor, labels: Tensor) -> None:
        accuracy.update_state(labels, model(images))

    if manager.restore_or_initialize():
        say(f"Going on with epoch {int(epochs) + 1}.")
    while int(epochs) < (config.stop_after or config.epochs):
        epochs.assign_add(1)
        model.train()
        for batch in tqdm(batches, f"Epoch {int(epochs)}", leave=False, disable=not strategy.is_chief or None):
            strategy.run(train_step, args=batch)
        model.eval()
        for batch in test_batches:
            strategy.run(test_step, args=batch)
        say(f"Epoch {int(epochs)}, loss: {float(loss.result()):.4f}, test accuracy: {float(accuracy.result()):.4f}")
        loss.reset_state()
        accuracy.reset_state()
        manager.save()
    say(f"Trained for {int(epochs)} epochs. The same folder goes on from here: {folder}")


def augment(example: tuple[Tensor, Tensor], number: Tensor) -> tuple[Tensor, Tensor]:
    """Move an image `[1, 28, 28]` by up to 2 pixels and mirror it half of the time, as a random number says."""
    image, label = example
    dx, dy, is_mirrored = int(number) % 5, int(number) // 5 % 5, int(number) // 25 % 2
    moved = nn.functional.pad(image, (2, 2, 2, 2))[:, dy : dy + 28, dx : dx + 28]
    return moved.flip(-1) if is_mirrored else moved, label


class Sum(nn.Sequential):
    """The sum of what two modules make of the same images."""

    def forward(self, images: Tensor) -> Tensor:
        """Return it where it is positive."""
        return nn.functional.relu(self[0](images) + self[1](images))


def make_block(inputs: int, outputs: int, stride: int) -> Sum:
    """Build two convolutions and a shortcut, from `[batch, inputs, h, w]` to `[batch, outputs, h / stride, ...]`."""
    first, second = (nn.Conv2d(i, outputs, 3, s, 1, bias=False) for i, s in ((inputs, stride), (outputs, 1)))
    layers = nn.Sequential(first, nn.BatchNorm2d(outputs), nn.ReLU(), second, nn.BatchNorm2d(outputs))
    return Sum(layers, nn.Identity() if inputs == outputs else nn.Conv2d(inputs, outputs, 1, stride, bias=False))


def make_model(depth: int, width: int) -> nn.Sequential:
    """Build a ResNet of 6n + 2 layers, from images `[batch, 1, 28, 28]` to logits `[batch, 10]`."""
    sizes = [width * 2 ** (i * 3 // (depth // 2 - 1)) for i in range(depth // 2 - 1)]
    blocks = [make_block(i, o, 1 if i == o else 2) for i, o in zip([width, *sizes], sizes, strict=False)]
    stem = [nn.Conv2d(1, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU()]
    return nn.Sequential(*stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(sizes[-1], 10))


def load_images(file: str | None, part: str) -> ts.data.Dataset:
    """Return images `[1, 28, 28]` in [0, 1] and labels, to "train" or "test" with; made up where there is no file."""
    if file or IMAGES.exists():
        arrays = np.load(file or IMAGES)
        images, labels = arrays[f"{part}_images"], arrays[f"{part}_labels"]
    else:
        print(f"Made up images to {part} with, because {IMAGES} is not there. data=FILE.npz reads yours.")
        labels = np.arange(2000) % 10
        images = np.random.default_rng(len(part)).integers(128, size=(2000, 28, 28)) + 12 * labels[:, None, None]
    return ts.data.Dataset.from_tensor_slices((torch.tensor(images[:, None]) / 255, torch.tensor(labels).long()))


if __name__ == "__main__":
    main()
