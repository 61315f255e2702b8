"""Sums of gradients and steps of optimizers on XLA devices: traced quickly, by one group of replicas for all."""

from __future__ import annotations

import contextlib
import functools
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils._device import DeviceContext

from torchstrategy.base import tree
from torchstrategy.base.context import current_replica_context
from torchstrategy.base.log import info_once
from torchstrategy.base.options import ReduceOp
from torchstrategy.gradients.notes import State
from torchstrategy.gradients.summer import doubt
from torchstrategy.replicas.record import optimizer_parameters
from torchstrategy.replicas.runner import MergeRequest
from torchstrategy.tpu.protocols import AnyHosting, SpmdReplicaContext

__all__ = ["SpmdGradients", "prepare_step", "send_state"]


class _Part(NamedTuple):
    """What one group brings: its gradients (``None`` where there is none or it is summed already) and buffers.

    ``changed`` has the keys of those buffers that differ between the group's replicas.
    """

    gradients: list[Tensor | None]
    buffers: dict[int, Tensor]
    changed: set[int]


class SpmdGradients:
    """Sums gradients over replicas in the graph that is traced.

    Args:
        hosting: where the replicas run.
    """

    def __init__(self, hosting: AnyHosting) -> None:
        self._hosting = hosting

    def sum_for(self, context: SpmdReplicaContext, optimizer: Optimizer, *, is_fresh: bool, uses_applied: bool) -> None:
        """Replace a group's gradients by their sum over replicas; every group calls it.

        Raises:
            RuntimeError: a gradient can't be summed, or some groups have summed one that others have not.
        """
        parameters = optimizer_parameters(optimizer)
        ledger = context.strategy.gradients.ledger
        states = [State.LOCAL] * len(parameters)
        if not is_fresh:
            states = ledger.states(parameters, context, uses_applied=uses_applied)
        gradients = []
        for k, (parameter, state) in enumerate(zip(parameters, states, strict=True)):
            if state is State.DOUBTFUL:
                raise RuntimeError(doubt(k, parameter))
            if parameter.grad is not None and parameter.grad.is_sparse:
                raise RuntimeError(
                    f"The gradient of parameter {k} (shape {tuple(parameter.shape)}) is sparse, which XLA does not "
                    "support. Use Embedding(sparse=False)."
                )
            gradients.append(parameter.grad if state is State.LOCAL else None)
        marked = [state is not State.LOCAL for state in states]  # an edited one can't be looked at, but was summed
        buffers = self._hosting.state.buffers_to_average(parameters, all_of_them=self._hosting.num_groups > 1)
        values = {key: buffer.detach() for key, buffer in buffers.items()}
        own = _Part(gradients, values, self._hosting.local_of(buffers))
        totals, means = context._meet(MergeRequest("the sum of gradients", self._merge, (own, marked)))
        with torch.no_grad():
            for parameter, total in zip(parameters, totals, strict=True):
                if total is not None:
                    parameter.grad = total.clone() if self._hosting.num_groups > 1 else total
            ledger.note_sum([p for p, total in zip(parameters, totals, strict=True) if total is not None], context)
            for key, mean in means.items():
                self._hosting.write_shared(buffers[key], mean)

    def _merge(self, payloads: list[Any]) -> Sequence[Any]:
        parts = [part for part, _ in payloads]
        if any(marked != payloads[0][1] for _, marked in payloads):
            raise RuntimeError(
                "Some replicas have already summed gradients that others have not. Every replica must call "
                "`sum_gradients` for the same optimizers."
            )
        columns = list(zip(*(part.gradients for part in parts), strict=True))
        with torch.no_grad():
            totals = [self._sum(column) for column in columns]
            changed = set().union(*(part.changed for part in parts))
            means = {key: self._mean([part.buffers[key] for part in parts]) for key in changed}
        if not any(total is not None for total in totals):
            return [(totals, means)] * len(payloads)
        info_once(
            f"Gradient all_reduce: {sum(total is not None for total in totals)} tensors, num_replicas = "
            f"{self._hosting.num_replicas}, implementation = XLA"
        )
        return [(totals, means)] * len(payloads)

    def _sum(self, column: Sequence[Tensor | None]) -> Tensor | None:
        present = [gradient for gradient in column if gradient is not None]
        if not present:
            return None
        values = [torch.zeros_like(present[0]) if gradient is None else gradient for gradient in column]
        return self._hosting.sum(values)

    def _mean(self, column: Sequence[Tensor]) -> Tensor:
        rows = self._hosting.stack(column)
        if not (rows.is_floating_point() or rows.is_complex()):
            return rows[0]
        counts = self._hosting.had_examples()
        if not any(counts):
            return rows.mean(0)
        # A replica without examples may hold NaN, which a zero weight would spread.
        taken = [rows[i] for i, counted in enumerate(counts) if counted]
        return rows.mean(0) if all(counts) else torch.stack(taken).mean(0)


_OURS = "_ts_steps_once"


def prepare_step(obj: Any) -> None:
    """Let the first group of replicas make an optimizer's or scheduler's step, and the others only bring gradients.

    Step counters stay on the host, where the optimizers compute with them as with numbers.
    """
    if isinstance(obj, LRScheduler) and not isinstance(obj, _OneScheduler):
        cls: Any = type(obj)
        obj.__class__ = _scheduler_class(cls)
    elif isinstance(obj, Optimizer) and not hasattr(obj.step, _OURS):
        obj.register_load_state_dict_post_hook(send_state)  # torch sends all but "step" to the parameters' device
        # A method of the object, as those that torch's schedulers put there: they wrap one another.
        obj.step = types.MethodType(_one_step(obj.step), obj)  # type: ignore[method-assign]


#: What torch's optimizers compute with as with numbers.
_NUMBERS = ("step", "mu_product")


def send_state(optimizer: Optimizer, device: torch.device | None = None) -> None:
    """Send an optimizer's state to a device, and what it takes for numbers to the host.

    Args:
        optimizer: the optimizer.
        device: the device; by default each tensor that is no number stays where it is.
    """
    captured = {id(p) for group in optimizer.param_groups if group.get("capturable") for p in group["params"]}
    for parameter, own in optimizer.state.items():
        for key, value in own.items() if isinstance(own, dict) else ():
            if isinstance(value, Tensor):
                is_number = key in _NUMBERS and id(parameter) not in captured
                own[key] = value.to("cpu" if is_number else device or value.device)


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
    groups = [group for group in optimizer.param_groups if group.get("foreach", False) is None and _may_be_one(group)]
    for group in groups:
        group["foreach"] = True
    try:
        yield
    finally:
        for group in groups:
            group["foreach"] = None  # as it is saved, and means on other devices


def _may_be_one(group: dict[str, Any]) -> bool:
    """Say whether torch's optimizers take ``foreach=True`` with these settings, at which they look by themselves."""
    settings = tree.all_leaves({name: value for name, value in group.items() if name != "params"})
    is_refused = any(group.get(name) for name in ("fused", "differentiable", "capturable"))
    return not is_refused and not any(isinstance(leaf, Tensor) for leaf in settings)


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
