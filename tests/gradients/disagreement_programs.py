"""Training programs on ranks that don't expect the same of sums during ``backward``."""

from __future__ import annotations

import torchstrategy as ts
from tests.gradients.early_job import Job, net, strategy_of
from tests.gradients.pass_programs import plain


def run_with_parameters_elsewhere_on_rank_1(implementation: str) -> tuple[list[float], list[float], list[int]]:
    """Train where no gradient of rank 1 can travel early, as if its parameters were on another device than rank 0's."""
    job = Job(strategy_of(True, implementation))
    if job.rank == 1:
        job.early._device_types = frozenset({"cuda"})
    return plain(Job(strategy_of(False, implementation))), plain(job), job.taken


def error_of_a_plan_on_one_rank(implementation: str) -> str:
    """Return what a rank raises if only rank 1 is to plan buckets."""
    job = Job(strategy_of(True, implementation))
    model, optimizer = job.make(net)
    job.train(model, optimizer, 1)
    if job.rank == 0:
        job.early._last.num_sums -= 1
    for _ in range(2):
        try:
            job.train(model, optimizer, 1)
        except ts.errors.DisagreementError as error:
            return str(error)
    return "no error"
