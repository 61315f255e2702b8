"""Learning-rate schedules, moving averages of weights, and stochastic weight averaging."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer, lr_scheduler
from torch.optim.swa_utils import SWALR, AveragedModel, get_ema_multi_avg_fn, update_bn

import torchstrategy as ts
from tests.parity.techniques.registry import data, fit, make_net, plain_step, program, state

SCHEDULERS: dict[str, Callable[[Optimizer], Any]] = {
    "StepLR": lambda o: lr_scheduler.StepLR(o, 2, 0.5),
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, 0.1, total_steps=8),
    "CyclicLR": lambda o: lr_scheduler.CyclicLR(o, 0.01, 0.1, step_size_up=2),
    "CosineAnnealingWarmRestarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 2),
    "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, lambda epoch: 0.9**epoch),
    "MultiplicativeLR": lambda o: lr_scheduler.MultiplicativeLR(o, lambda epoch: 0.9),
    "ChainedScheduler": lambda o: lr_scheduler.ChainedScheduler(
        [lr_scheduler.ConstantLR(o, 0.5, 2), lr_scheduler.ExponentialLR(o, 0.9)]
    ),
    "SequentialLR": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.LinearLR(o, 0.3, total_iters=3), lr_scheduler.CosineAnnealingLR(o, 5)], [3]
    ),
    "ReduceLROnPlateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=0, threshold=0.5),
}


def with_scheduler(strategy: Any, make: Callable[[Optimizer], Any], inside: bool) -> dict[str, Any]:
    """``ReduceLROnPlateau`` gets the loss over all replicas, in either context."""
    with strategy.scope():
        model = make_net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        scheduler = make(optimizer)
    on_plateau = isinstance(scheduler, lr_scheduler.ReduceLROnPlateau)
    train_step = plain_step(model, optimizer)
    rates = []

    def step(x: Tensor, y: Tensor) -> Tensor:
        loss = train_step(x, y)
        if inside:
            scheduler.step(*([float(ts.get_replica_context().all_reduce("SUM", loss))] if on_plateau else []))
        return loss

    def after(i: int, loss: float) -> None:
        if not inside:
            scheduler.step(*([loss] if on_plateau else []))
        rates.append(optimizer.param_groups[0]["lr"])

    losses = fit(strategy, step, after=after)
    assert len(set(rates)) > 1
    return {**state(model, losses=losses), "rates": torch.tensor(rates, dtype=torch.float64)}


for _name, _make in SCHEDULERS.items():
    for _inside in (True, False):
        program(f"{_name}, stepped {'inside' if _inside else 'outside'}", _make, _inside)(with_scheduler)


def net_with_buffers() -> nn.Module:
    """A network whose batch normalisation is not in training mode, so that shares don't matter."""
    model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Tanh(), nn.Linear(3, 2)).double()
    model[1].running_var.fill_(2.0)
    model[1].eval()
    return model


@program("EMA inside", inside=True)
@program("EMA outside", inside=False)
@program("EMA inside with buffers", inside=True, use_buffers=True)
@program("EMA outside with buffers", inside=False, use_buffers=True)
@program("EMA made later", inside=True, late=True)
def moving_average(strategy: Any, inside: bool, use_buffers: bool = False, late: bool = False) -> dict[str, Any]:
    made: list[Any] = []
    with strategy.scope():
        model = net_with_buffers()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    train_step = plain_step(model, optimizer)

    def make_average() -> None:
        with strategy.scope():
            made.append(AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.8), use_buffers=use_buffers))

    def step(x: Tensor, y: Tensor) -> Tensor:
        loss = train_step(x, y)
        with torch.no_grad():  # a buffer that depends on the steps, not on the share
            model[1].running_mean.add_(0.1)
        if inside:
            made[0].update_parameters(model)
        return loss

    def before(i: int) -> None:
        if i == (1 if late else 0):
            make_average()
        elif i == 0:
            made.append(nn.Identity())
            made[0].update_parameters = lambda model: None

    def after(i: int, loss: float) -> None:
        if late and i == 0:
            made.clear()
        elif not inside:
            made[0].update_parameters(model)

    losses = fit(strategy, step, before=before, after=after)
    assert int(made[0].n_averaged) == 6 - late
    return state(model, made[0], losses=losses)


@program("SWA and update_bn")
def stochastic_weight_averaging(strategy: Any) -> dict[str, Any]:
    """The averaged model's batch statistics are counted outside, over whole batches."""
    with strategy.scope():
        model = net_with_buffers()
        averaged = AveragedModel(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        scheduler = SWALR(optimizer, swa_lr=0.02, anneal_epochs=3)

    def after(i: int, loss: float) -> None:
        if i >= 2:
            averaged.update_parameters(model)
            scheduler.step()

    losses = fit(strategy, plain_step(model, optimizer), after=after)
    x, _ = data()
    update_bn(x.split(4), averaged)
    assert int(averaged.module[1].num_batches_tracked) == 3
    averaged.eval()
    found = strategy.experimental_local_results(strategy.run(lambda: averaged(x).detach()))
    return {**state(model, averaged, losses=losses), "output": found[-1]}
