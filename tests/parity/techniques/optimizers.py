"""Optimizers of torch with their options, and wrappers as programs write them."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import torchstrategy as ts
from tests.parity.techniques.registry import (
    EXACT_FLOAT,
    data,
    fit,
    loss_of,
    make_net,
    plain_step,
    program,
    state,
)

OPTIMIZERS: dict[str, Callable[[Any], Optimizer]] = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.05),
    "SGD nesterov": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, nesterov=True, weight_decay=0.01),
    "SGD dampening foreach": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, dampening=0.1, foreach=True),
    "SGD fused": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, fused=True),
    "SGD maximize": lambda p: torch.optim.SGD(p, lr=0.01, maximize=True),
    "Adam amsgrad": lambda p: torch.optim.Adam(p, lr=0.05, amsgrad=True, weight_decay=0.01),
    "Adam foreach": lambda p: torch.optim.Adam(p, lr=0.05, foreach=True),
    "Adam one by one": lambda p: torch.optim.Adam(p, lr=0.05, foreach=False),
    "Adam fused": lambda p: torch.optim.Adam(p, lr=0.05, fused=True),
    "Adam tensor rate": lambda p: torch.optim.Adam(p, lr=torch.tensor(0.05)),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.05, weight_decay=0.1),
    "AdamW fused amsgrad": lambda p: torch.optim.AdamW(p, lr=0.05, amsgrad=True, fused=True),
    "Adamax": lambda p: torch.optim.Adamax(p, lr=0.05),
    "NAdam": lambda p: torch.optim.NAdam(p, lr=0.05),
    "RAdam": lambda p: torch.optim.RAdam(p, lr=0.05),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=0.05, initial_accumulator_value=0.1),
    "Adadelta": lambda p: torch.optim.Adadelta(p, lr=0.5),
    "RMSprop centered": lambda p: torch.optim.RMSprop(p, lr=0.01, centered=True, momentum=0.9),
    "ASGD": lambda p: torch.optim.ASGD(p, lr=0.05),
    "Rprop": lambda p: torch.optim.Rprop(p, lr=0.01),
    "Muon": lambda p: torch.optim.Muon([each for each in p if each.ndim == 2], lr=0.02),
    "Adafactor": lambda p: torch.optim.Adafactor(p, lr=0.05),
}


def with_optimizer(strategy: Any, make: Callable[[Any], Optimizer], dtype: torch.dtype) -> dict[str, Any]:
    with strategy.scope():
        model = make_net(dtype)
        optimizer = make(model.parameters())
    losses = fit(strategy, plain_step(model, optimizer), arrays=data(dtype))
    return state(model, losses=losses)


for _name, _make in OPTIMIZERS.items():
    program(_name, _make, torch.float64)(with_optimizer)
program("SGD float32", OPTIMIZERS["SGD"], torch.float32, tolerance=EXACT_FLOAT)(with_optimizer)


@program("parameter groups with rates of their own")
def parameter_groups(strategy: Any) -> dict[str, Any]:
    with strategy.scope():
        model = make_net()
        groups = [
            {"params": model[0].parameters(), "lr": 0.01, "weight_decay": 0.1},
            {"params": [model[2].weight], "betas": (0.5, 0.9)},
            {"params": [model[2].bias], "weight_decay": 0.0},
        ]
        optimizer = torch.optim.AdamW(groups, lr=0.05)

    def before(i: int) -> None:
        if i == 3:
            optimizer.param_groups[1]["lr"] = 0.001

    return state(model, losses=fit(strategy, plain_step(model, optimizer), before=before))


@program("add_param_group")
@program("add_param_group inside run", inside=True)
def add_param_group(strategy: Any, inside: bool = False) -> dict[str, Any]:
    """The last layer is trained from the third step on."""
    with strategy.scope():
        model = make_net()
        optimizer = torch.optim.Adam(model[0].parameters(), lr=0.05)
    train_step = plain_step(model, optimizer)
    number = [0]

    def add() -> None:
        optimizer.add_param_group({"params": model[2].parameters(), "lr": 0.01})

    def step(x: Tensor, y: Tensor) -> Tensor:
        if inside and number[0] == 2:
            add()
        model.zero_grad()
        return train_step(x, y)

    def before(i: int) -> None:
        number[0] = i
        if i == 2 and not inside:
            add()

    return state(model, losses=fit(strategy, step, before=before))


@program("a layer and its parameters added later")
def grown(strategy: Any) -> dict[str, Any]:
    """A new head is put on in the scope after some steps, and the optimizer gets its parameters."""
    with strategy.scope():
        model = make_net()
        optimizer = torch.optim.Adam(model.parameters(), lr=0.05)

    def before(i: int) -> None:
        if i == 2:
            with strategy.scope():
                head = nn.Linear(2, 2).double()
            model.append(head)
            optimizer.add_param_group({"params": head.parameters()})

    return state(model, losses=fit(strategy, plain_step(model, optimizer), before=before))


def closure_of(model: nn.Module, optimizer: Optimizer, x: Tensor, y: Tensor) -> Callable[[], Tensor]:
    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = loss_of(model, x, y)
        loss.backward()
        return loss

    return closure


# A quasi-Newton step divides by differences of gradients, and a line search by differences of losses.
LINE_SEARCH = 1e-8


@program("LBFGS", lambda p: torch.optim.LBFGS(p, lr=0.5, max_iter=5), tolerance=LINE_SEARCH)
@program(
    "LBFGS strong_wolfe",
    lambda p: torch.optim.LBFGS(p, max_iter=4, line_search_fn="strong_wolfe"),
    tolerance=LINE_SEARCH,
)
@program("closure for SGD", lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9))
@program("closure for Adam, by keyword", lambda p: torch.optim.Adam(p, lr=0.05), keyword=True)
def closures(strategy: Any, make: Callable[[Any], Optimizer], keyword: bool = False) -> dict[str, Any]:
    """``step(closure)`` returns the loss over all replicas."""
    with strategy.scope():
        model = make_net()
        optimizer = make(model.parameters())

    def step(x: Tensor, y: Tensor) -> Tensor:
        closure = closure_of(model, optimizer, x, y)
        loss = optimizer.step(closure=closure) if keyword else optimizer.step(closure)
        return torch.as_tensor(float(loss), dtype=torch.float64) / strategy.num_replicas_in_sync

    return state(model, losses=fit(strategy, step))


class SAM(Optimizer):
    """Sharpness-aware minimisation: climb to the worst point nearby, and descend with the gradient from there."""

    def __init__(self, params: Any, base: Callable[[Any], Optimizer], rho: float = 0.1) -> None:
        super().__init__(params, {"rho": rho})
        self.base_optimizer = base(self.param_groups)
        self.param_groups = self.base_optimizer.param_groups

    @torch.no_grad()
    def first_step(self) -> None:
        grads = [p.grad.norm() for group in self.param_groups for p in group["params"]]
        norm = torch.stack(grads).norm()
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter]["start"] = parameter.clone()
                parameter.add_(parameter.grad * (group["rho"] / norm))
        self.zero_grad()

    @torch.no_grad()
    def second_step(self) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.copy_(self.state[parameter]["start"])
        self.base_optimizer.step()
        self.zero_grad()

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        closure = torch.enable_grad()(closure)
        loss = closure()
        self.first_step()
        closure()
        self.second_step()
        return loss


@program("SAM in two steps")
@program("SAM in two steps with Adam", base=lambda p: torch.optim.Adam(p, lr=0.05))
@program("SAM within its own step", within=True)
def sharpness_aware(
    strategy: Any,
    base: Callable[[Any], Optimizer] = lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9),
    within: bool = False,
) -> dict[str, Any]:
    with strategy.scope():
        model = make_net()
        optimizer = SAM(model.parameters(), base)

    def step(x: Tensor, y: Tensor) -> Tensor:
        if within:
            return optimizer.step(closure_of(model, optimizer, x, y)).detach() / strategy.num_replicas_in_sync
        loss = loss_of(model, x, y)
        loss.backward()
        sum_now(optimizer)
        optimizer.first_step()
        loss_of(model, x, y).backward()
        optimizer.second_step()
        return loss.detach()

    return state(model, losses=fit(strategy, step))


def sum_now(optimizer: Optimizer) -> None:
    """``first_step`` is no ``step``: it needs gradients that are summed already."""
    ts.get_replica_context().sum_gradients(optimizer)


class Lookahead(Optimizer):
    """Every two steps of the fast optimizer, the slow weights go half of the way; then both are equal again."""

    def __init__(self, fast: Optimizer, every: int = 2, rate: float = 0.5) -> None:
        self.fast = fast
        self.every, self.rate, self.count = every, rate, 0
        super().__init__(fast.param_groups, {})
        self.param_groups = fast.param_groups
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter]["slow"] = parameter.detach().clone()

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = self.fast.step(closure)
        self.count += 1
        if self.count % self.every == 0:
            for group in self.param_groups:
                for parameter in group["params"]:
                    slow = self.state[parameter]["slow"]
                    slow.lerp_(parameter, self.rate)
                    parameter.copy_(slow)
        return loss


class PlainLookahead:
    """The same as an ordinary class around an optimizer."""

    def __init__(self, fast: Optimizer, every: int = 2, rate: float = 0.5) -> None:
        self.fast = fast
        self.every, self.rate, self.count = every, rate, 0
        self.slow = [[p.detach().clone() for p in group["params"]] for group in fast.param_groups]

    def zero_grad(self) -> None:
        self.fast.zero_grad()

    @torch.no_grad()
    def step(self) -> None:
        self.fast.step()
        self.count += 1
        if self.count % self.every == 0:
            for group, kept in zip(self.fast.param_groups, self.slow, strict=True):
                for parameter, slow in zip(group["params"], kept, strict=True):
                    slow.lerp_(parameter, self.rate)
                    parameter.copy_(slow)


@program("Lookahead", Lookahead)
@program("Lookahead of a plain class", PlainLookahead)
def lookahead(strategy: Any, wrapper: Any) -> dict[str, Any]:
    with strategy.scope():
        model = make_net()
        optimizer = wrapper(torch.optim.Adam(model.parameters(), lr=0.05))
        if wrapper is PlainLookahead:
            optimizer = strategy.replicate(optimizer)
    return state(model, losses=fit(strategy, plain_step(model, optimizer), epochs=3))


@program("optimizer state loaded on the way")
def loaded_state(strategy: Any) -> dict[str, Any]:
    """Weights and optimizer go back to an earlier state between two runs."""
    with strategy.scope():
        model = make_net()
        optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    saved: dict[str, Any] = {}

    def after(i: int, loss: float) -> None:
        if i == 1:
            saved.update(copy.deepcopy({"model": model.state_dict(), "optimizer": optimizer.state_dict()}))
        if i == 3:
            model.load_state_dict(saved["model"])
            optimizer.load_state_dict(saved["optimizer"])

    return state(model, losses=fit(strategy, plain_step(model, optimizer), after=after))
