"""What the workers of these tests run. Functions with a ``config`` change this worker's ``TF_CONFIG`` first."""

from __future__ import annotations

import ctypes
import gc
import json
import logging
import os
import resource
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import torchstrategy as ts
from tests.programs import Lines
from torchstrategy.collectives import notices, record_group
from torchstrategy.testing.faults import Fault, message_fault


def rank() -> int:
    return int(json.loads(os.environ["TF_CONFIG"])["task"]["index"])


def rank_of(config: str) -> int:
    """Be the worker that this TF_CONFIG describes, from now on."""
    os.environ["TF_CONFIG"] = config
    return rank()


def sum_of_ones(deadline_s: float | None = None) -> float:
    return float(make_strategy(deadline_s=deadline_s).reduce("SUM", torch.ones(())))


def stop_before_connections(deadline_s: float) -> None:
    """Make a strategy; rank 0, which keeps the store, is stopped once all have met."""
    if rank() == 0:
        record_group.connect_records = lambda *_: os.kill(os.getpid(), signal.SIGSTOP)
    make_strategy(deadline_s=deadline_s)


def make_strategy(
    deadline_s: float | None = None,
    heartbeat_s: float | None = None,
    num_devices: int = 1,
    implementation: str = "AUTO",
) -> ts.MultiWorkerMirroredStrategy:
    if heartbeat_s is not None:
        os.environ["TORCHSTRATEGY_HEARTBEAT_S"] = str(heartbeat_s)
    options = ts.experimental.CommunicationOptions(timeout_seconds=deadline_s, implementation=implementation)
    devices = [f"cpu:{index}" for index in range(num_devices)]
    return ts.MultiWorkerMirroredStrategy(communication_options=options, devices=devices)


def train(
    num_steps: int,
    width: int = 4,
    fault: Fault | None = None,
    inside: bool = False,
    here: Path | None = None,
    **options: Any,
) -> tuple[list[float], Tensor]:
    """Train a small network on one batch after another; return the losses and the weights.

    Args:
        num_steps: number of steps.
        width: units of the hidden layer.
        fault: what goes wrong.
        inside: whether it does so after the backward pass instead of before the step.
        here: a folder in which each rank says, in its fourth step, that it trains.
        **options: of ``make_strategy``.
    """
    strategy = make_strategy(**options)
    torch.manual_seed(0)
    with strategy.scope():
        model = nn.Sequential(nn.Linear(3, width), nn.Tanh(), nn.Linear(width, 1)).double()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1 / width, momentum=0.5)
    own = 0 if strategy.workers is None else strategy.workers.rank

    def fn(step: int, x: Tensor, y: Tensor) -> Tensor:
        optimizer.zero_grad()
        squared = (model(x) - y).square().mean(dim=1)
        loss = ts.nn.compute_average_loss(squared, global_batch_size="actual")
        loss.backward()
        if fault is not None and inside:
            fault.strike(own, step)
        optimizer.step()
        return loss.detach()

    x = torch.randn(7 * 10, 3, dtype=torch.float64)
    dataset = strategy.experimental_distribute_dataset((x, x.sin().sum(dim=1, keepdim=True)), batch_size=7)
    batches, losses = list(dataset), []
    for step in range(num_steps):
        if fault is not None and not inside:
            fault.strike(own, step)
        losses.append(strategy.run(fn, args=(step, *batches[step % len(batches)])))
        if here is not None and step == 3:
            (here / str(own)).write_text(str(os.getpid()))
    totals = [float(strategy.reduce("SUM", loss)) for loss in losses[-5:]]
    weights = strategy.run(lambda: torch.cat([p.detach().flatten() for p in model.parameters()]))
    return totals, strategy.experimental_local_results(weights)[0]


def train_in_a_chain(*args: Any, **options: Any) -> tuple[list[float], Tensor]:
    """Train; notices go from rank to rank in a tree of one child each, as in a job of many."""
    notices.MAX_MESH_SIZE = notices._NUM_CHILDREN = 1
    return train(*args, **options)


def train_and_listen(num_steps: int, **options: Any) -> tuple[list[float], Tensor, list[str]]:
    """Train, and return also what was logged as a warning or worse."""
    lines = Lines()
    lines.setLevel(logging.WARNING)
    return *train(num_steps, **options), lines.lines


def train_and_stay(here: Path) -> str:
    """Train until something goes wrong; say so, stay until all is over, and return the error's message."""
    message = "no error"
    try:
        train(10**6, here=here)
    except ts.errors.OpError as error:
        message = str(error)
    (here / f"failed {rank()}").write_text("")
    while not (here / "end").exists():
        time.sleep(0.01)
    return message


def reduce_for_ever(num_floats: int, here: Path) -> None:
    """Sum tensors until something goes wrong."""
    strategy = make_strategy(heartbeat_s=1.0)
    tensor = torch.ones(num_floats)
    strategy.reduce("SUM", tensor)
    (here / str(strategy.workers.rank)).write_text("")
    while True:
        strategy.reduce("SUM", tensor)


def break_a_connection(rank_: int, message: int, num_floats: int) -> None:
    """Sum tensors until something goes wrong; a rank's connection breaks at one of its messages, and it lives on."""
    strategy = make_strategy(deadline_s=60.0)
    tensor = torch.ones(num_floats)
    strategy.reduce("SUM", tensor)
    with message_fault("torn" if strategy.workers.rank == rank_ else None, at=message):
        while True:
            strategy.reduce("SUM", tensor)


def end_one_after_the_other() -> list[str]:
    """Train and close, the last rank first; return what was logged as a warning or worse."""
    lines = Lines()
    lines.setLevel(logging.WARNING)
    strategy = make_strategy()
    watch, own = strategy.workers.watch, strategy.workers.rank
    for _ in range(3):
        strategy.reduce("SUM", torch.ones(20_000))
    if own < strategy.workers.size - 1:
        while own + 1 not in watch.gone:
            time.sleep(0.01)
    del strategy
    gc.collect()  # which closes the connections for data
    watch.close()
    return lines.lines


def hold_the_lock(rank_: int, seconds: int) -> tuple[float, int]:
    """Train, and let native code keep a rank's interpreter for some time."""
    strategy = make_strategy(heartbeat_s=1.0)
    strategy.reduce("SUM", torch.ones(()))
    if strategy.workers.rank == rank_:
        ctypes.PyDLL(None).sleep(seconds)
    return float(strategy.reduce("SUM", torch.ones(()))), strategy.workers.watch._plane._pulse._process.pid


def hang_in_a_replica() -> object:
    """Let the last of all replicas wait for ever."""
    strategy = make_strategy(deadline_s=3.0, num_devices=2)

    def the_place_to_hang() -> None:
        if ts.get_replica_context().replica_id_in_sync_group == 3:
            threading.Event().wait()

    def fn() -> object:
        ts.get_replica_context().all_reduce("SUM", torch.ones(()))
        the_place_to_hang()
        return ts.get_replica_context().all_reduce("SUM", torch.ones(()))

    return strategy.run(fn)


def mismatch(kind: str) -> object:
    """Bring something else than the other ranks on the last one."""
    strategy = make_strategy(deadline_s=20)
    is_other = strategy.workers.rank == strategy.workers.size - 1

    def all_reduce(value: object) -> object:
        return strategy.run(lambda: ts.get_replica_context().all_reduce("SUM", value))

    if kind == "shape":
        return all_reduce(torch.ones(3 if is_other else 2))
    if kind == "dtype":
        return all_reduce(torch.ones(2, dtype=torch.float64 if is_other else torch.float32))
    if kind == "number":
        return all_reduce([torch.ones(2)] * (2 if is_other else 1))
    if kind == "reduction":
        return strategy.reduce("MEAN" if is_other else "SUM", torch.ones(2))
    if kind == "axis":
        return strategy.gather(torch.ones(2, 2), axis=int(is_other))
    if kind == "reduced axis":
        return strategy.reduce("SUM", torch.ones(2, 2), axis=int(is_other))
    if kind == "axis of all_gather":
        return strategy.run(lambda: ts.get_replica_context().all_gather(torch.ones(2, 2), axis=int(is_other)))
    if kind == "gathered dtype":
        return strategy.gather(torch.ones(2, dtype=torch.int64 if is_other else torch.float32), axis=0)
    calls = [lambda: strategy.gather(torch.ones(2), axis=0), lambda: strategy.reduce("SUM", torch.ones(2))]
    return [call() for call in (reversed(calls) if is_other else calls)]


def skip(num_steps: int, skipped: int) -> tuple[list[float], Tensor]:
    """Leave out one step on rank 1."""
    strategy = make_strategy(deadline_s=20)
    with strategy.scope():
        model = nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def fn(x: Tensor) -> None:
        optimizer.zero_grad()
        ts.nn.compute_average_loss(model(x).sum(dim=1), global_batch_size="actual").backward()
        optimizer.step()

    for step, batch in enumerate(strategy.experimental_distribute_dataset(torch.randn(40, 2), batch_size=4)):
        if step < num_steps and not (strategy.workers.rank == 1 and step == skipped):
            strategy.run(fn, args=(batch,))
    return float(strategy.reduce("SUM", torch.ones(())))


def edit_config(edit: Callable[[dict[str, Any]], None]) -> None:
    config = json.loads(os.environ["TF_CONFIG"])
    edit(config)
    os.environ["TF_CONFIG"] = json.dumps(config)


def change_last_worker(change: dict[str, Any]) -> None:
    """Give the last worker another cluster: another address of one worker, one more, or one less."""

    def edit(config: dict[str, Any]) -> None:
        workers, task = config["cluster"]["worker"], config["task"]
        if task["index"] != len(workers) - 1:
            return
        if "address of worker" in change:
            workers[change["address of worker"]] = change["to"]
        if "one more" in change:
            workers.append(change["one more"])
        if "one less" in change:
            workers.pop(1)
            task["index"] -= 1

    edit_config(edit)


def different_cluster(change: dict[str, Any], deadline_s: float) -> float:
    change_last_worker(change)
    return float(make_strategy(deadline_s=deadline_s).reduce("SUM", torch.ones(())))


def different_setup(kind: str) -> float:
    """Make the strategy with something else on the last rank."""
    options: dict[str, Any] = {"timeout_seconds": 20.0}
    if kind == "devices over gloo":  # gradients have connections of their own there
        options["implementation"] = "RING"
    devices = ["cpu:0"]
    make = ts.MultiWorkerMirroredStrategy
    if int(os.environ["RANK"]) == int(os.environ["WORLD_SIZE"]) - 1:
        if kind == "bytes_per_pack":
            options["bytes_per_pack"] = 1 << 20
        elif kind == "timeout_seconds":
            options["timeout_seconds"] = 30.0
        elif kind == "implementation":
            options["implementation"] = "RING"
        elif kind == "strategy":
            make = ts.MirroredStrategy
        elif kind in ("devices", "devices over gloo"):
            devices.append("cpu:1")
        elif kind == "torch":
            torch.__version__ = "1.0.0"
        elif kind == "torchstrategy":
            from torchstrategy.collectives import process_group  # noqa: PLC0415

            process_group.__version__ = "0.0.1"
    strategy = make(communication_options=ts.experimental.CommunicationOptions(**options), devices=devices)
    return float(strategy.reduce("SUM", torch.ones(())))


def start(delays_s: tuple[float, ...], deadline_s: float | None = None, **edits: Any) -> tuple[float, float]:
    """Make the strategy after some seconds; a rank whose delay is negative never does.

    Args:
        delays_s: seconds for each rank.
        deadline_s: the strategy's.
        **edits: ``leader`` is another address of worker 0, for all workers.

    Returns:
        The sum of ones over workers.
    """
    own = rank()
    if delays_s[own] < 0:
        return 0.0
    if "leader" in edits:
        edit_config(lambda config: config["cluster"]["worker"].__setitem__(0, edits["leader"]))
    time.sleep(delays_s[own])
    return float(make_strategy(deadline_s=deadline_s).reduce("SUM", torch.ones(())))


def start_with_few_files(delays_s: tuple[float, ...], num_files: int) -> tuple[float, float]:
    """Do as ``start`` in a process that may open few files, as most may by default."""
    resource.setrlimit(resource.RLIMIT_NOFILE, (num_files, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
    return start(delays_s, 20.0)


def total(strategy: ts.Strategy) -> float:
    value = strategy.run(lambda: ts.get_replica_context().all_reduce("SUM", torch.ones(())))
    return float(strategy.experimental_local_results(value)[0])


def groups() -> list[float]:
    """Make groups before and after other work, use them in turn, drop one."""
    torch.randn(50, 50) @ torch.randn(50, 50)
    nn.Linear(3, 3)(torch.ones(1, 3)).sum().backward()
    first = make_strategy()
    found = [total(first)]
    second = make_strategy(num_devices=2)
    found += [total(second), total(first), total(second)]
    del first
    third = make_strategy()
    found += [total(third), total(second)]
    with second.scope():
        fourth = make_strategy()
    return [*found, total(fourth)]


def two_trainings() -> list[Tensor]:
    """Train in one group, then in another one, of another number of replicas."""
    return [train(5)[1], train(5, num_devices=2)[1], train(5)[1]]


def with_evaluator(folder: Path) -> dict[str, Any]:
    """Train on all workers but the last, which is the evaluator and ends before or after them."""

    def edit(config: dict[str, Any]) -> None:
        cluster = config["cluster"]
        cluster["chief"], cluster["evaluator"] = cluster["worker"][:1], cluster["worker"][-1:]
        cluster["worker"] = cluster["worker"][1:-1]
        index = config["task"]["index"]
        if index == 0:
            config["task"] = {"type": "chief", "index": 0}
        elif index <= len(cluster["worker"]):
            config["task"] = {"type": "worker", "index": index - 1}
        else:
            config["task"] = {"type": "evaluator", "index": 0}

    edit_config(edit)
    strategy = make_strategy()
    task = json.loads(os.environ["TF_CONFIG"])["task"]["type"]
    if task == "evaluator":
        while not (folder / "trained").exists():
            time.sleep(0.01)
        result = total(strategy)
        (folder / "evaluated").write_text("")
    else:
        result = total(strategy)
        if task == "chief":
            (folder / "trained").write_text("")
        while not (folder / "evaluated").exists():
            time.sleep(0.01)
        result = total(strategy)  # the group does not miss the evaluator
    return {
        "task": task,
        "replicas": strategy.num_replicas_in_sync,
        "total": result,
        "is_chief": strategy.is_chief,
        "alone": strategy.workers is None,
    }
