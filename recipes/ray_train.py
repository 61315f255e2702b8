"""A job of Ray, on as many workers as there are, with the weights of one replica. Commands: conf/ray_train.yaml."""

from __future__ import annotations

import os
import signal
import tempfile
from pathlib import Path

import hydra  # pip install hydra-core
import numpy as np
import ray.train
import torch
from hydra.core.hydra_config import HydraConfig
from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf
from ray.train.torch import TorchTrainer
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import torchstrategy as ts

IMAGES = Path(__file__).parent / "data" / "fashion_mnist_slice.npz"
CONF = "." if Path(__file__).with_name("ray_train.yaml").exists() else "../conf"  # a copy has it beside itself


@hydra.main(config_path=CONF, config_name="ray_train", version_base="1.3")
def main(config: DictConfig) -> None:
    """Let Ray run `train` on each worker; the same folder goes on from the last checkpoint that was reported."""
    folder = Path(HydraConfig.get().runtime.output_dir)
    config.data = os.path.abspath(config.data or IMAGES)  # workers have another working folder
    run = ray.train.RunConfig(
        name="training",
        storage_path=str(folder),
        failure_config=ray.train.FailureConfig(max_failures=config.max_failures),
        checkpoint_config=ray.train.CheckpointConfig(num_to_keep=2),
    )
    scaling = ray.train.ScalingConfig(**{**config.workers, "num_workers": tuple(config.workers.num_workers)})
    settings = OmegaConf.to_container(config, resolve=True)
    result = TorchTrainer(train, train_loop_config=settings, scaling_config=scaling, run_config=run).fit()
    figures = ", ".join(f"{name}: {value:.4g}" for name, value in result.metrics.items())
    print(f"Trained, {figures}. The same folder goes on from here: {folder}")


def train(settings: dict) -> None:
    """Runs on each worker; when one is lost or comes, on all of them anew, from the last reported checkpoint."""
    config = OmegaConf.create(settings)
    torch.set_default_dtype(getattr(torch, config.dtype))  # of the data and the weights
    strategy = instantiate(config.strategy, _convert_="all")
    # The order of the examples has a generator of its own, whose state belongs to the dataset's position.
    order = torch.Generator().manual_seed(config.seed)
    train_data, test_data = (load_images(config.data, part) for part in ("train", "test"))
    loader = DataLoader(train_data, batch_size=config.global_batch_size, shuffle=True, generator=order)
    batches = strategy.experimental_distribute_dataset(loader)
    test_batches = strategy.experimental_distribute_dataset(test_data, batch_size=config.global_batch_size)
    ts.utils.set_random_seed(config.seed)
    with strategy.scope():
        model = nn.Sequential(nn.Flatten(), nn.Linear(28 * 28, 32), nn.ReLU(), nn.Linear(32, 10))
        optimizer = instantiate(config.optimizer, _convert_="all")(model.parameters())
        loss, accuracy = ts.metrics.Mean(), ts.metrics.SparseCategoricalAccuracy()
        steps, epochs = (ts.Variable(0, trainable=False, name=name) for name in ("steps", "epochs"))
    state = {"model": model, "optimizer": optimizer, "loss": loss, "steps": steps, "epochs": epochs}
    checkpoint = ts.train.Checkpoint(dataset=batches, **state)
    if reported := ray.train.get_checkpoint():
        with reported.as_directory() as place:
            checkpoint.read(f"{place}/training").assert_consumed()

    def report(**metrics: float) -> None:
        """Give Ray a checkpoint, which it copies to its storage; all workers call it."""
        with tempfile.TemporaryDirectory() as place:
            checkpoint.write(f"{place}/training")  # the chief does
            kept = ray.train.Checkpoint.from_directory(place) if strategy.is_chief else None
            ray.train.report({"steps": int(steps), "epochs": int(epochs), **metrics}, checkpoint=kept)

    def train_step(images: Tensor, labels: Tensor) -> None:
        optimizer.zero_grad()
        per_example_loss = nn.functional.cross_entropy(model(images), labels, reduction="none")
        ts.nn.compute_average_loss(per_example_loss, global_batch_size="actual").backward()
        optimizer.step()
        loss.update_state(per_example_loss)

    @torch.no_grad()
    def test_step(images: Tensor, labels: Tensor) -> None:
        accuracy.update_state(labels, model(images))

    was_warned = False
    while int(epochs) < config.epochs:
        for batch in batches:
            strategy.run(train_step, args=batch)
            steps.assign_add(1)
            is_warned = ray.train.get_preemption_info() is not None  # a node will be taken away; equal on all workers
            if int(steps) % config.report_every == 0 or is_warned > was_warned:
                report()
            was_warned = is_warned
            if int(steps) == config.kill_at_step and reported is None and not strategy.is_chief:
                os.kill(os.getpid(), signal.SIGKILL)  # to see what happens
        for batch in test_batches:
            strategy.run(test_step, args=batch)
        epochs.assign_add(1)
        figures = {"loss": float(loss.result()), "accuracy": float(accuracy.result())}
        loss.reset_state()
        accuracy.reset_state()
        report(**figures)  # last, so that what goes on from here has all of it behind


def load_images(file: str, part: str) -> TensorDataset:
    """Return images `[1, 28, 28]` in [0, 1] and labels, to "train" or "test" with; made up where there is no file."""
    if Path(file).exists():
        arrays = np.load(file)
        images, labels = arrays[f"{part}_images"], arrays[f"{part}_labels"]
    else:
        print(f"Made up images to {part} with, because {file} is not there. data=FILE.npz reads yours.")
        labels = np.arange(2000) % 10
        images = np.random.default_rng(len(part)).integers(128, size=(2000, 28, 28)) + 12 * labels[:, None, None]
    return TensorDataset(torch.tensor(images[:, None]) / 255, torch.tensor(labels).long())


if __name__ == "__main__":
    main()
