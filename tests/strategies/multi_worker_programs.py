"""What the workers of the tests of MultiWorkerMirroredStrategy run; each gets its place from ``TF_CONFIG``."""

from __future__ import annotations

import contextlib
import io
import logging
import os
import shutil
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

import torchstrategy as ts
from tests import programs
from tests.clusters import as_task, task_of_rank
from tests.programs import cpu_devices

DOUBLE = torch.float64


def make(num_local: int = 1, **options: Any) -> ts.MultiWorkerMirroredStrategy:
    return ts.MultiWorkerMirroredStrategy(devices=cpu_devices(num_local), **options)


def train(num_local: int, **program: Any) -> list[list[float]]:
    return programs.train(make(num_local), **program)


def train_as_given_by_a_resolver(cluster: dict[str, list[str]], **program: Any) -> tuple[list[list[float]], str, int]:
    """Join the cluster of a resolver, though the environment has a launcher's job as well."""
    rank = int(os.environ["RANK"])
    task_type, task_id = task_of_rank(cluster, rank)
    spec = ts.cluster_resolver.ClusterSpec(cluster)
    resolver = ts.cluster_resolver.SimpleClusterResolver(spec, task_type=task_type, task_id=task_id)
    strategy = make(cluster_resolver=resolver)
    assert strategy.cluster_resolver is resolver
    return programs.train(strategy, **program), strategy.extended.worker_devices[0], strategy.workers.rank


def places(num_local: int) -> dict[str, Any]:
    strategy = make(num_local)
    ids = strategy.run(lambda: torch.tensor(ts.get_replica_context().replica_id_in_sync_group))
    return {
        "ids": [int(i) for i in strategy.experimental_local_results(ids)],
        "chief": strategy.is_chief,
        "checkpoint": strategy.extended.should_checkpoint,
        "summary": strategy.extended.should_save_summary,
        "devices": strategy.extended.worker_devices,
        "gathered": strategy.gather(strategy.run(lambda: own_row()), axis=0).flatten().tolist(),
    }


def own_row() -> torch.Tensor:
    return torch.full((1, 1), float(ts.get_replica_context().replica_id_in_sync_group))


def plain_values(num_local: int) -> dict[str, Any]:
    """Plain values, which count once for each process, and differ between the processes here."""
    strategy = make(num_local)
    own = torch.tensor([strategy.workers.rank + 1.0])
    return {
        "sum": strategy.reduce("SUM", own, axis=None).tolist(),
        "mean": strategy.reduce("MEAN", own, axis=None).tolist(),
        "number": float(strategy.reduce("SUM", 2, axis=None)),
        "gather": strategy.gather(own, axis=0).tolist(),
        "over axis": float(strategy.reduce("MEAN", own, axis=0)),  # of each replica
    }


def made_late() -> dict[str, list[float]]:
    """A notebook: other work and other strategies come first, and go on afterwards."""
    data = torch.randn(6, 3).sin()  # operations before any strategy
    local = ts.MirroredStrategy(cpu_devices(2))
    before = programs.train(local, dtype=DOUBLE)
    strategy = make()
    joined = programs.train(strategy, dtype=DOUBLE)
    second = programs.train(make(2), dtype=DOUBLE)  # another group of the same workers, with more replicas
    after = programs.train(local, dtype=DOUBLE)
    first_again = programs.train(strategy, dtype=DOUBLE)
    assert data.shape == (6, 3)
    return {"before": before, "joined": joined, "second": second, "after": after, "again": first_again}


def two_models_in_turns() -> tuple[list[float], list[float], list[float]]:
    """Each strategy trains its own model, one step at a time in turns."""
    own_strategies = (ts.MirroredStrategy(cpu_devices(2)), make(), ts.get_strategy())
    x = torch.linspace(-1, 1, 10, dtype=DOUBLE).reshape(5, 2)
    steps, models, batches = [], [], []
    for strategy in own_strategies:
        with strategy.scope():
            torch.manual_seed(4)
            model = nn.Linear(2, 1, dtype=DOUBLE)
            optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
        steps.append(_step_of(model, optimizer))
        models.append(model)
        batches.append(iter(strategy.experimental_distribute_dataset([x[:3], x[3:]] * 3)))
    for _ in range(6):
        for strategy, step, own in zip(own_strategies, steps, batches, strict=True):
            strategy.run(step, args=(next(own),))
    return tuple(model.weight.flatten().tolist() for model in models)


def _step_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> Any:
    def step(x: torch.Tensor) -> None:
        optimizer.zero_grad()
        errors = (model(x) - x.sum(dim=1, keepdim=True)).square().mean(dim=1)
        ts.nn.compute_average_loss(errors, global_batch_size="actual").backward()
        optimizer.step()

    return step


def _is_chief(task_type: str | None, task_id: int | None, cluster: dict[str, Any]) -> bool:
    """As in tf's tutorial."""
    first_worker = task_type == "worker" and task_id == 0 and "chief" not in cluster
    return task_type is None or task_type == "chief" or first_worker


def tutorial(folder: str, num_epochs: int) -> dict[str, Any]:
    """tf's tutorial: workers that are not the chief save into a folder that they delete each time."""
    strategy = make()
    resolver = strategy.cluster_resolver
    task_type, task_id, cluster = resolver.task_type, resolver.task_id, resolver.cluster_spec().as_dict()

    def dataset_fn(context: ts.InputContext) -> ts.data.Dataset:
        x = torch.linspace(-1, 1, 12).reshape(12, 1)
        dataset = ts.data.Dataset.from_tensor_slices((x, 3 * x))
        dataset = dataset.shard(context.num_input_pipelines, context.input_pipeline_id)
        return dataset.repeat().batch(context.get_per_replica_batch_size(2 * context.num_replicas_in_sync))

    with strategy.scope():
        torch.manual_seed(strategy.workers.rank)
        model = nn.Linear(1, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        seen = ts.Variable(
            0.0, synchronization=ts.VariableSynchronization.ON_READ, aggregation=ts.VariableAggregation.SUM
        )
    epoch = ts.Variable(torch.tensor(0), trainable=False)  # outside the scope, as there
    batches = iter(strategy.distribute_datasets_from_function(dataset_fn))
    checkpoint = ts.train.Checkpoint(model=model, optimizer=optimizer, epoch=epoch, seen=seen)
    chief = _is_chief(task_type, task_id, cluster)
    directory = Path(folder, "ckpt")
    own_directory = directory if chief else directory / f"workertemp_{task_id}"
    manager = ts.train.CheckpointManager(checkpoint, own_directory, max_to_keep=1)
    latest = ts.train.latest_checkpoint(directory)
    if latest:
        checkpoint.restore(latest)

    def train_step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = ts.nn.compute_average_loss((model(x) - y).square().mean(dim=1))
        loss.backward()
        optimizer.step()
        seen.assign_add(float(len(x)))
        return loss.detach()

    losses, kept = [], []
    while epoch.numpy() < num_epochs:
        per_replica = strategy.run(train_step, args=next(batches))
        losses.append(float(strategy.reduce(ts.ReduceOp.SUM, per_replica, axis=None)))
        epoch.assign_add(1)
        manager.save()
        kept.append(sorted(name for name in os.listdir(own_directory) if not name.startswith("workertemp")))
        if not chief:
            shutil.rmtree(own_directory)
    strategy.reduce("SUM", 0.0, axis=None)  # before anybody looks
    return {
        "chief": chief,
        "losses": losses,
        "kept": kept,
        "left": sorted(os.listdir(directory)),
        "seen": float(seen.read_value()),
        "weight": model.weight.item(),
    }


def saved_where_one_worker_cannot(folder: str) -> tuple[str, int]:
    strategy = make()
    with strategy.scope():
        checkpoint = ts.train.Checkpoint(v=ts.Variable(1.0))
    own = Path(folder, f"of_worker_{strategy.workers.rank}")
    if strategy.workers.rank == 1:
        own.write_text("a file where the folder should be")
    try:
        checkpoint.save(own / "ckpt")
    except RuntimeError as error:
        message = str(error)
    checkpoint.save(Path(folder, "together", "ckpt"))  # the job goes on
    return message, checkpoint.save_counter


def error_of(cluster: dict[str, Any], task: Sequence[Any], **arguments: Any) -> str:
    with as_task(cluster, *task):
        try:
            ts.MultiWorkerMirroredStrategy(**arguments)
        except (ValueError, TypeError, RuntimeError) as error:
            return f"{type(error).__name__}: {error}"
    return "made"


def run_in_guide_cluster(cluster: dict[str, list[str]]) -> tuple[list[str], list[str], int]:
    """Make the strategy twice as a worker of a cluster; return what was logged, the warnings, and the replicas."""
    rows: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: rows.append(record.getMessage())  # type: ignore[method-assign]
    log = logging.getLogger("torchstrategy")
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    with as_task(cluster, "worker", int(os.environ["RANK"])), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        first, second = make(), make()
    assert first.num_replicas_in_sync == second.num_replicas_in_sync
    return rows, [str(warning.message) for warning in caught], first.num_replicas_in_sync


def run_program(code: str, folder: str) -> str:
    """Run the code of a program in a folder; return what it prints."""
    output = io.StringIO()
    before = os.getcwd()
    os.chdir(folder)
    try:
        with contextlib.redirect_stdout(output):
            exec(compile(code, "train.py", "exec"), {"__name__": "__main__"})
    finally:
        os.chdir(before)
    return output.getvalue()
