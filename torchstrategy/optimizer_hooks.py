"""Where gradient sums happen by themselves: ``optimizer.step()``, ``GradScaler`` and ``backward``.

torch's global step hooks see every optimizer's ``step``. With one replica they do nothing.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from torchstrategy.context import current_replica_context
from torchstrategy.gradients.summer import optimizer_parameters
from torchstrategy.options import ReduceOp
from torchstrategy.replicas.marks import is_own, mark_applied, note_backward, unmark
from torchstrategy.replicas.mirrored import resolve
from torchstrategy.replicas.record import find_owner, owner, watch
from torchstrategy.replicas.updating import is_updating

__all__ = ["guard_parameter", "install", "prepare"]


@functools.cache
def install() -> None:
    """Register the step hooks, and watch for what is made outside the scopes; once in a process."""
    watch(prepare)
    register_optimizer_step_pre_hook(_before_step)
    register_optimizer_step_post_hook(_after_step)


def prepare(obj: Any) -> None:
    """Make a ``GradScaler`` sum gradients before it looks for infinities; let ``Optimizer.zero_grad`` end marks."""
    if isinstance(obj, torch.amp.GradScaler) and not isinstance(obj, _SummingScaler):
        obj.__class__ = _summing_class(type(obj))  # type: ignore[arg-type]
    if isinstance(obj, Optimizer):
        obj.__dict__["zero_grad"] = functools.partial(_zero_grad, obj)


def guard_parameter(
    parameter: Tensor, local_id: int, running: Callable[[], int | None], note: Callable[[Tensor], None]
) -> None:
    """Raise when another replica's backward reaches a parameter, or one adds to a gradient that is summed already.

    Args:
        parameter: a replica's own parameter.
        local_id: the replica's position in the process.
        running: returns the position of the replica whose turn it is, or ``None``; for the threads of autograd, which
            have no context.
        note: called after each backward pass of the replica that has added to the parameter's gradient.
    """
    own = weakref.ref(parameter)

    def check(tensor: Tensor) -> None:
        if tensor is not own():  # all replicas' copies of a parameter have the same hooks
            return
        context = current_replica_context()
        current = running() if context is None else context.local_id
        if current is not None and current != local_id:
            raise RuntimeError(
                f"The backward pass of local replica {current} reached a parameter (shape {tuple(tensor.shape)}) of "
                f"local replica {local_id}. A tensor or list of parameters taken from the model outside `run` belongs "
                "to replica 0: read it from the model inside the replica function."
            )
        note_backward(tensor, inside=current is not None)
        if current is not None:
            note(tensor)

    if parameter.is_leaf and not parameter.is_inference() and (parameter.is_floating_point() or parameter.is_complex()):
        required = parameter.requires_grad
        parameter.requires_grad_()  # a frozen one may be trained later
        parameter.register_post_accumulate_grad_hook(check)  # type: ignore[no-untyped-call]
        parameter.requires_grad_(required)


def _before_step(optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if is_updating():
        _check_summed(resolve(optimizer))
        return None
    context = current_replica_context()
    plain = resolve(optimizer)
    if context is None or context.num_replicas_in_sync == 1:
        strategy = find_owner(plain) if context is None else owner(plain)
        if strategy is not None and strategy.num_replicas_in_sync > 1:
            raise RuntimeError(
                f"{type(plain).__name__}.step() was called outside `run` of the {type(strategy).__name__} that the "
                "optimizer belongs to, so the gradients of its replicas could not be summed. Call it inside the "
                "function that you give to `strategy.run`."
            )
        if context is not None and context.strategy._updates_elsewhere:
            raise RuntimeError(
                f"{type(plain).__name__}.step() would update this process's values only: its parameters were not made "
                f"in the scope of the {type(context.strategy).__name__}. Make module and optimizer inside "
                "`with strategy.scope():`."
            )
        return None
    context._check_optimizer(plain)
    context.step_depth += 1
    context.sum_gradients(plain)
    return _with_summed_closure(context, plain, args, kwargs)


def _after_step(optimizer: Any, *_: Any) -> None:
    context = current_replica_context()
    if context is None or context.num_replicas_in_sync == 1 or is_updating():
        return
    context.step_depth -= 1
    if context.step_depth == 0:  # wrappers such as SAM step inside their own step
        for parameter in optimizer_parameters(resolve(optimizer)):
            mark_applied(parameter)


def _check_summed(optimizer: Optimizer) -> None:
    """Refuse a step inside another optimizer's update on the host, where replicas can't meet, if it needs a sum."""
    if any(is_own(parameter) for parameter in optimizer_parameters(optimizer)):
        raise RuntimeError(
            f"{type(optimizer).__name__}.step() was called inside another optimizer's step on the host, for "
            "parameters that the other one does not have, so their gradients are not summed. Call "
            "`ts.get_replica_context().sum_gradients(optimizer)` for it before, or give the outer one all parameters."
        )


def _with_summed_closure(
    context: Any, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Sum after each call of a closure; its loss becomes the sum over replicas, so that line searches agree."""
    closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
    if not callable(closure):
        return None

    def summed() -> Any:
        for parameter in optimizer_parameters(optimizer):
            unmark(parameter)
        loss = closure()
        context.sum_gradients(optimizer)
        return context.all_reduce(ReduceOp.SUM, torch.as_tensor(loss).detach())

    if "closure" in kwargs:
        return args, {**kwargs, "closure": summed}
    return (args[0], summed, *args[2:]), kwargs


def _zero_grad(optimizer: Optimizer, set_to_none: bool = True) -> None:  # noqa: FBT001, FBT002 - torch's signature
    for parameter in optimizer_parameters(optimizer):
        unmark(parameter)
    type(optimizer).zero_grad(optimizer, set_to_none)


class _SummingScaler:
    """Mixed in before a ``GradScaler`` class."""

    def unscale_(self, optimizer: Optimizer) -> None:
        _sum_here(self, optimizer)
        super().unscale_(optimizer)  # type: ignore[misc]

    def step(self, optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
        _sum_here(self, optimizer)
        self._note(optimizer)
        return super().step(optimizer, *args, **kwargs)  # type: ignore[misc]

    def update(self, new_scale: Any = None) -> None:
        super().update(new_scale)  # type: ignore[misc]
        for optimizer in self.__dict__.pop("_ts_stepped", []):  # a skipped step leaves its marks
            for parameter in optimizer_parameters(resolve(optimizer)):
                unmark(parameter)

    def _note(self, optimizer: Optimizer) -> None:
        self.__dict__.setdefault("_ts_stepped", []).append(optimizer)

    def __reduce_ex__(self, protocol: Any) -> Any:
        plain: Any = type(self).__bases__[1]  # whose name this class has
        return object.__new__, (plain,), plain.__getstate__(self)


def _sum_here(scaler: Any, optimizer: Optimizer) -> None:
    context = current_replica_context()
    if context is None or context.num_replicas_in_sync == 1:
        return
    if owner(scaler) is None and len(context.strategy.placement.devices) > 1:
        raise RuntimeError(
            f"A {type(scaler).__name__} that was made outside `strategy.scope()` can't serve several replicas in one "
            "process: each would update its scale. Make it inside `with strategy.scope():`."
        )
    context.sum_gradients(optimizer)


@functools.cache
def _summing_class(cls: type) -> type:
    names = {"__module__": cls.__module__, "__qualname__": cls.__qualname__, "__doc__": cls.__doc__}
    return type(cls.__name__, (_SummingScaler, cls), names)
