"""Which objects of the program live on XLA devices, by name: for messages about what would be lost."""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

__all__ = ["describe_living"]

_MAX_NAMED = 5


def describe_living(users: Iterable[object] = ()) -> str:
    """Name the modules, optimizers and other tensors that live on XLA devices.

    Args:
        users: objects to name besides, such as strategies.

    Returns:
        For example ``"TPUStrategy, Linear (module), 2 x tensor of shape (3,)"``; an empty string if there is nothing.
    """
    gc.collect()  # what was deleted may wait in a cycle
    with torch._C.DisableTorchFunctionSubclass():  # some tensors stand for others
        objects = gc.get_objects()
        modules = _outermost([m for m in objects if issubclass(type(m), nn.Module) and any(map(_is_here, _held_by(m)))])
        optimizers = [o for o in objects if issubclass(type(o), Optimizer) and any(map(_is_here, _state_of(o)))]
        tensors = [t for t in objects if issubclass(type(t), Tensor) and _is_here(t)]
        inside = {id(tensor) for module in modules for tensor in _held_by(module)}
        inside |= {id(tensor) for optimizer in optimizers for tensor in _state_of(optimizer)}
        names = [
            *(type(user).__name__ for user in users),
            *(f"{type(module).__name__} (module)" for module in modules),
            *(f"{type(optimizer).__name__} (optimizer)" for optimizer in optimizers),
            *(f"tensor of shape {tuple(tensor.shape)}" for tensor in tensors if id(tensor) not in inside),
        ]
    named = [name if count == 1 else f"{count} x {name}" for name, count in Counter(names).items()]
    return ", ".join(named[:_MAX_NAMED]) + (f", and {len(named) - _MAX_NAMED} more" if named[_MAX_NAMED:] else "")


def _is_here(value: object) -> bool:
    return isinstance(value, Tensor) and value.device.type == "xla"


def _held_by(module: nn.Module) -> Iterator[object]:
    """Yield the tensors of a module and of those in it; ``parameters()`` may be the user's own."""
    for part in nn.Module.modules(module):
        for tensor in (*part._parameters.values(), *part._buffers.values()):
            yield tensor
            yield getattr(tensor, "grad", None) if isinstance(tensor, Tensor) and tensor.is_leaf else None


def _state_of(optimizer: Optimizer) -> Iterator[object]:
    for state in optimizer.state.values():
        yield from state.values() if isinstance(state, dict) else ()
    for group in optimizer.param_groups:
        yield from group["params"]


def _outermost(modules: list[nn.Module]) -> list[nn.Module]:
    inner = {id(part) for module in modules for part in nn.Module.modules(module) if part is not module}
    return [module for module in modules if id(module) not in inner]
