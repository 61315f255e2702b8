"""What a checkpoint can hold: one class for each kind of object, which captures, checks and restores it."""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader

from torchstrategy.base.context import get_strategy, reporting_failures
from torchstrategy.base.log import warning_once
from torchstrategy.base.names import uncompiled_name
from torchstrategy.base.values import RemoteTensor
from torchstrategy.checkpoint.process_reports import is_writer
from torchstrategy.checkpoint.tracked import (
    Group,
    Plan,
    Tracked,
    TrackedScheduler,
    TrackedStateful,
    TrackedTensor,
    TrackedVariable,
    check_parameters,
    check_tensor,
    divided_as,
    gathered,
    no_shape_message,
    to_plain,
)
from torchstrategy.collectives.summing import in_format_of, memory_order
from torchstrategy.gradients.sharded_states import shard_of
from torchstrategy.replicas import metric_states
from torchstrategy.replicas.distributed_variables import user_variable
from torchstrategy.replicas.dtensors import is_dtensor, keeps_parts
from torchstrategy.replicas.metric_states import MetricState
from torchstrategy.replicas.mirrored import bodies, opened
from torchstrategy.replicas.on_read import SyncOnReadVariable
from torchstrategy.replicas.record import optimizer_parameters, owner
from torchstrategy.replicas.variables import Variable

__all__ = [
    "align_before_step",
    "align_state",
    "capture_together",
    "is_dense",
    "strategy_of",
    "track_all",
    "track_object",
]


def align_state(optimizer: Optimizer) -> None:
    """Give what an optimizer remembers of a parameter the parameter's memory format."""
    for body in bodies(optimizer):
        for parameter, state in body.state.items():
            if isinstance(parameter, Tensor) and isinstance(state, dict) and not is_lazy(parameter):
                _align(parameter, state)


def align_before_step(optimizer: Optimizer, *_: Any) -> None:
    """Do so for a fused step, with the gradients as well, whoever made them; a step pre-hook.

    A parameter that has gaps in its memory, as a part of another tensor, can't be updated by a fused step.
    """
    for group in [group for group in optimizer.param_groups if group.get("fused")]:
        for parameter in group["params"]:
            grad = parameter.grad
            if not is_dense(parameter):
                group["fused"] = False
            if grad is not None and not grad.is_sparse and grad.stride() != parameter.stride():
                parameter.grad = in_format_of(grad, parameter)
            _align(parameter, optimizer.state.get(parameter, {}))


def is_dense(tensor: Tensor) -> bool:
    """Say whether a tensor's elements lie in memory without gaps, each once."""
    return tensor.is_contiguous() or memory_order(tensor) is not None


def _align(parameter: Tensor, state: dict[str, Any]) -> None:
    strides, shape = parameter.stride(), parameter.shape
    for name, value in state.items():
        is_strided = isinstance(value, Tensor) and value.layout is torch.strided  # SGD's momentum of sparse ones is not
        if is_strided and value.shape == shape and value.stride() != strides:
            state[name] = in_format_of(value, parameter)


class TrackedModule(Tracked):
    """A module, matched value by value. Names are those of the module before ``torch.compile``.

    Its values are those of its ``state_dict`` and the variables that are plain attributes, as in tf.
    """

    @property
    def is_collective(self) -> bool:
        return any(isinstance(value, SyncOnReadVariable) or is_dtensor(value) for value in self._state().values())

    def capture(self, strategy: Any) -> Any:
        state = self._state()
        result = OrderedDict(
            (uncompiled_name(key), self._capture(key, value, strategy)) for key, value in state.items()
        )
        result._metadata = {uncompiled_name(key): value for key, value in state._metadata.items()}  # type: ignore[attr-defined]
        return result

    def plan(self, state: Any, strategy: Any) -> Plan:
        own = self._state()
        key_of = {uncompiled_name(key): key for key in own}
        values = OrderedDict((key_of[name], value) for name, value in state.items() if name in key_of)
        variables = []
        for key in list(values):
            if isinstance(own[key], Variable):
                variables.append(TrackedVariable(f"{self.name}.{key}", own[key]).plan(values.pop(key), strategy))
            elif isinstance(own[key], Tensor) and not is_lazy(own[key]):
                check_tensor(f"{self.name}.{key}", values[key], own[key])
        metadata = getattr(state, "_metadata", {})
        values._metadata = {  # type: ignore[attr-defined]
            key: metadata.get(uncompiled_name(key), default) for key, default in own._metadata.items()
        }

        def apply() -> None:
            for key, value in values.items():
                values[key] = divided_as(value, own[key])
            self.obj.load_state_dict(values, strict=False)
            for variable in variables:
                variable.apply()

        return Plan(
            apply,
            [f"{self.name}.{name}" for name in state if name in key_of],
            [f"{self.name}.{name}" for name in key_of if name not in state],
            [f"{self.name}.{name}" for name in state if name not in key_of],
        )

    def leaves(self) -> list[str]:
        return [f"{self.name}.{uncompiled_name(key)}" for key in self._state()]

    def _capture(self, key: str, value: Any, strategy: Any) -> Any:
        tracked = TrackedVariable if isinstance(value, Variable) else TrackedTensor
        return tracked(f"{self.name}.{key}", value).capture(strategy)

    def _state(self) -> Any:
        """Return the module's ``state_dict`` with its variables in place of their values."""
        module = bodies(self.obj)[0]
        registered = itertools.chain(
            module.named_parameters(remove_duplicate=False), module.named_buffers(remove_duplicate=False)
        )
        registered_variables = {key: user_variable(value) for key, value in registered if isinstance(value, Variable)}
        served = any(isinstance(value, RemoteTensor) for value in module.state_dict(keep_vars=True).values())
        # Reading a variable may need all processes, or too much memory, so that state_dict must not do it.
        state = self.obj.state_dict(keep_vars=bool(registered_variables) or served)
        state.update({key: variable for key, variable in registered_variables.items() if key in state})
        for prefix, part in module.named_modules(remove_duplicate=False):
            for name, value in vars(part).items():
                if isinstance(value, Variable):
                    state[f"{prefix}.{name}" if prefix else name] = user_variable(value)
        return state


class TrackedScaler(TrackedStateful):
    """A gradient scaler. A disabled one has no state, and leaves an enabled one as it is."""

    def plan(self, state: Any, strategy: Any) -> Plan:
        if self.obj.is_enabled() and not state:
            return Plan(missing=[self.name])
        return super().plan(state, strategy)


#: What a parameter group says of how a step is computed, and not of what.
_WAYS = ("fused", "foreach", "capturable")


class TrackedOptimizer(Tracked):
    """An optimizer. It numbers its parameters: shapes, and names if the checkpoint has them, tell another order."""

    #: By ``id``, the names of the parameters of the checkpoint's modules.
    names: Mapping[int, str] = MappingProxyType({})

    @property
    def is_collective(self) -> bool:
        optimizer = bodies(self.obj)[0]
        return shard_of(optimizer) is not None or any(map(is_dtensor, optimizer_parameters(optimizer)))

    def capture(self, strategy: Any) -> Any:
        self._warn_of_gradients(strategy)
        shapes = self._shapes()
        if any(None in group for group in shapes):
            raise ValueError(no_shape_message(f"A parameter of {self.name}"))
        state = to_plain(gathered(self.obj.state_dict()), self.name)
        return {"class": self._class_name(), "shapes": shapes, "names": self._known_names(), "state": state}

    def plan(self, state: Any, strategy: Any) -> Plan:  # noqa: ARG002
        if state["class"] != self._class_name():
            raise ValueError(
                f"The checkpoint's {self.name} is of class {state['class']}, the object is of class "
                f"{self._class_name()}. Restore it into an optimizer of the same class, or leave it out."
            )
        check_parameters(self.name, state, self._shapes(), self._known_names())
        return Plan(lambda: self._load(state["state"]), [self.name])

    def _warn_of_gradients(self, strategy: Any) -> None:
        ledger = getattr(getattr(strategy, "gradients", None), "ledger", None)
        if ledger is None or all(ledger.own_pass(p) is None for p in optimizer_parameters(bodies(self.obj)[0])):
            return
        warning_once(
            f"A checkpoint was saved while {self.name} had gradients that no step had used. It holds none, so the next "
            "step of who goes on from it lacks them. With accumulation save after optimizer.step(), and let a call of "
            "PreemptionCheckpointHandler.run make a whole step. (If the next one begins with zero_grad(), all is well.)"
        )

    def _load(self, state: dict[str, Any]) -> None:
        self.obj.load_state_dict(self._as_here(state))
        align_state(self.obj)

    def _as_here(self, state: dict[str, Any]) -> dict[str, Any]:
        """Return the state with this optimizer's own ways to compute, which depend on the device."""
        groups = [
            {**saved, **{key: own[key] for key in _WAYS if key in own}}
            for saved, own in zip(state["param_groups"], self.obj.param_groups, strict=True)
        ]
        values, parameters = state["state"], optimizer_parameters(self.obj)
        if any(map(is_dtensor, parameters)):
            own = dict(zip([number for group in groups for number in group["params"]], parameters, strict=True))
            values = {
                number: {name: divided_as(value, own[number]) for name, value in known.items()}
                for number, known in values.items()
            }
        return {**state, "state": values, "param_groups": groups}

    def _class_name(self) -> str:
        return type(bodies(self.obj)[0]).__name__

    def _known_names(self) -> list[str | None]:
        return [self.names.get(id(p)) for group in self.obj.param_groups for p in group["params"]]

    def _shapes(self) -> list[list[list[int] | None]]:
        """Return each group's shapes; a lazy module's parameter has none yet."""
        groups = self.obj.param_groups
        return [[None if is_lazy(p) else list(p.shape) for p in group["params"]] for group in groups]


class TrackedGenerator(Tracked):
    """A random generator."""

    def capture(self, strategy: Any) -> Any:  # noqa: ARG002
        return {"device": self.obj.device.type, "state": to_plain(self.obj.get_state(), self.name)}

    def plan(self, state: Any, strategy: Any) -> Plan:  # noqa: ARG002
        if state["device"] != self.obj.device.type:
            raise ValueError(
                f"The checkpoint's generator {self.name} is one for {state['device']}, the object is one for "
                f"{self.obj.device.type}: their states differ. Leave it out of the checkpoint."
            )
        return Plan(lambda: self._restore(state["state"]), [self.name])

    def _restore(self, state: Tensor) -> None:
        for body in bodies(self.obj):
            body.set_state(state)


class TrackedMetric(Tracked):
    """A torchmetrics metric. What all replicas accumulated is saved; a restore gives it to replica 0."""

    @property
    def is_collective(self) -> bool:
        return True

    def capture(self, strategy: Any) -> Any:
        with opened(self.obj) as own:
            states = metric_states.merged_states(strategy, own, resumable=True)
        return {
            name: {"num_updates": state.num_updates, "values": to_plain(state.values, f"{self.name}.{name}")}
            for name, state in states.items()
        }

    def plan(self, state: Any, strategy: Any) -> Plan:
        metrics = metric_states.metrics_of(bodies(self.obj)[0])
        plan = Plan()
        loaded = {}
        for name, metric in metrics.items():
            path = f"{self.name}.{name}" if name else self.name
            if name not in state:
                plan.missing.append(path)
                continue
            _check_metric(path, state[name]["values"], metric)
            plan.matched.append(path)
            loaded[name] = MetricState(state[name]["num_updates"], state[name]["values"])
        plan.unused = [f"{self.name}.{name}" for name in state if name not in metrics]
        plan.apply = lambda: self._restore(loaded, is_first=strategy.is_chief)
        return plan

    def _restore(self, states: dict[str, MetricState], *, is_first: bool) -> None:
        with opened(self.obj) as own:
            for i, body in enumerate(own):
                for name, metric in metric_states.metrics_of(body).items():
                    if name in states:
                        metric.reset()
                        if i == 0 and is_first:
                            metric_states.load_state(metric, states[name])


def track_object(name: str, obj: Any) -> Tracked:
    """Return what saves and restores an object.

    Raises:
        ValueError: a checkpoint can't hold the object.
    """
    if metric_states.is_metric(obj):
        return TrackedMetric(name, obj)
    for cls, tracked in (
        (nn.Module, TrackedModule),
        (Variable, TrackedVariable),
        (Tensor, TrackedTensor),
        (torch.optim.Optimizer, TrackedOptimizer),
        (torch.amp.GradScaler, TrackedScaler),
        (LRScheduler, TrackedScheduler),
        (torch.Generator, TrackedGenerator),
    ):
        if isinstance(obj, cls):
            return tracked(name, obj)
    if callable(getattr(obj, "state_dict", None)) and callable(getattr(obj, "load_state_dict", None)):
        return TrackedStateful(name, obj)
    hint = "Wrap a number: torch.tensor(0)."
    if isinstance(obj, DataLoader):  # which the default strategy returns as it is
        hint = "Give it what experimental_distribute_dataset(loader) of a strategy like ts.OneDeviceStrategy returns."
    raise ValueError(
        f"A checkpoint can't hold {name}={obj!r} of type {type(obj).__name__}: it must be a module, an optimizer, a "
        "metric, a variable, a generator, a tensor, anything with state_dict and load_state_dict, or a dict, list or "
        f"tuple of these. {hint}"
    )


def track_all(items: Mapping[str, Any], beside: Mapping[str, Tracked] = MappingProxyType({})) -> dict[str, Tracked]:
    """Return what saves and restores each object of a structure; ``beside`` it are objects of the same checkpoint."""
    tracked = {name: track_object(name, item) for name, item in items.items() if not isinstance(item, Group)}
    if optimizers := [item for item in tracked.values() if isinstance(item, TrackedOptimizer)]:
        names: dict[int, str] = {}
        for name, item in {**beside, **tracked}.items():
            if isinstance(item, TrackedModule):
                for path, parameter in item.obj.named_parameters():
                    names.setdefault(id(parameter), f"{name}.{path}")
        for optimizer in optimizers:
            optimizer.names = names
    return tracked


def capture_together(tracked: Mapping[str, Tracked], strategy: Any, path: str) -> Callable[[], dict[str, Any]]:
    """Do what all processes must do together to capture objects, before they write one after another.

    Args:
        tracked: the objects.
        strategy: their strategy.
        path: the file that this process writes, if it is the chief or no other does; else it keeps no other's parts.

    Returns:
        A function for the process that writes. It captures the others, and returns all states by name.
    """
    with reporting_failures(strategy, f"writing of checkpoint {path}"):
        together = {name: item for name, item in tracked.items() if item.is_collective}
        token = keeps_parts.set(not together or is_writer(strategy, path))
        try:
            states = {name: item.capture(strategy) for name, item in together.items()}
        finally:
            keeps_parts.reset(token)
    return lambda: {name: states[name] if name in states else item.capture(strategy) for name, item in tracked.items()}


def strategy_of(tracked: Mapping[str, Tracked]) -> Any:
    """Return the strategy that made the objects, else the current one."""
    owners = (owner(item.obj) for item in tracked.values())
    return next((strategy for strategy in owners if strategy is not None), None) or get_strategy()


def _check_metric(name: str, saved: dict[str, Any], metric: Any) -> None:
    if saved.keys() != metric._defaults.keys():
        raise ValueError(
            f"The metric {name} has the states {sorted(metric._defaults)}, but the checkpoint's has {sorted(saved)}. "
            "Build the same metric as when it was saved."
        )
    for key, default in metric._defaults.items():
        value = saved[key]
        if isinstance(default, list) != isinstance(value, list) or (
            isinstance(default, Tensor) and default.ndim > 0 and value.shape != default.shape
        ):
            raise ValueError(
                f"The state {key!r} of the metric {name} does not fit the checkpoint's: expected {_shape(default)}, "
                f"received {_shape(value)}. Build the same metric as when it was saved."
            )


def _shape(value: Any) -> str:
    return "a list" if isinstance(value, list) else f"a tensor of shape {tuple(value.shape)}"
