"""Lower precision: GradScaler and autocast."""

from __future__ import annotations

import contextlib
import math
from typing import Any

import torch
from torch import Tensor, nn

from tests.parity.techniques.registry import (
    EXACT_FLOAT,
    average,
    data,
    fit,
    loss_of,
    make_net,
    plain_step,
    program,
    state,
)

# One rounding of the last gradients in a half format is at most 2^-9 (bfloat16) or 2^-12 (float16) of their size. Each
# matrix product in the backward pass rounds a replica's part of the sum over examples by itself, so the gradients of
# one and of several replicas differ by a few such roundings. They are of the size 1, the rate is 0.05, and there are
# six steps.
BFLOAT16 = 6 * 0.05 * 4 * 2**-9
FLOAT16 = 6 * 0.05 * 4 * 2**-12


@program("scaler", tolerance=EXACT_FLOAT)
@program("scaler, unscaled and clipped", clip=True, tolerance=EXACT_FLOAT)
@program("scaler, overflow on one replica", overflow=True, tolerance=EXACT_FLOAT)
@program("scaler, clipped, overflow on one replica", overflow=True, clip=True, tolerance=EXACT_FLOAT)
@program("scaler, fused optimizer", fused=True, overflow=True, tolerance=EXACT_FLOAT)
@program("scaler, accumulation", accumulation=2, overflow=True, tolerance=EXACT_FLOAT)
@program("scaler, updated outside", outside=True, overflow=True, tolerance=EXACT_FLOAT)
def scaler(
    strategy: Any,
    overflow: bool = False,
    clip: bool = False,
    fused: bool = False,
    outside: bool = False,
    accumulation: int = 1,
) -> dict[str, Any]:
    """In the second batch the first example's gradient overflows, which one replica sees; later steps go on."""
    with strategy.scope():
        model = make_net(torch.float32)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, fused=fused)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=3)
    x, y = data(torch.float32)
    if overflow:
        y = y.clone()
        y[4] = 3e38
    last = [True]

    def step(x: Tensor, y: Tensor) -> Tensor:
        loss = loss_of(model, x, y)
        scaler.scale(loss / accumulation).backward()
        if last[0]:
            if clip:
                scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            scaler.step(optimizer)
            if not outside:
                scaler.update()
            optimizer.zero_grad()
        return loss.detach()

    scales = []

    def before(i: int) -> None:
        last[0] = i % accumulation == accumulation - 1

    def after(i: int, loss: float) -> None:
        if outside:
            scaler.update()
        scales.append(scaler.get_scale())

    losses = fit(strategy, step, arrays=(x, y), epochs=3, before=before, after=after)
    assert len(set(scales)) > 1
    assert (min(scales) < 2.0**10) == overflow
    return {**state(model, losses=losses), "scales": scales}


@program("autocast bfloat16", torch.bfloat16, tolerance=BFLOAT16)
@program("autocast bfloat16, around run", torch.bfloat16, around=True, tolerance=BFLOAT16)
@program("autocast float16 with scaler", torch.float16, tolerance=FLOAT16)
def autocast(strategy: Any, dtype: torch.dtype, around: bool = False) -> dict[str, Any]:
    with strategy.scope():
        model = make_net(torch.float32)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**6, enabled=dtype is torch.float16)

    def enter() -> contextlib.AbstractContextManager[Any]:
        return torch.autocast("cpu", dtype=dtype) if around else contextlib.nullcontext()

    def step(x: Tensor, y: Tensor) -> Tensor:
        optimizer.zero_grad()
        with contextlib.nullcontext() if around else torch.autocast("cpu", dtype=dtype):
            output = model(x)
        assert output.dtype is dtype
        loss = average((output.float() - y).square().sum(1))
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        return loss.detach()

    # Not around the whole loop: torch keeps the cast weights until the outermost autocast ends.
    losses = fit(strategy, step, arrays=data(torch.float32), around=enter)
    return state(model, losses=losses)


@program("half-precision parameters", tolerance=BFLOAT16)
def half_parameters(strategy: Any) -> dict[str, Any]:
    """The weights and sums are bfloat16, too."""
    with strategy.scope():
        model = make_net(torch.bfloat16)
        optimizer = torch.optim.SGD(model.parameters(), lr=2.0**-5)

    def step(x: Tensor, y: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = average((model(x.bfloat16()).float() - y).square().sum(1))
        loss.backward()
        optimizer.step()
        return loss.detach()

    losses = fit(strategy, step, arrays=data(torch.float32), epochs=1)
    return state(model, losses=losses)


@program("default dtype float64")
def default_dtype(strategy: Any) -> dict[str, Any]:
    """A program that changes torch's default dtype before it makes its model."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with strategy.scope():
            model = nn.Linear(4, 2)
            optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
        losses = fit(strategy, plain_step(model, optimizer))
        assert not any(math.isnan(loss) for loss in losses)
    finally:
        torch.set_default_dtype(before)
    return state(model, losses=losses)
