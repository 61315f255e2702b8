"""What the ranks of the multi-process tests run."""

from __future__ import annotations

import os
import time

import torch
from torch import Tensor, nn

import torchstrategy as ts


def collectives(devices: list[str] | None) -> dict[str, object]:
    strategy = ts.MirroredStrategy(devices)
    n = strategy.num_replicas_in_sync

    def fn() -> dict[str, object]:
        context = ts.get_replica_context()
        i = context.replica_id_in_sync_group
        x = torch.tensor(i + 1.0, requires_grad=True)
        y = context.all_reduce("sum", {"square": x * x, "other": (torch.tensor([i]),)})
        ((i + 1) * y["square"]).backward()
        rows = torch.full((i, 2), float(i), requires_grad=True)
        gathered = context.all_gather(rows, axis=0)
        (gathered.sum() * (i + 1)).backward()
        return {
            "id": torch.tensor(i),
            "sum": y["square"].detach(),
            "other": y["other"][0],
            "grad": x.grad,
            "mean": context.all_reduce("mean", torch.tensor(i)),
            "gathered": gathered.detach(),
            "gather_grad": rows.grad,
        }

    result = strategy.run(fn)
    local = strategy.experimental_local_results(result)
    uneven = strategy.run(lambda: torch.arange(float(ts.get_replica_context().replica_id_in_sync_group)))
    return {
        "local": local,
        "n": n,
        "reduce": strategy.reduce("sum", result["id"]),
        "mean_over_axis": strategy.reduce("mean", uneven, axis=0),
        "gather": strategy.gather(uneven, axis=0),
    }


class Partial(nn.Module):
    """Has a parameter that some replicas do not use, one that nobody uses, and batch normalisation."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(6, 2, sparse=True)
        self.always = nn.Linear(2, 2)
        self.sometimes = nn.Linear(2, 2)
        self.never = nn.Linear(2, 2)
        self.norm = nn.BatchNorm1d(2, affine=False)

    def forward(self, ids: Tensor, *, extra: bool) -> Tensor:
        x = self.norm(self.always(self.embedding(ids)))
        return x + self.sometimes(x) if extra else x


def partial_gradients(devices: list[str] | None) -> dict[str, object]:
    torch.manual_seed(3)
    strategy = ts.MirroredStrategy(devices)
    with strategy.scope():
        model = Partial()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    (batch,) = strategy.experimental_distribute_dataset(torch.tensor([0, 1, 1, 2, 5, 3, 0, 4]), batch_size=8)

    def fn(ids: Tensor) -> None:
        context = ts.get_replica_context()
        out = model(ids, extra=context.replica_id_in_sync_group == 0)
        (out.sum() + out.square().sum()).backward()
        optimizer.step()

    strategy.run(fn, args=(batch,))
    return {
        "never": [parameter.grad is None for parameter in model.never.parameters()],
        "state": {name: value.clone() for name, value in model.state_dict().items()},
        "sparse": model.embedding.weight.grad.is_sparse,
    }


def scaled_step(devices: list[str] | None, bad_replica: int | None) -> tuple[list[float], float]:
    strategy = ts.MirroredStrategy(devices)
    with strategy.scope():
        model = nn.Linear(1, 1, bias=False)
        nn.init.ones_(model.weight)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.25)
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0)

    def fn() -> None:
        i = ts.get_replica_context().replica_id_in_sync_group
        x = torch.full((1, 1), float("inf") if i == bad_replica else i + 1.0)
        scaler.scale(model(x).sum()).backward()
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()

    strategy.run(fn)
    weights = strategy.run(lambda: model.weight.detach().clone())
    scales = strategy.run(scaler.get_scale)
    return [float(w) for w in strategy.experimental_local_results(weights)], strategy.experimental_local_results(scales)


def random_masks() -> tuple[list[float], list[float], bool]:
    """Return what the replica draws in two runs of equal seed, and whether the program's stream stayed in step."""
    strategy = ts.MirroredStrategy()
    drawn = []
    for _ in range(2):
        torch.manual_seed(5)
        drawn.append(strategy.run(lambda: torch.rand(3)).tolist())
    torch.manual_seed(5)
    strategy.run(lambda: None)
    return drawn[0], drawn[1], strategy.gather(torch.rand(1), axis=0).unique().numel() == 1


def own_scale() -> float:
    """Take over the chief's initial values and its random order of the data."""
    strategy = ts.MirroredStrategy()
    torch.manual_seed(strategy.workers.rank)
    with strategy.scope():
        model = nn.Linear(3, 3)
    strategy.run(lambda: None)
    return float(model.weight.sum())


def two_strategies() -> list[float]:
    results = []
    first, second = ts.MirroredStrategy(), ts.MirroredStrategy()
    for strategy in (first, second, first):
        value = strategy.run(lambda: ts.get_replica_context().all_reduce("sum", torch.ones(())))
        results.append(float(value))
    return results


def fails(kind: str) -> object:
    options = ts.experimental.CommunicationOptions(timeout_seconds=3)
    strategy = ts.MirroredStrategy(communication_options=options)
    rank = strategy.workers.rank

    def fn() -> object:
        context = ts.get_replica_context()
        if rank == 1:
            if kind == "raises":
                raise ValueError("boom")
            if kind == "dies":
                os._exit(3)
            if kind == "returns":
                return 1
            if kind == "sleeps":
                time.sleep(6)
        shape = (2 + rank,) if kind == "shapes" else (2,)
        dtype = torch.float64 if kind == "dtypes" and rank else torch.float32
        return context.all_reduce("sum", torch.ones(shape, dtype=dtype))

    result = strategy.run(fn)
    return strategy.reduce("sum", torch.ones(3)) if kind == "returns" else result


def fails_outside() -> None:
    """Rank 1 fails outside `run`, as when reading its data."""
    strategy = ts.MirroredStrategy()
    if strategy.workers.rank == 1:
        raise OSError("no such shard")
    strategy.reduce("sum", torch.ones(3))


def step_outside_run() -> None:
    strategy = ts.MirroredStrategy()
    with strategy.scope():
        model = nn.Linear(1, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(torch.ones(1, 1)).sum().backward()
    optimizer.step()


def foreign_model() -> None:
    strategy = ts.MirroredStrategy()
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def fn() -> None:
        model(torch.ones(1, 1)).sum().backward()
        optimizer.step()

    strategy.run(fn)


def different_models() -> None:
    strategy = ts.MirroredStrategy()
    with strategy.scope():
        nn.Linear(1, 2 + strategy.workers.rank)
        kept = nn.Linear(1, 2 + strategy.workers.rank)
    strategy.run(lambda: kept.weight)
