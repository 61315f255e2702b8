"""A program of some ranks, of which the first ends while sums of its are under way; started by a test."""

import os
import sys
import time
from pathlib import Path
from unittest import mock

import torch

from tests.gradients.early_job import Job, net, strategy_of
from torchstrategy.collectives import rendezvous


def main(implementation: str, compression: str, hosts: str) -> None:
    host_of_each = tuple(map(int, hosts.split(",")))
    with mock.patch.object(rendezvous, "_number_hosts", return_value=host_of_each):
        job = Job(strategy_of(True, implementation, gradient_compression=compression or None))
    model, optimizer = job.make(net)

    def step(x: torch.Tensor, is_last: bool) -> None:
        optimizer.zero_grad()
        if not is_last or job.rank == 0:
            model(x).square().sum().backward()
        if not is_last:
            optimizer.step()

    for i, x in job.batches():
        job.run(step, x, i == 7)
    if job.early._opened.num_started != (0 if job.rank else 3):
        raise SystemExit("no sum was under way")
    own = Path("first_rank")
    if job.rank == 0:
        own.write_text(str(os.getpid()))
        return
    deadline = time.monotonic() + 100
    while not own.exists() or Path("/proc", own.read_text() or "self").exists():
        if time.monotonic() > deadline:
            raise SystemExit("the first rank does not end")
        time.sleep(0.05)


if __name__ == "__main__":
    main(*sys.argv[1:])
