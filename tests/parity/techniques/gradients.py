"""What programs do with gradients between ``backward`` and ``step``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import torchstrategy as ts
from tests.parity.techniques.registry import average, fit, loss_of, make_net, plain_step, program, state


def net_and_optimizer(strategy: Any) -> tuple[nn.Sequential, torch.optim.Optimizer]:
    with strategy.scope():
        model = make_net()
        return model, torch.optim.Adam(model.parameters(), lr=0.05, weight_decay=0.01)


# clearing and accumulating


def drop(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for parameter in model.parameters():
        parameter.grad = None


def zero_in_place(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad.zero_()


@program("zero_grad of the optimizer", lambda model, optimizer: optimizer.zero_grad())
@program("zero_grad to zeros", lambda model, optimizer: optimizer.zero_grad(set_to_none=False))
@program("zero_grad, positional", lambda model, optimizer: optimizer.zero_grad(False))
@program("zero_grad of the model", lambda model, optimizer: model.zero_grad())
@program("zero_grad of the model to zeros", lambda model, optimizer: model.zero_grad(set_to_none=False))
@program("zero_grad by dropping", drop)
@program("zero_grad in place", zero_in_place)
@program("zero_grad outside", lambda model, optimizer: optimizer.zero_grad(), inside=False)
@program("zero_grad outside to zeros", lambda model, optimizer: optimizer.zero_grad(set_to_none=False), inside=False)
@program("zero_grad of the model outside", lambda model, optimizer: model.zero_grad(), inside=False)
def clearing(strategy: Any, clear: Callable[[Any, Any], None], inside: bool = True) -> dict[str, Any]:
    model, optimizer = net_and_optimizer(strategy)

    def step(x: Tensor, y: Tensor) -> Tensor:
        if inside:
            clear(model, optimizer)
        loss = loss_of(model, x, y)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return state(model, losses=fit(strategy, step, before=lambda i: inside or clear(model, optimizer)))


@program("accumulation of 2", 2)
@program("accumulation of 3", 3)
@program("accumulation of 2, to zeros", 2, set_to_none=False)
def accumulation(strategy: Any, count: int, set_to_none: bool = True) -> dict[str, Any]:
    model, optimizer = net_and_optimizer(strategy)
    is_last = [False]

    def step(x: Tensor, y: Tensor) -> Tensor:
        loss = loss_of(model, x, y) / count
        loss.backward()
        if is_last[0]:
            optimizer.step()
            optimizer.zero_grad(set_to_none=set_to_none)
        return loss.detach()

    def before(i: int) -> None:
        is_last[0] = i % count == count - 1

    return state(model, losses=fit(strategy, step, epochs=3, before=before))


@program("several losses")
@program("several losses, retained graph", retain=True)
def several_losses(strategy: Any, retain: bool = False) -> dict[str, Any]:
    model, optimizer = net_and_optimizer(strategy)

    def step(x: Tensor, y: Tensor) -> Tensor:
        optimizer.zero_grad()
        output = model(x)
        first = average((output - y).square().sum(1))
        second = average((output if retain else model(x)).abs().sum(1)) * 0.5
        third = ts.nn.scale_regularization_loss(sum(p.square().sum() for p in model.parameters()) * 0.01)
        first.backward(retain_graph=retain)
        second.backward()
        third.backward()
        optimizer.step()
        return (first + second + third).detach()

    return state(model, losses=fit(strategy, step))


# clipping, and looking at gradients


@program("clip_grad_norm_", lambda p: nn.utils.clip_grad_norm_(p, 0.3))
@program("clip_grad_norm_, largest", lambda p: nn.utils.clip_grad_norm_(p, 0.1, norm_type=float("inf")))
@program("clip_grad_norm_, one by one", lambda p: nn.utils.clip_grad_norm_(p, 0.3, foreach=False))
@program("clip_grad_value_", lambda p: nn.utils.clip_grad_value_(p, 0.05))
def global_clipping(strategy: Any, clip: Callable[[Any], Any]) -> dict[str, Any]:
    model, optimizer = net_and_optimizer(strategy)

    def step(x: Tensor, y: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = loss_of(model, x, y)
        loss.backward()
        ts.get_replica_context().sum_gradients(optimizer)
        clip(model.parameters())
        optimizer.step()
        return loss.detach()

    return state(model, losses=fit(strategy, step))


@program("clipping of one of two optimizers")
def clip_one_of_two(strategy: Any) -> dict[str, Any]:
    with strategy.scope():
        model = make_net()
        first = torch.optim.SGD(model[0].parameters(), lr=0.05)
        second = torch.optim.Adam(model[2].parameters(), lr=0.05)

    def step(x: Tensor, y: Tensor) -> Tensor:
        loss = loss_of(model, x, y)
        loss.backward()
        ts.get_replica_context().sum_gradients(first)
        nn.utils.clip_grad_norm_(model[0].parameters(), 0.2)
        for optimizer in (first, second):
            optimizer.step()
            optimizer.zero_grad()
        return loss.detach()

    return state(model, losses=fit(strategy, step))


@program("logged gradient norm")
def logged_norm(strategy: Any) -> dict[str, Any]:
    model, optimizer = net_and_optimizer(strategy)
    norms: list[float] = []

    def step(x: Tensor, y: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss_of(model, x, y).backward()
        ts.get_replica_context().sum_gradients(optimizer)
        norm = nn.utils.get_total_norm([p.grad for p in model.parameters()])
        optimizer.step()
        return norm / ts.get_replica_context().num_replicas_in_sync

    return state(model, losses=fit(strategy, step, after=lambda i, loss: norms.append(loss)))


# gradients that do not come from backward()


@program("autograd.grad, summed at the step")
@program("autograd.grad, summed by hand", by_hand=True)
def autograd_grad(strategy: Any, by_hand: bool = False) -> dict[str, Any]:
    model, optimizer = net_and_optimizer(strategy)

    def step(x: Tensor, y: Tensor) -> Tensor:
        context = ts.get_replica_context()
        loss = loss_of(model, x, y)
        parameters = list(model.parameters())
        for parameter, grad in zip(parameters, torch.autograd.grad(loss, parameters), strict=True):
            parameter.grad = context.all_reduce("SUM", grad) if by_hand else grad
        if by_hand:
            context.mark_summed(optimizer)
        optimizer.step()
        return loss.detach()

    return state(model, losses=fit(strategy, step))


@program("torch.func per-example gradients")
def per_example_gradients(strategy: Any) -> dict[str, Any]:
    """Each example's gradient is clipped by itself, as in differentially private training."""
    model, optimizer = net_and_optimizer(strategy)

    def step(x: Tensor, y: Tensor) -> Tensor:
        parameters = {name: p.detach() for name, p in model.named_parameters()}

        def loss_of_one(parameters: dict[str, Tensor], x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
            loss = (torch.func.functional_call(model, parameters, (x[None],))[0] - y).square().sum()
            return loss, loss

        count = ts.get_replica_context().actual_batch_size()
        each, losses = torch.func.vmap(torch.func.grad(loss_of_one, has_aux=True), (None, 0, 0))(parameters, x, y)
        norms = sum(grad.flatten(1).square().sum(1) for grad in each.values()).sqrt()
        factors = (1.0 / norms).clamp(max=1.0)
        for name, parameter in model.named_parameters():
            parameter.grad = torch.einsum("i,i...->...", factors, each[name]) / count
        optimizer.step()
        return losses.sum() / count

    return state(model, losses=fit(strategy, step, batch_size=3))


@program("gradient penalty")
def gradient_penalty(strategy: Any) -> dict[str, Any]:
    """A double backward, through the gradient with respect to the input."""
    model, optimizer = net_and_optimizer(strategy)

    def step(x: Tensor, y: Tensor) -> Tensor:
        optimizer.zero_grad()
        x = x.clone().requires_grad_()
        output = model(x)
        (slope,) = torch.autograd.grad(output.sum(), x, create_graph=True)
        loss = average((output - y).square().sum(1) + 0.1 * (slope.square().sum(1) - 1).square())
        loss.backward()
        optimizer.step()
        return loss.detach()

    return state(model, losses=fit(strategy, step))


@program("penalty on the gradient of the parameters")
def parameter_gradient_penalty(strategy: Any) -> dict[str, Any]:
    """The penalty is on the gradient of the whole batch, so the gradient is reduced inside the graph."""
    model, optimizer = net_and_optimizer(strategy)

    def step(x: Tensor, y: Tensor) -> Tensor:
        context = ts.get_replica_context()
        optimizer.zero_grad()
        loss = loss_of(model, x, y)
        grads = torch.autograd.grad(loss, list(model.parameters()), create_graph=True)
        whole = context.all_reduce("SUM", list(grads))
        loss = loss + ts.nn.scale_regularization_loss(0.1 * sum(grad.square().sum() for grad in whole))
        loss.backward()
        optimizer.step()
        return loss.detach()

    return state(model, losses=fit(strategy, step))


# what runs during backward


@program("activation checkpointing", use_reentrant=False)
@program("activation checkpointing, reentrant", use_reentrant=True)
def checkpointing(strategy: Any, use_reentrant: bool) -> dict[str, Any]:
    model, optimizer = net_and_optimizer(strategy)

    def step(x: Tensor, y: Tensor) -> Tensor:
        optimizer.zero_grad()
        hidden = checkpoint(model[:2], x.clone().requires_grad_(), use_reentrant=use_reentrant)
        loss = average((model[2](hidden) - y).square().sum(1))
        loss.backward()
        optimizer.step()
        return loss.detach()

    return state(model, losses=fit(strategy, step))


@program("hooks")
@program("hooks registered after the first run", late=True)
def hooks(strategy: Any, late: bool = False) -> dict[str, Any]:
    model, optimizer = net_and_optimizer(strategy)

    def register() -> None:
        model[0].register_forward_pre_hook(lambda module, args: (args[0] * 1.5,))
        model[1].register_forward_hook(lambda module, args, output: output + 0.1)
        model[1].register_full_backward_hook(lambda module, grads, outer: (grads[0] * 0.5,))
        model[2].weight.register_hook(lambda grad: grad * 2)
        optimizer.register_step_pre_hook(lambda opt, args, kwargs: halve(opt))

    def halve(opt: torch.optim.Optimizer) -> None:
        """Sees this replica's gradients, or all replicas': halving is the same."""
        for parameter in opt.param_groups[0]["params"]:
            parameter.grad.mul_(0.5)

    def before(i: int) -> None:
        if i == (2 if late else 0):
            register()

    return state(model, losses=fit(strategy, plain_step(model, optimizer), before=before))


# which parameters take part


@program("frozen, then unfrozen outside")
@program("frozen, then unfrozen inside", inside=True)
@program("frozen with requires_grad of each parameter", each=True)
def freezing(strategy: Any, inside: bool = False, each: bool = False) -> dict[str, Any]:
    """The first layer is frozen for the first two steps and again for the last."""
    model, optimizer = net_and_optimizer(strategy)
    number = [0]

    def set_frozen() -> None:
        if each:
            for parameter in model[0].parameters():
                parameter.requires_grad = 2 <= number[0] < 5
        else:
            model[0].requires_grad_(2 <= number[0] < 5)

    train_step = plain_step(model, optimizer)

    def step(x: Tensor, y: Tensor) -> Tensor:
        if inside:
            set_frozen()
        return train_step(x, y)

    def before(i: int) -> None:
        number[0] = i
        if not inside:
            set_frozen()

    return state(model, losses=fit(strategy, step, before=before))


@program("a parameter that some batches do not use")
def unused(strategy: Any) -> dict[str, Any]:
    """One layer is used by examples of a kind only, which some replicas and some batches lack."""
    with strategy.scope():
        model = nn.ModuleDict({"always": nn.Linear(4, 2), "sometimes": nn.Linear(4, 2), "never": nn.Linear(4, 2)})
        model.double()
        optimizer = torch.optim.Adam(model.parameters(), lr=0.05, weight_decay=0.1)

    def step(x: Tensor, y: Tensor) -> Tensor:
        optimizer.zero_grad()
        chosen = x[:, 0] > 1.2
        output = model["always"](x)
        if chosen.any():
            output = output + chosen[:, None] * model["sometimes"](x)
        loss = average((output - y).square().sum(1))
        loss.backward()
        optimizer.step()
        return loss.detach()

    result = state(model, losses=fit(strategy, step))
    assert not model["never"].weight.grad
    return result


@program("two models with two optimizers")
def generator_and_critic(strategy: Any) -> dict[str, Any]:
    """The critic takes three steps on each batch, the generator one."""
    with strategy.scope():
        generator, critic = (
            nn.Linear(4, 2).double(),
            nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 1)).double(),
        )
        first = torch.optim.Adam(generator.parameters(), lr=0.02, betas=(0.5, 0.9))
        second = torch.optim.RMSprop(critic.parameters(), lr=0.01)

    def step(x: Tensor, y: Tensor) -> Tensor:
        for _ in range(3):
            second.zero_grad()
            score = critic(generator(x).detach()).sum(1) - critic(y).sum(1)
            critic_loss = average(score.tanh())
            critic_loss.backward()
            second.step()
        first.zero_grad()
        loss = average(-critic(generator(x)).sum(1))
        loss.backward()
        first.step()
        return (loss + critic_loss).detach()

    return state(generator, critic, losses=fit(strategy, step))
