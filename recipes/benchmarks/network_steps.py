"""A process of recipes/benchmarks/network.py, on a host of its own: trains blocks of steps when it is asked to.

``python network_steps.py '{"model": {"_target_": "models.mlp", ...}, "num_replicas": 2, ...}'``
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import json
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import profiles
import torch
from blocks import Program, serve, tell
from network_model import Traffic
from step_times import make_work
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from training_steps import ALONE, OURS, PEERS, Training, Work, alone, ddp, ours

import torchstrategy as ts

UNCOMPRESSED_STEPS = 2  # that PowerSGD starts with, here as in DDP's hook, which needs two
_PR_SET_PDEATHSIG = 1


def main() -> None:
    """Answer the benchmark; the first answer says what the parts of a step take without a network."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)  # who waits for a lost network would wait for long
    options = json.loads(sys.argv[1])
    torch.set_num_threads(options["threads"])
    work = make_work(options)
    shapes = [list(parameter.shape) for parameter in work.make_model().parameters()]
    tell(compute=time_parts(work, options["compute_steps"]), shapes=shapes)

    def build(way: str) -> Program:
        torch.manual_seed(0)
        training = WAYS[way].train(work)
        for _ in range(UNCOMPRESSED_STEPS):
            training.step()
        return Program(training.step, sum(parameter.numel() for parameter in training.model.parameters()))

    def record(program: Program, folder: str) -> None:
        with contextlib.redirect_stdout(sys.stderr):  # the benchmark reads the other one
            profiles.record_calls(program.step, options["profile_steps"], Path(folder), name=f"rank {work.rank}")

    serve(build, torch.__version__, record)


def time_parts(work: Work, num_steps: int) -> dict[str, list[float]]:
    """Return the seconds of each step's forward pass, backward pass and optimizer, in one process alone."""
    model = work.make_model()
    optimizer = work.make_optimizer(model.parameters())
    images, labels = work.share
    times: dict[str, list[float]] = {"forward": [], "backward": [], "optimizer": []}
    for number in range(-1, num_steps):  # step -1 is the warm-up
        moments = [time.perf_counter()]
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(images), labels)
        moments.append(time.perf_counter())
        loss.backward()
        moments.append(time.perf_counter())
        optimizer.step()
        moments.append(time.perf_counter())
        if number >= 0:
            for name, start, end in zip(times, moments, moments[1:], strict=False):
                times[name].append(end - start)
    return times


def ddp_fp16(work: Work) -> Training:
    """Train under DDP with its hook for 16-bit gradients; the one for bf16 refuses gloo."""
    training = ddp(work)
    training.model.register_comm_hook(None, default_hooks.fp16_compress_hook)
    return training


def ddp_powersgd(work: Work) -> Training:
    """Train under DDP with its PowerSGD hook.

    There is one bucket: with several, gloo's threads start their sums in an order that can differ between processes,
    which then fail or wait for ever.
    """
    training = ddp(work, bucket_cap_mb=100_000)
    state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=1, start_powerSGD_iter=UNCOMPRESSED_STEPS)
    training.model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    return training


def ours_with(work: Work, **options: Any) -> Training:
    """Train under ``ts.MultiWorkerMirroredStrategy`` with the given communication options."""
    communication = ts.experimental.CommunicationOptions(**options)
    return ours(work, ts.MultiWorkerMirroredStrategy(communication_options=communication, devices=["cpu:0"]))


class Way(NamedTuple):
    """A way to train, and what it sends."""

    train: Callable[[Work], Training]
    traffic: Traffic = Traffic()


WAYS = {
    ALONE: Way(alone, Traffic(bits=0)),  # what computing takes at the moment, for the model of the step time
    **{name: Way(train) for name, train in PEERS.items()},
    OURS: Way(ours_with),
    "ours, no overlap": Way(functools.partial(ours_with, overlap=False), Traffic(overlaps=False)),
    "ours, bf16": Way(functools.partial(ours_with, gradient_compression="bf16"), Traffic(bits=16)),
    "DDP, fp16": Way(ddp_fp16, Traffic(bits=16)),
    "ours, fp16": Way(functools.partial(ours_with, gradient_compression="fp16"), Traffic(bits=16)),
    "DDP, PowerSGD": Way(ddp_powersgd, Traffic(rank=1, overlaps=False)),
    "ours, PowerSGD": Way(
        functools.partial(
            ours_with, gradient_compression=ts.experimental.PowerSGD(rank=1, start_after=UNCOMPRESSED_STEPS)
        ),
        Traffic(rank=1, overlaps=False),
    ),
}


if __name__ == "__main__":
    main()
