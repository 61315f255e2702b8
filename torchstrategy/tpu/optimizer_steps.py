"""Steps of optimizers on XLA devices: traced quickly, counters on the host, by one group of replicas for all."""

from __future__ import annotations

import contextlib
import functools
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils._device import DeviceContext

from torchstrategy.base.context import current_replica_context
from torchstrategy.base.options import ReduceOp
from torchstrategy.gradients.summer import optimizer_parameters
from torchstrategy.tpu.traced_context import SpmdReplicaContext

__all__ = ["prepare_step"]

_OURS = "_ts_steps_once"


def prepare_step(obj: Any) -> None:
    """Let the first group of replicas make an optimizer's or scheduler's step, and the others only bring gradients.

    Step counters stay on the host, where the optimizers compute with them as with numbers.
    """
    if isinstance(obj, LRScheduler) and not isinstance(obj, _OneScheduler):
        cls: Any = type(obj)
        obj.__class__ = _scheduler_class(cls)
    elif isinstance(obj, Optimizer) and not hasattr(obj.step, _OURS):
        # A method of the object, as those that torch's schedulers put there: they wrap one another.
        obj.step = types.MethodType(_one_step(obj.step), obj)  # type: ignore[method-assign]


def _one_step(step: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(step)
    def own_step(optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
        context = current_replica_context()
        if context is None:
            return step(*args, **kwargs)
        if not isinstance(context, SpmdReplicaContext):
            return _trace_step(context, optimizer, step, args, kwargs)
        one_step = context._hosting.one_step(optimizer_parameters(optimizer))
        if context.group > 0:
            with one_step:
                return _follow(context, optimizer, kwargs.get("closure", args[0] if args else None))
        with one_step:
            return _trace_step(context, optimizer, step, args, kwargs)

    setattr(own_step, _OURS, True)
    return own_step


def _trace_step(
    context: Any, optimizer: Optimizer, step: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    with _made_on_host(), _all_at_once(optimizer):
        if args and callable(args[0]):
            args = (_on_default_device(args[0], context), *args[1:])
        elif callable(kwargs.get("closure")):
            kwargs = {**kwargs, "closure": _on_default_device(kwargs["closure"], context)}
        return step(*args, **kwargs)


@contextlib.contextmanager
def _all_at_once(optimizer: Optimizer) -> Iterator[None]:
    """Let torch's optimizers call one operation for all parameters, which XLA sees as one for each, unless told not to.

    The program is the same, and is traced in half of the time.
    """
    groups = [
        group
        for group in optimizer.param_groups
        if group.get("foreach", False) is None and not group.get("fused") and not group.get("differentiable")
    ]
    for group in groups:
        group["foreach"] = True
    try:
        yield
    finally:
        for group in groups:
            group["foreach"] = None  # as it is saved, and means on other devices


@contextlib.contextmanager
def _made_on_host() -> Iterator[None]:
    """Let tensors be made on the host unless the code says otherwise."""
    modes = torch.overrides._get_current_function_mode_stack()  # type: ignore[no-untyped-call]
    if len(modes) == 1 and isinstance(modes[0], DeviceContext):
        # Torch's own default is the host: without a mode, torch calls no Python for each look at a tensor.
        torch.overrides._pop_mode()  # type: ignore[no-untyped-call]
        try:
            yield
        finally:
            torch.overrides._push_mode(modes[0])  # type: ignore[no-untyped-call]
    else:
        with torch.device("cpu"):
            yield


def _on_default_device(closure: Callable[[], Any], context: Any) -> Callable[[], Any]:
    def call() -> Any:
        with torch.device(context.strategy.placement.devices[0]):
            return closure()

    return call


def _follow(context: SpmdReplicaContext, optimizer: Optimizer, closure: Callable[[], Any] | None) -> Any:
    """Do what a step does between replicas, without the step."""
    context._sum(optimizer, uses_applied=callable(closure))
    loss = None
    if callable(closure):
        with torch.enable_grad():
            loss = closure()
        context.sum_gradients(optimizer)
        loss = context.all_reduce(ReduceOp.SUM, torch.as_tensor(loss).detach())
    context.strategy.gradients.ledger.note_step(optimizer_parameters(optimizer))
    return loss


class _OneScheduler:
    """Mixed in before the class of a scheduler."""

    def step(self, *args: Any, **kwargs: Any) -> Any:
        context = current_replica_context()
        if isinstance(context, SpmdReplicaContext) and context.group > 0:
            return None
        return super().step(*args, **kwargs)  # type: ignore[misc]

    def __reduce_ex__(self, protocol: Any) -> Any:
        plain: Any = type(self).__bases__[1]  # whose name this class has
        return object.__new__, (plain,), self.__dict__


@functools.cache
def _scheduler_class(cls: type) -> type:
    names = {"__module__": cls.__module__, "__qualname__": cls.__qualname__, "__doc__": cls.__doc__}
    return type(cls.__name__, (_OneScheduler, cls), names)
