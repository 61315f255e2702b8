"""Where the library hears of what replicas do with gradients, and sums them: hooks of torch and replaced functions.

torch's global step hooks see every optimizer's ``step``, and methods of ``GradScaler`` are replaced while there is a
strategy with several replicas, whenever a scaler is made. With one replica they do nothing.

From when such a strategy first looks at its parameters, in its first run at the latest, the one function of
``torch.autograd`` by which ``backward``, ``Tensor.backward`` and ``grad`` reach the engine tells of its calls, also of
those by names that the program took before, and so do ``Module.zero_grad`` and ``Optimizer.zero_grad``. They are not
changed in every run: then Python would look up the attributes of all modules anew.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from torchstrategy import patches
from torchstrategy.base.context import current_replica_context, is_updating
from torchstrategy.base.log import call_site
from torchstrategy.base.options import ReduceOp
from torchstrategy.gradients.ledger import hear_all
from torchstrategy.replicas.mirrored import resolve
from torchstrategy.replicas.record import find_owner, optimizer_parameters, owner

__all__ = ["install", "watch"]


def install(user: Any) -> None:
    """Register the step hooks, and serve gradient scalers.

    Args:
        user: as long as it lives they stay: a strategy.
    """
    _hooks.use(user)


def _install() -> list[Callable[[], None]]:
    why = "gradients are summed at optimizer.step()"
    ends = [
        patches.note(f"torch's global optimizer step {name} hooks", why, patches.STRATEGIES, handle.remove)
        for name, handle in (
            ("pre", register_optimizer_step_pre_hook(_before_step)),
            ("post", register_optimizer_step_post_hook(_after_step)),
        )
    ]
    return [*ends, *_serve_scalers()]


def _serve_scalers() -> list[Callable[[], None]]:
    why = "gradients are summed before a scaler looks for infinities"
    scaler: Any = torch.amp.GradScaler
    ends: list[Callable[[], None]] = []

    def serve(cls: type[Any]) -> None:
        for name, summing in (("unscale_", _summing_unscale), ("step", _summing_step)):
            if name in vars(cls):
                ends.append(patches.replace(cls, name, summing(vars(cls)[name]), why, patches.STRATEGIES))

    def init_subclass(cls: type[Any], /, **kwargs: Any) -> None:
        super(scaler, cls).__init_subclass__(**kwargs)
        serve(cls)

    for cls in _with_subclasses(scaler):
        serve(cls)
    undo = patches.replace(scaler, "__init_subclass__", classmethod(init_subclass), why, patches.STRATEGIES)

    def end_all() -> None:
        for end in ends:
            end()

    return [undo, end_all]


_hooks = patches.WhileUsed(_install)


def _before_step(optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    context = current_replica_context()
    plain = resolve(optimizer)
    if is_updating():
        _check_summed(plain)
        return None
    if context is None or context.num_replicas_in_sync == 1:
        strategy = find_owner(plain) if context is None else owner(plain)
        if strategy is not None and strategy.num_replicas_in_sync > 1:
            raise RuntimeError(
                f"{type(plain).__name__}.step() was called outside `run` of the {type(strategy).__name__} that the "
                "optimizer belongs to, so the gradients of its replicas could not be summed. Call it inside the "
                "function that you give to `strategy.run`."
            )
        if context is not None:
            context.strategy._check_lone_step(plain)
        return None
    context.strategy.gradients.check(plain, context.local_id)
    context.strategy.gradients.take_up([plain])
    closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
    context._sum(plain, uses_applied=callable(closure))  # what stands there before the closure makes new ones
    context.step_depth += 1
    if (shard := context.strategy.gradients.shard_of(plain)) is not None:
        shard.begin(plain)
    return _with_summed_closure(context, plain, closure, args, kwargs) if callable(closure) else None


def _after_step(optimizer: Any, *_: Any) -> None:
    context = current_replica_context()
    if context is None or context.num_replicas_in_sync == 1 or is_updating():
        return
    context.step_depth -= 1
    if context.step_depth == 0:  # wrappers such as SAM step inside their own step
        context.strategy.gradients.ledger.note_step(optimizer_parameters(resolve(optimizer)))


def _check_summed(optimizer: Optimizer) -> None:
    """Refuse a step inside another optimizer's update on the host, where replicas can't meet, if it needs a sum."""
    strategy = owner(optimizer)
    if strategy is not None and any(map(strategy.gradients.ledger.is_local, optimizer_parameters(optimizer))):
        raise RuntimeError(
            f"{type(optimizer).__name__}.step() was called inside another optimizer's step on the host, for "
            "parameters that the other one does not have, so their gradients are not summed. Call "
            "`ts.get_replica_context().sum_gradients(optimizer)` for it before, or give the outer one all parameters."
        )


def _with_summed_closure(
    context: Any, optimizer: Optimizer, closure: Callable[[], Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Sum after each call of a closure; its loss becomes the sum over replicas, so that line searches agree."""
    shard = context.strategy.gradients.shard_of(optimizer)

    def summed() -> Any:
        with contextlib.nullcontext() if shard is None else shard.shown(optimizer):
            loss = closure()
            context.sum_gradients(optimizer)
        return context.all_reduce(ReduceOp.SUM, torch.as_tensor(loss).detach())

    if "closure" in kwargs:
        return args, {**kwargs, "closure": summed}
    return (args[0], summed, *args[2:]), kwargs


#: Of scalers that no scope recorded, which local replica used each first: one made in `run` is a replica's own.
_users: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()


def _with_subclasses(cls: type[Any]) -> Iterator[type]:
    yield cls
    for subclass in cls.__subclasses__():
        yield from _with_subclasses(subclass)


def _summing_unscale(unscale: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(unscale)
    def unscale_(self: Any, optimizer: Optimizer) -> None:
        _sum_here(self, optimizer)
        unscale(self, optimizer)

    return unscale_


def _summing_step(step: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(step)
    def summing(self: Any, optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
        _sum_here(self, optimizer)
        result = step(self, optimizer, *args, **kwargs)
        context = current_replica_context()
        if context is not None:  # it may have left the step out
            context.strategy.gradients.ledger.forget_unused(optimizer_parameters(resolve(optimizer)))
        return result

    return summing


def _sum_here(scaler: Any, optimizer: Optimizer) -> None:
    context = current_replica_context()
    if context is None or context.num_replicas_in_sync == 1:
        return
    if (
        owner(scaler) is None
        and scaler.is_enabled()
        and _users.setdefault(scaler, context.local_id) != context.local_id
    ):
        raise RuntimeError(
            f"A {type(scaler).__name__} that was made outside `strategy.scope()` can't serve several replicas in one "
            "process: each would update its scale. Make it inside `with strategy.scope():`."
        )
    context.sum_gradients(optimizer)


def watch(user: Any) -> None:
    """Hear of backward passes and of cleared gradients from now on.

    Args:
        user: as long as it lives: what belongs to a strategy with several replicas.
    """
    _watching.use(user)


def _watch() -> list[Callable[[], None]]:
    until = "no strategy with several replicas that has looked at its parameters is left"
    tell = _telling_of_passes(torch.autograd._engine_run_backward)  # type: ignore[attr-defined]
    why = "backward and grad tell of gradients"
    ends = [patches.replace(torch.autograd, "_engine_run_backward", tell, why, until)]
    why = "cleared gradients are new ones"
    for cls in (torch.nn.Module, torch.optim.Optimizer):
        ends.append(patches.replace(cls, "zero_grad", _telling_of_clearing(cls.zero_grad), why, until))
    return ends


#: Changed from when a strategy first looks at its parameters, at the latest in its first run.
_watching = patches.WhileUsed(_watch)


@functools.lru_cache(maxsize=16)
def _telling_of_passes(engine: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(engine)
    def tell(outputs: Any, grad_outputs: Any, *args: Any, accumulate_grad: bool, **kwargs: Any) -> Any:
        run = functools.partial(engine, outputs, grad_outputs, *args, accumulate_grad=accumulate_grad, **kwargs)
        context = current_replica_context()
        if context is None or context.num_replicas_in_sync == 1:
            return _heard(run)
        context._has_computed = True
        _, create_graph, inputs = args[:3]
        gradients = context.strategy.gradients
        if accumulate_grad:
            gradients.before_backward(context, outputs, grad_outputs, create_graph=bool(create_graph))
            return _heard(run)
        context._differentiated.update(map(id, inputs))
        mean = gradients.before_grad(context, outputs, grad_outputs, inputs)
        found = run()
        gradients.after_grad(context, mean, found)
        return found

    return tell


def _heard(run: Callable[[], Any]) -> Any:
    """Run a backward pass, and look at the gradients that it has reached, also if it fails half-way."""
    try:
        result = run()
    except BaseException:
        with contextlib.suppress(RuntimeError):  # its own error is the first
            hear_all()
        raise
    hear_all()
    return result


@functools.lru_cache(maxsize=16)
def _telling_of_clearing(zero_grad: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(zero_grad)
    def tell(*args: Any, **kwargs: Any) -> Any:
        context = current_replica_context()
        if context is None or context.num_replicas_in_sync == 1:
            return zero_grad(*args, **kwargs)
        ledger = context.strategy.gradients.ledger
        written = ledger.with_written(context.local_id)
        result = zero_grad(*args, **kwargs)
        if any(parameter.grad is not grad or grad._version != version for parameter, grad, version in written):
            ledger.cleared_at = call_site()
        ledger.sweep(context.local_id)
        return result

    return tell
