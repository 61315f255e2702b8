"""A GAN on images of clothes: two models and two optimizers in one scope, trained in turn. Commands: conf/gan.yaml."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import hydra  # pip install hydra-core
import numpy as np
import torch
from hydra.core.hydra_config import HydraConfig
from hydra.utils import instantiate
from omegaconf import DictConfig
from torch import Tensor, nn
from torch.nn.functional import softplus
from torch.utils.data import DataLoader, TensorDataset
from tqdm import tqdm

import torchstrategy as ts

IMAGES = Path(__file__).parent / "data" / "fashion_mnist_slice.npz"
CONF = "." if Path(__file__).with_name("gan.yaml").exists() else "../conf"  # a copy has it beside itself


@hydra.main(config_path=CONF, config_name="gan", version_base="1.3")
def main(config: DictConfig) -> None:
    """Train both models; after each epoch save them and let the generator draw the same garments again."""
    folder = Path(HydraConfig.get().runtime.output_dir)
    torch.set_default_dtype(getattr(torch, config.dtype))  # of the data and the weights
    strategy = instantiate(config.strategy, _convert_="all")
    say = tqdm.write if strategy.is_chief else lambda _: None
    say(f"Number of replicas: {strategy.num_replicas_in_sync}")

    # Noise is input, as images are: what the steps drew would depend on the number of replicas.
    batch_size = config.global_batch_size or config.batch_size_per_replica * strategy.num_replicas_in_sync
    torch.manual_seed(config.seed)
    images = DataLoader(load_images(config.data), batch_size, shuffle=True)
    image_batches = strategy.experimental_distribute_dataset(images)
    noise_batches = iter(strategy.experimental_distribute_dataset(Noise(batch_size, config.noise_size, config.seed)))
    samples = next(iter(Noise(20, config.noise_size, config.seed + 1)))
    with strategy.scope():
        generator, discriminator = make_models(config.noise_size, config.width)
        make_optimizer = instantiate(config.optimizer, _convert_="all")
        generator_optimizer = make_optimizer(generator.parameters(), lr=config.generator_lr)
        discriminator_optimizer = make_optimizer(discriminator.parameters(), lr=config.discriminator_lr)
        losses = {name: ts.metrics.Mean() for name in ("generator", "real images", "fakes")}
    ts.utils.tune(generator, generator_optimizer, torch.zeros(2, config.noise_size))
    ts.utils.tune(discriminator, discriminator_optimizer, torch.zeros(2, 1, 28, 28))
    state = {"models": [generator, discriminator], "optimizers": [generator_optimizer, discriminator_optimizer]}
    checkpoint = ts.train.Checkpoint(**state)

    def discriminator_step(images: Tensor, noise: Tensor) -> None:
        discriminator_optimizer.zero_grad()
        with torch.no_grad():  # no gradients for the generator, which does not learn here
            fakes = generator(noise)
        real_loss, fake_loss = softplus(-discriminator(images)), softplus(discriminator(fakes))
        (mean_loss(real_loss, images) + mean_loss(fake_loss, noise)).backward()
        discriminator_optimizer.step()
        losses["real images"].update_state(real_loss)
        losses["fakes"].update_state(fake_loss)

    def generator_step(noise: Tensor) -> None:
        generator_optimizer.zero_grad()
        loss = softplus(-discriminator(generator(noise)))
        mean_loss(loss, noise).backward(inputs=list(generator.parameters()))  # none stay in the discriminator
        generator_optimizer.step()
        losses["generator"].update_state(loss)

    with ts.summary.create_file_writer(folder).as_default():
        for epoch in range(1, config.epochs + 1):
            for (images,) in tqdm(image_batches, f"Epoch {epoch}", leave=False, disable=not strategy.is_chief or None):
                strategy.run(discriminator_step, args=(images, next(noise_batches)))
                strategy.run(generator_step, args=(next(noise_batches),))
            checkpoint.save(folder / "checkpoints" / "ckpt")
            say(f"Epoch {epoch}, losses: " + ", ".join(f"{name} {float(m.result()):.4f}" for name, m in losses.items()))
            for name, loss in losses.items():
                ts.summary.scalar(f"loss/{name}", loss.result(), step=epoch)
                loss.reset_state()
            drawn = generator(samples.to(next(generator.parameters()).device)).detach()
            ts.summary.image("samples", drawn.movedim(1, -1), step=epoch, max_outputs=len(drawn))
    say(f"Files, for TensorBoard: {folder}")


def mean_loss(losses: Tensor, inputs: Tensor) -> Tensor:
    """Return this replica's part of the mean over its global batch: that of images may be shorter than of noise."""
    return ts.nn.compute_average_loss(losses, global_batch_size=ts.get_replica_context().actual_batch_size(inputs))


class Noise:
    """Endless batches `[batch_size, size]` of normally distributed noise, from the beginning for each iterator."""

    def __init__(self, batch_size: int, size: int, seed: int) -> None:
        self.shape, self.seed = (batch_size, size), seed

    def __iter__(self) -> Iterator[Tensor]:
        random = torch.Generator().manual_seed(self.seed)
        while True:
            yield torch.randn(self.shape, generator=random)


def make_models(noise_size: int, width: int) -> tuple[nn.Sequential, nn.Sequential]:
    """Build the generator, from noise to images in [0, 1], and the discriminator, from images to one logit for each."""
    layers = [nn.Linear(noise_size, 2 * width * 49), nn.Unflatten(1, (2 * width, 7, 7)), nn.GroupNorm(8, 2 * width)]
    layers += [nn.ReLU(), nn.ConvTranspose2d(2 * width, width, 4, 2, 1), nn.GroupNorm(8, width), nn.ReLU()]
    layers += [nn.ConvTranspose2d(width, width // 4, 4, 2, 1), nn.ReLU(), nn.Conv2d(width // 4, 1, 3, padding=1)]
    generator = nn.Sequential(*layers, nn.Sigmoid())
    layers = [nn.Conv2d(1, width, 4, 2, 1), nn.LeakyReLU(0.2), nn.Conv2d(width, 2 * width, 4, 2, 1), nn.LeakyReLU(0.2)]
    return generator, nn.Sequential(*layers, nn.Flatten(), nn.Linear(2 * width * 49, 1), nn.Flatten(0))


def load_images(file: str | None) -> TensorDataset:
    """Return images `[1, 28, 28]` in [0, 1]; made up where there is no file."""
    if file or IMAGES.exists():
        return TensorDataset(torch.tensor(np.load(file or IMAGES)["train_images"][:, None]) / 255)
    print(f"Made up images, because {IMAGES} is not there. data=FILE.npz reads yours.")
    return TensorDataset(torch.rand(2000, 1, 28, 28) * torch.linspace(0, 1, 28))


if __name__ == "__main__":
    main()
