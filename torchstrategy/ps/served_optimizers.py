"""Optimizers of a ``ParameterServerStrategy``: ``step()`` sends gradients, and the update runs on the servers.

The optimizer in the program's hands keeps its class, its parameter groups and all that schedulers need. It has no
state: that is on the servers, beside the parts of the parameters.

Every replica calls ``optimizer.step()``. The replicas of the process meet there: their gradients are summed and sent
once, and all replicas see what the servers made of the parameters.
"""

from __future__ import annotations

import functools
import types
import weakref
from collections import OrderedDict, defaultdict
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from torchstrategy.base.context import current_replica_context
from torchstrategy.base.options import ReduceOp, VariableAggregation
from torchstrategy.ps.bindings import Binding, Bindings
from torchstrategy.ps.optimizer_updates import attributes_of, plain_ones
from torchstrategy.ps.served import Served
from torchstrategy.ps.served_variables import ServedVariable
from torchstrategy.ps.user_modules import dumps
from torchstrategy.replicas.copies import bind_step
from torchstrategy.replicas.mirrored import bodies, mirror_of, resolve
from torchstrategy.replicas.record import optimizer_parameters, owner
from torchstrategy.replicas.runner import MergeRequest
from torchstrategy.replicas.variables import fitting

__all__ = [
    "BindingOf",
    "OptimizerLink",
    "SharedStep",
    "SharedVariable",
    "hyper_parameters",
    "make_worker_optimizer",
    "push_steps",
    "step_hooks",
]


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


_STEP_HOOKS = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")
BindingOf = Callable[[Tensor], "Binding | None"]


class OptimizerLink:
    """Connects an optimizer to its counterpart on the parameter servers.

    Args:
        optimizer: the optimizer.
        optimizer_id: its number on the servers.
        bindings: the process's variables.
        binding_of: returns a parameter's binding.
    """

    def __init__(self, optimizer: Optimizer, optimizer_id: int, bindings: Bindings, binding_of: BindingOf) -> None:
        self._optimizer = weakref.ref(optimizer)  # which has this link's methods
        self.id = optimizer_id
        self._bindings = bindings
        self._binding_of = binding_of
        self._sent: list[dict[str, Any]] = []
        self._is_on_worker = True
        #: A function makes its steps as the program wanted when it scheduled it, whatever a scheduler did since.
        self._hyper_of_step: list[dict[str, Any]] | None = None

    @property
    def is_needed(self) -> bool:
        """Whether the program still has the optimizer."""
        return self._optimizer() is not None

    @property
    def optimizer(self) -> Optimizer:
        """The optimizer in the program's hands."""
        optimizer = self._optimizer()
        if optimizer is None:
            raise RuntimeError("The optimizer no longer exists.")
        return optimizer

    def define(self) -> None:
        """Make the optimizer on the servers.

        Raises:
            ValueError: its updates can't be made there.
        """
        groups = self.optimizer.param_groups
        specs = [self._binding(p).spec for group in groups for p in group["params"]]
        hyper = hyper_parameters(self.optimizer)
        ids = [[self._binding(p).spec.id for p in group["params"]] for group in groups]
        definition = {
            "class": type(self.optimizer),
            "defaults": dict(self.optimizer.defaults),
            "groups": [{"params": own, **values} for own, values in zip(ids, hyper, strict=True)],
            "attributes": attributes_of(self.optimizer),
        }
        self._bindings.client.define_optimizer(self.id, dumps(definition), specs)
        self._sent = hyper
        self._is_on_worker = False
        if self.optimizer.state:  # it has made steps already, or was restored
            self._send_state()

    def send_changes(self) -> None:
        """Tell the servers which hyper-parameters, such as a scheduler's learning rates, have changed."""
        hyper = hyper_parameters(self.optimizer)
        if not _equal(hyper, self._sent):
            self._bindings.client.set_hyper(self.id, hyper)
            self._sent = hyper

    def refresh(self) -> None:
        """Pull the parameters if the optimizer has changed them since they were pulled.

        A loop clears gradients before it computes new ones, so what uses parameters without calling their module sees
        their new values, too.
        """
        parameters = [p for group in self.optimizer.param_groups for p in group["params"] if not isinstance(p, Served)]
        self._bindings.refresh([self._binding(parameter) for parameter in parameters])

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Send the gradients; the servers update the parameters that have one.

        Args:
            closure: computes the gradients, and returns the loss.

        Returns:
            What the closure returned.
        """
        optimizer, loss = self.optimizer, None
        for hook in tuple(optimizer._optimizer_step_pre_hooks.values()):
            hook(optimizer, (), {})
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if self._is_on_worker:
            self._check_hyper_parameters()
        else:
            self.send_changes()
        gradients, bindings = {}, []
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                binding = self._binding(parameter)
                bindings.append(binding)
                grad = binding.gradient() if isinstance(parameter, Served) else parameter.grad
                if grad is not None:
                    gradients[binding.spec.id] = grad.detach().cpu()
        if gradients:
            self._bindings.client.push(self.id, gradients, self._hyper_of_step)
            self._bindings.fall_behind(bindings)
        for hook in tuple(optimizer._optimizer_step_post_hooks.values()):
            hook(optimizer, (), {})
        return loss

    def state_dict(self) -> dict[str, Any]:
        """Return what the plain optimizer's ``state_dict`` would hold, with the state that is on the servers."""
        plain: dict[str, Any] = type(self.optimizer).state_dict(self.optimizer)
        parameters = optimizer_parameters(self.optimizer)
        states = {}
        for index, parameter in enumerate(parameters):
            state = self._bindings.client.optimizer_state(self.id, self._binding(parameter).spec)
            if state:
                states[index] = state
        return {**plain, "state": states}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Give hyper-parameters and state to the optimizer and its counterpart."""
        type(self.optimizer).load_state_dict(self.optimizer, state_dict)
        self._send_state()
        self.send_changes()

    def add_param_group(self, group: dict[str, Any]) -> None:
        """Refuse: the counterparts on the servers have the groups that the optimizer was made with."""
        raise RuntimeError(
            f"A parameter group of {len(list(group.get('params', [])))} parameters can't be added to a "
            f"{type(self.optimizer).__name__} that is on the parameter servers already. Make the optimizer with all "
            "its groups."
        )

    def undo_changes(self) -> None:
        """Give the optimizer in a worker the hyper-parameters that it came with."""
        for group, sent in zip(self.optimizer.param_groups, self._sent, strict=True):
            group.update(sent)

    def _check_hyper_parameters(self) -> None:
        if _equal(hyper_parameters(self.optimizer), self._sent):
            return
        self.undo_changes()
        raise RuntimeError(
            f"A function on a worker changed hyper-parameters of the {type(self.optimizer).__name__}, such as its "
            "learning rate, but the update runs on the parameter servers with those of the coordinator's program. "
            "Change them there: the next function that is scheduled uses them."
        )

    def _send_state(self) -> None:
        """Replace the state on the servers; that of a parameter which has none here begins anew."""
        for parameter in optimizer_parameters(self.optimizer):
            state = dict(self.optimizer.state.get(parameter, {}))
            self._bindings.client.load_optimizer_state(self.id, self._binding(parameter).spec, state)
        self.optimizer.state.clear()

    def _binding(self, parameter: Tensor) -> Binding:
        binding = self._binding_of(parameter)
        if binding is None:
            raise ValueError(
                f"{type(self.optimizer).__name__} has a parameter of shape {tuple(parameter.shape)} that was not made "
                "in the scope of the ParameterServerStrategy: the servers don't have it. Make its module, or the "
                "ts.Variable, inside `with strategy.scope():`."
            )
        return binding

    def attach(self) -> None:
        """Put this link's methods in the place of the optimizer's; copies and pickles have the plain ones."""
        optimizer = self.optimizer
        if self._is_on_worker:
            self._sent = hyper_parameters(optimizer)
            self._hyper_of_step = list(map(plain_ones, self._sent))

        def step(self: Any, closure: Any = None) -> Any:  # noqa: ARG001 - a method, which schedulers ask it to be
            return link.step(closure)

        def zero_grad(self: Any, set_to_none: bool = True) -> None:  # noqa: FBT001, FBT002 - torch's signature
            link.refresh()
            type(self).zero_grad(self, set_to_none)

        link = self
        step._wrapped_by_lr_sched = True  # type: ignore[attr-defined] # the servers step, so a scheduler can't count
        state = optimizer.__dict__
        state["_opt_called"] = True
        state["step"] = types.MethodType(step, optimizer)
        state["zero_grad"] = types.MethodType(zero_grad, optimizer)
        state["state_dict"] = self.state_dict
        state["load_state_dict"] = self.load_state_dict
        state["add_param_group"] = self.add_param_group


def hyper_parameters(optimizer: Optimizer) -> list[dict[str, Any]]:
    """Return copies of the groups without their parameters."""
    groups = [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]
    return [{k: v.detach().clone() if isinstance(v, Tensor) else v for k, v in group.items()} for group in groups]


def make_worker_optimizer(
    cls: type[Optimizer], defaults: dict[str, Any], groups: list[dict[str, Any]], attributes: dict[str, Any]
) -> Optimizer:
    """Return an optimizer without calling its constructor, as pickle does."""
    optimizer = cls.__new__(cls)
    optimizer.__setstate__({"defaults": defaults, "state": defaultdict(dict), "param_groups": groups})
    optimizer.__dict__.update(attributes)
    return optimizer


def step_hooks(optimizer: Optimizer) -> dict[str, Any]:
    """Return the attributes with what is called before and after each step."""
    return {name: OrderedDict(vars(optimizer)[name]) for name in _STEP_HOOKS if vars(optimizer).get(name)}


def _equal(first: list[dict[str, Any]], second: list[dict[str, Any]]) -> bool:
    if len(first) != len(second):
        return False
    for own, other in zip(first, second, strict=True):
        if own.keys() != other.keys():
            return False
        for key, value in own.items():
            is_tensor = isinstance(value, Tensor) or isinstance(other[key], Tensor)
            if not (
                torch.equal(torch.as_tensor(value), torch.as_tensor(other[key])) if is_tensor else value == other[key]
            ):
                return False
    return True
