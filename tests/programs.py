"""Training programs that several tests run with one replica and with many."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import DataLoader, TensorDataset

import torchstrategy as ts

START_WEIGHT = -0.5542974286410899


def strategy_for(devices: Sequence[str] | ts.Strategy | None) -> ts.Strategy:
    """``None`` means whatever the environment says (torchrun processes), ``[]`` the default strategy."""
    if isinstance(devices, ts.Strategy):
        return devices
    return ts.get_strategy() if devices is not None and not devices else ts.MirroredStrategy(devices)


def guide_losses(devices: Sequence[str] | None, version: int = 2024) -> list[float]:
    """The loss table of the distributed-training guide: 50 or 20 steps, then ten more by ``iter`` and ``next``."""
    strategy = strategy_for(devices)
    steps, batch, weight, bias, factor = (50, 20, START_WEIGHT, 0.0, 1e-4)
    if version == 2021:
        steps, batch, weight, bias, factor = (20, 5, 1.0584903872, 0.0, 0.0)
    with strategy.scope():
        model = nn.Linear(1, 1)
        nn.init.constant_(model.weight, weight)
        nn.init.constant_(model.bias, bias)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    data = torch.ones(steps * batch, 1)
    dataset = strategy.experimental_distribute_dataset((data, data), batch_size=batch)

    def train_step(inputs: tuple[Tensor, Tensor]) -> Tensor:
        x, y = inputs
        optimizer.zero_grad()
        per_example = nn.functional.binary_cross_entropy_with_logits(model(x), y, reduction="none").mean(1)
        loss = ts.nn.compute_average_loss(per_example, global_batch_size=None if factor else batch)
        if factor:
            loss = loss + ts.nn.scale_regularization_loss(factor * model.weight.square().sum())
        loss.backward()
        optimizer.step()
        return loss.detach()

    def step(inputs: object) -> float:
        return float(strategy.reduce("SUM", strategy.run(train_step, args=(inputs,))))

    losses = [step(inputs) for inputs in dataset]
    iterator = iter(dataset)
    return losses + [step(next(iterator)) for _ in range(10)]


def smooth_net(dtype: torch.dtype) -> nn.Module:
    return nn.Sequential(nn.Linear(5, 8, dtype=dtype), nn.Tanh(), nn.Linear(8, 3, dtype=dtype))


def conv_net(dtype: torch.dtype) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 4, 3, dtype=dtype),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(4, 6, 3, dtype=dtype),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(24, 8, dtype=dtype),
        nn.ReLU(),
        nn.Linear(8, 3, dtype=dtype),
    )


def make_optimizer(name: str, parameters: object) -> torch.optim.Optimizer:
    if name == "sgd":
        return torch.optim.SGD(parameters, lr=0.1, momentum=0.9, weight_decay=1e-3)
    return torch.optim.Adam(parameters, lr=0.01)


def make_train_step(
    model: Callable[[Tensor], Tensor], optimizer: torch.optim.Optimizer
) -> Callable[[tuple[Tensor, Tensor]], Tensor]:
    """Return a replica's step on images and labels, which gives its part of the mean loss."""

    def train_step(inputs: tuple[Tensor, Tensor]) -> Tensor:
        images, labels = inputs
        optimizer.zero_grad()
        per_example = nn.functional.cross_entropy(model(images), labels, reduction="none")
        loss = ts.nn.compute_average_loss(per_example, global_batch_size="actual")
        loss.backward()
        optimizer.step()
        return loss.detach()

    return train_step


def train(
    devices: Sequence[str] | ts.Strategy | None,
    optimizer_name: str = "sgd",
    accumulation: int = 1,
    net: str = "smooth",
    dtype: torch.dtype = torch.float32,
    num_examples: int = 23,
    batch_size: int = 5,
    epochs: int = 1,
    clip: float | None = None,
) -> list[list[float]]:
    """Train on a data set whose size is no multiple of the batch; return every parameter and the losses."""
    torch.manual_seed(7)
    strategy = strategy_for(devices)
    shape = (num_examples, 1, 14, 14) if net == "conv" else (num_examples, 5)
    x, y = torch.randn(shape, dtype=dtype), torch.randint(3, (num_examples,))
    with strategy.scope():
        model = conv_net(dtype) if net == "conv" else smooth_net(dtype)
        optimizer = make_optimizer(optimizer_name, model.parameters())
    loader = DataLoader(TensorDataset(x, y), batch_size, shuffle=True)
    dataset = strategy.experimental_distribute_dataset(loader)
    weight = model[0].weight

    def train_step(inputs: tuple[Tensor, Tensor], apply: bool) -> Tensor:
        images, labels = inputs
        per_example = nn.functional.cross_entropy(model(images), labels, reduction="none")
        loss = ts.nn.compute_average_loss(per_example, global_batch_size="actual")
        loss = loss + ts.nn.scale_regularization_loss(1e-3 * model[0].weight.square().sum())
        loss.backward()
        if apply:
            if clip is not None:
                ts.get_replica_context().sum_gradients(optimizer)
                nn.utils.clip_grad_norm_(model.parameters(), clip)
            optimizer.step()
            optimizer.zero_grad()
        return loss.detach()

    losses = []
    step = 0
    for _ in range(epochs):
        for inputs in dataset:
            step += 1
            per_replica = strategy.run(train_step, args=(inputs, step % accumulation == 0))
            losses.append(float(strategy.reduce("SUM", per_replica)))
    assert weight is model[0].weight
    return [parameter.detach().flatten().tolist() for parameter in model.parameters()] + [losses]


def largest_difference(first: list[list[float]], second: list[list[float]]) -> float:
    pairs = zip(first, second, strict=True)
    return max(abs(a - b) for row_a, row_b in pairs for a, b in zip(row_a, row_b, strict=True))


def cpu_devices(count: int) -> list[str]:
    return [f"cpu:{i}" for i in range(count)]


def assert_equal(actual: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float, note: object = "") -> None:
    """Compare named tensors; ``note`` is added to the message."""
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        text = functools.partial("{0} differs: {2}\n{1}".format, name, note)
        torch.testing.assert_close(actual[name], value, rtol=tolerance, atol=tolerance, msg=text)


class Lines(logging.Handler):
    """Takes down what the library logs."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []
        logging.getLogger("torchstrategy").addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


class CountedKernels(TorchDispatchMode):
    """Counts operations that start kernels."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if not func.is_view:
            self.names.append(str(func))
        return func(*args, **(kwargs or {}))
