"""One tensor's place in the host's memory, and what the replicas have of it: a view, or a copy on their device."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from torchstrategy.collectives.host_blocks import HostBlock, PlainBlock
from torchstrategy.replicas.variables import Variable

__all__ = ["Place"]


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
