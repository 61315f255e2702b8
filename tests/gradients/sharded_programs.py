"""Training programs whose optimizer states are split over ranks or not, in worker processes."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

import torchstrategy as ts
from tests.gradients.early_job import Job, net
from tests.gradients.early_programs import PROGRAMS
from tests.gradients.parameter_programs import Words

OPTIMIZERS: dict[str, tuple[Any, dict[str, Any]]] = {
    "SGD": (torch.optim.SGD, {"momentum": 0.9, "weight_decay": 0.1}),
    "Adam": (torch.optim.Adam, {"foreach": True, "amsgrad": True}),
    "AdamW": (torch.optim.AdamW, {"fused": True}),
    "Adagrad": (torch.optim.Adagrad, {}),
    "Adafactor": (torch.optim.Adafactor, {}),
}


def strategy_of(sharded: Any, implementation: str = "AUTO", overlap: bool | None = None) -> Any:
    options = ts.experimental.CommunicationOptions(implementation=implementation, bytes_per_pack=400, overlap=overlap)
    return ts.MultiWorkerMirroredStrategy(
        devices=["cpu:0"], communication_options=options, shard_optimizer_states=sharded
    )


class Remembering(Job):
    """Gives optimizers that would have no states some."""

    def make(self, model: Any, optimizer: Any = torch.optim.SGD, **options: Any) -> tuple[Any, Any]:
        if model is Words:
            optimizer = torch.optim.Adagrad  # which takes sparse gradients and dense ones
        elif optimizer is torch.optim.SGD:
            options = {"momentum": 0.5, **options}
        return super().make(model, optimizer, **options)


def run(names: list[str], implementation: str) -> dict[str, tuple[list[float], list[float]]]:
    """Return the numbers of some programs with whole states, and with split ones and sums that begin early."""
    whole, split = strategy_of(False, implementation, False), strategy_of(True, implementation, True)
    return {name: (PROGRAMS[name](Remembering(whole)), PROGRAMS[name](Remembering(split))) for name in names}


def gradients_of(model: nn.Module) -> list[Any]:
    return [None if p.grad is None else p.grad.flatten().tolist() for p in model.parameters()]


def num_bytes(optimizer: torch.optim.Optimizer) -> int:
    values = [value for state in optimizer.state.values() for value in state.values()]
    return sum(value.nbytes for value in values if isinstance(value, Tensor) and value.dim())


def optimizers(names: list[str]) -> dict[str, list[Any]]:
    """Return for each class the weights, gradients and states with whole and with split states, and their bytes."""
    strategies = strategy_of(False), strategy_of(True)
    found: dict[str, list[Any]] = {}
    for name in names:
        cls, options = OPTIMIZERS[name]
        found[name] = []
        for strategy in strategies:
            job = Job(strategy)
            model, optimizer = job.make(net, cls, **options)
            numbers = job.train(model, optimizer)
            size = num_bytes(optimizer)
            states = {k: {n: torch.as_tensor(v).tolist() for n, v in state.items()}
                      for k, state in optimizer.state_dict()["state"].items()}  # fmt: skip
            strategy.check_sync()
            found[name].append((numbers, gradients_of(model), states, size))
    return found
