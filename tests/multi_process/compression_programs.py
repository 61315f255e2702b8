"""What the ranks of the tests of gradient compression run."""

from __future__ import annotations

import copy
import logging
import os
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

import torchstrategy as ts
from tests.programs import Lines
from torchstrategy.collectives import rendezvous
from torchstrategy.collectives.compression import NarrowBackend
from torchstrategy.gradients.power_sgd import LowRankSums

PowerSGD = ts.experimental.PowerSGD
IN, HIDDEN = 12, 16
_KEPT: list[DistributedDataParallel] = []


def options(compression: Any, implementation: str = "ring", **others: Any) -> Any:
    return ts.experimental.CommunicationOptions(
        implementation=implementation, gradient_compression=compression, **others
    )


def simulate_hosts(hosts: Sequence[int]) -> None:
    """Let the processes take themselves for those of several hosts; before the first strategy of a process."""
    rendezvous._number_hosts = lambda job, names, addresses: tuple(hosts)


class Net(nn.Module):
    """Two matrices, a kernel, and some small parameters, one of which has no gradient in most steps."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(IN, HIDDEN)
        self.conv = nn.Conv1d(4, 8, 3)
        self.last = nn.Linear(16, 10)
        self.now_and_then = nn.Parameter(torch.ones(6, 8))
        self.never = nn.Parameter(torch.ones(6, 8))
        self.register_buffer("seen", torch.zeros(2))

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x).tanh().view(-1, 4, HIDDEN // 4)
        return self.last(self.conv(hidden).reshape(-1, 16).relu())


def make_net() -> Net:
    torch.manual_seed(3)
    return Net()


def loss_of(net: Net, step: int, i: int, micro: int) -> Tensor:
    """Return replica ``i``'s part of the loss; only replica 1 has a gradient of one parameter, and not always."""
    generator = torch.Generator().manual_seed(1000 * step + 10 * i + micro)
    x = torch.randn(5, IN, generator=generator, dtype=torch.float64).to(net.first.weight.dtype)
    loss = net(x).square().mean()
    if i == 1 and step != 2:
        loss = loss + (net.now_and_then * (step + 1)).square().sum() * 0.01
    return loss


def backward(net: Net, step: int, i: int) -> None:
    """Accumulate two gradients in every third step; in step 4, replica 0 computes none."""
    if (step, i) == (4, 0):
        return
    for micro in range(2 if step % 3 == 2 else 1):
        loss_of(net, step, i, micro).backward()


def train(
    compression: Any,
    devices: list[str] | None = None,
    num_steps: int = 8,
    dtype: torch.dtype = torch.float64,
    hosts: Sequence[int] | None = None,
    implementation: str = "ring",
    start: dict[str, Any] | None = None,
    overlap: bool | None = None,
    forgotten_at: int | None = None,
) -> dict[str, Any]:
    """Train; return weights, the optimizer's state, exact values, and what was logged.

    Before the step ``forgotten_at`` the last rank forgets what its PowerSGD has summed.
    """
    if hosts is not None:
        simulate_hosts(hosts)
    log = Lines()
    torch.set_default_dtype(dtype)
    try:
        strategy = ts.MirroredStrategy(
            devices or ["cpu:0"],
            communication_options=options(compression, implementation, overlap=overlap, bytes_per_pack=2000),
        )
        with strategy.scope():
            net = make_net()
            optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
        if start is not None:
            net.load_state_dict(start["weights"])
            optimizer.load_state_dict(copy.deepcopy(start["optimizer"]))  # its tensors came in memory of all ranks

        def step_fn(step: int) -> Tensor:
            context = ts.get_replica_context()
            i = context.replica_id_in_sync_group
            optimizer.zero_grad()
            net.seen += torch.tensor([1.0 + 2.0**-20, i])
            backward(net, step, i)
            optimizer.step()
            return context.all_reduce("sum", torch.tensor([1.0 + 2.0**-20] * 5000))

        values = []
        for step in range(num_steps):
            if step == forgotten_at and strategy.workers.rank == strategy.workers.size - 1:
                strategy.gradients.summer._dense.low_rank.forget(list(net.parameters()))
            values.append(strategy.experimental_local_results(strategy.run(step_fn, (step,)))[0])
    finally:
        torch.set_default_dtype(torch.float32)
        logging.getLogger("torchstrategy").removeHandler(log)
    return {
        "weights": {name: value.clone() for name, value in net.state_dict().items()},
        "optimizer": optimizer.state_dict(),
        "sum": values[-1].unique().tolist(),
        "log": log.lines,
    }


def with_scaler(compression: Any, first_scale: float) -> list[Any]:
    """Train with gradients that are scaled, and overflow at first; return scales, skipped steps and the weight."""
    strategy = ts.MirroredStrategy(["cpu:0"], communication_options=options(compression))
    with strategy.scope():
        torch.manual_seed(0)
        net = nn.Linear(20, 30)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        scaler = torch.amp.GradScaler("cpu", init_scale=first_scale, growth_interval=3)

    def step_fn(step: int) -> float:
        i = ts.get_replica_context().replica_id_in_sync_group
        optimizer.zero_grad()
        x = torch.randn(4, 20, generator=torch.Generator().manual_seed(10 * step + i))
        factor = torch.inf if (step, i) == (3, 1) else 1.0
        scaler.scale(net(x).square().sum() * factor).backward()
        scaler.step(optimizer)
        scaler.update()
        return scaler.get_scale()

    scales = [strategy.run(step_fn, (k,)) for k in range(8)]
    return [scales, net.weight.detach().clone()]


def beside_ddp(rank: int, num_steps: int, folder: str) -> list[list[Tensor]]:
    """Train one matrix under DDP with torch's own hook and with ours; return its values after each step."""
    torch.set_default_dtype(torch.float64)
    try:
        return [_under_ddp(rank, num_steps, folder), _under_strategy(rank, num_steps)]
    finally:
        torch.set_default_dtype(torch.float32)


def _inputs(step: int, rank: int) -> Tensor:
    return torch.randn(6, 20, generator=torch.Generator().manual_seed(10 * step + rank))


def _matrix() -> nn.Linear:
    torch.manual_seed(1)
    return nn.Linear(20, 30, bias=False)


def _first_factor(rank: int) -> Tensor:
    """Return what torch's hook begins with."""
    torch.manual_seed(np.random.RandomState(0).randint(1_000_000_000))
    return torch.randn(20, rank)


def _under_ddp(rank: int, num_steps: int, folder: str) -> list[Tensor]:
    number = int(os.environ["RANK"])
    dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/store", 2), rank=number, world_size=2)
    net = _matrix()
    model = DistributedDataParallel(net)
    # A process group that goes when DDP's hooks do ends the process, so both stay until the process ends by itself.
    _KEPT.append(model)
    state = powerSGD_hook.PowerSGDState(
        None, matrix_approximation_rank=rank, start_powerSGD_iter=2, min_compression_rate=1
    )
    model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    found = []
    for step in range(num_steps):
        optimizer.zero_grad()
        model(_inputs(step, number)).square().mean().backward()
        optimizer.step()
        found.append(net.weight.detach().clone())
    return found


def _under_strategy(rank: int, num_steps: int) -> list[Tensor]:
    original = LowRankSums._random
    LowRankSums._random = lambda self, memory, index: _first_factor(rank)
    try:
        compression = PowerSGD(rank, start_after=2, min_compression=1)
        strategy = ts.MirroredStrategy(["cpu:0"], communication_options=options(compression))
        with strategy.scope():
            net = _matrix()
            optimizer = torch.optim.SGD(net.parameters(), lr=0.1)

        def step_fn(step: int) -> None:
            optimizer.zero_grad()
            i = ts.get_replica_context().replica_id_in_sync_group
            (net(_inputs(step, i)).square().mean() / 2).backward()
            optimizer.step()

        found = []
        for step in range(num_steps):
            strategy.run(step_fn, (step,))
            found.append(net.weight.detach().clone())
        return found
    finally:
        LowRankSums._random = original


def dies_while_others_wait(compression: Any) -> None:
    """Rank 1 ends when gradients have begun to travel."""
    strategy = ts.MirroredStrategy(["cpu:0"], communication_options=options(compression, timeout_seconds=20.0))
    with strategy.scope():
        net = nn.Linear(200, 300)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)

    def step_fn() -> None:
        optimizer.zero_grad()
        net(torch.ones(1, 200)).sum().backward()
        optimizer.step()

    strategy.run(step_fn)
    if strategy.workers.rank == 1:
        LowRankSums.__call__ = NarrowBackend._sum = lambda *args: os._exit(3)
    strategy.run(step_fn)
