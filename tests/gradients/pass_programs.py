"""Programs that differ in their backward passes and steps, for ``early_programs``."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import torchstrategy as ts
from tests.gradients.early_job import DOUBLE, Job, net, weights


def plain(job: Job) -> list[float]:
    model, optimizer = job.make(net, torch.optim.Adam)
    return job.train(model, optimizer, then=lambda *_: job.events.append("end of backward"))


def accumulation(job: Job) -> list[float]:
    """Windows of 3 batches, but for one that ends early."""
    model, optimizer = job.make(net)

    def step(i: int, x: Tensor) -> None:
        model(x).square().sum().backward()
        if i % 3 == 2 or i == 12:
            optimizer.step()
            optimizer.zero_grad()

    job.run_batches(step, 24)
    return weights(model)


def gradients_kept_as_zeros(job: Job) -> list[float]:
    model, optimizer = job.make(net, torch.optim.SGD, momentum=0.9)

    def step(_: int, x: Tensor) -> None:
        optimizer.zero_grad(set_to_none=False)
        model(x).square().sum().backward()
        optimizer.step()

    job.run_batches(step)
    return weights(model)


def retained_graph(job: Job) -> list[float]:
    """Two backward passes over one graph, and in some steps a third one."""
    model, optimizer = job.make(net)

    def backward(i: int, x: Tensor) -> None:
        y = model(x)
        y.square().sum().backward(retain_graph=True)
        y.sum().backward(retain_graph=i % 4 == 3)
        if i % 4 == 3:
            y.exp().sum().backward()

    return job.train(model, optimizer, 14, backward=backward)


def higher_order(job: Job) -> list[float]:
    """A penalty on the gradient of the inputs, and gradients that have a graph themselves."""
    model, optimizer = job.make(net)

    def step(i: int, x: Tensor) -> None:
        optimizer.zero_grad()
        x.requires_grad_()
        loss = model(x).square().sum()
        (slope,) = torch.autograd.grad(loss, x, create_graph=True)
        (loss + slope.square().sum()).backward(create_graph=i % 3 == 2)
        if i % 3 == 2:
            model[0].weight.grad.square().sum().backward(inputs=[model[2].weight])
        optimizer.step()
        optimizer.zero_grad()

    job.run_batches(step, 12)
    return weights(model)


def a_rank_without_backward(job: Job) -> list[float]:
    model, optimizer = job.make(net)

    def backward(i: int, x: Tensor) -> None:
        if i < 4 or i % 3 != job.rank:
            model(x).square().sum().backward()

    return job.train(model, optimizer, 14, backward=backward)


class Fails(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        raise ValueError("in the middle of backward")


def an_exception_inside_backward(job: Job) -> list[float]:
    """After half of a backward pass the program clears what there is and tries again, or goes on without."""
    model, optimizer = job.make(net)

    def backward(i: int, x: Tensor) -> None:
        if i in (5, 7, 9) and (i == 5 or job.rank == 0):
            try:
                model[2:](Fails.apply(model[:2](x))).square().sum().backward()
            except ValueError:
                if i != 9:
                    optimizer.zero_grad()
        if i != 9:
            model(x).square().sum().backward()

    return job.train(model, optimizer, 14, backward=backward)


def an_exception_that_ends_run(job: Job) -> list[float]:
    """All ranks fail in the middle of a backward pass, and go on with the next batch."""
    model, optimizer = job.make(net)

    def step(i: int, x: Tensor) -> None:
        optimizer.zero_grad()
        if i == 6:
            job.strategy.workers.exchange("the end of the sum before on all ranks", None)
        (model[2:](Fails.apply(model[:2](x))) if i == 6 else model(x)).square().sum().backward()
        optimizer.step()

    for i, x in job.batches(14):
        try:
            job.run(step, i, x)
        except ValueError:
            assert i == 6
    return weights(model)


def closure(job: Job) -> list[float]:
    model, optimizer = job.make(net, torch.optim.LBFGS, max_iter=3)

    def step(_: int, x: Tensor) -> None:
        def loss() -> Tensor:
            optimizer.zero_grad()
            value = model(x).square().sum()
            value.backward()
            return value

        optimizer.step(loss)

    job.run_batches(step, 4)
    return weights(model)


def steps_inside_backward(job: Job) -> list[float]:
    """An optimizer for each parameter, which steps as soon as the gradient is there."""
    model, _ = job.make(net)
    with job.strategy.scope():
        optimizers = {parameter: torch.optim.SGD([parameter], lr=0.05) for parameter in model.parameters()}

    def step_at_once(parameter: Tensor) -> None:
        optimizers[parameter].step()
        optimizers[parameter].zero_grad()

    def step(_: int, x: Tensor) -> None:
        if not handles:
            handles.extend(p.register_post_accumulate_grad_hook(step_at_once) for p in model.parameters())
        model(x).square().sum().backward()

    handles: list[Any] = []
    job.run_batches(step)
    return weights(model)


def other_collectives(job: Job) -> list[float]:
    """A program's own collectives between the backward pass and the step, and inside it."""
    model, optimizer = job.make(net)

    def step(x: Tensor) -> Tensor:
        optimizer.zero_grad()
        context = ts.get_replica_context()
        loss = context.all_reduce("SUM", model(x).square().sum())
        loss.backward()
        total = context.all_reduce("SUM", torch.ones(5000, dtype=DOUBLE))
        optimizer.step()
        return total.sum()

    for _, x in job.batches():
        found = job.strategy.reduce("SUM", job.run(step, x))
        job.strategy.sync_buffers()
    return [*weights(model), float(found)]
