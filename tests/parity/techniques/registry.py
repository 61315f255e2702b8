"""What the programs of this folder share: their data, their loop, and the names by which worker processes find them."""

from __future__ import annotations

import contextlib
import functools
import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import torchstrategy as ts
from tests.programs import strategy_for

EXACT = 1e-10  # float64
EXACT_FLOAT = 1e-6  # float32 with SGD
MODULES = ("gradients", "models", "optimizers", "precision", "schedules", "weights")


@dataclass(frozen=True)
class Program:
    """``run(strategy)`` returns named tensors and numbers, equal for any number of replicas to within ``tolerance``."""

    run: Callable[[Any], dict[str, Any]]
    tolerance: float


PROGRAMS: dict[str, Program] = {}


def program(name: str, /, *args: Any, tolerance: float = EXACT, **kwargs: Any) -> Callable[[Any], Any]:
    """Register ``fn(strategy, *args, **kwargs)`` under a name."""

    def register(fn: Callable[..., dict[str, Any]]) -> Callable[..., dict[str, Any]]:
        assert name not in PROGRAMS
        PROGRAMS[name] = Program(lambda strategy: fn(strategy, *args, **kwargs), tolerance)
        return fn

    return register


def load_programs() -> dict[str, Program]:
    """Return all programs by name."""
    for module in MODULES:
        importlib.import_module(f"tests.parity.techniques.{module}")
    return PROGRAMS


def run_program(devices: Sequence[str] | None, name: str) -> dict[str, Tensor]:
    """Run a program; ``[]`` means the default strategy, ``None`` the one of the launcher's environment."""
    torch.manual_seed(7)
    results = load_programs()[name].run(strategy_for(devices))
    return {key: torch.as_tensor(value).detach().clone() for key, value in results.items()}


@functools.cache
def data(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    """Eleven examples of four features, and two targets each."""
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(11, 4, generator=generator, dtype=torch.float64)
    y = torch.stack([x.sum(1).sin(), x.prod(1)], 1)
    return x.to(dtype), y.to(dtype)


def fit(
    strategy: Any,
    step: Callable[..., Any],
    *,
    arrays: Any = None,
    batch_size: int = 4,
    epochs: int = 2,
    before: Callable[[int], None] = lambda i: None,
    after: Callable[[int, float], None] = lambda i, loss: None,
    around: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext,
) -> list[float]:
    """Call ``step(x, y)`` in ``run`` for each batch, the last of which is short, and return the losses.

    A batch of 4 leaves the third of three replicas without examples. ``before(i)`` and ``after(i, loss)`` are called
    outside, and ``run`` in the context that ``around()`` returns.
    """
    dataset = strategy.experimental_distribute_dataset(arrays or data(), batch_size=batch_size)
    losses: list[float] = []
    for _ in range(epochs):
        for inputs in dataset:
            before(len(losses))
            with around():
                per_replica = strategy.run(step, args=tuple(inputs))
            losses.append(float(strategy.reduce("SUM", per_replica, axis=None)))
            after(len(losses) - 1, losses[-1])
    return losses


def average(per_example: Tensor) -> Tensor:
    """Return the replica's part of the batch's mean loss."""
    return ts.nn.compute_average_loss(per_example, global_batch_size="actual")


def loss_of(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """Return the replica's part of the mean squared error."""
    return average((model(x) - y).square().sum(1))


def make_net(dtype: torch.dtype = torch.float64) -> nn.Sequential:
    """Return a small smooth network."""
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 2)).to(dtype)


def plain_step(model: nn.Module, optimizer: torch.optim.Optimizer) -> Callable[[Tensor, Tensor], Tensor]:
    """Return the usual replica function."""

    def step(x: Tensor, y: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = loss_of(model, x, y)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


def state(*models: nn.Module, losses: Sequence[float] = ()) -> dict[str, Any]:
    """Return the models' parameters and buffers, and the losses."""
    found: dict[str, Any] = {"losses": torch.tensor(losses, dtype=torch.float64)}
    for number, model in enumerate(models):
        found.update({f"{number}.{name}": value for name, value in model.state_dict().items()})
    return found
