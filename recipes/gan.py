"""A GAN on images of clothes: two models and two optimizers in one scope, trained in turn.

The commands that run it are at the head of conf/gan.yaml.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

import checks
import hydra
import jobs
import profiles
import torch
from hydra.core.hydra_config import HydraConfig
from hydra.utils import instantiate
from omegaconf import DictConfig
from reports import Report
from torch import Tensor, nn
from torch.nn.functional import softplus
from torch.optim import Optimizer
from torch.utils.data import DataLoader

import torchstrategy as ts


@hydra.main(config_path="../conf", config_name="gan", version_base="1.3")
@jobs.launched
def main(config: DictConfig) -> None:
    """Train both models; every few epochs save them and let the generator draw the same garments again."""
    numbers = ("epochs", "batch_size_per_replica", "noise_size", "width", "num_samples", "save_every")
    checks.integers(config, *numbers, "discriminator_steps", "generator_steps")
    checks.integers(config, "max_steps", may_be_null=True)
    checks.profile(config)
    started = time.perf_counter()
    run_path = Path(HydraConfig.get().runtime.output_dir)
    train_data, _ = instantiate(config.data, _convert_="all")
    strategy = instantiate(config.strategy, _convert_="all")
    num_replicas = strategy.num_replicas_in_sync
    jobs.check_strategy(strategy)
    title = f"gan on {HydraConfig.get().runtime.choices.data}, replicas: {num_replicas}"
    report = Report(run_path, title, is_chief=strategy.is_chief)
    report.say(f"Number of replicas: {num_replicas}")

    # Input: images and noise, each in global batches that are split between the replicas.
    global_batch_size = config.batch_size_per_replica * num_replicas
    torch.manual_seed(config.seed)
    loader = DataLoader(train_data, batch_size=global_batch_size, shuffle=True)
    noise = Noise(global_batch_size, config.noise_size, seed=config.seed)
    image_batches = strategy.experimental_distribute_dataset(loader)
    noise_batches = iter(strategy.experimental_distribute_dataset(noise))

    with strategy.scope():
        generator, discriminator = make_generator(config.noise_size, config.width), make_discriminator(config.width)
        gan = Gan(
            generator,
            discriminator,
            instantiate(config.generator_optimizer, _convert_="all")(generator.parameters()),
            instantiate(config.discriminator_optimizer, _convert_="all")(discriminator.parameters()),
        )
        if config.tune:
            ts.utils.tune(generator, gan.generator_optimizer, torch.zeros(2, config.noise_size))
            ts.utils.tune(discriminator, gan.discriminator_optimizer, torch.zeros(2, 1, 28, 28))
        checkpoint = ts.train.Checkpoint(
            generator=generator,
            discriminator=discriminator,
            generator_optimizer=gan.generator_optimizer,
            discriminator_optimizer=gan.discriminator_optimizer,
        )

    sample_noise = next(iter(Noise(config.num_samples, config.noise_size, seed=config.seed + 1)))
    profile = profiles.Profile(config, run_path, strategy)
    with report, profile:
        for epoch in range(1, config.epochs + 1):
            images = report.progress(itertools.islice(image_batches, config.max_steps), epoch, len(loader))
            images = profile.steps(images)
            figures = train_epoch(
                strategy, gan, images, noise_batches, config.discriminator_steps, config.generator_steps
            )
            report.add_epoch(**figures)
            if (config.epochs - epoch) % config.save_every == 0:  # the last epoch included
                checkpoint.save(run_path / "checkpoints" / "ckpt")
                if strategy.is_chief:
                    report.save_images(f"samples_{epoch:03}.png", gan.draw(sample_noise))
    report.save_learning_curve()
    report.say(
        f"Generator loss: {report.epochs[-1]['generator_loss']:.4f} after {config.epochs} epochs with {num_replicas} "
        f"replica(s) in {time.perf_counter() - started:.1f} s; files: {run_path}"
    )


class Noise:
    """Endless global batches of normally distributed noise.

    Noise is input like the images: each example has its own, whichever replica it goes to. Noise that the steps draw
    would depend on the number of replicas.

    Args:
        batch_size: examples in a global batch.
        size: numbers in an example's noise.
        seed: of the sequence that every iteration begins anew.
    """

    def __init__(self, batch_size: int, size: int, *, seed: int) -> None:
        self.shape = (batch_size, size)
        self.seed = seed

    def __iter__(self) -> Iterator[Tensor]:
        random = torch.Generator().manual_seed(self.seed)
        while True:
            yield torch.randn(self.shape, generator=random)


class Gan:
    """The step of each model, and how well it does; made in a strategy's scope.

    Args:
        generator: makes images of noise.
        discriminator: gives a logit for each image, positive for those it takes to be real.
        generator_optimizer: of the generator's parameters.
        discriminator_optimizer: of the discriminator's parameters.
    """

    def __init__(
        self,
        generator: nn.Module,
        discriminator: nn.Module,
        generator_optimizer: Optimizer,
        discriminator_optimizer: Optimizer,
    ) -> None:
        self.generator = generator
        self.discriminator = discriminator
        self.generator_optimizer = generator_optimizer
        self.discriminator_optimizer = discriminator_optimizer
        self.generator_loss = ts.metrics.Mean(name="generator_loss")
        self.real_loss = ts.metrics.Mean(name="real_loss")
        self.fake_loss = ts.metrics.Mean(name="fake_loss")

    def discriminator_step(self, images: Tensor, noise: Tensor) -> None:
        """Teach the discriminator to tell images from what the generator makes of noise."""
        self.discriminator_optimizer.zero_grad()
        with torch.no_grad():  # no gradients for the generator, which does not learn here
            fakes = self.generator(noise)
        real_loss = softplus(-self.discriminator(images))
        fake_loss = softplus(self.discriminator(fakes))
        (mean_loss(real_loss, images) + mean_loss(fake_loss, noise)).backward()
        self.discriminator_optimizer.step()
        self.real_loss.update_state(real_loss)
        self.fake_loss.update_state(fake_loss)

    def generator_step(self, noise: Tensor) -> None:
        """Teach the generator to make images that the discriminator takes to be real."""
        self.generator_optimizer.zero_grad()
        loss = softplus(-self.discriminator(self.generator(noise)))
        # The gradients pass through the discriminator, but must not stay there.
        mean_loss(loss, noise).backward(inputs=list(self.generator.parameters()))
        self.generator_optimizer.step()
        self.generator_loss.update_state(loss)

    def pop_losses(self) -> dict[str, float]:
        """Return the mean losses since the last call."""
        metrics = (self.generator_loss, self.real_loss, self.fake_loss)
        generator, real, fake = (float(metric.result()) for metric in metrics)
        for metric in metrics:
            metric.reset_state()
        return {"generator_loss": generator, "discriminator_loss": (real + fake) / 2}

    @torch.no_grad()
    def draw(self, noise: Tensor) -> Tensor:
        """Return the generator's images of some noise."""
        return self.generator(noise.to(next(self.generator.parameters()).device))


def mean_loss(per_example_loss: Tensor, inputs: Tensor) -> Tensor:
    """Return this replica's part of the mean over the global batch that ``inputs`` are a share of.

    Images and noise come in batches of their own: the last one of the images is shorter.
    """
    size = ts.get_replica_context().actual_batch_size(inputs)
    return ts.nn.compute_average_loss(per_example_loss, global_batch_size=size)


def train_epoch(
    strategy: ts.Strategy,
    gan: Gan,
    image_batches: Iterable[tuple[Tensor, Tensor]],
    noise_batches: Iterator[Tensor],
    discriminator_steps: int,
    generator_steps: int,
) -> dict[str, float]:
    """Train in rounds: so many steps of the discriminator, each with new images, then so many of the generator.

    Returns:
        The mean losses.
    """
    for step, (images, _) in enumerate(image_batches, start=1):
        strategy.run(gan.discriminator_step, args=(images, next(noise_batches)))
        if step % discriminator_steps == 0:
            for _ in range(generator_steps):
                strategy.run(gan.generator_step, args=(next(noise_batches),))
    return gan.pop_losses()


def make_generator(noise_size: int, width: int) -> nn.Sequential:
    """Build a network from noise ``[batch, noise_size]`` to images ``[batch, 1, 28, 28]`` in [0, 1].

    GroupNorm and not BatchNorm, whose statistics would be those of a replica's share.
    """
    return nn.Sequential(
        nn.Linear(noise_size, 2 * width * 7 * 7),
        nn.Unflatten(1, (2 * width, 7, 7)),
        nn.GroupNorm(8, 2 * width),
        nn.ReLU(),
        nn.ConvTranspose2d(2 * width, width, 4, stride=2, padding=1),
        nn.GroupNorm(8, width),
        nn.ReLU(),
        nn.ConvTranspose2d(width, width // 4, 4, stride=2, padding=1),
        nn.ReLU(),
        nn.Conv2d(width // 4, 1, 3, padding=1),
        nn.Sigmoid(),
    )


def make_discriminator(width: int) -> nn.Sequential:
    """Build a network from images ``[batch, 1, 28, 28]`` to one logit for each, ``[batch]``."""
    return nn.Sequential(
        nn.Conv2d(1, width, 4, stride=2, padding=1),
        nn.LeakyReLU(0.2),
        nn.Conv2d(width, 2 * width, 4, stride=2, padding=1),
        nn.LeakyReLU(0.2),
        nn.Flatten(),
        nn.Linear(2 * width * 7 * 7, 1),
        nn.Flatten(0),
    )


if __name__ == "__main__":
    main()
