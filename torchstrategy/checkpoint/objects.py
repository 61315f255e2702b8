"""What a checkpoint can hold: one class for each kind of object, which captures, checks and restores it.

A restore is planned first: a plan has compared everything in the file with the object and changed nothing. Only when
all plans of all processes are made is the first object changed.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from torchstrategy import errors
from torchstrategy.checkpoint.plain import to_plain
from torchstrategy.replicas import metric_states
from torchstrategy.replicas.metric_states import MetricState
from torchstrategy.replicas.mirrored import bodies

__all__ = ["Plan", "Tracked", "track_object"]


@dataclass
class Plan:
    """How one object will be restored.

    Args:
        apply: changes the object.
        matched: names of the values that the object will get.
        missing: names of the object's values that the checkpoint lacks.
        unused: names of the checkpoint's values that the object lacks.
    """

    apply: Callable[[], Any] = lambda: None
    matched: list[str] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    unused: list[str] = field(default_factory=list)


class Tracked(ABC):
    """One object in a checkpoint.

    Args:
        name: its path in the checkpoint, such as ``model`` or ``optimizers/0``.
        obj: the object.
    """

    #: Every process must capture it at the same point.
    is_collective = False

    def __init__(self, name: str, obj: Any) -> None:
        self.name = name
        self.obj = obj

    @property
    def kind(self) -> str:
        """What the file says the object is."""
        return type(self).__name__.removeprefix("Tracked").lower()

    @abstractmethod
    def capture(self, strategy: Any) -> Any:
        """Return the object's state as plain data."""

    @abstractmethod
    def plan(self, state: Any, strategy: Any) -> Plan:
        """Check a captured state against the object.

        Raises:
            ValueError: it does not fit.
        """

    def leaves(self) -> list[str]:
        """Return the names of the object's values."""
        return [self.name]


class TrackedModule(Tracked):
    """A module, matched value by value. Names are those of the module before ``torch.compile``."""

    def capture(self, strategy: Any) -> Any:  # noqa: ARG002
        state = self.obj.state_dict()
        result = OrderedDict((_uncompiled(key), to_plain(value, f"{self.name}.{key}")) for key, value in state.items())
        result._metadata = {_uncompiled(key): value for key, value in state._metadata.items()}  # type: ignore[attr-defined]
        return result

    def plan(self, state: Any, strategy: Any) -> Plan:  # noqa: ARG002
        own = self.obj.state_dict()
        key_of = {_uncompiled(key): key for key in own}
        values = OrderedDict((key_of[name], value) for name, value in state.items() if name in key_of)
        for key, value in values.items():
            if isinstance(own[key], Tensor) and not torch.nn.parameter.is_lazy(own[key]):
                _check_tensor(f"{self.name}.{key}", value, own[key])
        metadata = getattr(state, "_metadata", {})
        values._metadata = {  # type: ignore[attr-defined]
            key: metadata.get(_uncompiled(key), default) for key, default in own._metadata.items()
        }
        return Plan(
            lambda: self.obj.load_state_dict(values, strict=False),
            [f"{self.name}.{name}" for name in state if name in key_of],
            [f"{self.name}.{name}" for name in key_of if name not in state],
            [f"{self.name}.{name}" for name in state if name not in key_of],
        )

    def leaves(self) -> list[str]:
        return [f"{self.name}.{_uncompiled(key)}" for key in self.obj.state_dict()]


class TrackedTensor(Tracked):
    """A tensor or parameter, restored in place."""

    def capture(self, strategy: Any) -> Any:  # noqa: ARG002
        return to_plain(self.obj, self.name)

    def plan(self, state: Any, strategy: Any) -> Plan:  # noqa: ARG002
        _check_tensor(self.name, state, self.obj)
        return Plan(lambda: self._copy(state), [self.name])

    def _copy(self, value: Tensor) -> None:
        with torch.no_grad():
            self.obj.copy_(value)


class TrackedStateful(Tracked):
    """Anything with ``state_dict`` and ``load_state_dict``, such as a learning-rate scheduler."""

    def capture(self, strategy: Any) -> Any:  # noqa: ARG002
        return to_plain(self.obj.state_dict(), self.name)

    def plan(self, state: Any, strategy: Any) -> Plan:  # noqa: ARG002
        return Plan(lambda: self.obj.load_state_dict(state), [self.name])


class TrackedScaler(TrackedStateful):
    """A gradient scaler. A disabled one has no state, and leaves an enabled one as it is."""

    def plan(self, state: Any, strategy: Any) -> Plan:
        if self.obj.is_enabled() and not state:
            return Plan(missing=[self.name])
        return super().plan(state, strategy)


class TrackedOptimizer(Tracked):
    """An optimizer. Its parameters have no names, so their shapes are kept, to notice another model's optimizer."""

    def capture(self, strategy: Any) -> Any:  # noqa: ARG002
        state = to_plain(self.obj.state_dict(), self.name)
        return {"class": self._class_name(), "shapes": self._shapes(), "state": state}

    def plan(self, state: Any, strategy: Any) -> Plan:  # noqa: ARG002
        if state["class"] != self._class_name():
            raise ValueError(
                f"The checkpoint's {self.name} is of class {state['class']}, the object is of class "
                f"{self._class_name()}. Restore it into an optimizer of the same class, or leave it out."
            )
        for group, (saved, own) in enumerate(_zip_longest(state["shapes"], self._shapes())):
            if saved != own:
                raise ValueError(
                    f"Parameter group {group} of {self.name} does not fit the checkpoint's. "
                    f"{_first_difference(saved, own)} Build the optimizer with the same parameters in the same order "
                    "as when it was saved."
                )
        return Plan(lambda: self.obj.load_state_dict(state["state"]), [self.name])

    def _class_name(self) -> str:
        return type(bodies(self.obj)[0]).__name__

    def _shapes(self) -> list[list[list[int]]]:
        return [[list(p.shape) for p in group["params"]] for group in self.obj.param_groups]


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

    is_collective = True

    def capture(self, strategy: Any) -> Any:
        states = metric_states.merged_states(strategy, bodies(self.obj), resumable=True)
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
        for i, body in enumerate(bodies(self.obj)):
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
        (Tensor, TrackedTensor),
        (torch.optim.Optimizer, TrackedOptimizer),
        (torch.amp.GradScaler, TrackedScaler),
        (torch.Generator, TrackedGenerator),
    ):
        if isinstance(obj, cls):
            return tracked(name, obj)
    if callable(getattr(obj, "state_dict", None)) and callable(getattr(obj, "load_state_dict", None)):
        return TrackedStateful(name, obj)
    raise ValueError(
        f"A checkpoint can't hold {name}={obj!r} of type {type(obj).__name__}: it must be a module, an optimizer, a "
        "metric, a generator, a tensor, anything with state_dict and load_state_dict, or a dict, list or tuple of "
        "these. Wrap a number: torch.tensor(0)."
    )


def _uncompiled(key: str) -> str:
    return f"{key}.".replace("_orig_mod.", "")[:-1] if key.endswith("_orig_mod") else key.replace("_orig_mod.", "")


def _check_tensor(name: str, saved: Any, own: Tensor) -> None:
    if not isinstance(saved, Tensor):
        raise ValueError(f"{name} is a tensor, but the checkpoint holds a {type(saved).__name__} under its name.")
    if saved.shape != own.shape:
        raise ValueError(
            f"{name} has shape {tuple(own.shape)}, but the checkpoint's value has shape {tuple(saved.shape)}. Build "
            "the object as it was when it was saved."
        )
    if saved.dtype != own.dtype:
        raise errors.InvalidArgumentError(
            f"{name} has dtype {own.dtype}, but the checkpoint's value has dtype {saved.dtype}. Restore into an object "
            "of the saved dtype and convert it afterwards."
        )


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


def _zip_longest(first: list[Any], second: list[Any]) -> list[tuple[Any, Any]]:
    length = max(len(first), len(second))
    return list(zip(first + [[]] * (length - len(first)), second + [[]] * (length - len(second)), strict=True))


def _first_difference(saved: list[Any], own: list[Any]) -> str:
    if len(saved) != len(own):
        return f"It has {len(own)} parameters, the checkpoint's has {len(saved)}."
    index = next(i for i, pair in enumerate(zip(saved, own, strict=True)) if pair[0] != pair[1])
    return f"Its parameter {index} has shape {tuple(own[index])}, the checkpoint's has shape {tuple(saved[index])}."
