"""Asynchronous training: workers pull parameters and push gradients. Commands: conf/parameter_server.yaml."""

from __future__ import annotations

import contextlib
from collections import deque
from pathlib import Path

import hydra  # pip install hydra-core
import numpy as np
import torch
from hydra.core.hydra_config import HydraConfig
from hydra.utils import instantiate
from omegaconf import DictConfig
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from tqdm import tqdm

import torchstrategy as ts

IMAGES = Path(__file__).parent / "data" / "fashion_mnist_slice.npz"
CONF = "." if Path(__file__).with_name("parameter_server.yaml").exists() else "../conf"  # a copy has it beside itself


@hydra.main(config_path=CONF, config_name="parameter_server", version_base="1.3")
def main(config: DictConfig) -> None:
    """Serve or coordinate: all tasks of a cluster run the same command, and TF_CONFIG tells each what it is."""
    resolver = ts.cluster_resolver.TFConfigClusterResolver()
    with contextlib.ExitStack() as stack:
        if not resolver.cluster_spec():  # a cluster on this host, for a try
            cluster = stack.enter_context(ts.testing.LocalCluster(config.cluster.workers, config.cluster.ps))
            resolver = cluster.resolver()
        jobs = {"chief", "worker", "ps"}
        if resolver.task_type not in jobs or not {"worker", "ps"} <= set(resolver.cluster_spec().jobs):
            raise SystemExit(f"This is no task of a chief, workers and ps in TF_CONFIG: {resolver.cluster_spec()}")
        if resolver.task_type != "chief":
            stack.enter_context(contextlib.suppress(KeyboardInterrupt))
            ts.Server(resolver.cluster_spec(), resolver.task_type, resolver.task_id).join()
            return
        strategy = stack.enter_context(contextlib.closing(instantiate(config.strategy)(resolver)))
        train(config, strategy)  # raises if a parameter server is lost; the next start goes on after the last epoch


def train(config: DictConfig, strategy: ts.ParameterServerStrategy) -> None:
    """Train, test and save after every epoch."""
    folder = Path(HydraConfig.get().runtime.output_dir)
    data = config.data or (IMAGES if IMAGES.exists() else None)  # what the chief has, the workers must have, too
    num_workers = strategy.cluster_spec.num_tasks("worker")
    coordinator = ts.coordinator.ClusterCoordinator(strategy)
    torch.manual_seed(config.seed)
    with strategy.scope():  # what is made in it lives on the parameter servers
        model = make_model()
        optimizer = instantiate(config.optimizer, _convert_="all")(model.parameters())
        accuracy = ts.metrics.SparseCategoricalAccuracy()
        epochs_done = ts.Variable(0, trainable=False, name="epochs_done")
    checkpoint = ts.train.Checkpoint(model=model, optimizer=optimizer, epochs_done=epochs_done)
    manager = ts.train.CheckpointManager(checkpoint, folder / "checkpoints", max_to_keep=2)
    if manager.restore_or_initialize():
        tqdm.write(f"Going on after epoch {int(epochs_done)}: {folder} was there already.")
    first_epoch = int(epochs_done) + 1

    def make_batches() -> ts.data.Dataset:
        """Runs on each worker: its share of the data, for ever, in an order of its own."""
        worker = ts.coordinator.experimental_get_current_worker_index()
        images = ts.data.Dataset.from_tensor_slices(load_images(data, "train").tensors)
        share = images.shard(num_workers, worker).shuffle(len(images), seed=config.seed + first_epoch)
        return share.batch(config.batch_size).repeat()

    def train_step(batches):  # noqa: ANN001, ANN202 - the worker's own iterator
        """Runs on a worker: parameters are pulled before it, `step` sends gradients to the parameter servers."""
        images, labels = next(batches)
        optimizer.zero_grad()
        logits = model(images)
        loss = nn.functional.cross_entropy(logits, labels)
        loss.backward()
        optimizer.step()
        accuracy.update_state(labels, logits)
        return loss.detach()

    batches = iter(coordinator.create_per_worker_dataset(make_batches))
    train_data, test_data = (load_images(data, part) for part in ("train", "test"))
    num_steps = config.steps_per_epoch or len(train_data) // config.batch_size
    for epoch in range(first_epoch, config.epochs + 1):
        running, losses = deque(), []
        for _ in tqdm(range(num_steps), f"Epoch {epoch}", leave=False, disable=None):
            running.append(coordinator.schedule(train_step, args=(batches,)))
            if len(running) > config.steps_ahead * num_workers:
                losses.append(running.popleft().fetch())
        coordinator.join()  # the parameters stand still from here on
        losses += [value.fetch() for value in running]
        with torch.no_grad():
            tested = sum(int((model(x).argmax(1) == y).sum()) for x, y in DataLoader(test_data, 1000)) / len(test_data)
        figures = {"loss": sum(losses) / num_steps, "accuracy": accuracy.result(), "test accuracy": tested}
        tqdm.write(f"Epoch {epoch}, " + ", ".join(f"{name}: {float(value):.4f}" for name, value in figures.items()))
        accuracy.reset_state()
        epochs_done.assign(epoch)
        manager.save()
    tqdm.write(f"Trained for {int(epochs_done)} epochs. The same folder goes on from here: {folder}")


def make_model() -> nn.Sequential:
    """Build the tutorial's network, from images `[batch, 1, 28, 28]` to logits `[batch, 10]`."""
    convolutions = [nn.Conv2d(1, 32, 3), nn.MaxPool2d(2), nn.ReLU(), nn.Conv2d(32, 64, 3), nn.MaxPool2d(2), nn.ReLU()]
    return nn.Sequential(*convolutions, nn.Flatten(), nn.Linear(64 * 5 * 5, 64), nn.ReLU(), nn.Linear(64, 10))


def load_images(file: str | Path | None, part: str) -> TensorDataset:
    """Return images `[1, 28, 28]` in [0, 1] and labels, to "train" or "test" with; made up where there is no file."""
    if file:
        arrays = np.load(file)
        images, labels = arrays[f"{part}_images"], arrays[f"{part}_labels"]
    else:
        print(f"Made up images to {part} with, because {IMAGES} is not there. data=FILE.npz reads yours.")
        labels = np.arange(2000) % 10
        images = np.random.default_rng(len(part)).integers(128, size=(2000, 28, 28)) + 12 * labels[:, None, None]
    return TensorDataset(torch.tensor(images[:, None]) / 255, torch.tensor(labels).long())


if __name__ == "__main__":
    main()
