"""What central storage has in the host's memory: the place of each tensor, and the state of optimizers."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from torchstrategy.base.log import warn_once
from torchstrategy.collectives.host_blocks import HostBlock, PlainBlock
from torchstrategy.collectives.summing import in_memory_order, memory_order
from torchstrategy.replicas.record import optimizer_parameters
from torchstrategy.replicas.variables import Variable

__all__ = [
    "Place",
    "StateSharing",
]


class Place:
    """One tensor's place in the host's memory, and what the replicas have of it.

    Args:
        tensors: the replicas' tensors, replica 0's (the user's) first.
        block: where its value is.
        part: the number of its part there.
        devices: the replicas'.
    """

    def __init__(
        self, tensors: Sequence[Tensor], block: HostBlock | PlainBlock, part: int, devices: Sequence[torch.device]
    ) -> None:
        first = tensors[0]
        self.is_parameter = isinstance(first, nn.Parameter)
        self.block = block
        self._tensors = [weakref.ref(tensor) for tensor in tensors]
        self._layout = (first.dtype, first.storage_offset(), first.shape, first.stride())
        #: What the optimizer steps on; ``None`` in a process that is not the host.
        self.host = None if block.memory is None else self._typed(block.memory[part])
        #: What the user's tensor is outside run.
        self.outside = self._typed(block.views[0][part])
        self._address = self.outside.data_ptr()
        #: What the replicas' tensors are inside.
        self.inside: list[Tensor] = []
        self.is_copied: list[bool] = []
        for i, (tensor, device) in enumerate(zip(tensors, devices, strict=True)):
            is_view = i < len(block.views) and _can_read(device, block.views[i][part])
            self.is_copied.append(not is_view)
            self.inside.append(self._typed(block.views[i][part]) if is_view else tensor.detach().to(device, copy=True))
        #: Version of the user's tensor when the replicas last had what the host has.
        self.version = -1

    def has(self, tensors: Sequence[Any]) -> bool:
        """Say whether these are the replicas' tensors."""
        return all(reference() is tensor for reference, tensor in zip(self._tensors, tensors, strict=True))

    def first(self) -> Tensor | None:
        """Return the user's tensor, if it lives."""
        return self._tensors[0]()

    def living(self) -> list[Tensor]:
        """Return the replicas' tensors that live."""
        return [tensor for tensor in (reference() for reference in self._tensors) if tensor is not None]

    def put(self, data: Sequence[Tensor]) -> None:
        """Let the replicas' tensors have these memories; of several, only the first ones if fewer are given."""
        for reference, own in zip(self._tensors, data, strict=False):
            tensor = reference()
            if tensor is not None:
                tensor.data = own
        first = self.first()
        if isinstance(first, Variable) and first.user_variable is not None:
            first.user_variable.data = data[0]

    def is_written(self) -> bool:
        """Say whether the user's tensor was written to since the replicas had what the host has."""
        first = self.first()
        return first is not None and first._version != self.version

    def note(self) -> None:
        """Note that the replicas have what the host has."""
        first = self.first()
        if first is not None:
            self.version = first._version

    def moved_from(self, data: Sequence[Tensor]) -> list[tuple[Tensor, Tensor]]:
        """Return the replicas' tensors that the program has given another memory than these, each after its memory."""
        pairs = [(own, reference()) for reference, own in zip(self._tensors, data, strict=False)]
        return [(own, tensor) for own, tensor in pairs if tensor is not None and not _is_same_memory(tensor, own)]

    def is_lost(self) -> bool:
        """Say whether the memory itself was replaced, as ``share_memory_`` does with a storage."""
        return self.outside.data_ptr() != self._address

    def fits(self, tensor: Tensor) -> bool:
        """Say whether a value can stand here."""
        return tensor.dtype == self._layout[0] and tensor.shape == self._layout[2]

    def _typed(self, part: Tensor) -> Tensor:
        dtype, offset, shape, stride = self._layout
        return torch.empty(0, dtype=dtype, device=part.device).set_(part.untyped_storage(), offset, shape, stride)


def _can_read(device: torch.device, memory: Tensor) -> bool:
    """Say whether a replica can compute on the host's memory in place."""
    return memory.device == device


def _is_same_memory(tensor: Tensor, other: Tensor) -> bool:
    return (
        tensor.data_ptr() == other.data_ptr()
        and tensor.shape == other.shape
        and tensor.stride() == other.stride()
        and tensor.is_conj() == other.is_conj()
        and tensor.is_neg() == other.is_neg()
    )


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
        self._blocks: weakref.WeakKeyDictionary[Optimizer, HostBlock | PlainBlock] = weakref.WeakKeyDictionary()

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
        parameters = optimizer_parameters(optimizer)
        rows = description.get("tensors")
        shared: list[tuple[int, str, Tensor]] = []
        if rows:
            sizes = [torch.Size(shape).numel() * getattr(torch, dtype).itemsize for _, _, dtype, shape, _ in rows]
            block = self._blocks[optimizer] = self._share(sizes)
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

    def refresh(self, optimizer: Optimizer) -> None:
        """See the chief's state again, after a step, where the program has written to what this process sees of it."""
        if self._workers is not None and self._workers.rank > 0 and optimizer in self._blocks:
            self._blocks[optimizer].refresh(0)

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
    parameters = optimizer_parameters(optimizer)
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
