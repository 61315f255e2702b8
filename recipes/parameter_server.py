"""Asynchronous training with parameter servers: a coordinator sends steps to workers, which pull and push.

The commands that run it are at the head of conf/parameter_server.yaml. Every task of a cluster may be started with the
same command: by its TF_CONFIG a worker or parameter server knows that it is to serve.
"""

from __future__ import annotations

import time
from collections import deque
from pathlib import Path

import checks
import clusters
import hydra
import profiles
import torch
from hydra.core.hydra_config import HydraConfig
from hydra.utils import instantiate
from omegaconf import DictConfig
from reports import Report
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import torchstrategy as ts

STEPS_AHEAD = 8  # scheduled for each worker before the coordinator waits for the oldest


@hydra.main(config_path="../conf", config_name="parameter_server", version_base="1.3")
def main(config: DictConfig) -> None:
    """Train on the cluster of TF_CONFIG, or on one that is started here."""
    checks.integers(config, "epochs", "batch_size")
    checks.integers(config, "steps_per_epoch", may_be_null=True)
    checks.profile(config)
    run_path = Path(HydraConfig.get().runtime.output_dir)
    cluster = config.cluster
    with clusters.find_or_start(cluster.ps, cluster.workers, run_path / "servers", cluster.max_restarts) as resolver:
        strategy = instantiate(config.strategy)(resolver, instantiate(config.partitioner))
        try:
            train(config, strategy)
        except (ts.errors.UnavailableError, ts.errors.CancelledError) as error:
            # A parameter server is lost, and with it the parameters; a function that waited says why it was cancelled.
            lost = error if isinstance(error, ts.errors.UnavailableError) else error.__cause__
            if not isinstance(lost, ts.errors.UnavailableError):
                raise
            raise SystemExit(f"{lost}\nThe same command with folder={run_path} goes on after the last epoch.") from None
        finally:
            strategy.close()


def train(config: DictConfig, strategy: ts.ParameterServerStrategy) -> None:
    """Train, test and save after every epoch; then restore without a strategy and test again."""
    started = time.perf_counter()
    run_path = Path(HydraConfig.get().runtime.output_dir)
    num_ps, num_workers = (strategy.cluster_spec.num_tasks(job) for job in ("ps", "worker"))
    coordinator = ts.coordinator.ClusterCoordinator(strategy)

    # What is made in the scope lives on the parameter servers; large tables are cut into parts.
    torch.manual_seed(config.seed)
    load_data = instantiate(config.data, _convert_="all", _partial_=True)  # the workers load it, too
    train_data, test_data = load_data()
    compute_loss = instantiate(config.loss)
    with strategy.scope():
        model = instantiate(config.model)
        optimizers = make_optimizers(config, model)
        epochs_done = ts.Variable(0, trainable=False, name="epochs_done")
        train_metric = instantiate(config.metric)
    checkpoint = ts.train.Checkpoint(model=model, epochs_done=epochs_done, **optimizers)
    manager = ts.train.CheckpointManager(checkpoint, run_path / "checkpoints", max_to_keep=2)
    title = f"parameter_server: {HydraConfig.get().runtime.choices.model}, workers: {num_workers}"
    restored_from = manager.restore_or_initialize()
    first_epoch = int(epochs_done) + 1
    report = Report(run_path, title, is_chief=True, first_epoch=first_epoch)
    if restored_from:
        report.say(f"Going on with epoch {first_epoch}, from {restored_from}")

    def make_batches() -> ts.data.Dataset:
        """Runs on each worker: its share of the data, for ever, in an order of its own."""
        worker = ts.coordinator.experimental_get_current_worker_index()
        data, _ = load_data()
        share = ts.data.Dataset.from_tensor_slices(data.tensors).shard(num_workers, worker)
        return share.shuffle(len(data), seed=config.seed + first_epoch).batch(config.batch_size).repeat()

    worker_profile = profiles.WorkerProfile(config, run_path)

    @worker_profile.recorded
    def train_step(batches):  # noqa: ANN001, ANN202 - the worker's own iterator
        """Runs on a worker: parameters are pulled before it, `step` sends gradients to the parameter servers."""
        *inputs, labels = profiles.next_batch(batches)
        for optimizer in optimizers.values():
            optimizer.zero_grad()
        logits = model(*inputs)
        loss = compute_loss(logits, labels)
        loss.backward()
        for optimizer in optimizers.values():
            optimizer.step()
        train_metric.update_state(labels, logits)
        return loss.detach()

    batches = iter(coordinator.create_per_worker_dataset(make_batches))
    ahead = STEPS_AHEAD * num_workers  # until then the coordinator waits for nothing
    profile = profiles.Profile(config, run_path, name="coordinator", skip_more=ahead)
    num_steps = config.steps_per_epoch or len(train_data) // config.batch_size
    with report, profile:
        for epoch in range(first_epoch, config.epochs + 1):
            running, losses = deque(), []
            for _ in profile.steps(report.progress(range(num_steps), epoch, num_steps)):
                running.append(coordinator.schedule(train_step, args=(batches,)))
                if len(running) > ahead:
                    losses.append(running.popleft().fetch())
            coordinator.join()  # the parameters stand still from here on
            losses += [value.fetch() for value in running]

            test_loss, test_metric = evaluate(config, model, test_data)
            name = train_metric.name
            report.add_epoch(
                **{
                    "train_loss": float(sum(losses)) / num_steps,
                    f"train_{name}": float(train_metric.result()),
                    "test_loss": test_loss,
                    f"test_{name}": test_metric,
                }
            )
            train_metric.reset_state()
            epochs_done.assign(epoch)
            manager.save()

    if not report.epochs:
        report.say(f"All {config.epochs} epochs were done before; ask for more with epochs=...")
        return
    worker_profile.tell()
    report.save_learning_curve()
    restored = instantiate(config.model)
    ts.train.Checkpoint(model=restored).restore(manager.latest_checkpoint).expect_partial()
    name, (_, value) = train_metric.name, evaluate(config, restored, test_data)
    seconds, last = time.perf_counter() - started, report.epochs[-1][f"test_{name}"]
    report.say(f"Test {name} after restoring the saved model without strategy: {value:.4f}")
    report.say(
        f"Test {name}: {last:.4f} after {config.epochs} epochs with {num_workers} worker(s) and {num_ps} parameter "
        f"server(s) in {seconds:.1f} s; files: {run_path}"
    )


def make_optimizers(config: DictConfig, model: nn.Module) -> dict[str, torch.optim.Optimizer]:
    """Make an optimizer for the dense parameters, and one for tables with sparse gradients where there are any."""
    tables = [module.weight for module in model.modules() if isinstance(module, nn.Embedding) and module.sparse]
    dense = [parameter for parameter in model.parameters() if all(parameter is not table for table in tables)]
    optimizers = {"optimizer": instantiate(config.optimizer, _convert_="all")(dense)}
    if tables:
        make = instantiate(config.embedding_optimizer, _convert_="all")
        optimizers["embedding_optimizer"] = make(tables)
    return optimizers


def evaluate(config: DictConfig, model: nn.Module, data: TensorDataset) -> tuple[float, float]:
    """Return the mean loss and the metric of test examples, computed by this process."""
    compute_loss, metric, mean = instantiate(config.loss), instantiate(config.metric), ts.metrics.Mean()
    model.eval()
    with torch.no_grad():
        for *inputs, labels in DataLoader(data, batch_size=1000):
            logits = model(*inputs)
            mean.update_state(compute_loss(logits, labels), sample_weight=len(labels))
            metric.update_state(labels, logits)
    model.train()
    return float(mean.result()), float(metric.result())


if __name__ == "__main__":
    if not clusters.serve():
        main()
