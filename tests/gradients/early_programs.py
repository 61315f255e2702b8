"""Training programs whose gradients are summed during ``backward`` or at ``step``, in worker processes."""

from __future__ import annotations

import gc
import logging
import os
import signal
import weakref
from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch import Tensor

import torchstrategy as ts
from tests.gradients import edit_programs, parameter_programs, pass_programs
from tests.gradients.early_job import Job, net, strategy_of
from tests.gradients.pass_programs import Fails, plain
from tests.programs import Lines
from torchstrategy.base import log

PROGRAMS: dict[str, Callable[[Job], list[float]]] = {
    function.__name__: function
    for function in (
        plain,
        pass_programs.accumulation,
        pass_programs.gradients_kept_as_zeros,
        parameter_programs.unused_parameters,
        edit_programs.clipped_before_the_sum,
        edit_programs.clipped_past_the_version_counter,
        edit_programs.zero_sums_edited_past_the_version_counter,
        edit_programs.clipped_after_the_sum,
        edit_programs.edited_now_and_then,
        parameter_programs.frozen_and_late_parameters,
        parameter_programs.sparse_gradients,
        parameter_programs.tied_weights,
        pass_programs.retained_graph,
        pass_programs.higher_order,
        pass_programs.a_rank_without_backward,
        pass_programs.an_exception_inside_backward,
        pass_programs.an_exception_that_ends_run,
        parameter_programs.gan,
        parameter_programs.gan_of_both_at_once,
        parameter_programs.twins,
        pass_programs.closure,
        edit_programs.scaler,
        edit_programs.summed_by_hand,
        pass_programs.steps_inside_backward,
        pass_programs.other_collectives,
        parameter_programs.types_and_buffers,
    )
}


def run(names: list[str], implementation: str) -> dict[str, tuple[list[float], list[float], list[int]]]:
    """Return for each program its numbers without and with overlap, and how many gradients each sum has taken early."""
    reference, overlapping = strategy_of(False, implementation), strategy_of(True, implementation)
    assert reference.gradients.summer.early is None
    found = {}
    for name in names:
        job = Job(overlapping)
        found[name] = PROGRAMS[name](Job(reference)), PROGRAMS[name](job), job.taken
    return found


def events_of(implementation: str) -> list[Any]:
    job = Job(strategy_of(True, implementation))
    plain(job)
    return job.events


def warnings_about_overlap() -> list[list[str]]:
    """Ask for overlap in several ways; return for each what the library warns of."""
    ts.experimental.register_communication("gloo of the user's", dist.ProcessGroupGloo)
    lines = Lines()
    found = []
    for devices, others in (
        (["cpu:0", "cpu:1"], {"implementation": "RING"}),
        (["cpu:0"], {"implementation": "RING", "gradient_compression": ts.experimental.PowerSGD()}),
        (["cpu:0"], {"implementation": "gloo of the user's"}),
        (["cpu:0"], {"implementation": "RING", "gradient_compression": "bf16"}),
        (["cpu:0"], {"implementation": "AUTO"}),
    ):
        log._said.clear()  # each of the warnings is said once in a process
        lines.lines.clear()
        options = ts.experimental.CommunicationOptions(overlap=True, **others)
        ts.MirroredStrategy(devices, communication_options=options)
        found.append([line for line in lines.lines if "overlap" in line])
    logging.getLogger("torchstrategy").removeHandler(lines)
    return found


def lose_while_a_bucket_flies(rank: int, how: str, implementation: str) -> None:
    """One rank is lost in the middle of a backward pass, when the others have begun sums that it has not."""
    job = Job(strategy_of(True, implementation, timeout_seconds=20.0))
    model, optimizer = job.make(net)

    def backward(i: int, x: Tensor) -> None:
        if i == 5 and job.rank == rank:
            model[0].weight.register_hook(lambda _: _lose(how))
        model(x).square().sum().backward()

    job.train(model, optimizer, backward=backward)


def _lose(how: str) -> None:
    if how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    raise ValueError("boom")


def errors_after_a_loss(implementation: str, *, is_late: bool) -> list[str]:
    """Rank 1 fails in the middle of a backward pass; say what this rank's next steps and collectives raise.

    Args:
        implementation: of the communication.
        is_late: whether rank 0 is told before it waits for the sums of the step before.
    """
    job = Job(strategy_of(True, implementation))
    model, optimizer = job.make(net)
    watch, finish = job.strategy.workers.watch, job.early.finish

    def finish_late(reports: Any) -> Any:
        assert watch.wait_for_report(20.0) is not None
        return finish(reports)

    def step(i: int, x: Tensor) -> None:
        optimizer.zero_grad()
        y = model[:2](x)
        if i == 5 and job.rank == 1:
            y = Fails.apply(y)
        model[2:](y).square().sum().backward()
        optimizer.step()

    errors = []
    for i, x in job.batches(8):
        job.early.finish = finish_late if is_late and (i, job.rank) == (4, 0) else finish
        try:
            job.run(step, i, x)
        except (ValueError, ts.errors.ReplicaFailedError) as error:
            errors.append(f"{i}: {type(error).__name__}: {error}")
    try:
        job.strategy.reduce("SUM", 1.0)
    except ts.errors.ReplicaFailedError as error:
        errors.append(f"reduce: {type(error).__name__}: {error}")
    return errors


def errors_after_a_failure_at_different_points(implementation: str) -> list[str]:
    """All ranks fail in one sum, rank 0 when it knows already which sums come next; say what steps raise."""
    job = Job(strategy_of(True, implementation))
    model, optimizer = job.make(net)
    prepare = job.early.prepare

    def fails(*args: Any) -> None:
        if job.rank == 0:
            prepare(*args)
        job.strategy.workers.exchange("the end of the sum on all ranks", None)
        raise ValueError("boom")

    def step(x: Tensor) -> None:
        optimizer.zero_grad()
        model(x).square().sum().backward()
        optimizer.step()

    errors = []
    for i, x in job.batches():
        job.early.prepare = fails if i == 5 else prepare
        try:
            job.run(step, x)
        except (ValueError, ts.errors.DisagreementError, ts.errors.ReplicaFailedError) as error:
            errors.append(f"{i}: {type(error).__name__}: {error}")
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

    job.run_batches(step, 4)
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
    return results[0], results[1], len(job.early._plans)


def forks(job: Job) -> list[float]:
    """Fork while sums are under way, as loaders of data do."""
    model, optimizer = job.make(net)

    def fork(i: int, _: Tensor) -> None:
        if i == 4:
            pid = os.fork()
            if pid == 0:
                os._exit(0)
            os.waitpid(pid, 0)

    return job.train(model, optimizer, then=fork)


def run_with_forks(implementation: str) -> tuple[list[float], list[float], list[int]]:
    job = Job(strategy_of(True, implementation))
    return forks(Job(strategy_of(False, implementation))), forks(job), job.taken
