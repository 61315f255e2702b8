"""What the ranks of the multi-process tests run."""

from __future__ import annotations

import os
import signal
import sys
import time
import warnings
from collections.abc import Callable
from typing import Any

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
    if kind == "raises after an early start":
        strategy.workers.start_sum_of_numbers("what comes early", [1])

    def fn() -> object:
        context = ts.get_replica_context()
        if rank == 1:
            if kind.startswith("raises"):
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


def uses_two_strategies_in_another_order() -> None:
    options = ts.experimental.CommunicationOptions(timeout_seconds=1.0)
    strategies = [ts.MultiWorkerMirroredStrategy(communication_options=options) for _ in range(2)]
    if strategies[0].workers.rank == 1:
        strategies.reverse()
    for strategy in strategies:
        strategy.reduce("SUM", torch.ones(()))


def fails_outside() -> None:
    """Rank 1 fails outside `run`, as when reading its data."""
    strategy = ts.MirroredStrategy()
    if strategy.workers.rank == 1:
        raise OSError("no such shard")
    strategy.reduce("sum", torch.ones(3))


class _BadFile:
    def __init__(self, rank: int) -> None:
        self._rank = rank

    def __iter__(self):
        yield torch.ones(2)
        if self._rank == 1:
            raise OSError("shard-3.npz is damaged")
        yield torch.ones(2)


def bad_data_on_one_rank() -> None:
    strategy = ts.MirroredStrategy(["cpu:0"])
    data = _BadFile(strategy.workers.rank)
    for batch in strategy.experimental_distribute_dataset(data, auto_shard_policy=ts.data.AutoShardPolicy.OFF):
        strategy.run(lambda x: ts.get_replica_context().all_reduce("sum", x.sum()), args=(batch,))


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


def _train(change: Callable[[nn.Module, torch.optim.Optimizer, int], None], num_steps: int) -> None:
    """Train; before the last step each rank makes a change."""
    strategy = ts.MirroredStrategy()
    with strategy.scope():
        model = nn.Linear(1, 1)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.1)

    def fn() -> None:
        optimizer.zero_grad()
        model(torch.ones(1, 1)).sum().backward()
        optimizer.step()

    for _ in range(num_steps):
        strategy.run(fn)
    change(model, optimizer, int(not strategy.is_chief))
    strategy.run(fn)


def loads_on_the_chief_only(num_steps: int) -> None:
    def load(model: nn.Module, optimizer: torch.optim.Optimizer, rank: int) -> None:
        if rank == 0:
            model.load_state_dict({"weight": torch.full((1, 1), 9.0), "bias": torch.zeros(1)})

    _train(load, num_steps)


def changes_a_rate(key: str, *values: object) -> None:
    def change(model: nn.Module, optimizer: torch.optim.Optimizer, rank: int) -> None:
        optimizer.param_groups[0][key] = values[rank]

    _train(change, 4)


def groups_differently() -> None:
    strategy = ts.MirroredStrategy()
    with strategy.scope():
        model = nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1))
        first, *rest = parameters = list(model.parameters())
        groups = [parameters] if strategy.is_chief else [[first], rest]
        optimizer = torch.optim.SGD([{"params": group} for group in groups], lr=0.1)

    def fn() -> None:
        model(torch.ones(1, 1)).sum().backward()
        optimizer.step()

    strategy.run(fn)


def steps_different_optimizers() -> None:
    strategy = ts.MirroredStrategy()
    with strategy.scope():
        model = nn.Linear(1, 1)
        kind = torch.optim.SGD if strategy.is_chief else torch.optim.Adam
        optimizer = kind(model.parameters(), lr=0.1)

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


def message_of(fn: Callable[[], object]) -> str:
    try:
        fn()
    except Exception as error:  # noqa: BLE001 - the test looks at it
        return f"{type(error).__name__}: {error}"
    return "no error"


def dtypes(devices: list[str] | None) -> dict[str, Tensor]:
    """Every kind of number is added and gathered, and what comes back belongs to the program alone."""
    strategy = ts.MirroredStrategy(devices)
    found = {}
    for dtype in DTYPES:
        value = strategy.run(lambda: torch.ones(ts.get_replica_context().replica_id_in_sync_group, 2, dtype=dtype))  # noqa: B023
        found[f"gather {dtype}"] = strategy.gather(value, axis=0)
        if dtype is not torch.bool:
            found[f"reduce {dtype}"] = strategy.reduce("sum", value, axis=0)
    sparse = strategy.run(
        lambda: torch.eye(5)[ts.get_replica_context().replica_id_in_sync_group].to_sparse().coalesce()
    )
    found["sparse"] = strategy.reduce("sum", sparse).to_dense()
    return found


DTYPES = [
    torch.bool, torch.uint8, torch.int16, torch.int64, torch.float16, torch.bfloat16, torch.float64, torch.complex64
]  # fmt: skip


def differentiated(devices: list[str] | None) -> tuple[list[float], ...]:
    """In-place changes of results, a result that the loss does not use, and a second derivative."""
    strategy = ts.MirroredStrategy(devices)

    def fn() -> Tensor:
        context = ts.get_replica_context()
        x = torch.tensor(context.replica_id_in_sync_group + 1.0, requires_grad=True)
        y, _, count = context.all_reduce("sum", (x * x, x * 3, torch.tensor(1)))
        y += count
        (first,) = torch.autograd.grad(y * y, x, create_graph=True)
        (second,) = torch.autograd.grad(first, x)
        return torch.stack([y.detach(), first.detach(), second])

    value = strategy.run(fn)
    return tuple(part.tolist() for part in strategy.gather(value, axis=0).split(3))


def in_order(devices: list[str] | None) -> list[list[int]]:
    strategy = ts.MirroredStrategy(devices)
    dataset = strategy.experimental_distribute_dataset(torch.arange(11), batch_size=7)
    return [strategy.gather(strategy.run(lambda x: x, args=(batch,)), axis=0).tolist() for batch in dataset]


def disagreements() -> list[str]:
    """Return the messages of calls in which the ranks differ; none of them ends the job."""
    strategy = ts.MirroredStrategy()
    rank = strategy.workers.rank
    tensors = {"first" if rank == 0 else "second": torch.ones(1)}
    many = [torch.ones(1 + (i == 70 and rank)) for i in range(80)]
    messages = [
        message_of(lambda: strategy.run(lambda: ts.get_replica_context().all_reduce("sum", tensors))),
        message_of(lambda: strategy.reduce("sum", tensors)),
        message_of(lambda: strategy.run(lambda: ts.get_replica_context().all_reduce("sum", many))),
        message_of(lambda: strategy.workers.exchange("long", "x" * 9000 * (rank + 1)) and None),
    ]
    return [*messages, str(float(strategy.reduce("sum", torch.ones(()))))]


def other_models() -> tuple[str, float]:
    """Return the message where the ranks have made other models, and a sum after it."""
    strategy = ts.MirroredStrategy()
    with strategy.scope():
        model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 2 + strategy.workers.rank))
    message = message_of(lambda: strategy.run(lambda: str(model)))
    return message, float(ts.MirroredStrategy().reduce("sum", torch.ones(())))


def exchanges_started_early() -> list[object]:
    """Return sums of numbers that start before other collectives, and messages where the ranks then differ."""
    strategy = ts.MirroredStrategy()
    workers = strategy.workers
    rank = workers.rank
    finish = workers.start_sum_of_numbers("one", [rank, 0.25])
    where = workers.watch.position
    between = float(strategy.reduce("sum", torch.ones(())))
    both = [workers.start_sum_of_numbers(name, [10 * len(name) + rank]) for name in ("two", "three")]
    several = [result() for result in both]
    once_more = finish()
    uneven = message_of(lambda: workers.start_sum_of_numbers("uneven", [1] * (rank + 1))() and None)
    wrong = workers.start_sum_of_numbers("mine" if rank else "yours", [rank])
    refused = [message_of(lambda: workers.exchange("the next", None) and None), message_of(lambda: wrong() and None)]
    last = float(strategy.reduce("sum", torch.ones(())))
    return [finish(), where, between, several, once_more, uneven, refused, last]


class Mixed(nn.Module):
    """Parameters of many kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.both = nn.Linear(2, 2)
        self.first = nn.Linear(2, 2)
        self.second = nn.Linear(2, 2)
        self.embedding = nn.Embedding(5, 2, sparse=True)
        self.c64 = nn.Parameter(torch.ones(2, dtype=torch.complex64))
        self.conv = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
        self.bf16 = nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
        self.f64 = nn.Parameter(torch.ones(3, dtype=torch.float64))
        self.empty = nn.Parameter(torch.ones(0, 3))
        self.tiny = nn.ParameterList([nn.Parameter(torch.ones(())) for _ in range(1500)])


def mixed_gradients(devices: list[str] | None) -> dict[str, Tensor]:
    """Which gradients are there, and of which layout, differs between replicas and from step to step."""
    torch.manual_seed(0)
    options = ts.experimental.CommunicationOptions(bytes_per_pack=40)
    strategy = ts.MirroredStrategy(devices, communication_options=options)
    with strategy.scope():
        model = Mixed()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.125)

    def fn(step: int) -> None:
        i = ts.get_replica_context().replica_id_in_sync_group
        optimizer.zero_grad()
        x = torch.ones(1, 2) * (i + 1)
        loss = model.both(x).square().sum() + model.bf16.float().sum() * (i + 1) + model.f64.sum().float()
        loss = loss + model.conv(torch.ones(1, 3, 4, 4).to(memory_format=torch.channels_last) * (i + 1)).sum()
        loss = loss + model.empty.sum() + (model.c64 * (1 + 2j)).abs().square().sum() * i
        if i == 0 and step:
            loss = loss + model.first(x).sum() + sum(model.tiny[::2])
        if i == 1:
            loss = loss + model.second(x).sum() + model.embedding(torch.tensor([1, 1, 4])).sum()
        if i == 0 and step == 1:
            loss = loss + model.embedding.weight.square().sum()
        if i == 0 or step != 2:
            loss.backward()
        optimizer.step()

    for step in range(3):
        strategy.run(fn, args=(step,))
    return {name: value.clone() for name, value in model.state_dict().items()}


def line_search(devices: list[str] | None) -> list[float]:
    torch.manual_seed(0)
    strategy = ts.MirroredStrategy(devices)
    with strategy.scope():
        model = nn.Linear(2, 1).double()
        optimizer = torch.optim.LBFGS(model.parameters(), lr=0.5, max_iter=5, line_search_fn="strong_wolfe")
    x, y = torch.arange(8.0).double().view(4, 2) / 8, torch.tensor([[1.0], [2.0], [0.0], [3.0]]).double()

    def fn() -> None:
        context = ts.get_replica_context()
        own = slice(context.replica_id_in_sync_group, None, context.num_replicas_in_sync)

        def closure() -> Tensor:
            optimizer.zero_grad()
            loss = (model(x[own]) - y[own]).square().sum() / 4
            loss.backward()
            return loss

        optimizer.step(closure)

    strategy.run(fn)
    strategy.run(fn)
    return [*model.weight.flatten().tolist(), *model.bias.tolist()]


def replaced_gradient(devices: list[str] | None) -> float:
    strategy = ts.MirroredStrategy(devices)
    with strategy.scope():
        model = nn.Linear(1, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    before = model.bias.item()

    def fn(scale: float) -> None:
        model.zero_grad()
        model(torch.ones(1, 1)).sum().backward()
        if scale:
            ts.get_replica_context().sum_gradients(optimizer)
            model.bias.grad = model.bias.grad * scale
        optimizer.step()

    strategy.run(fn, args=(0.5,))  # 2 * 0.5
    strategy.run(fn, args=(0.0,))  # 2
    return before - model.bias.item()


def fail_together() -> list[object]:
    """All ranks fail at the same point and go on."""
    strategy = ts.MirroredStrategy()

    def fn() -> None:
        raise ValueError("everywhere")

    found: list[object] = []
    for _ in range(2):
        found += [message_of(lambda: strategy.run(fn)), float(strategy.reduce("sum", torch.ones(())))]
    return found


def fail_alone() -> list[str]:
    """Rank 1 fails, both catch it and try to go on."""
    strategy = ts.MirroredStrategy()

    def fn() -> None:
        if strategy.workers.rank == 1:
            raise ValueError("alone")
        ts.get_replica_context().all_reduce("sum", torch.ones(()))

    return [
        message_of(lambda: strategy.run(fn)),
        message_of(lambda: strategy.reduce("sum", torch.ones(()))),
        message_of(ts.MirroredStrategy),
    ]


def fail_after_a_collective() -> list[str]:
    """Rank 1 fails when it has got through a collective; rank 0 is told before it receives what it waits for."""
    strategy = ts.MirroredStrategy()
    workers = strategy.workers
    start = workers._records.start

    def start_slowly(body: bytes, check: Any, unite: Any) -> Any:
        receive = start(body, check, unite)

        def receive_late(check: Any) -> Any:
            assert workers.watch.wait_for_report(20.0) is not None
            check()
            return receive(check)

        return receive_late

    if workers.rank == 0:
        workers._records.start = start_slowly
    found = [str(float(strategy.reduce("sum", torch.ones(()))))]
    if workers.rank == 1:

        def fn() -> None:
            raise ValueError("after it")

        return [*found, message_of(lambda: strategy.run(fn))]
    return [*found, message_of(lambda: strategy.reduce("sum", torch.ones(())))]


def lose(rank: int, how: str) -> object:
    options = ts.experimental.CommunicationOptions(timeout_seconds=2 if how == "stop" else None)
    strategy = ts.MirroredStrategy(communication_options=options)
    if strategy.workers.rank == rank:
        if how == "exit":
            sys.exit(0)
        os.kill(os.getpid(), signal.SIGKILL if how == "kill" else signal.SIGSTOP)
    return strategy.run(lambda: ts.get_replica_context().all_reduce("sum", torch.ones(())))


def strategy_on_one_rank() -> None:
    ts.MirroredStrategy()
    if int(os.environ["RANK"]) == 0:
        ts.MirroredStrategy(communication_options=ts.experimental.CommunicationOptions(timeout_seconds=1))


def from_different_lines():
    """Reduce on each rank at a line of its own; return the sum and the warnings."""
    strategy = ts.MirroredStrategy()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            if strategy.is_chief:
                total = strategy.reduce("SUM", torch.tensor(1.0))
            else:
                total = strategy.reduce("SUM", torch.tensor(2.0))
    return float(total), [str(w.message) for w in caught if w.category is UserWarning]


def metric_before_the_first_run():
    """Evaluate without run: each process its own examples."""
    strategy = ts.MirroredStrategy()
    with strategy.scope():
        metric = ts.metrics.Mean()
    metric.update_state(torch.tensor([1.0 + strategy.workers.rank]))
    first = float(metric.result())
    strategy.run(lambda: metric.update_state(torch.tensor([3.0])))
    second = float(metric.result())
    metric.reset_state()
    return first, second, float(metric.result())


def variable_made_outside():
    """Assign in run to a variable that each process made for itself; return the warnings."""
    strategy = ts.MirroredStrategy()
    variable = ts.Variable(0.0)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            strategy.run(lambda: variable.assign_add(1.0))
    return [str(w.message) for w in caught if w.category is UserWarning]


def skips_a_batch() -> list[int]:
    """Rank 1 leaves out the fourth batch, and would end an epoch later than this in any case."""
    strategy = ts.MirroredStrategy()
    with strategy.scope():
        model = torch.nn.Linear(1, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x: torch.Tensor) -> None:
        optimizer.zero_grad()
        ts.nn.compute_average_loss(model(x).square().mean(1), global_batch_size="actual").backward()
        optimizer.step()

    done = []
    for number, x in enumerate(strategy.experimental_distribute_dataset(torch.ones(400, 1), batch_size=4)):
        if number == 3 and strategy.workers.rank == 1:
            continue
        strategy.run(step, args=(x,))
        done.append(number)
        assert number <= 3, "the ranks summed gradients of different batches"
    return done
