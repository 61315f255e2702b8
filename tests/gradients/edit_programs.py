"""Programs that change or sum gradients themselves between the backward pass and the step, for ``early_programs``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

import torchstrategy as ts
from tests.gradients.early_job import DOUBLE, Job, net, strategy_of, weights
from torchstrategy.gradients import early_buckets


def clipped_before_the_sum(job: Job) -> list[float]:
    """Wrong numbers, but the same ones."""
    model, optimizer = job.make(net)
    return job.train(model, optimizer, 12, then=lambda *_: nn.utils.clip_grad_norm_(model.parameters(), 0.1))


def clipped_past_the_version_counter(job: Job) -> list[float]:
    model, optimizer = job.make(net)

    def clip(_: int, x: Tensor) -> None:
        if job.rank == 0:
            model[2].weight.grad.data.clamp_(-0.01, 0.01)

    return job.train(model, optimizer, 12, then=clip)


def zero_sums_edited_past_the_version_counter(job: Job) -> list[float]:
    """The gradients are [g, -g], and what is done to them on one rank leaves their sum as it is."""
    model, optimizer = job.make(lambda: nn.Linear(1, 2, dtype=DOUBLE))
    edits: list[Callable[[Tensor], Any]] = [lambda g: g.clamp_(-0.1, 0.1), lambda g: g.mul_(0.5), lambda g: g.neg_()]

    def backward(_: int, x: Tensor) -> None:
        y = model(x[:, :1])
        nn.functional.softplus(y[:, 0] - y[:, 1]).sum().backward()

    def edit(i: int, _: Tensor) -> None:
        if i >= 4 and i % 4 == 0 and job.rank == 0:
            for parameter in model.parameters():
                edits[i // 4 % len(edits)](parameter.grad.data)

    return job.train(model, optimizer, 20, backward=backward, then=edit)


def clipped_after_the_sum(job: Job) -> list[float]:
    model, optimizer = job.make(net)

    def sum_and_clip(*_: object) -> None:
        ts.get_replica_context().sum_gradients(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)

    return job.train(model, optimizer, then=sum_and_clip)


def edited_now_and_then(job: Job) -> list[float]:
    """A gradient is scaled, replaced, dropped or made anew, on one rank or on all."""
    model, optimizer = job.make(net)

    def edit(i: int, x: Tensor) -> None:
        weight = model[2].weight
        if i == 4:
            weight.grad.mul_(0.5)
        elif i == 6 and job.rank == 1:
            weight.grad = weight.grad * 2
        elif i == 9 and job.rank == 0:
            weight.grad = None
        elif i == 12:
            optimizer.zero_grad()
            model(2 * x).square().sum().backward()
        elif i == 14:
            optimizer.zero_grad()

    return job.train(model, optimizer, 20, then=edit)


def scaler(job: Job) -> list[float]:
    """A rank overflows in one step, which all of them leave out."""
    model, optimizer = job.make(net)
    with job.strategy.scope():
        own = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=4)

    def step(i: int, x: Tensor) -> None:
        optimizer.zero_grad()
        loss = model(x).square().sum()
        own.scale(loss * (float("inf") if i == 5 and job.rank == 1 else 1.0)).backward()
        own.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        own.step(optimizer)
        own.update()

    job.run_batches(step, 12)
    return [*weights(model), own.get_scale()]


def summed_by_hand(job: Job) -> list[float]:
    """In some steps the program sums the gradients itself."""
    model, optimizer = job.make(net)

    def sum_by_hand(i: int, _: Tensor) -> None:
        if i % 4 == 3:
            context = ts.get_replica_context()
            for parameter in model.parameters():
                parameter.grad = context.all_reduce("SUM", parameter.grad)
            context.mark_summed(optimizer)

    return job.train(model, optimizer, 14, then=sum_by_hand)


def edited_late_as_on_an_accelerator(implementation: str) -> list[int]:
    """Begin after 5 steps to change gradients past the version counter; return how many each sum has taken early."""
    job = Job(strategy_of(True, implementation))
    model, optimizer = job.make(net)

    def edit(i: int, _: Tensor) -> None:
        if i >= 5:
            model[2].weight.grad.data.mul_(0.5)

    with (
        mock.patch.object(early_buckets, "_always_compares", return_value=False),
        mock.patch.object(early_buckets, "_COMPARED_EVERY", 5),
    ):
        job.train(model, optimizer, 10, then=edit)
    return job.taken
