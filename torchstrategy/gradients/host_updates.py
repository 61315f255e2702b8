"""Steps of optimizers whose parameters are in the host's memory: one update by one optimizer, replica 0's.

Every replica calls ``optimizer.step()``, as under any strategy. The replicas meet there: their gradients are summed,
the host's optimizer steps once on the host's memory, and all replicas see the result. A closure is called by all
replicas as often as the host's optimizer calls it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from torchstrategy.base.context import current_replica_context, is_updating
from torchstrategy.base.options import ReduceOp
from torchstrategy.gradients.summer import GradientSum, GradientSummer, optimizer_parameters
from torchstrategy.replicas.copies import bind_step
from torchstrategy.replicas.host_memory import HostMemory
from torchstrategy.replicas.mirrored import bodies, mirror_of, resolve
from torchstrategy.replicas.record import owner
from torchstrategy.replicas.runner import MergeRequest

__all__ = ["HostUpdater", "HostedOptimizer", "step_on_host"]

_OPERATION = "the update on the host"
_EVALUATE, _DONE = "evaluate", "done"


class _Step(NamedTuple):
    """What one replica brings to an update."""

    gradients: GradientSum
    optimizer: Optimizer
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


class HostUpdater:
    """Makes the updates of one strategy.

    Args:
        summer: sums gradients.
        memory: the host's.
        num_replicas: of the strategy, in all processes.
    """

    def __init__(self, summer: GradientSummer, memory: HostMemory, num_replicas: int) -> None:
        self._summer = summer
        self._memory = memory
        self._num_replicas = num_replicas

    def step(self, context: Any, optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Step as one replica; every replica calls this."""
        closure = kwargs.get("closure", args[0] if args else None)
        if not callable(closure):
            payload = _Step(context.strategy.gradients.part_of(context, optimizer), optimizer, args, kwargs)
            return context._meet(MergeRequest(_OPERATION, self._step, payload))
        if context.num_replicas_in_sync > 1:
            context._sum(optimizer, uses_applied=True)  # those from before, as under any strategy
        parameters = optimizer_parameters(optimizer)
        evaluate = functools.partial(self._evaluate, context, optimizer, closure)
        if context.replica_id_in_sync_group == 0:
            if "closure" in kwargs:
                kwargs = {key: value for key, value in kwargs.items() if key != "closure"}
            else:
                args = args[1:]
            result = self._lead(context, optimizer, evaluate, args, kwargs)
        else:
            result = None
            while True:
                what, _, cleared = self._meet(context, optimizer, "").partition(" ")
                _clear(parameters, cleared)
                if what == _DONE:
                    break
                loss = evaluate()
                result = loss if result is None else result
        self._summer.ledger.note_step(parameters)
        return result

    def _step(self, parts: Sequence[_Step]) -> list[Any]:
        """Sum the gradients and update once, while all replicas wait."""
        if self._num_replicas > 1:
            self._summer([part.gradients for part in parts])
        first = parts[0]
        result, cleared = None, 0
        if self._memory.is_host:
            before = [_grad_stamp(parameter) for parameter in first.gradients.parameters]
            with self._memory.on_host(first.optimizer):
                result = _plain_step(first.optimizer)(*first.args, **first.kwargs)
            if before != [_grad_stamp(parameter) for parameter in first.gradients.parameters]:
                cleared = _cleared(first.optimizer)
        command = self._memory.finish(first.optimizer, f"{cleared:x}")
        for part in parts:
            _clear(part.gradients.parameters, command)
            self._summer.ledger.note_step(part.gradients.parameters)
        return [result] * len(parts)

    def _lead(
        self,
        context: Any,
        optimizer: Optimizer,
        evaluate: Callable[[], Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """Step with a closure on replica 0; between its calls the optimizer is on the host."""
        on_host = [self._memory.on_host(optimizer)]

        def closure() -> Any:
            on_host.pop().__exit__(None, None, None)
            self._meet(context, optimizer, f"{_EVALUATE} {_cleared(optimizer):x}")
            loss = evaluate()
            on_host.append(self._memory.on_host(optimizer))
            on_host[0].__enter__()
            return loss

        on_host[0].__enter__()
        try:
            result = _plain_step(optimizer)(closure, *args, **kwargs)
        finally:
            if on_host:
                on_host.pop().__exit__(None, None, None)
        self._meet(context, optimizer, f"{_DONE} {_cleared(optimizer):x}")
        return result

    def _meet(self, context: Any, optimizer: Optimizer, command: str) -> str:
        """Let all replicas see what the host has; return what replica 0 wants them to do."""

        def merge(payloads: Sequence[tuple[Optimizer, str]]) -> list[str]:
            wanted = self._memory.finish(*payloads[0])
            return [wanted] * len(payloads)

        return str(context._meet(MergeRequest(_OPERATION, merge, (optimizer, command))))

    def _evaluate(self, context: Any, optimizer: Optimizer, closure: Callable[[], Any]) -> Any:
        """Call one replica's closure and sum gradients and losses."""
        loss = closure()
        context.sum_gradients(optimizer)
        return context.all_reduce(ReduceOp.SUM, torch.as_tensor(loss).detach())


def step_on_host(optimizer: Any) -> None:
    """Let an optimizer that a strategy has taken up (the user's object) step on the host.

    Its class is changed, not its ``step``: schedulers wrap the class's.
    """
    cls: type[Any] = type(resolve(optimizer))
    if issubclass(cls, HostedOptimizer):
        return
    optimizer.__class__ = _hosted_class(cls)  # type: ignore[arg-type]
    if mirror_of(optimizer) is None:
        bind_step(optimizer, optimizer)
    for body in bodies(optimizer)[1:]:
        body.state.clear()  # the host has it


class HostedOptimizer:
    """Mixed in before an optimizer's class."""

    def step(self, *args: Any, **kwargs: Any) -> Any:
        """Step on the host, in ``run`` together with the other replicas."""
        optimizer = resolve(self)
        context = current_replica_context()
        updater = getattr(getattr(context, "strategy", None), "host_updater", None)
        if is_updating() or updater is None or owner(optimizer) is not context.strategy:
            return _plain_step(optimizer)(*args, **kwargs)
        if context.num_replicas_in_sync > 1:
            context.strategy.gradients.check(optimizer, context.local_id)
        return updater.step(context, optimizer, args, kwargs)

    step.hooked = True  # type: ignore[attr-defined]  # torch's hooks are called by the step that this one makes

    def __reduce_ex__(self, protocol: Any) -> Any:
        plain: Any = type(self).__bases__[1]  # whose name this class has
        return object.__new__, (plain,), plain.__getstate__(self)


def _cleared(optimizer: Optimizer) -> int:
    """Return which parameters have no gradient or zeros, as a bit mask: the optimizer may have cleared them."""
    grads = [parameter.grad for parameter in optimizer_parameters(optimizer)]
    values = [grad._values() if grad is not None and grad.is_sparse else grad for grad in grads]
    return sum((value is None or not bool(value.count_nonzero())) << k for k, value in enumerate(values))


def _clear(parameters: Sequence[Tensor], mask: str) -> None:
    """Clear the gradients that replica 0's optimizer has cleared."""
    cleared = int(mask, 16)
    for k, parameter in enumerate(parameters if cleared else ()):
        if cleared >> k & 1:
            parameter.grad = None


def _grad_stamp(parameter: Tensor) -> tuple[int, int]:
    grad = parameter.grad
    return (0, 0) if grad is None else (id(grad), grad._version)


def _plain_step(optimizer: Any) -> Callable[..., Any]:
    plain: Any = type(optimizer).__bases__[1]
    return functools.partial(plain.step, optimizer)


@functools.cache
def _hosted_class(cls: Any) -> type:
    names = {"__module__": cls.__module__, "__qualname__": cls.__qualname__, "__doc__": cls.__doc__}
    return type(cls.__name__, (HostedOptimizer, cls), names)
