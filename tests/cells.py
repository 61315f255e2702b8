"""One training in each way of training, under any strategy: the cells of the table in docs/supported.md."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn

import torchstrategy as ts
from torchstrategy.coordinator import ClusterCoordinator

EPOCHS, BATCH = 2, 4


def data(number: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(number, 3, generator=generator, dtype=torch.float64)
    return x, (x.sum(dim=1, keepdim=True) + 0.1).tanh()


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)).double()


momentum = functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9)


def weights(model: nn.Module) -> list[float]:
    return [number for value in model.state_dict().values() for number in value.cpu().flatten().tolist()]


def custom_loop(strategy: ts.Strategy, folder: Path) -> list[float]:
    """Train on batches of 4, 4 and 2 examples by a loop of one's own."""
    with strategy.scope():
        model = net()
        optimizer = momentum(model.parameters())
    batches = strategy.experimental_distribute_dataset(data(10), batch_size=BATCH)

    def step(x: Tensor, y: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = ts.nn.compute_average_loss((model(x) - y).square().mean(dim=1), global_batch_size="actual")
        loss.backward()
        optimizer.step()
        return loss.detach()

    @ts.function(jit_compile=False)
    def distributed(batch: tuple[Tensor, Tensor]) -> Tensor:
        return strategy.reduce("SUM", strategy.run(step, args=batch))

    for _ in range(EPOCHS):
        for batch in batches:
            distributed(batch)
    return weights(model)


def fit(strategy: ts.Strategy, folder: Path) -> list[float]:
    """Train on the same batches by ``compile`` and ``fit``."""
    with strategy.scope():
        model = ts.Model(net())
    model.compile(optimizer=momentum, loss="mse", metrics=["mae"])
    model.fit(*data(10), batch_size=BATCH, epochs=EPOCHS, shuffle=False, verbose=0)
    return weights(model)


def estimator(strategy: ts.Strategy, folder: Path) -> list[float]:
    """Train an Estimator, whose replicas take whole batches in turn, on two batches of 4 examples in an epoch."""

    def model_fn(features: Tensor, labels: Tensor, mode: str) -> ts.estimator.EstimatorSpec:
        module = net()
        train_op = momentum(module.parameters())
        return ts.estimator.EstimatorSpec(mode, module=module, loss=nn.functional.mse_loss, train_op=train_op)

    def input_fn(input_context: ts.InputContext | None = None) -> ts.data.Dataset:
        dataset = ts.data.Dataset.from_tensor_slices(data(8))
        if input_context is not None:
            dataset = dataset.batch(input_context.get_per_replica_batch_size(BATCH))
            share = dataset.shard(input_context.num_input_pipelines, input_context.input_pipeline_id)
            return share.repeat(EPOCHS)
        return dataset.batch(BATCH).repeat(EPOCHS)

    config = ts.estimator.RunConfig(model_dir=str(folder), train_distribute=strategy)
    made = ts.estimator.Estimator(model_fn, config=config)
    made.train(input_fn)
    values = [torch.as_tensor(made.get_variable_value(name)) for name in net().state_dict()]
    return [number for value in values for number in value.flatten().tolist()]


def scheduled(strategy: ts.ParameterServerStrategy, folder: Path) -> list[float]:
    """Train by functions that a coordinator schedules; with one worker they take turns."""
    coordinator = ClusterCoordinator(strategy)
    with strategy.scope():
        model = net()
        optimizer = momentum(model.parameters())

    def step(x: Tensor, y: Tensor) -> None:
        optimizer.zero_grad()
        (model(x) - y).square().mean().backward()
        optimizer.step()

    x, y = data(10)
    for _ in range(EPOCHS):
        for start in range(0, 10, BATCH):
            coordinator.schedule(step, args=(x[start : start + BATCH], y[start : start + BATCH]))
            coordinator.join()
    return weights(model)


WAYS: dict[str, Callable[..., list[float]]] = {"custom_loop": custom_loop, "fit": fit, "estimator": estimator}


def make(strategy: str, devices: list[str] | None) -> ts.Strategy:
    """Return a strategy of this name."""
    if strategy == "default":
        return ts.get_strategy()
    if strategy == "OneDeviceStrategy":
        return ts.OneDeviceStrategy("cpu:0")
    if strategy == "concurrent":
        return ts.MirroredStrategy(devices, concurrent=True)
    module = ts.experimental if strategy == "CentralStorageStrategy" else ts
    return getattr(module, strategy)(devices=devices) if module is ts else module.CentralStorageStrategy(devices)


def train(way: str, strategy: str, devices: list[str] | None, folder: Path) -> list[float]:
    """Train in a way under a strategy, and return the weights."""
    return WAYS[way](make(strategy, devices), folder)
