"""What training programs have in common whose gradients are summed during ``backward`` or at ``step``."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

import torchstrategy as ts

DOUBLE = torch.float64
NUM_STEPS = 8
_BUCKET_BYTES = 400


def strategy_of(overlap: bool | None, implementation: str = "AUTO", **options: Any) -> ts.Strategy:
    """Return a strategy with one replica in each process, and small buckets."""
    options = {"bytes_per_pack": _BUCKET_BYTES, **options}
    communication = ts.experimental.CommunicationOptions(overlap=overlap, implementation=implementation, **options)
    return ts.MultiWorkerMirroredStrategy(devices=["cpu:0"], communication_options=communication)


class Job:
    """What a program needs.

    Args:
        strategy: runs it.
    """

    def __init__(self, strategy: ts.Strategy) -> None:
        self.strategy = strategy
        self.rank = strategy.workers.rank
        self.early = strategy.gradients.summer.early
        #: What happened in order: "start" of a bucket, "step", and how many gradients a step has taken from early sums.
        self.events: list[Any] = []
        if self.early is not None:
            self._watch(self.early, strategy.workers)
        self._random = torch.Generator().manual_seed(self.rank)

    def _watch(self, early: Any, workers: Any) -> None:
        start, finish = type(workers).start_early_sum.__get__(workers), type(early).finish.__get__(early)

        def noted_start(*args: Any) -> Any:
            self.events.append("start")
            return start(*args)

        def noted_finish(reports: Any) -> Any:
            self.events.append("step")
            sums = finish(reports)
            self.events.append(len(sums))
            return sums

        workers.start_early_sum, early.finish = noted_start, noted_finish

    def make(self, model: Callable[[], nn.Module], optimizer: Any = torch.optim.SGD, **options: Any) -> tuple[Any, Any]:
        with self.strategy.scope():
            torch.manual_seed(5)
            made = model()
            return made, optimizer(made.parameters(), **{"lr": 0.005, **options})

    def batches(self, number: int = NUM_STEPS, rows: int = 3) -> Iterator[tuple[int, Tensor]]:
        for i in range(number):
            yield i, torch.randn(rows, 5, dtype=DOUBLE, generator=self._random)

    def run(self, step: Callable[..., Any], *args: Any) -> Any:
        return self.strategy.run(step, args=args)

    def run_batches(self, step: Callable[[int, Tensor], Any], number: int = NUM_STEPS) -> None:
        """Run a function with the number of each batch, and the batch."""
        for i, x in self.batches(number):
            self.run(step, i, x)

    def train(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        number: int = NUM_STEPS,
        *,
        backward: Callable[[int, Tensor], object] | None = None,
        then: Callable[[int, Tensor], object] | None = None,
    ) -> list[float]:
        """Make one step with each of some batches, and return the weights.

        Args:
            model: what is trained.
            optimizer: of its parameters.
            number: of batches.
            backward: computes the gradients; given the number of the batch, and the batch. Without it they are those
                of the model's squared outputs.
            then: called with the same arguments between that and the step.
        """

        def step(i: int, x: Tensor) -> None:
            optimizer.zero_grad()
            if backward is None:
                model(x).square().sum().backward()
            else:
                backward(i, x)
            if then is not None:
                then(i, x)
            optimizer.step()

        self.run_batches(step, number)
        return weights(model)

    @property
    def taken(self) -> list[int]:
        """For each sum, how many gradients had been summed early."""
        return [event for event in self.events if isinstance(event, int)]


def net() -> nn.Sequential:
    layers = [nn.Linear(5, 8, dtype=DOUBLE), nn.Tanh(), nn.Linear(8, 6, dtype=DOUBLE), nn.Tanh()]
    return nn.Sequential(*layers, nn.Linear(6, 3, dtype=DOUBLE))


def weights(*models: nn.Module) -> list[float]:
    return torch.cat([p.detach().flatten() for model in models for p in model.parameters()]).tolist()
