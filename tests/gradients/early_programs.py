"""Training programs whose gradients are summed during ``backward`` or at ``step``, in worker processes."""

from __future__ import annotations

import gc
import os
import signal
import weakref
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import torchstrategy as ts
from torchstrategy.gradients import early

DOUBLE = torch.float64
_BUCKET_BYTES = 400
NUM_STEPS = 8


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
        self.early = strategy.gradient_summer._early
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

    @property
    def taken(self) -> list[int]:
        """For each sum, how many gradients had been summed early."""
        return [event for event in self.events if isinstance(event, int)]


def net() -> nn.Sequential:
    layers = [nn.Linear(5, 8, dtype=DOUBLE), nn.Tanh(), nn.Linear(8, 6, dtype=DOUBLE), nn.Tanh()]
    return nn.Sequential(*layers, nn.Linear(6, 3, dtype=DOUBLE))


def weights(*models: nn.Module) -> list[float]:
    return torch.cat([p.detach().flatten() for model in models for p in model.parameters()]).tolist()


def plain(job: Job) -> list[float]:
    model, optimizer = job.make(net, torch.optim.Adam)

    def step(x: Tensor) -> None:
        optimizer.zero_grad()
        model(x).square().sum().backward()
        job.events.append("end of backward")
        optimizer.step()

    for _, x in job.batches():
        job.run(step, x)
    return weights(model)


def accumulation(job: Job) -> list[float]:
    """Windows of 3 batches, but for one that ends early."""
    model, optimizer = job.make(net)

    def step(x: Tensor, is_last: bool) -> None:
        model(x).square().sum().backward()
        if is_last:
            optimizer.step()
            optimizer.zero_grad()

    for i, x in job.batches(24):
        job.run(step, x, i % 3 == 2 or i == 12)
    return weights(model)


def gradients_kept_as_zeros(job: Job) -> list[float]:
    model, optimizer = job.make(net, torch.optim.SGD, momentum=0.9)

    def step(x: Tensor) -> None:
        optimizer.zero_grad(set_to_none=False)
        model(x).square().sum().backward()
        optimizer.step()

    for _, x in job.batches():
        job.run(step, x)
    return weights(model)


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

    def step(x: Tensor, branch: int) -> None:
        optimizer.zero_grad()
        model(x, branch).square().sum().backward()
        optimizer.step()

    for i, x in job.batches(30):
        branch = 0 if i < 6 else (i + job.rank) % 2 if i < 12 else 2 if i == 27 else 1
        job.run(step, x, branch)
    return weights(model)


def clipped_before_the_sum(job: Job) -> list[float]:
    """Wrong numbers, but the same ones."""
    model, optimizer = job.make(net)

    def step(x: Tensor) -> None:
        optimizer.zero_grad()
        model(x).square().sum().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()

    for _, x in job.batches(12):
        job.run(step, x)
    return weights(model)


def clipped_past_the_version_counter(job: Job) -> list[float]:
    model, optimizer = job.make(net)

    def step(x: Tensor) -> None:
        optimizer.zero_grad()
        model(x).square().sum().backward()
        if job.rank == 0:
            model[2].weight.grad.data.clamp_(-0.01, 0.01)
        optimizer.step()

    for _, x in job.batches(12):
        job.run(step, x)
    return weights(model)


def zero_sums_edited_past_the_version_counter(job: Job) -> list[float]:
    """The gradients are [g, -g], and what is done to them on one rank leaves their sum as it is."""
    model, optimizer = job.make(lambda: nn.Linear(1, 2, dtype=DOUBLE))
    edits: list[Callable[[Tensor], Any]] = [lambda g: g.clamp_(-0.1, 0.1), lambda g: g.mul_(0.5), lambda g: g.neg_()]

    def step(i: int, x: Tensor) -> None:
        optimizer.zero_grad()
        y = model(x[:, :1])
        nn.functional.softplus(y[:, 0] - y[:, 1]).sum().backward()
        if i >= 4 and i % 4 == 0 and job.rank == 0:
            for parameter in model.parameters():
                edits[i // 4 % len(edits)](parameter.grad.data)
        optimizer.step()

    for i, x in job.batches(20):
        job.run(step, i, x)
    return weights(model)


def clipped_after_the_sum(job: Job) -> list[float]:
    model, optimizer = job.make(net)

    def step(x: Tensor) -> None:
        optimizer.zero_grad()
        model(x).square().sum().backward()
        ts.get_replica_context().sum_gradients(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()

    for _, x in job.batches():
        job.run(step, x)
    return weights(model)


def edited_now_and_then(job: Job) -> list[float]:
    """A gradient is scaled, replaced, dropped or made anew, on one rank or on all."""
    model, optimizer = job.make(net)

    def step(i: int, x: Tensor) -> None:
        optimizer.zero_grad()
        model(x).square().sum().backward()
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
        optimizer.step()

    for i, x in job.batches(20):
        job.run(step, i, x)
    return weights(model)


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

    def step(x: Tensor, is_dense: bool) -> None:
        optimizer.zero_grad()
        words = (x * 10).long().abs() % 20
        model(words, is_dense=is_dense).square().sum().backward()
        optimizer.step()

    for i, x in job.batches(18):
        job.run(step, x, i >= 5 and (i < 10 or (i + job.rank) % 2 == 0))
    return weights(model)


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
    model, optimizer = job.make(Tied)

    def step(x: Tensor) -> None:
        optimizer.zero_grad()
        model(x).square().sum().backward()
        optimizer.step()

    for _, x in job.batches():
        job.run(step, x)
    return weights(model)


def retained_graph(job: Job) -> list[float]:
    """Two backward passes over one graph, and in some steps a third one."""
    model, optimizer = job.make(net)

    def step(i: int, x: Tensor) -> None:
        optimizer.zero_grad()
        y = model(x)
        y.square().sum().backward(retain_graph=True)
        y.sum().backward(retain_graph=i % 4 == 3)
        if i % 4 == 3:
            y.exp().sum().backward()
        optimizer.step()

    for i, x in job.batches(14):
        job.run(step, i, x)
    return weights(model)


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

    for i, x in job.batches(12):
        job.run(step, i, x)
    return weights(model)


def a_rank_without_backward(job: Job) -> list[float]:
    model, optimizer = job.make(net)

    def step(i: int, x: Tensor) -> None:
        optimizer.zero_grad()
        if i < 4 or i % 3 != job.rank:
            model(x).square().sum().backward()
        optimizer.step()

    for i, x in job.batches(14):
        job.run(step, i, x)
    return weights(model)


class _Fails(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        raise ValueError("in the middle of backward")


def an_exception_inside_backward(job: Job) -> list[float]:
    """After half of a backward pass the program clears what there is and tries again, or goes on without."""
    model, optimizer = job.make(net)

    def step(i: int, x: Tensor) -> None:
        optimizer.zero_grad()
        if i in (5, 7, 9) and (i == 5 or job.rank == 0):
            try:
                model[2:](_Fails.apply(model[:2](x))).square().sum().backward()
            except ValueError:
                if i != 9:
                    optimizer.zero_grad()
        if i != 9:
            model(x).square().sum().backward()
        optimizer.step()

    for i, x in job.batches(14):
        job.run(step, i, x)
    return weights(model)


def an_exception_that_ends_run(job: Job) -> list[float]:
    """All ranks fail in the middle of a backward pass, and go on with the next batch."""
    model, optimizer = job.make(net)

    def step(i: int, x: Tensor) -> None:
        optimizer.zero_grad()
        if i == 6:
            job.strategy.workers.exchange("the end of the sum before on all ranks", None)
        (model[2:](_Fails.apply(model[:2](x))) if i == 6 else model(x)).square().sum().backward()
        optimizer.step()

    for i, x in job.batches(14):
        try:
            job.run(step, i, x)
        except ValueError:
            assert i == 6
    return weights(model)


def gan(job: Job, *, together: bool = False) -> list[float]:
    """Two optimizers of one shape; each backward pass of one reaches the other's parameters as well."""
    first, of_first = job.make(net, torch.optim.Adam)
    with job.strategy.scope():
        second = nn.Sequential(nn.Linear(3, 4, dtype=DOUBLE), nn.Tanh(), nn.Linear(4, 1, dtype=DOUBLE))
        of_second = torch.optim.Adam(second.parameters(), lr=0.02)

    def step(x: Tensor) -> None:
        of_second.zero_grad()
        (second(x[:, :3]) - second(first(x).detach())).tanh().sum().backward()
        if not together:
            of_second.step()
        of_first.zero_grad()
        second(first(x)).sum().backward()
        of_first.step()
        if together:
            of_second.step()

    for _, x in job.batches(10):
        job.run(step, x)
    return weights(first, second)


def gan_of_both_at_once(job: Job) -> list[float]:
    return gan(job, together=True)


def twins(job: Job) -> list[float]:
    """Two optimizers of equal shapes, in an order that changes."""
    models = [job.make(net) for _ in range(2)]

    def step(number: int, x: Tensor) -> None:
        optimizer = models[number][1]
        optimizer.zero_grad()
        sum(m(x).square().sum() for m, _ in models).backward()
        optimizer.step()

    for i, x in job.batches(20):
        job.run(step, int(i % 2 if i < 10 else i % 3 == 0), x)
    return weights(*(model for model, _ in models))


def closure(job: Job) -> list[float]:
    model, optimizer = job.make(net, torch.optim.LBFGS, max_iter=3)

    def step(x: Tensor) -> None:
        def loss() -> Tensor:
            optimizer.zero_grad()
            value = model(x).square().sum()
            value.backward()
            return value

        optimizer.step(loss)

    for _, x in job.batches(4):
        job.run(step, x)
    return weights(model)


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

    for i, x in job.batches(12):
        job.run(step, i, x)
    return [*weights(model), own.get_scale()]


def summed_by_hand(job: Job) -> list[float]:
    """In some steps the program sums the gradients itself."""
    model, optimizer = job.make(net)

    def step(i: int, x: Tensor) -> None:
        optimizer.zero_grad()
        model(x).square().sum().backward()
        if i % 4 == 3:
            context = ts.get_replica_context()
            for parameter in model.parameters():
                parameter.grad = context.all_reduce("SUM", parameter.grad)
            context.mark_summed(optimizer)
        optimizer.step()

    for i, x in job.batches(14):
        job.run(step, i, x)
    return weights(model)


def steps_inside_backward(job: Job) -> list[float]:
    """An optimizer for each parameter, which steps as soon as the gradient is there."""
    model, _ = job.make(net)
    with job.strategy.scope():
        optimizers = {parameter: torch.optim.SGD([parameter], lr=0.05) for parameter in model.parameters()}

    def step_at_once(parameter: Tensor) -> None:
        optimizers[parameter].step()
        optimizers[parameter].zero_grad()

    def step(x: Tensor) -> None:
        if not handles:
            handles.extend(p.register_post_accumulate_grad_hook(step_at_once) for p in model.parameters())
        model(x).square().sum().backward()

    handles: list[Any] = []
    for _, x in job.batches():
        job.run(step, x)
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

    def step(x: Tensor) -> None:
        optimizer.zero_grad()
        model(x).square().sum().backward()
        optimizer.step()

    for _, x in job.batches():
        job.run(step, x)
    return torch.cat([value.double().flatten() for value in model.state_dict().values()]).tolist()


PROGRAMS: dict[str, Callable[[Job], list[float]]] = {
    function.__name__: function
    for function in (
        plain,
        accumulation,
        gradients_kept_as_zeros,
        unused_parameters,
        clipped_before_the_sum,
        clipped_past_the_version_counter,
        zero_sums_edited_past_the_version_counter,
        clipped_after_the_sum,
        edited_now_and_then,
        frozen_and_late_parameters,
        sparse_gradients,
        tied_weights,
        retained_graph,
        higher_order,
        a_rank_without_backward,
        an_exception_inside_backward,
        an_exception_that_ends_run,
        gan,
        gan_of_both_at_once,
        twins,
        closure,
        scaler,
        summed_by_hand,
        steps_inside_backward,
        other_collectives,
        types_and_buffers,
    )
}


def run(names: list[str], implementation: str) -> dict[str, tuple[list[float], list[float], list[int]]]:
    """Return for each program its numbers without and with overlap, and how many gradients each sum has taken early."""
    reference, overlapping = strategy_of(False, implementation), strategy_of(True, implementation)
    assert reference.gradient_summer._early is None
    found = {}
    for name in names:
        job = Job(overlapping)
        found[name] = PROGRAMS[name](Job(reference)), PROGRAMS[name](job), job.taken
    return found


def events_of(implementation: str) -> list[Any]:
    job = Job(strategy_of(True, implementation))
    plain(job)
    return job.events


def lose_while_a_bucket_flies(rank: int, how: str, implementation: str) -> float:
    """One rank is lost in the middle of a backward pass, when the others have begun sums that it has not."""
    job = Job(strategy_of(True, implementation, timeout_seconds=20.0))
    model, optimizer = job.make(net)

    def step(i: int, x: Tensor) -> None:
        optimizer.zero_grad()
        if i == 5 and job.rank == rank:
            model[0].weight.register_hook(lambda _: _lose(how))
        model(x).square().sum().backward()
        optimizer.step()

    for i, x in job.batches():
        job.run(step, i, x)
    return 0.0


def _lose(how: str) -> None:
    if how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    raise ValueError("boom")


def errors_after_a_loss(implementation: str) -> list[str]:
    """Rank 1 fails in the middle of a backward pass; say what this rank's next steps and collectives raise."""
    job = Job(strategy_of(True, implementation))
    model, optimizer = job.make(net)

    def step(i: int, x: Tensor) -> None:
        optimizer.zero_grad()
        y = model[:2](x)
        if i == 5 and job.rank == 1:
            y = _Fails.apply(y)
        model[2:](y).square().sum().backward()
        optimizer.step()

    errors = []
    for i, x in job.batches(8):
        try:
            job.run(step, i, x)
        except (ValueError, ts.errors.ReplicaFailedError) as error:
            errors.append(f"{i}: {type(error).__name__}: {error}")
    try:
        job.strategy.reduce("SUM", 1.0)
    except ts.errors.ReplicaFailedError as error:
        errors.append(f"reduce: {type(error).__name__}: {error}")
    return errors


def dropped_objects(implementation: str) -> tuple[list[Any], list[bool]]:
    """Drop optimizer and model in the middle of a backward pass, and go on with others."""
    job = Job(strategy_of(True, implementation))
    references = _trained_and_dropped(job)
    gc.collect()
    are_gone = [reference() is None for reference in references]
    plain(job)
    return job.events, are_gone


def _trained_and_dropped(job: Job) -> list[weakref.ref[Any]]:
    model, optimizer = job.make(net)

    def step(i: int, x: Tensor) -> None:
        optimizer.zero_grad()
        model(x).square().sum().backward()
        if i < 3:
            optimizer.step()

    for i, x in job.batches(4):
        job.run(step, i, x)
    job.events.append("dropped")
    return [weakref.ref(value) for value in (model, optimizer)]


def new_optimizers(implementation: str) -> tuple[list[float], list[float], int]:
    """A program that makes a model and an optimizer again and again, with the same strategies."""
    results = []
    for overlap in (False, True):
        job = Job(strategy_of(overlap, implementation))
        numbers: list[float] = []
        for _ in range(3):
            numbers += plain(job)
            gc.collect()
        results.append(numbers)
    return results[0], results[1], len(job.early._schedules)


def forks(job: Job) -> list[float]:
    """Fork while sums are under way, as loaders of data do."""
    model, optimizer = job.make(net)

    def step(i: int, x: Tensor) -> None:
        optimizer.zero_grad()
        model(x).square().sum().backward()
        if i == 4:
            pid = os.fork()
            if pid == 0:
                os._exit(0)
            os.waitpid(pid, 0)
        optimizer.step()

    for i, x in job.batches():
        job.run(step, i, x)
    return weights(model)


def run_with_forks(implementation: str) -> tuple[list[float], list[float], list[int]]:
    job = Job(strategy_of(True, implementation))
    return forks(Job(strategy_of(False, implementation))), forks(job), job.taken


def edited_late_as_on_an_accelerator(implementation: str) -> list[int]:
    """Begin after 5 steps to change gradients past the version counter; return how many each sum has taken early."""
    job = Job(strategy_of(True, implementation))
    model, optimizer = job.make(net)

    def step(i: int, x: Tensor) -> None:
        optimizer.zero_grad()
        model(x).square().sum().backward()
        if i >= 5:
            model[2].weight.grad.data.mul_(0.5)
        optimizer.step()

    with (
        mock.patch.object(early, "_always_compares", return_value=False),
        mock.patch.object(early, "_COMPARED_EVERY", 5),
    ):
        for i, x in job.batches(10):
            job.run(step, i, x)
    return job.taken


def totals_that_change(size: int, dtype: torch.dtype) -> list[bool]:
    """Say for each of some edits whether the totals show it."""
    grad = torch.randn(2, size, generator=torch.Generator().manual_seed(1)).to(dtype)
    grad[1] = -grad[0]
    edits: list[Callable[[Tensor], Any]] = [
        lambda g: g.mul_(0.5),
        lambda g: g.neg_(),
        lambda g: g.clamp_(-0.5, 0.5),
        lambda g: g.copy_(g.flip(0)),
        lambda g: g[:, -1].zero_(),
    ]
    found = []
    for edit in edits:
        edited = grad.clone()
        edit(edited)
        found.append(not early._equal(early._totals([grad, None]), early._totals([edited, None])))
    return found
