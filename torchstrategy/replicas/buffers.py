"""Which module buffers travel with the gradients, and what becomes of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from torchstrategy.replicas.clone import Slot
from torchstrategy.replicas.variables import Variable

__all__ = ["BufferSync"]


class BufferSync:
    """Averages changed floating-point buffers over the replicas that had examples; others take replica 0's value.

    Args:
        slots: returns where the parameters and buffers live.
    """

    def __init__(self, slots: Callable[[], list[Slot]]) -> None:
        self._slots = slots
        self._stamps: dict[int, tuple[Any, ...]] = {}

    def note_new(self) -> None:
        """Take the values of buffers that are new as synchronised: initial values are equal on all replicas."""
        for slot in self.candidates():
            self._stamps.setdefault(_key(slot), _stamp(slot))

    def candidates(self) -> list[Slot]:
        """Return the slots that hold buffers; a variable says itself how its copies are brought together."""
        return [
            (dicts, name)
            for dicts, name in self._slots()
            if isinstance(dicts[0].get(name), Tensor) and not isinstance(dicts[0][name], (torch.nn.Parameter, Variable))
        ]

    def changed(self, slots: Sequence[Slot]) -> list[bool]:
        """Say which buffers any local replica has changed since they were last synchronised.

        A module's buffers count as changed together: torch's batch normalisation writes its moving averages without
        moving their version, but it counts its batches. Buffers whose shapes follow the replica's share of the batch
        are the replica's own.
        """
        modules = {id(slot[0][0]) for slot in slots if self._stamps.get(_key(slot)) != _stamp(slot)}
        return [id(slot[0][0]) in modules and _have_equal_shapes(slot) for slot in slots]

    def contributions(self, slot: Slot, weights: Sequence[float], *, holds_first: bool) -> list[Tensor]:
        """Return what each local replica adds to the sum over replicas.

        Args:
            slot: the buffer.
            weights: for each local replica, its part of the average.
            holds_first: whether replica 0 is the first local one.
        """
        dicts, name = slot
        values = [own[name].detach() for own in dicts]
        if values[0].is_floating_point() or values[0].is_complex():
            return [_weighted(value, weight) for value, weight in zip(values, weights, strict=True)]
        wide = [value.to(torch.int64) for value in values]
        return [value if holds_first and i == 0 else torch.zeros_like(value) for i, value in enumerate(wide)]

    def store(self, slot: Slot, totals: Sequence[Tensor]) -> None:
        """Write the sums to the replicas' buffers."""
        dicts, name = slot
        with torch.no_grad():
            for own, total in zip(dicts, totals, strict=True):
                own[name].copy_(total)

    def mark_synchronised(self, slots: Sequence[Slot]) -> None:
        """Note the present values as synchronised."""
        self._stamps = {_key(slot): _stamp(slot) for slot in slots}


def _weighted(value: Tensor, weight: float) -> Tensor:
    # A replica without examples may hold NaN, which a zero weight would spread.
    return torch.zeros_like(value) if weight == 0 else value * weight


def _have_equal_shapes(slot: Slot) -> bool:
    dicts, name = slot
    first = dicts[0][name].shape
    return all(isinstance(own.get(name), Tensor) and own[name].shape == first for own in dicts[1:])


def _key(slot: Slot) -> int:
    dicts, name = slot
    return hash((id(dicts[0]), name))


def _stamp(slot: Slot) -> tuple[Any, ...]:
    dicts, name = slot
    stamps: list[Any] = []
    for own in dicts:
        tensor = own.get(name)
        stamps += [id(tensor), -1 if tensor is None or tensor.is_inference() else tensor._version]
    return tuple(stamps)
