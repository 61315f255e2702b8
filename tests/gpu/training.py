"""A training loop that runs with a strategy of one replica or without any, on any device."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import torchstrategy as ts
from tests.accelerator import loading
from tests.parity.random_programs import RandomProgram

#: A GPU, or the accelerator for tests where there is none.
ACCELERATORS = [
    pytest.param("standin:0", marks=pytest.mark.accelerator),
    pytest.param("cuda:0", marks=pytest.mark.gpu),
]
#: The CPU is what the others are compared with.
DEVICES = ["cpu:0", *ACCELERATORS]


def make_data(dtype: torch.dtype = torch.float64, num_examples: int = 23) -> tuple[Tensor, Tensor]:
    """Return inputs ``[examples, 5]`` and targets ``[examples, 3]``."""
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(num_examples, 5, generator=generator, dtype=torch.float64)
    return x.to(dtype), torch.stack([x.sum(1).sin(), x.prod(1), x.square().mean(1)], 1).to(dtype)


def make_net(dtype: torch.dtype = torch.float64) -> nn.Module:
    """Return a small smooth network, whose initial values do not depend on the device."""
    model = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3)).to(dtype)
    generator = torch.Generator().manual_seed(4)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator, device="cpu") * 0.4)
    return model


def train(
    device: str,
    strategy: ts.Strategy | None,
    *,
    dtype: torch.dtype = torch.float64,
    autocast: torch.dtype | None = None,
    scales: bool = False,
    overflow: int | None = None,
    num_ahead: int = 1,
    wrap: Any = lambda step: step,
) -> dict[str, Tensor]:
    """Train for two epochs of batches of 5, the last of which is short.

    Args:
        device: where to train.
        strategy: a strategy of one replica there; ``None`` writes everything out in plain torch.
        dtype: of parameters and data.
        autocast: what forward passes compute in; ``None`` means ``dtype``.
        scales: whether a ``GradScaler`` is used.
        overflow: the example whose gradient overflows.
        num_ahead: batches that travel to the device ahead.
        wrap: what the step function is given to.

    Returns:
        Parameters, optimizer state, losses and scales, on the CPU.
    """
    x, y = make_data(dtype)
    if overflow is not None:
        y[overflow] = torch.inf
    kind = torch.device(device).type
    with torch.device(device) if strategy is None else strategy.scope():
        model = make_net(dtype)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        scaler = torch.amp.GradScaler(kind, init_scale=2.0**8, growth_interval=3, enabled=scales)

    def step(x: Tensor, y: Tensor) -> Tensor:
        optimizer.zero_grad()
        with torch.autocast(kind, dtype=autocast, enabled=autocast is not None):
            output = model(x)
        per_example = (output.to(y.dtype) - y).square().mean(1)
        if strategy is None:
            loss = per_example.mean()
        else:
            loss = ts.nn.compute_average_loss(per_example, global_batch_size="actual")
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        return loss.detach()

    step = wrap(step)
    losses, scale = [], []
    if strategy is None:
        batches = list(zip(x.split(5), y.split(5), strict=True))
    else:
        options = ts.InputOptions(experimental_per_replica_buffer_size=num_ahead)
        loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, y), 5)
        batches = strategy.experimental_distribute_dataset(loader, options)
    for _ in range(2):
        for inputs in batches:
            if strategy is None:
                loss = step(*(part.to(device) for part in inputs))
            else:
                loss = strategy.run(step, args=tuple(inputs))
                assert loss.device == torch.device(device) or kind == "cpu"
            losses.append(loss)
            scale.append(scaler.get_scale())
    found = {name: value.detach().cpu().clone() for name, value in model.state_dict().items()}
    buffers = [optimizer.state[parameter]["momentum_buffer"].detach().cpu() for parameter in model.parameters()]
    found.update({f"momentum of {name}": value for name, value in zip(model.state_dict(), buffers, strict=True)})
    return {**found, "losses": torch.stack(losses).cpu(), "scales": torch.tensor(scale)}


def on(device: str, function: Any, *args: Any, **kwargs: Any) -> Any:
    """Call a function in a process that may have to load the device's kind."""
    if device.startswith(loading.NAME):
        loading.load()
    return function(*args, **kwargs)


def skip_sparse(device: str, program: RandomProgram) -> None:
    if device.startswith(loading.NAME) and "sparse" in program.layers:
        pytest.skip("the accelerator for tests has no sparse tensors")
