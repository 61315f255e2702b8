"""The state of optimizers in memory that processes share: the chief's, which the others see."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from torchstrategy.base.log import warn_once
from torchstrategy.collectives.host_blocks import HostBlock, PlainBlock
from torchstrategy.collectives.packing import in_memory_order, memory_order

__all__ = ["StateSharing"]

#: After so many new layouts that replaced shared tensors, an optimizer's state stays the chief's.
_MOST_LAYOUTS = 4

_Key = tuple[int, str]


class _Known:
    """What the chief last said of one optimizer's state."""

    def __init__(self) -> None:
        self.values: list[Any] = []  # kept, so that none can have the id of one that is gone
        self.tensors: list[Tensor] = []
        self.num_layouts = 0


class StateSharing:
    """Lets the other processes see the state of the chief's optimizers.

    Tensors move to shared memory when they are new, which is after the first step. What else there is (numbers) is
    told when it changes; what neither is a number nor a dense tensor stays the chief's.

    Args:
        workers: the processes.
        share: makes shared memory of parts of the given sizes; every process calls it.
    """

    def __init__(self, workers: Any, share: Callable[[Sequence[int]], HostBlock | PlainBlock]) -> None:
        self._workers = workers
        self._share = share
        self._known: weakref.WeakKeyDictionary[Optimizer, _Known] = weakref.WeakKeyDictionary()

    def describe(self, optimizer: Optimizer) -> dict[str, Any] | None:
        """Return what the others must hear of an optimizer's state after a step; ``None`` if nothing. On the chief."""
        known = self._known.setdefault(optimizer, _Known())
        entries = _entries(optimizer)
        values = [value for _, value in entries]
        is_same = len(values) == len(known.values) and all(map(_is, values, known.values))
        if is_same or known.num_layouts > _MOST_LAYOUTS:
            return None
        known.values = values
        tensors = [(key, value) for key, value in entries if _can_be_shared(value)]
        numbers = [[*key, value] for key, value in entries if _is_number(value)]
        own = [value for _, value in tensors]
        if len(own) == len(known.tensors) and all(map(_is, own, known.tensors)):
            return {"numbers": numbers}
        known.num_layouts += 1
        if known.num_layouts > _MOST_LAYOUTS:
            warn_once(
                f"{type(optimizer).__name__} makes new tensors for its state again and again, so the state is the "
                "chief's only: on other processes its `state_dict()` is empty."
            )
            return {"numbers": []}
        rows = [[*key, str(v.dtype)[6:], list(v.shape), memory_order(v)] for key, v in tensors]
        return {"numbers": numbers, "tensors": rows}

    def follow(self, optimizer: Optimizer, description: dict[str, Any]) -> None:
        """Do on every process what the description of the chief says."""
        is_chief = self._workers.rank == 0
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        rows = description.get("tensors")
        shared: list[tuple[int, str, Tensor]] = []
        if rows:
            sizes = [torch.Size(shape).numel() * getattr(torch, dtype).itemsize for _, _, dtype, shape, _ in rows]
            block = self._share(sizes)
            parts = block.views[0] if block.memory is None else block.memory
            for (k, name, dtype, shape, order), part in zip(rows, parts, strict=True):
                tensor = part.view(getattr(torch, dtype)).view(shape)
                shared.append((k, name, in_memory_order(tensor, order)))  # which fused optimizers take for granted
            if is_chief:
                self._move(optimizer, parameters, shared)
            self._workers.exchange("sharing the state of an optimizer", len(rows))
        if is_chief:
            return
        if rows is not None or not description["numbers"]:
            optimizer.state.clear()
        for k, name, value in [*shared, *description["numbers"]]:
            optimizer.state[parameters[k]][name] = value

    def _move(
        self, optimizer: Optimizer, parameters: Sequence[Tensor], shared: Sequence[tuple[int, str, Tensor]]
    ) -> None:
        """Let the chief's state be the shared memory."""
        with torch.no_grad():
            for k, name, tensor in shared:
                entry = optimizer.state[parameters[k]]
                tensor.copy_(entry[name])
                entry[name] = tensor
        known = self._known[optimizer]
        known.values = [value for _, value in _entries(optimizer)]
        known.tensors = [tensor for _, _, tensor in shared]


def _entries(optimizer: Optimizer) -> list[tuple[_Key, Any]]:
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    return [
        ((k, name), value)
        for k, parameter in enumerate(parameters)
        if parameter in optimizer.state
        for name, value in optimizer.state[parameter].items()
    ]


def _can_be_shared(value: Any) -> bool:
    return type(value) is Tensor and value.layout is torch.strided and value.is_cpu and value.numel() > 0


def _is_number(value: Any) -> bool:
    return value is None or type(value) in (bool, int, float, str)


def _is(first: Any, second: Any) -> bool:
    return first is second
