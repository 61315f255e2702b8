"""Several models and optimizers, and programs that write to weights themselves."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

import torchstrategy as ts
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


@program("two optimizers with one scaler", tolerance=EXACT_FLOAT)
def one_scaler(strategy: Any) -> dict[str, Any]:
    """One is unscaled and clipped by itself; in some steps a gradient overflows on one replica."""
    with strategy.scope():
        first, second = nn.Linear(4, 2), nn.Linear(2, 2)
        optimizers = torch.optim.SGD(first.parameters(), lr=0.05), torch.optim.SGD(second.parameters(), lr=0.02)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8, growth_interval=2)
    x, y = data(torch.float32)
    y = y.clone()
    y[5] = 3e38

    def step(x: Tensor, y: Tensor) -> Tensor:
        loss = average((second(first(x)) - y).square().sum(1))
        scaler.scale(loss).backward()
        scaler.unscale_(optimizers[0])
        nn.utils.clip_grad_norm_(first.parameters(), 0.5)
        for optimizer in optimizers:
            scaler.step(optimizer)
            optimizer.zero_grad()
        scaler.update()
        return loss.detach()

    losses = fit(strategy, step, arrays=(x, y), epochs=3)
    assert scaler.get_scale() < 2.0**8
    return {**state(first, second, losses=losses), "scale": scaler.get_scale()}


@program("two heads on one trunk")
def shared_trunk(strategy: Any) -> dict[str, Any]:
    """Both optimizers move the trunk."""
    with strategy.scope():
        trunk = nn.Linear(4, 3)
        heads = [nn.Sequential(trunk, nn.Tanh(), nn.Linear(3, 2)).double() for _ in range(2)]
        first = torch.optim.Adam(heads[0].parameters(), lr=0.02)
        second = torch.optim.SGD(heads[1].parameters(), lr=0.02, momentum=0.9)

    def step(x: Tensor, y: Tensor) -> Tensor:
        total = torch.zeros(())
        for head, optimizer in zip(heads, (first, second), strict=True):
            optimizer.zero_grad()
            loss = loss_of(head, x, y)
            loss.backward()
            optimizer.step()
            total = total + loss.detach()
        return total

    return state(*heads, losses=fit(strategy, step))


@program("optimizers that step at different paces")
def paces(strategy: Any) -> dict[str, Any]:
    with strategy.scope():
        models = make_net(), make_net()
        often, seldom = (torch.optim.Adam(model.parameters(), lr=0.02) for model in models)
    number = [0]

    def step(x: Tensor, y: Tensor) -> Tensor:
        loss = loss_of(models[0], x, y) + loss_of(models[1], x, y)
        loss.backward()
        for optimizer, every in ((often, 1), (seldom, 3)):
            if number[0] % every == every - 1:
                optimizer.step()
                optimizer.zero_grad()
        return loss.detach()

    def before(i: int) -> None:
        number[0] = i

    return state(*models, losses=fit(strategy, step, epochs=3, before=before))


@program("target network moved inside", where="inside")
@program("target network moved outside", where="outside")
@program("target network loaded outside", where="loaded")
def target_network(strategy: Any, where: str) -> dict[str, Any]:
    with strategy.scope():
        online, target = make_net(), make_net()
        target.load_state_dict(online.state_dict())
        target.requires_grad_(False)
        optimizer = torch.optim.Adam(online.parameters(), lr=0.02)

    @torch.no_grad()
    def move() -> None:
        for slow, fast in zip(target.parameters(), online.parameters(), strict=True):
            slow.mul_(0.9).add_(fast, alpha=0.1)

    def step(x: Tensor, y: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = average((online(x) - 0.9 * target(x) - y).square().sum(1))
        loss.backward()
        optimizer.step()
        if where == "inside":
            move()
        return loss.detach()

    def after(i: int, loss: float) -> None:
        if where == "outside":
            move()
        elif where == "loaded" and i % 2:
            target.load_state_dict(online.state_dict())

    return state(online, target, losses=fit(strategy, step, after=after))


@program("weights written as one vector")
def one_vector(strategy: Any) -> dict[str, Any]:
    """Inside and outside; ``vector_to_parameters`` replaces what ``parameter.data`` is."""
    with strategy.scope():
        model = make_net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    train_step = plain_step(model, optimizer)

    def scale(factor: float) -> None:
        vector = nn.utils.parameters_to_vector(model.parameters()).detach()
        nn.utils.vector_to_parameters(vector * factor, model.parameters())

    def step(x: Tensor, y: Tensor) -> Tensor:
        loss = train_step(x, y)
        scale(0.99)
        return loss

    return state(model, losses=fit(strategy, step, after=lambda i, loss: scale(1.02)))


@program("weights clamped inside")
def clamped(strategy: Any) -> dict[str, Any]:
    with strategy.scope():
        model = make_net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    train_step = plain_step(model, optimizer)

    def step(x: Tensor, y: Tensor) -> Tensor:
        loss = train_step(x, y)
        for parameter in model.parameters():
            parameter.data.clamp_(-0.3, 0.3)
        return loss

    return state(model, losses=fit(strategy, step))


@program("weights moved by hand with all-reduced gradients")
def by_hand(strategy: Any) -> dict[str, Any]:
    with strategy.scope():
        model = make_net()

    def step(x: Tensor, y: Tensor) -> Tensor:
        loss = loss_of(model, x, y)
        parameters = list(model.parameters())
        own = torch.autograd.grad(loss, parameters)
        with torch.no_grad():
            for parameter, grad in zip(parameters, ts.get_replica_context().all_reduce("SUM", own), strict=True):
                parameter.sub_(0.1 * grad)
        return loss.detach()

    return state(model, losses=fit(strategy, step))


@program("another optimizer from the fourth step on", inside=True)
@program("another optimizer, made outside the scope", inside=False)
def changed_optimizer(strategy: Any, inside: bool) -> dict[str, Any]:
    with strategy.scope():
        model = make_net()
        used = [torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.5)]

    def step(x: Tensor, y: Tensor) -> Tensor:
        return plain_step(model, used[0])(x, y)

    def before(i: int) -> None:
        if i == 3 and inside:
            with strategy.scope():
                used[0] = torch.optim.Adam(model.parameters(), lr=0.01)
        elif i == 3:
            used[0] = torch.optim.Adam(model.parameters(), lr=0.01)

    return state(model, losses=fit(strategy, step, before=before))


@program("two steps on one backward")
def two_steps(strategy: Any) -> dict[str, Any]:
    with strategy.scope():
        model = make_net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.5)

    def step(x: Tensor, y: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = loss_of(model, x, y)
        loss.backward()
        optimizer.step()
        optimizer.step()
        return loss.detach()

    return state(model, losses=fit(strategy, step))


@program("state saved and loaded inside")
def rolled_back(strategy: Any) -> dict[str, Any]:
    """Each replica keeps a copy of its own."""
    with strategy.scope():
        model = make_net()
        optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    train_step = plain_step(model, optimizer)
    saved: dict[int, Any] = {}
    number = [0]

    def step(x: Tensor, y: Tensor) -> Tensor:
        i = ts.get_replica_context().replica_id_in_sync_group
        if number[0] == 2:
            saved[i] = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
        if number[0] == 4:
            model.load_state_dict(saved[i][0])
            optimizer.load_state_dict(saved[i][1])
        return train_step(x, y)

    def before(i: int) -> None:
        number[0] = i

    return state(model, losses=fit(strategy, step, before=before))
