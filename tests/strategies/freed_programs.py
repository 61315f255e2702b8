"""Programs whose strategies, models and optimizers must be gone once the program has dropped them."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn
from torch.nn.utils import parametrizations

import torchstrategy as ts
from tests.programs import strategy_for

KINDS = (nn.Module, torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler, ts.Strategy)
#: How long threads may take to let go of what they hold.
PATIENCE_S = 5.0


def left_by(program: str, devices: list[str] | None, folder: str) -> list[str]:
    """Run a program, and return what is left of it.

    Args:
        program: its name.
        devices: of its strategy; ``None`` for the one of the launcher's environment.
        folder: where it may write.
    """
    before = {id(obj) for obj in living()}
    PROGRAMS[program](strategy_for(devices), Path(folder))
    deadline = time.monotonic() + PATIENCE_S
    while (left := [obj for obj in living() if id(obj) not in before]) and time.monotonic() < deadline:
        del left
        time.sleep(0.01)
    return [type(obj).__name__ for obj in left]


def living() -> list[object]:
    """Return the living models, optimizers, schedulers and strategies."""
    gc.collect()
    return [obj for obj in gc.get_objects() if issubclass(type(obj), KINDS)]


def _nested(strategy: ts.Strategy, folder: Path) -> None:
    """Train modules inside modules, with buffers."""
    _train(strategy, lambda: nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.Sequential(nn.Tanh())))


def _parametrized(strategy: ts.Strategy, folder: Path) -> None:
    """Train a module that has a class of its own."""
    _train(strategy, lambda: parametrizations.weight_norm(nn.Linear(2, 3)))


def _failed(strategy: ts.Strategy, folder: Path) -> None:
    """Let a replica function raise, whose traceback holds all that it held."""
    with strategy.scope():
        model = nn.Sequential(nn.Linear(2, 3), nn.Tanh())

    def step() -> None:
        model(torch.ones(2, 2))
        raise ArithmeticError("on purpose")

    try:
        strategy.run(step)
    except ArithmeticError:
        return
    raise AssertionError("The error is lost.")


def _mismatched(strategy: ts.Strategy, folder: Path) -> None:
    """Let the replicas of a process meet at different points, which ends the run on all."""
    with strategy.scope():
        model = nn.Sequential(nn.Linear(2, 3), nn.Tanh())

    def step() -> None:
        context = ts.get_replica_context()
        value = model(torch.ones(2, 2)).sum()
        if context.replica_id_in_sync_group == 0 and context.num_replicas_in_sync > 1:
            context.all_reduce("SUM", value)
        elif context.num_replicas_in_sync > 1:
            context.merge_call(lambda _: None)

    try:
        strategy.run(step)
    except RuntimeError:
        return
    assert strategy.num_replicas_in_sync == 1


def _fit(strategy: ts.Strategy, folder: Path) -> None:
    """Train by ``fit``, with metrics, a callback and validation."""
    with strategy.scope():
        model = ts.Model(nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.Linear(3, 1)))
        model.compile("adam", "mse", metrics=["mae"])
    x = torch.linspace(-1, 1, 16).reshape(8, 2)
    y = x.sum(1, keepdim=True)
    stopping = ts.callbacks.EarlyStopping("val_loss", restore_best_weights=True)
    model.fit(x, y, batch_size=4, epochs=2, verbose=0, validation_data=(x, y), callbacks=[stopping])
    model.predict(x, verbose=0)


def _saved(strategy: ts.Strategy, folder: Path) -> None:
    """Save and restore, also asynchronously."""
    model, optimizer = _train(strategy, lambda: nn.Sequential(nn.Linear(2, 3), nn.Tanh()))
    manager = ts.train.CheckpointManager(ts.train.Checkpoint(model=model, optimizer=optimizer), str(folder), 2)
    manager.save(options=ts.train.CheckpointOptions(enable_async=True))
    manager.sync()
    manager.checkpoint.restore(manager.save())


def _averaged(strategy: ts.Strategy, folder: Path) -> None:
    """Keep averages of the weights, a schedule and a variable."""
    with strategy.scope():
        variable = ts.Variable(0.0, aggregation=ts.VariableAggregation.SUM)
        model = nn.Sequential(nn.Linear(2, 3), nn.Tanh())
        average = torch.optim.swa_utils.AveragedModel(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2)

    def step() -> None:
        optimizer.zero_grad()
        ts.nn.compute_average_loss(model(torch.ones(2, 2)).sum(1)).backward()
        optimizer.step()
        average.update_parameters(model)
        variable.assign_add(torch.tensor(1.0))

    strategy.run(step)
    schedule.step()


def _train(strategy: ts.Strategy, make: Callable[[], nn.Module]) -> tuple[nn.Module, torch.optim.Optimizer]:
    with strategy.scope():
        model = make()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step() -> torch.Tensor:
        optimizer.zero_grad()
        loss = ts.nn.compute_average_loss(model(torch.ones(2, 2)).sum(1))
        loss.backward()
        optimizer.step()
        return loss.detach()

    for _ in range(2):
        strategy.reduce("SUM", strategy.run(step), axis=None)
    return model, optimizer


PROGRAMS = {
    "nested modules": _nested,
    "a parametrization": _parametrized,
    "an error": _failed,
    "a mismatch": _mismatched,
    "fit": _fit,
    "checkpoints": _saved,
    "averages, a schedule and a variable": _averaged,
}
