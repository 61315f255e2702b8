"""The object that ``strategy.scope()`` returns, and objects that become a strategy's without it."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from contextlib import ExitStack
from types import TracebackType
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from torchstrategy.base.context import Frame, pop_frame, push_frame
from torchstrategy.base.devices import tensor_device
from torchstrategy.replicas.hosting import on_device
from torchstrategy.replicas.record import owner, start_recording, stop_recording

__all__ = ["Scope", "take_in"]


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


class Scope:
    """Makes a strategy current and records what is made inside; usable once.

    Args:
        strategy: what ``with strategy.scope() as s`` gives.
        frame: pushed on entry; ``None`` for the default strategy, whose scope changes nothing.
        device: the default device inside, as tensors report it; ``None`` leaves it.
    """

    def __init__(self, strategy: Any, frame: Frame | None, device: Any) -> None:
        self._strategy = strategy
        self._frame = frame
        self._device = device
        self._stack: ExitStack | None = None
        self._used = False

    def __enter__(self) -> Any:
        if self._used:
            raise RuntimeError(
                "This scope was entered before. Call `strategy.scope()` anew: `with strategy.scope(): ...`."
            )
        self._strategy._check_can_enter()
        self._used = True
        stack = ExitStack()
        stack.enter_context(on_device(self._device))
        if self._frame is not None:
            push_frame(self._frame)
            start_recording(self._strategy)
        self._stack = stack
        return self._strategy

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._stack is None:
            raise RuntimeError("Strategy scope nesting error: this scope is not open. Use `with strategy.scope():`.")
        if self._frame is not None:
            pop_frame(self._frame)
            stop_recording()
            self._strategy.hosting.leave_scope()
        stack, self._stack = self._stack, None
        stack.close()
