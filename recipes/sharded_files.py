"""Sharded files, each read by one process; a second start goes on in the epoch. Commands: conf/sharded_files.yaml."""

from __future__ import annotations

import shutil
import uuid
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
CONF = "." if Path(__file__).with_name("sharded_files.yaml").exists() else "../conf"  # a copy has it beside itself


@hydra.main(config_path=CONF, config_name="sharded_files", version_base="1.3")
def main(config: DictConfig) -> None:
    """Train, saving the position in the data as well; tell where a second start goes on, and what was seen."""
    folder = Path(HydraConfig.get().runtime.output_dir)
    shards = Path(config.shards or folder / f"{config.num_shards}_shards")
    if not shards.exists() and not config.shards:
        write_shards(shards, config.num_shards)
    strategy = instantiate(config.strategy, _convert_="all")
    say = tqdm.write if strategy.is_chief else lambda _: None

    files = ts.data.Dataset.from_files(sorted(shards.iterdir()), instantiate(config.reader, _convert_="all"))
    num_examples = sum(1 for _ in files)
    dataset = files.shuffle(config.shuffle_buffer, seed=config.seed).map(prepare).batch(config.global_batch_size)
    batches = strategy.experimental_distribute_dataset(dataset, auto_shard_policy=ts.data.AutoShardPolicy.FILE)
    say(batches.explain_sharding())

    torch.manual_seed(config.seed)
    with strategy.scope():
        model = nn.Sequential(nn.Flatten(), nn.Linear(28 * 28, 32), nn.ReLU(), nn.Linear(32, 10))
        optimizer = instantiate(config.optimizer, _convert_="all")(model.parameters())
        loss, accuracy = ts.metrics.Mean(), ts.metrics.SparseCategoricalAccuracy()
        counts = {name: ts.Variable(0, trainable=False, name=name) for name in ("epochs", "steps", "starts")}
        # How often each example was seen in this epoch. Every replica counts its own; reading adds them up.
        on_read = {"synchronization": ts.VariableSynchronization.ON_READ, "aggregation": ts.VariableAggregation.SUM}
        seen = ts.Variable(torch.zeros(num_examples, dtype=torch.float64), trainable=False, **on_read)

    def train_step(images: Tensor, labels: Tensor, ids: Tensor) -> None:
        optimizer.zero_grad()
        logits = model(images)
        per_example_loss = nn.functional.cross_entropy(logits, labels, reduction="none")
        ts.nn.compute_average_loss(per_example_loss, global_batch_size="actual").backward()
        optimizer.step()
        loss.update_state(per_example_loss)
        accuracy.update_state(labels, logits)
        seen.assign_add(torch.bincount(ids, minlength=num_examples).double())

    state = {"model": model, "optimizer": optimizer, "loss": loss, "accuracy": accuracy, "seen": seen, **counts}
    checkpoint = ts.train.Checkpoint(dataset=batches, **state)
    manager = ts.train.CheckpointManager(checkpoint, folder / "checkpoints", max_to_keep=2)
    if manager.restore_or_initialize():
        where = f"epoch {int(counts['epochs']) + 1} after step {int(counts['steps'])}"
        say(f"Going on with {where}: {int(seen.sum())} of {num_examples} examples were seen.")
    while int(counts["epochs"]) < config.epochs:
        counts["starts"].assign_add(1)
        title = f"Epoch {int(counts['epochs']) + 1}"
        for batch in tqdm(batches, title, leave=False, disable=not strategy.is_chief or None):
            strategy.run(train_step, args=batch)
            counts["steps"].assign_add(1)
            if int(counts["steps"]) % config.save_every == 0:
                manager.save()
            if int(counts["steps"]) == config.stop_at_step:
                say(f"Stopped after step {config.stop_at_step}. Start again to go on from the last checkpoint.")
                return

        times = seen.round()
        say(
            f"{title}, loss: {float(loss.result()):.4f}, accuracy: {float(accuracy.result()):.4f}; {int(times.sum())} "
            f"examples were seen in {int(counts['starts'])} start(s): {int((times == 0).sum())} of {num_examples} "
            f"never, {int((times > 1).sum())} more than once"
        )
        loss.reset_state()
        accuracy.reset_state()
        seen.assign(torch.zeros_like(seen))
        counts["starts"].assign(0)
        counts["epochs"].assign_add(1)
        manager.save()
    say(f"Trained for {config.epochs} epochs. The same folder goes on from here: {folder}")


def prepare(example: dict[str, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """Return the image `[1, 28, 28]` in [0, 1], and its label and number as indices."""
    return example["images"][None] / 255, example["labels"].long(), example["ids"].long()


def write_shards(folder: Path, number: int) -> None:
    """Write example files for a start; of several processes all write, and one gives its folder the name."""
    if IMAGES.exists():
        images, labels = (np.load(IMAGES)[name] for name in ("train_images", "train_labels"))
    else:
        print(f"Made up images, because {IMAGES} is not there. shards=FOLDER reads your files.")
        labels = np.arange(2000) % 10
        images = (np.random.default_rng(0).integers(128, size=(2000, 28, 28)) + 12 * labels[:, None, None]).astype("u1")
    partial = folder.with_name(f".{uuid.uuid4()}")
    partial.mkdir()
    for k in range(number):
        mine = np.arange(k, len(images), number)
        np.savez(partial / f"{k:03}.npz", images=images[mine], labels=labels[mine], ids=mine)
    try:
        partial.rename(folder)
    except OSError:
        shutil.rmtree(partial)
        if not folder.exists():  # else another process was first
            raise


if __name__ == "__main__":
    main()
