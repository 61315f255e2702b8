"""Training on sharded files: each process reads files of its own, and a second start goes on within the epoch.

The commands that run it are at the head of conf/sharded_files.yaml.
"""

from __future__ import annotations

from pathlib import Path

import checks
import hydra
import jobs
import profiles
import torch
from hydra.core.hydra_config import HydraConfig
from hydra.utils import instantiate
from omegaconf import DictConfig
from shards import FORMATS, make_files
from torch import Tensor, nn
from tqdm import tqdm

import torchstrategy as ts


@hydra.main(config_path="../conf", config_name="sharded_files", version_base="1.3")
@jobs.launched
def main(config: DictConfig) -> None:
    """Train, saving the position in the data as well; tell where a second start goes on, and what was seen."""
    checks.integers(config, "num_shards", "shuffle_buffer", "global_batch_size", "epochs", "save_every")
    checks.integers(config, "stop_at_step", may_be_null=True)
    checks.profile(config)
    folder = Path(config.folder)
    strategy = instantiate(config.strategy, _convert_="all")
    jobs.check_strategy(strategy)

    def say(message: str) -> None:
        if strategy.is_chief:
            tqdm.write(message)

    dataset, num_examples = make_dataset(config, folder)
    batches = strategy.experimental_distribute_dataset(dataset, auto_shard_policy=ts.data.AutoShardPolicy.FILE)
    say(batches.explain_sharding())

    torch.manual_seed(config.seed)
    with strategy.scope():
        model = instantiate(config.model)
        optimizer = instantiate(config.optimizer, _convert_="all")(model.parameters())
        if config.tune:
            ts.utils.tune(model, optimizer, torch.zeros(2, 1, 28, 28))
        loss, accuracy = ts.metrics.Mean(name="loss"), ts.metrics.SparseCategoricalAccuracy(name="accuracy")
        counts = {name: ts.Variable(0, trainable=False, name=name) for name in ("epochs", "steps", "starts")}
        # How often each example was seen in this epoch. Every replica counts its own; reading adds them up.
        times_seen = ts.Variable(
            torch.zeros(num_examples, dtype=torch.float64),
            trainable=False,
            synchronization=ts.VariableSynchronization.ON_READ,
            aggregation=ts.VariableAggregation.SUM,
        )

    def train_step(images: Tensor, labels: Tensor, ids: Tensor) -> None:
        optimizer.zero_grad()
        logits = model(images)
        per_example_loss = nn.functional.cross_entropy(logits, labels, reduction="none")
        ts.nn.compute_average_loss(per_example_loss, global_batch_size="actual").backward()
        optimizer.step()
        loss.update_state(per_example_loss)
        accuracy.update_state(labels, logits)
        times_seen.assign_add(torch.bincount(ids, minlength=num_examples).double())

    checkpoint = ts.train.Checkpoint(
        model=model, optimizer=optimizer, dataset=batches, loss=loss, accuracy=accuracy, seen=times_seen, **counts
    )
    manager = ts.train.CheckpointManager(checkpoint, folder / "checkpoints", max_to_keep=2)
    if manager.restore_or_initialize():
        say(
            f"Going on with epoch {int(counts['epochs']) + 1} after step {int(counts['steps'])}: "
            f"{int(times_seen.sum().round())} of {num_examples} examples were seen."
        )
    num_steps = -(-num_examples // config.global_batch_size)
    hidden = None if strategy.is_chief else True  # None hides the bar where stderr is no terminal
    with profiles.Profile(config, folder, strategy) as profile:
        while int(counts["epochs"]) < config.epochs:
            counts["starts"].assign_add(1)
            num_done = int(times_seen.sum().round()) // config.global_batch_size
            title = f"Epoch {int(counts['epochs']) + 1}"
            steps = profile.steps(batches)
            for batch in tqdm(steps, title, num_steps, initial=num_done, leave=False, disable=hidden, unit="step"):
                strategy.run(train_step, args=batch)
                counts["steps"].assign_add(1)
                if int(counts["steps"]) % config.save_every == 0:
                    manager.save()
                if int(counts["steps"]) == config.stop_at_step:
                    say(f"Stopped after step {config.stop_at_step}. Start again to go on from the last checkpoint.")
                    return

            seen = times_seen.round()
            say(
                f"{title}, Loss: {float(loss.result()):.4f}, Accuracy: {100 * float(accuracy.result()):.2f}; "
                f"{int(seen.sum())} examples were seen in {int(counts['starts'])} start(s): "
                f"{int((seen == 0).sum())} of {num_examples} never, {int((seen > 1).sum())} more than once"
            )
            loss.reset_state()
            accuracy.reset_state()
            times_seen.assign(torch.zeros_like(times_seen))
            counts["starts"].assign(0)
            counts["epochs"].assign_add(1)
            manager.save()
    say(f"Trained for {config.epochs} epochs. Files: {folder}")


def make_dataset(config: DictConfig, folder: Path) -> tuple[ts.data.Dataset, int]:
    """Write the shards if need be; return the batches of images, labels and ids, and the number of examples."""
    if config.format not in FORMATS:
        raise ValueError(f"format must be one of {', '.join(FORMATS)}. Received: {config.format}")
    form = FORMATS[config.format]
    train_data, _ = instantiate(config.data, _convert_="all")
    name = f"{HydraConfig.get().runtime.choices.data}-{config.format}-{config.num_shards}"
    files = make_files(folder / name, form, config.num_shards, *train_data.tensors)
    dataset = (
        ts.data.Dataset.from_files(files, form.reader)
        .map(form.to_tuple)
        .shuffle(config.shuffle_buffer, seed=config.seed)
        .map(prepare)
        .batch(config.global_batch_size)
    )
    return dataset, len(train_data)


def prepare(image: Tensor, label: Tensor, number: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the image ``[1, 28, 28]`` in [0, 1], and its label and number as indices."""
    return image[None] / 255, label.long(), number.long()


if __name__ == "__main__":
    main()
