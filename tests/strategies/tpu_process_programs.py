"""What processes run that drive a chip each; a stand-in for the chip has its tensors on the CPU, and sums over gloo."""

from __future__ import annotations

import os
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torchmetrics.classification import MulticlassAccuracy

import torchstrategy as ts
from tests import programs
from torchstrategy.cluster_resolver.detect import find_job
from torchstrategy.xla import system

DOUBLE = torch.float64


class StandIn:
    """A chip of several: a collective is put down when it is called, and carried out by ``sync``, as XLA does.

    The devices' order is the reverse of the ranks'.
    """

    name = "stand-in 1.0"
    hardware = "TPU"
    is_spmd = False
    is_started = True
    connects_processes = True
    device = torch.device("cpu")

    def __init__(self, path: str, rank: int, size: int) -> None:
        self.ordinal = size - 1 - rank
        self.events: list[Any] = []
        self._size = size
        self._pending: list[Callable[[], None]] = []
        self._group = dist.ProcessGroupGloo(dist.FileStore(path, size), self.ordinal, size, timedelta(seconds=20))
        self.fails_at: int | None = None

    def sum_over_devices(self, value: Tensor) -> None:
        self._pending.append(lambda: self._group.allreduce([value]).wait())
        self.events.append(("sum", str(value.dtype)))

    def gather_over_devices(self, value: Tensor) -> Tensor:
        rows = value.new_empty((self._size, *value.shape))
        self._pending.append(lambda: self._group.allgather([list(rows)], [value]).wait())
        self.events.append(("gather", str(value.dtype)))
        return rows

    def sync(self, *, wait: bool = False) -> None:
        self.events.append("sync")
        if len(self.events) == self.fails_at:
            raise RuntimeError("the compiler ran out of memory")
        pending, self._pending = self._pending, []
        for launch in pending:
            launch()

    def num_compilations(self) -> int:
        return 0


def place() -> tuple[int, int]:
    job = find_job()
    return job.rank, job.size


def make(path: str) -> ts.TPUStrategy:
    return on_chip(StandIn(path, *place()))


def on_chip(runtime: Any) -> ts.TPUStrategy:
    """Make the strategy as if the TPU system had been initialised with a stand-in."""
    system._current = system.TpuSystem(runtime, None)
    return ts.TPUStrategy()


def train_on_chips_and_on_cpus(path: str, **program: Any) -> list[list[list[float]]]:
    strategies = (make(path), ts.MultiWorkerMirroredStrategy(devices=["cpu:0"]))
    return [programs.train(strategy, **program) for strategy in strategies]


def batches_of(strategy: ts.Strategy, num_examples: int, batch_size: int) -> Any:
    torch.manual_seed(3)
    x, y = torch.randn(num_examples, 5, dtype=DOUBLE), torch.randint(3, (num_examples,))
    return strategy.experimental_distribute_dataset((x, y), batch_size=batch_size)


def everything(strategy: ts.Strategy, folder: str) -> dict[str, Any]:
    """Batch normalisation of a share and of the batch, metrics, collectives of the user's, and a checkpoint."""
    with strategy.scope():
        torch.manual_seed(1)
        norms = [nn.BatchNorm1d(4, dtype=DOUBLE), ts.nn.SyncBatchNorm(4, dtype=DOUBLE)]
        model = nn.Sequential(nn.Linear(5, 4, dtype=DOUBLE), *norms, nn.Linear(4, 3, dtype=DOUBLE))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        accuracy = MulticlassAccuracy(3)
        mean = ts.metrics.Mean()
        checkpoint = ts.train.Checkpoint(model=model, optimizer=optimizer)
    step = programs.make_train_step(model, optimizer)

    def step_and_metrics(batch: Any) -> Any:
        loss = step(batch)
        with torch.no_grad():
            accuracy.update(model(batch[0]), batch[1])
        mean.update_state(loss)
        context = ts.get_replica_context()
        return loss, context.all_reduce("mean", loss), context.all_gather(loss.reshape(1), 0)

    rows = []
    for batch in batches_of(strategy, 24, 8):
        loss, average, all_losses = strategy.run(step_and_metrics, args=(batch,))
        total = strategy.reduce("sum", loss)
        gathered = strategy.gather(loss.reshape(1), axis=0)
        rows.append([float(total), float(average), *all_losses.tolist(), *gathered.tolist()])
    path = checkpoint.save(os.path.join(folder, "ckpt"))
    before = model[0].weight.detach().clone()
    with torch.no_grad():
        model[0].weight.zero_()
    checkpoint.restore(path)
    restored = bool(torch.equal(model[0].weight, before))
    return {
        "rows": rows,
        "weights": [p.detach().flatten().tolist() for p in model.parameters()],
        "buffers": [b.double().flatten().tolist() for b in model.buffers()],
        "accuracy": float(accuracy.compute()),
        "mean": float(mean.result()),
        "restored": restored,
    }


def everything_on_chips_and_on_cpus(path: str, folder: str) -> list[dict[str, Any]]:
    chips, cpus = make(path), ts.MultiWorkerMirroredStrategy(devices=["cpu:0"])
    return [everything(chips, os.path.join(folder, "chips")), everything(cpus, os.path.join(folder, "cpus"))]


def events_of_a_step(path: str) -> list[Any]:
    """The steps of a loop have the same events; two dtypes are two collectives, each a program of its own."""
    strategy = make(path)
    with strategy.scope():
        model = nn.Sequential(nn.Linear(5, 4, dtype=DOUBLE), nn.Linear(4, 3, dtype=DOUBLE))
        head = nn.Linear(3, 3)
        optimizer = torch.optim.SGD([*model.parameters(), *head.parameters()], lr=0.1)

    def forward(x: Tensor) -> Tensor:
        return head(model(x).float())

    step = programs.make_train_step(forward, optimizer)
    events = []
    for batch in batches_of(strategy, 32, 8):
        start = len(strategy.runtime.events)
        strategy.run(step, args=(batch,))
        events.append(strategy.runtime.events[start:])
    return events


def sums(path: str) -> dict[str, Any]:
    strategy = make(path)
    rank = strategy.workers.rank
    found = {}
    for dtype in (torch.float32, torch.bfloat16, torch.float16, DOUBLE, torch.int64, torch.uint8, torch.complex64):
        value = (torch.arange(40_000) % 5 + rank).to(dtype)  # too large for a message
        total = strategy.reduce("sum", value)
        assert total.dtype is dtype
        found[str(dtype)] = total.real.double().sum().item()
        gathered = strategy.gather(value[: 30_000 + rank], axis=0)
        own = gathered[30_000 * rank + rank * (rank - 1) // 2 :][: 30_000 + rank]
        assert torch.equal(own, value[: 30_000 + rank])
    empty = strategy.gather(torch.zeros(0, 2), axis=0)
    return {**found, "empty": list(empty.shape), "flags": strategy.gather(torch.tensor([rank == 1]), axis=0).tolist()}


def fail_before_a_launch(path: str) -> tuple[str, list[Any]]:
    """What rank 1 traced can't be compiled: no rank may launch a collective that rank 1 won't take part in."""
    strategy = make(path)
    with strategy.scope():
        model = nn.Linear(5, 3, dtype=DOUBLE)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = programs.make_train_step(model, optimizer)
    batches = iter(batches_of(strategy, 32, 8))
    strategy.run(step, args=(next(batches),))
    runtime = strategy.runtime
    start = len(runtime.events)
    if strategy.workers.rank == 1:
        runtime.fails_at = start + 1
    try:
        strategy.run(step, args=(next(batches),))
    except RuntimeError as error:
        return f"{type(error).__name__}: {error}", runtime.events[start:]
    return "no error", []


def leave_one_out(path: str) -> str:
    strategy = make(path)

    def step() -> None:
        context = ts.get_replica_context()
        if context.replica_id_in_sync_group == 0:
            context.all_reduce("sum", torch.ones(40_000))
        context.all_gather(torch.ones(40_000), 0)

    try:
        strategy.run(step)
    except ts.errors.DisagreementError as error:
        return str(error)
    return "no error"


def one_device_twice(path: str) -> str:
    runtime = StandIn(path, *place())
    runtime.ordinal = 0
    try:
        on_chip(runtime)
    except RuntimeError as error:
        return str(error)
    return "made"
