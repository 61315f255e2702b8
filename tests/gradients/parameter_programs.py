"""Programs that differ in their parameters and in the number of their optimizers, for ``early_programs``."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.gradients.early_job import DOUBLE, Job, net, weights


class Branches(nn.Module):
    """A network with three middle layers, one of which is used."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, 4, dtype=DOUBLE)
        self.middle = nn.ModuleList(nn.Linear(4, 4, dtype=DOUBLE) for _ in range(3))
        self.last = nn.Linear(4, 1, dtype=DOUBLE)

    def forward(self, x: Tensor, branch: int) -> Tensor:
        return self.last(self.middle[branch](self.first(x)))


def unused_parameters(job: Job) -> list[float]:
    """Which layers are used differs between ranks and steps; one is used never, or seldom."""
    model, optimizer = job.make(Branches, torch.optim.SGD, weight_decay=0.1)

    def backward(i: int, x: Tensor) -> None:
        branch = 0 if i < 6 else (i + job.rank) % 2 if i < 12 else 2 if i == 27 else 1
        model(x, branch).square().sum().backward()

    return job.train(model, optimizer, 30, backward=backward)


def frozen_and_late_parameters(job: Job) -> list[float]:
    """Layers are frozen, thawed, and added to the optimizer, in the middle."""
    model, optimizer = job.make(net, torch.optim.Adam)
    with job.strategy.scope():
        head = nn.Linear(3, 3, dtype=DOUBLE)

    def step(i: int, x: Tensor) -> None:
        optimizer.zero_grad()
        y = model(x)
        (head(y) if i >= 18 else y).square().sum().backward()
        optimizer.step()

    for i, x in job.batches(26):
        model[0].requires_grad_(not 4 <= i < 15)
        if i == 20:
            optimizer.add_param_group({"params": head.parameters(), "lr": 0.01})
        job.run(step, i, x)
    return weights(model, head)


class Words(nn.Module):
    """An embedding with sparse gradients, whose weight another one of dense gradients stands for later on."""

    def __init__(self) -> None:
        super().__init__()
        self.sparse = nn.Embedding(20, 4, sparse=True, dtype=DOUBLE)
        self.last = nn.Linear(4, 2, dtype=DOUBLE)
        self.other = nn.Linear(2, 2, dtype=DOUBLE)

    def forward(self, words: Tensor, *, is_dense: bool) -> Tensor:
        rows = nn.functional.embedding(words, self.sparse.weight) if is_dense else self.sparse(words)
        return self.other(self.last(rows))


def sparse_gradients(job: Job) -> list[float]:
    """Sparse, then dense, then both: on one rank each."""
    model, optimizer = job.make(Words, lr=0.002)

    def backward(i: int, x: Tensor) -> None:
        words = (x * 10).long().abs() % 20
        is_dense = i >= 5 and (i < 10 or (i + job.rank) % 2 == 0)
        model(words, is_dense=is_dense).square().sum().backward()

    return job.train(model, optimizer, 18, backward=backward)


class Tied(nn.Module):
    """Layers that share a weight, which has a gradient of both."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, 5, dtype=DOUBLE)
        self.second = nn.Linear(5, 5, dtype=DOUBLE)
        self.third = nn.Linear(5, 5, dtype=DOUBLE)
        self.third.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.third(self.second(self.first(x).tanh()).tanh())


def tied_weights(job: Job) -> list[float]:
    return job.train(*job.make(Tied))


class Mixed(nn.Module):
    """Parameters of several types, batch normalisation, and a layer that is computed again in the backward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, 4)
        self.norm = nn.BatchNorm1d(4)
        self.second = nn.Linear(4, 4, dtype=DOUBLE)
        self.last = nn.Linear(4, 2, dtype=torch.bfloat16)
        self.empty = nn.Parameter(torch.zeros(0, 3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.first(x.float()))
        x = checkpoint(self.second, x.double(), use_reentrant=True)
        return self.last(x.bfloat16()).float() + self.empty.sum()


def types_and_buffers(job: Job) -> list[float]:
    model, optimizer = job.make(Mixed)
    job.train(model, optimizer)
    return torch.cat([value.double().flatten() for value in model.state_dict().values()]).tolist()


def gan(job: Job, *, together: bool = False) -> list[float]:
    """Two optimizers of one shape; each backward pass of one reaches the other's parameters as well."""
    first, of_first = job.make(net, torch.optim.Adam)
    with job.strategy.scope():
        second = nn.Sequential(nn.Linear(3, 4, dtype=DOUBLE), nn.Tanh(), nn.Linear(4, 1, dtype=DOUBLE))
        of_second = torch.optim.Adam(second.parameters(), lr=0.02)

    def step(_: int, x: Tensor) -> None:
        of_second.zero_grad()
        (second(x[:, :3]) - second(first(x).detach())).tanh().sum().backward()
        if not together:
            of_second.step()
        of_first.zero_grad()
        second(first(x)).sum().backward()
        of_first.step()
        if together:
            of_second.step()

    job.run_batches(step, 10)
    return weights(first, second)


def gan_of_both_at_once(job: Job) -> list[float]:
    return gan(job, together=True)


def twins(job: Job) -> list[float]:
    """Two optimizers of equal shapes, in an order that changes."""
    models = [job.make(net) for _ in range(2)]

    def step(i: int, x: Tensor) -> None:
        optimizer = models[int(i % 2 if i < 10 else i % 3 == 0)][1]
        optimizer.zero_grad()
        sum(m(x).square().sum() for m, _ in models).backward()
        optimizer.step()

    job.run_batches(step, 20)
    return weights(*(model for model, _ in models))
