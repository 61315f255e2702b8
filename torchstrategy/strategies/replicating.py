"""Objects that were made outside a strategy's scope and become its own."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from torchstrategy.base.devices import tensor_device
from torchstrategy.replicas.record import owner

__all__ = ["take_in"]


def take_in(strategy: Any, objects: Sequence[Any]) -> None:
    """Record objects as the scope would have, on the device on which it would have made them.

    Args:
        strategy: whose they become.
        objects: ``Strategy.replicate`` says which.
    """
    if not objects:
        raise ValueError("replicate takes the objects to replicate: strategy.replicate(model, optimizer).")
    for obj in objects:
        _check(strategy, obj)
    device = tensor_device(strategy.placement.devices[0])
    if device.type not in ("cpu", "xla"):  # what goes to XLA devices does so at the first run, with its parameters
        for obj in objects:
            if isinstance(obj, nn.Module):
                obj.to(device)
        for obj in objects:
            if isinstance(obj, Optimizer) and obj.state:
                obj.load_state_dict(obj.state_dict())  # which takes what it remembers to the parameters' device
    for obj in (*objects, *_schedulers_of(objects)):
        strategy.record.add(obj)


def _schedulers_of(objects: Sequence[Any]) -> list[Any]:
    """Return the schedulers of optimizers, which would take a step for each replica if they were left out."""
    optimizers = {id(obj) for obj in objects if isinstance(obj, Optimizer)}
    if not optimizers:
        return []
    schedulers = [obj for obj in gc.get_objects() if issubclass(type(obj), LRScheduler)]
    return [obj for obj in schedulers if id(getattr(obj, "optimizer", None)) in optimizers]


def _check(strategy: Any, obj: Any) -> None:
    if isinstance(obj, Tensor):
        raise TypeError("A tensor can't be replicated. Make it with `ts.Variable(tensor)` in `strategy.scope()`.")
    other = owner(obj)
    if other is not None and other is not strategy:
        raise ValueError(
            f"The {type(obj).__name__} belongs to a {type(other).__name__} already, so it can't be replicated by this "
            f"{type(strategy).__name__}. Make another one, and load its state_dict."
        )
