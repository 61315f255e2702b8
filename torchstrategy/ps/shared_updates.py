"""Steps of optimizers whose updates run on parameter servers that processes share without a coordinator.

Every replica calls ``optimizer.step()``. The replicas of the process meet there: their gradients are summed and sent
once, and all replicas see what the servers made of the parameters.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from torchstrategy.base.context import current_replica_context
from torchstrategy.base.options import ReduceOp, VariableAggregation
from torchstrategy.ps.served import ServedVariable
from torchstrategy.replicas.copies import bind_step
from torchstrategy.replicas.mirrored import bodies, mirror_of, resolve
from torchstrategy.replicas.record import owner
from torchstrategy.replicas.runner import MergeRequest
from torchstrategy.replicas.variables import fitting

__all__ = ["SharedStep", "SharedVariable", "push_steps"]


class SharedVariable(ServedVariable):
    """A ``ts.Variable`` on a parameter server, whose assignments by all processes count."""

    @override
    def _update(self, method: str, value: Any) -> Any:
        context = current_replica_context()
        if context is None or context.num_replicas_in_sync == 1:
            return super()._update(method, value)
        aggregation = self.options.aggregation
        if aggregation is VariableAggregation.NONE:
            raise ValueError(
                f"{method} in `run` needs an aggregation method for variable {self.name!r}, which has one value for "
                "all replicas. Make it with ts.Variable(..., aggregation=ts.VariableAggregation.SUM, MEAN or "
                "ONLY_FIRST_REPLICA), or assign outside `run`."
            )

        def merge(values: list[Any]) -> list[Tensor]:
            total = values[0]
            if aggregation is not VariableAggregation.ONLY_FIRST_REPLICA:
                stacked = torch.stack([fitting(self, own) for own in values])
                is_mean = aggregation is VariableAggregation.MEAN
                total = stacked.mean(0) if is_mean else stacked.sum(0, dtype=self.dtype)
            self.bindings.update(self.binding, method, self._fitting(total))
            now = self.read_value().detach()
            return [now.clone() for _ in values]

        return context._meet(MergeRequest(f"{method} of variable {self.name!r}", merge, value))


_OPERATION = "the update on the parameter servers"


class SharedStep(NamedTuple):
    """What one replica brings to an update."""

    gradients: Any  # what the strategy's ``gradients.part_of`` returned
    optimizer: Optimizer


class _PushingOptimizer:
    """Mixed in before an optimizer's class: its updates run on the parameter servers."""

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Send the gradients, in ``run`` together with the other replicas."""
        optimizer: Any = resolve(self)
        strategy = owner(optimizer)
        context = current_replica_context()
        if context is None or context.strategy is not strategy:
            raise RuntimeError(
                f"{type(optimizer).__name__}.step() was called outside `run` of the strategy that the optimizer "
                "belongs to. Call it inside the function that you give to `strategy.run`."
            )
        for hook in tuple(optimizer._optimizer_step_pre_hooks.values()):
            hook(optimizer, (), {})
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
            loss = context.all_reduce(ReduceOp.SUM, torch.as_tensor(loss).detach())
        strategy.gradients.check(optimizer, context.local_id)
        part = SharedStep(strategy.gradients.part_of(context, optimizer), optimizer)
        context._meet(MergeRequest(_OPERATION, strategy._step, part))
        for hook in tuple(optimizer._optimizer_step_post_hooks.values()):
            hook(optimizer, (), {})
        return loss

    step.hooked = True  # type: ignore[attr-defined]  # torch's global hooks are for optimizers that update here

    def state_dict(self) -> dict[str, Any]:
        """Return what the plain optimizer's would hold, with the state that is on the servers."""
        shared = owner(resolve(self))._shared
        return shared.optimizer(_first(self)).state_dict()  # type: ignore[no-any-return]

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Give hyper-parameters to the optimizer and, as the chief, its state to the servers."""
        own = resolve(self)
        if own is _first(self):
            owner(own)._shared.optimizer(own).load_state_dict(state_dict)

    def add_param_group(self, group: dict[str, Any]) -> None:
        """Refuse: the counterparts on the servers have the groups that the optimizer was made with."""
        raise RuntimeError(
            f"A parameter group of {len(list(group.get('params', [])))} parameters can't be added to a "
            f"{type(resolve(self)).__name__} that is on the parameter servers already. Make the optimizer with all its "
            "groups."
        )

    def __reduce_ex__(self, protocol: Any) -> Any:
        plain: Any = type(self).__bases__[1]  # whose name this class has
        return object.__new__, (plain,), plain.__getstate__(self)


def _first(optimizer: Any) -> Any:
    """Return the first replica's body of an optimizer, given a facade or any body."""
    strategy = owner(resolve(optimizer))
    for obj in strategy.record:
        if isinstance(obj, Optimizer) and any(body is resolve(optimizer) for body in bodies(obj)):
            return bodies(obj)[0]
    return resolve(optimizer)


def push_steps(optimizer: Any) -> None:
    """Let an optimizer that was taken up send its gradients. Its class is changed: schedulers wrap the class's step."""
    cls: type[Any] = type(resolve(optimizer))
    if not issubclass(cls, _PushingOptimizer):
        optimizer.__class__ = _pushing_class(cls)  # type: ignore[arg-type]
        if mirror_of(optimizer) is None:
            bind_step(optimizer, optimizer)
        for body in bodies(optimizer):
            body.state.clear()  # the servers have it


@functools.cache
def _pushing_class(cls: Any) -> type:
    names = {"__module__": cls.__module__, "__qualname__": cls.__qualname__, "__doc__": cls.__doc__}
    return type(cls.__name__, (_PushingOptimizer, cls), names)
