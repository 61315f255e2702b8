"""A training loop of your own under a strategy: the tf.distribute tutorial, step by step, in PyTorch.

The commands that run it are at the head of conf/custom_loop.yaml.
"""

from __future__ import annotations

import functools
import itertools
import time
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
from torch.utils.data import DataLoader

import torchstrategy as ts

DTYPES = {"fp64": torch.float64, "fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@hydra.main(config_path="../conf", config_name="custom_loop", version_base="1.3")
@jobs.launched
def main(config: DictConfig) -> None:
    """Train, test after every epoch, save every second one, then restore without a strategy and test again."""
    checks.integers(config, "epochs", "batch_size_per_replica")
    checks.integers(config, "global_batch_size", "max_steps", may_be_null=True)
    checks.flags(config, "tune")
    checks.profile(config)
    started = time.perf_counter()
    run_path = Path(HydraConfig.get().runtime.output_dir)
    dtype = get_dtype(config.precision)
    torch.set_default_dtype(torch.float64 if dtype == torch.float64 else torch.float32)  # of the data and the weights
    train_data, test_data = instantiate(config.data, _convert_="all")
    strategy = instantiate(config.strategy, _convert_="all")
    num_replicas = strategy.num_replicas_in_sync
    jobs.check_strategy(strategy)
    title = f"custom_loop on {HydraConfig.get().runtime.choices.data}, replicas: {num_replicas}"
    report = Report(run_path, title, is_chief=strategy.is_chief)
    report.say(f"Number of replicas: {num_replicas}")

    # Input: unless its size is given, the batch that is split between the replicas grows with their number.
    global_batch_size = config.global_batch_size or config.batch_size_per_replica * num_replicas
    torch.manual_seed(config.seed)
    train_loader = DataLoader(train_data, batch_size=global_batch_size, shuffle=True)
    test_loader = DataLoader(test_data, batch_size=global_batch_size)
    train_batches = strategy.experimental_distribute_dataset(train_loader)
    test_batches = strategy.experimental_distribute_dataset(test_loader)

    # All that has state is made in the scope, so that every replica gets its copy.
    learning_rate = instantiate(config.learning_rate, global_batch_size=global_batch_size, _convert_="all")
    with strategy.scope():
        model = instantiate(config.model)
        optimizer = instantiate(config.optimizer, _convert_="all")(model.parameters(), lr=learning_rate.rate)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, learning_rate.factor)
        scaler = torch.amp.GradScaler(next(model.parameters()).device.type, enabled=dtype == torch.float16)
        test_loss = ts.metrics.Mean(name="test_loss")
        train_accuracy = ts.metrics.SparseCategoricalAccuracy(name="train_accuracy")
        test_accuracy = ts.metrics.SparseCategoricalAccuracy(name="test_accuracy")
        checkpoint = ts.train.Checkpoint(model=model, optimizer=optimizer, scheduler=scheduler, scaler=scaler)
    if config.tune:
        ts.utils.tune(model, optimizer, torch.zeros(2, 1, 28, 28))

    amp_dtype = dtype if dtype in (torch.bfloat16, torch.float16) else None

    def predict(images: Tensor) -> Tensor:
        with torch.autocast(images.device.type, amp_dtype, enabled=amp_dtype is not None):
            return model(images).to(torch.get_default_dtype())

    def train_step(batch: tuple[Tensor, Tensor]) -> Tensor:
        images, labels = batch
        optimizer.zero_grad()
        logits = predict(images)
        # This replica's share of the global mean: the replicas' gradients are summed.
        per_example_loss = nn.functional.cross_entropy(logits, labels, reduction="none")
        loss = ts.nn.compute_average_loss(per_example_loss, global_batch_size="actual")
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        ts.get_replica_context().sum_gradients(optimizer)  # before the clipping, which needs the summed gradients
        if config.clip_norm is not None:
            nn.utils.clip_grad_norm_(model.parameters(), config.clip_norm)
        scaler.step(optimizer)
        scaler.update()
        scheduler.step()
        train_accuracy.update_state(labels, logits)
        return loss.detach()

    # On a TPU all that happens in such a function is one program; elsewhere it runs as it is.
    @ts.function(jit_compile=False)
    def distributed_train_step(batch: tuple[Tensor, Tensor]) -> Tensor:
        per_replica_loss = strategy.run(train_step, args=(batch,))
        return strategy.reduce("SUM", per_replica_loss, axis=None)

    def test_step(batch: tuple[Tensor, Tensor]) -> None:
        images, labels = batch
        logits = predict(images)
        test_loss.update_state(nn.functional.cross_entropy(logits, labels, reduction="none"))
        test_accuracy.update_state(labels, logits)

    distributed_test_step = ts.function(functools.partial(strategy.run, test_step), jit_compile=False)

    profile = profiles.Profile(config, run_path, strategy)
    with report, profile:
        for epoch in range(1, config.epochs + 1):
            model.train()
            batches = report.progress(itertools.islice(train_batches, config.max_steps), epoch, len(train_loader))
            # Losses are read when the epoch ends: reading waits.
            losses = [distributed_train_step(batch) for batch in profile.steps(batches)]

            model.eval()
            with torch.no_grad():
                for batch in test_batches:
                    distributed_test_step(args=(batch,))

            if (config.epochs - epoch) % 2 == 0:  # every second one, the last included
                checkpoint.save(run_path / "checkpoints" / "ckpt")
            report.add_epoch(
                train_loss=sum(map(float, losses)) / len(losses),
                train_accuracy=float(train_accuracy.result()),
                test_loss=float(test_loss.result()),
                test_accuracy=float(test_accuracy.result()),
            )
            test_loss.reset_state()
            train_accuracy.reset_state()
            test_accuracy.reset_state()

    report.save_learning_curve()
    tell_result(config, report, run_path, strategy, test_loader, time.perf_counter() - started)


def tell_result(
    config: DictConfig,
    report: Report,
    run_path: Path,
    strategy: ts.Strategy,
    test_loader: DataLoader[tuple[Tensor, Tensor]],
    seconds: float,
) -> None:
    """Say how well the model does, as it was trained and as it was saved."""
    if strategy.is_chief:
        accuracy = test_restored_model(config, run_path, test_loader)
        report.say(f"Accuracy after restoring the saved model without strategy: {100 * accuracy:.2f}")
        report.say(
            f"Test accuracy: {report.epochs[-1]['test_accuracy']:.4f} after {config.epochs} epochs with "
            f"{strategy.num_replicas_in_sync} replica(s) in {seconds:.1f} s; files: {run_path}"
        )


def test_restored_model(config: DictConfig, run_path: Path, test_loader: DataLoader) -> float:
    """Restore the last checkpoint without a strategy and test it."""
    model = instantiate(config.model).eval()
    ts.train.Checkpoint(model=model).restore(ts.train.latest_checkpoint(run_path / "checkpoints"))
    accuracy = ts.metrics.SparseCategoricalAccuracy(name="eval_accuracy")
    with torch.no_grad():
        for images, labels in test_loader:
            accuracy.update_state(labels, model(images))
    return float(accuracy.result())


def get_dtype(precision: str) -> torch.dtype:
    """Return the type that the forward pass computes in."""
    if precision not in DTYPES:
        raise ValueError(f"precision must be one of {', '.join(DTYPES)}. Received: {precision}")
    return DTYPES[precision]


if __name__ == "__main__":
    main()
