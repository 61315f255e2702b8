"""How a checkpoint treats one object: the base class, tensors and variables, and plain data, which files hold.

A restore is planned first: a plan has compared everything in the file with the object and changed nothing. Only when
all plans of all processes are made is the first object changed.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.parameter import is_lazy
from typing_extensions import override

from torchstrategy import errors
from torchstrategy.base.options import VariableAggregation
from torchstrategy.base.values import RemoteTensor
from torchstrategy.replicas.dtensors import is_dtensor, keeps_parts
from torchstrategy.replicas.mirrored import bodies
from torchstrategy.replicas.on_read import SyncOnReadVariable

__all__ = [
    "Group",
    "Plan",
    "Tracked",
    "TrackedScheduler",
    "TrackedStateful",
    "TrackedTensor",
    "TrackedVariable",
    "check_parameters",
    "check_tensor",
    "divided_as",
    "gathered",
    "no_shape_message",
    "scheduler_name",
    "to_plain",
    "walk",
]

_ATOMS = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size)


def to_plain(value: Any, name: str) -> Any:
    """Return the value with its tensors on the CPU, detached; nothing is copied that need not be.

    Args:
        value: a structure of dicts, lists, tuples and sets.
        name: what error messages call it.

    Raises:
        TypeError: it holds something else than whole tensors, numbers, strings and the like.
        ValueError: a tensor has no shape yet.
    """
    if is_lazy(value):
        raise ValueError(no_shape_message(name))
    if is_dtensor(value):
        raise TypeError(
            f"{name} is a DTensor, of which this process has a part only. Give ts.train.Checkpoint the module, the "
            "optimizer or the tensor itself, or call save_weights, which gather all parts; or save by "
            "torch.distributed.checkpoint, on every process."
        )
    if isinstance(value, Tensor):
        return _plain_tensor(value)
    if isinstance(value, np.generic):
        return value.item()
    if type(value) in _ATOMS:
        return value
    if type(value) is Counter:
        return Counter(value)
    if isinstance(value, dict):
        items = [(to_plain(k, f"a key of {name}"), to_plain(v, f"{name}[{k!r}]")) for k, v in value.items()]
        return OrderedDict(items) if isinstance(value, OrderedDict) else dict(items)
    if type(value) in (list, tuple, set):
        return type(value)(to_plain(item, f"{name}[{i}]") for i, item in enumerate(value))
    raise TypeError(
        f"{name} is a {type(value).__name__}, which a checkpoint can't hold: it holds tensors, numbers, strings, None, "
        "and dicts, lists, tuples and sets of these. Return such values from state_dict()."
    )


def gathered(value: Any) -> Any:
    """Return a structure with whole tensors, in the host's memory, for its DTensors; every process calls this.

    Args:
        value: a tensor, or dicts of them in any depth.

    Returns:
        The structure; where ``keeps_parts`` is false, with empty tensors.
    """
    if type(value) in (dict, OrderedDict):
        return type(value)((key, gathered(item)) for key, item in value.items())
    if not is_dtensor(value):
        return value
    whole = value.detach().full_tensor()
    return whole.cpu() if keeps_parts.get() else whole.new_empty(0)


def check_parameters(name: str, saved: Mapping[str, Any], shapes: list[Any], names: list[str | None]) -> None:
    """Check that an optimizer has the checkpoint's parameters, in the same order.

    Args:
        name: the optimizer's.
        saved: what the checkpoint has of it.
        shapes: for each group those of its parameters; ``None`` for what has none yet.
        names: of all parameters, ``None`` for unknown ones; where a checkpoint has none, only shapes tell.

    Raises:
        ValueError: they are others, or in another order.
    """
    if len(saved["shapes"]) != len(shapes) and [*filter(None, saved["shapes"])] == [*filter(None, shapes)]:
        raise ValueError(
            f"{name} has {len(shapes)} parameter groups, the checkpoint's has {len(saved['shapes'])}: one without "
            "parameters counts, too. Build the optimizer with the same groups as when it was saved."
        )
    for group, (then, now) in enumerate(_zip_longest(saved["shapes"], shapes)):
        if not _same_shapes(then, now):
            raise ValueError(
                f"Parameter group {group} of {name} does not fit the checkpoint's. {_first_difference(then, now)} "
                "Build the optimizer with the same parameters in the same order as when it was saved."
            )
    known = saved.get("names", [])
    if known == names or None in known or Counter(known) != Counter(names):
        return
    index = next(i for i, (then, now) in enumerate(zip(known, names, strict=True)) if then != now)
    raise ValueError(
        f"The parameters of {name} are in another order than in the checkpoint: number {index} is {names[index]}, and "
        f"was {known[index]}. An optimizer knows them by their numbers. Build it with the same parameters in the same "
        "order as when it was saved."
    )


def _zip_longest(first: list[Any], second: list[Any]) -> list[tuple[Any, Any]]:
    length = max(len(first), len(second))
    return list(zip(first + [[]] * (length - len(first)), second + [[]] * (length - len(second)), strict=True))


def _same_shapes(saved: list[Any], own: list[Any]) -> bool:
    return len(saved) == len(own) and all(b is None or a == b for a, b in zip(saved, own, strict=True))


def _first_difference(saved: list[Any], own: list[Any]) -> str:
    if len(saved) != len(own):
        return f"It has {len(own)} parameters, the checkpoint's has {len(saved)}."
    index = next(i for i, pair in enumerate(zip(saved, own, strict=True)) if not _same_shapes(*([p] for p in pair)))
    return f"Its parameter {index} has shape {tuple(own[index])}, the checkpoint's has shape {tuple(saved[index])}."


def divided_as(value: Any, own: Any) -> Any:
    """Return this process's part of a value that all processes have, as a DTensor laid out as another tensor is.

    Args:
        value: is returned as it is unless it is a tensor of the other's shape.
        own: the other tensor; values stay whole if it is no DTensor.
    """
    if not is_dtensor(own) or not isinstance(value, Tensor) or value.shape != own.shape:
        return value
    distribute = torch.distributed.tensor.distribute_tensor  # its module is there if there is a DTensor
    # Without a source nothing is sent.
    return distribute(value, own.device_mesh, own.placements, src_data_rank=None).to(own.device)


def no_shape_message(name: str) -> str:
    """Return what to say of a value of a lazy module that was never called."""
    return (
        f"{name} has no shape yet, because its lazy module was never called. Call the module once, or restore it, "
        "before saving."
    )


def _plain_tensor(tensor: Tensor) -> Tensor:
    if isinstance(tensor, RemoteTensor):
        return tensor.snapshot()
    result = tensor.detach().cpu()
    # A view of a larger buffer would be written with all of that buffer.
    is_view = result.layout is torch.strided and result.untyped_storage().nbytes() > result.nbytes
    return result.clone() if is_view else result


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

    def __init__(self, name: str, obj: Any) -> None:
        self.name = name
        self.obj = obj

    @property
    def is_collective(self) -> bool:
        """Whether every process must capture it at the same point."""
        return False

    @property
    def kind(self) -> str:
        """What the file says the object is."""
        return type(self).__name__.removeprefix("Tracked").lower()

    @property
    def class_name(self) -> str | None:
        """Of what class an object must be to be given the state, if a restore itself could not tell."""
        return None

    def entry(self, state: Any) -> dict[str, Any]:
        """Return what the file holds of a captured state."""
        of_class = {} if self.class_name is None else {"class": self.class_name}
        return {"kind": self.kind, **of_class, "state": state}

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


class Group:
    """Named objects that are saved together: what a ``Checkpoint`` is for those that it is a part of."""

    _objects: dict[str, Any]


def walk(name: str, value: Any, parents: tuple[Any, ...] = ()) -> Iterator[tuple[str, Any]]:
    """Yield the objects and the checkpoints in a structure with their paths.

    Raises:
        ValueError: a key is no name, or something contains itself.
    """
    if isinstance(value, Group):
        yield name, value
        children: Mapping[Any, Any] = value._objects
    elif type(value) is dict:
        children = value
    elif type(value) in (list, tuple):
        children = {str(i): item for i, item in enumerate(value)}
    else:
        yield name, value
        return
    if any(value is parent for parent in parents):
        raise ValueError(f"A checkpoint can't contain itself. Received: {name!r}, which is a part of itself.")
    for key, item in children.items():
        if not isinstance(key, str) or "/" in key or not key:
            raise ValueError(f"The keys of {name!r} in a checkpoint must be names without '/'. Received: {key!r}")
        yield from walk(f"{name}/{key}" if name else key, item, (*parents, value))


class TrackedTensor(Tracked):
    """A tensor or parameter, restored in place."""

    @property
    @override
    def is_collective(self) -> bool:
        return is_dtensor(self.obj)

    @override
    def capture(self, strategy: Any) -> Any:
        return to_plain(gathered(self.obj), self.name)

    @override
    def plan(self, state: Any, strategy: Any) -> Plan:
        check_tensor(self.name, state, self.obj)
        return Plan(lambda: self._copy(state), [self.name])

    def _copy(self, value: Tensor) -> None:
        with torch.no_grad():
            self.obj.copy_(divided_as(value, self.obj))


class TrackedVariable(TrackedTensor):
    """A variable. One that is aggregated when it is read is saved as the aggregate, and restored so that it is again.

    A checkpoint doesn't tell it from a tensor: variables can become tensors, and the reverse.
    """

    @property
    @override
    def kind(self) -> str:
        return "tensor"

    @property
    @override
    def is_collective(self) -> bool:
        return isinstance(self.obj, SyncOnReadVariable)

    @override
    def capture(self, strategy: Any) -> Any:
        return to_plain(self.obj if isinstance(self.obj, RemoteTensor) else self.obj.read_value(), self.name)

    @override
    def plan(self, state: Any, strategy: Any) -> Plan:
        check_tensor(self.name, state, self.obj)
        if isinstance(self.obj, SyncOnReadVariable) and self.obj.aggregation is VariableAggregation.NONE:
            raise ValueError(
                f"{self.name} is an ON_READ variable without aggregation: it has no single value that could be "
                "restored. Give it an aggregation, or leave it out of the checkpoint."
            )
        return Plan(lambda: self.obj.assign(state), [self.name])


class TrackedStateful(Tracked):
    """Anything with ``state_dict`` and ``load_state_dict``, such as a distributed dataset."""

    @property
    @override
    def is_collective(self) -> bool:
        return getattr(self.obj, "state_is_collective", False) is True

    @override
    def capture(self, strategy: Any) -> Any:
        return to_plain(self.obj.state_dict(), self.name)

    @override
    def plan(self, state: Any, strategy: Any) -> Plan:
        check = getattr(type(self.obj), "_check_state", None)  # a dataset's; other objects say it when they are changed
        if check is not None:
            check(self.obj, state)
        return Plan(lambda: self.obj.load_state_dict(state), [self.name])


class TrackedScheduler(TrackedStateful):
    """A learning-rate scheduler, which takes whatever it is given: another one's numbers would be of no use to it."""

    @property
    @override
    def kind(self) -> str:
        return "stateful"

    @property
    @override
    def class_name(self) -> str:
        return scheduler_name(bodies(self.obj)[0])


def scheduler_name(scheduler: Any) -> str:
    """Return a scheduler's class, with those of the schedulers that it calls."""
    parts = ", ".join(map(scheduler_name, getattr(scheduler, "_schedulers", ())))
    return type(scheduler).__name__ + (f"({parts})" if parts else "")


def check_tensor(name: str, saved: Any, own: Tensor) -> None:
    """Check that a saved value fits a tensor.

    Raises:
        ValueError: it is no tensor, or its shape differs.
        InvalidArgumentError: its dtype differs.
    """
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
