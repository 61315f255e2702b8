"""Copies of batches to the replicas' devices, which run beside the computation.

A device with streams gets its copies on one side stream for the whole process, so that the memory which one
iteration's batches leave behind serves the next one's. The host does not wait for them. On CPUs nothing is copied.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchstrategy.base import tree
from torchstrategy.base.devices import Placement, accelerator_module, kind_of, tensor_device
from torchstrategy.base.values import BatchShares, PerReplica, set_shares
from torchstrategy.data.batch import LocalBatch, as_given
from torchstrategy.data.example_lists import Examples
from torchstrategy.data.split import Splittable

__all__ = ["DeviceCopies", "InFlight"]


class _Arrival(NamedTuple):
    copies: list[Tensor]  # not to be read before the event
    device: torch.device
    event: Any


@dataclass(frozen=True)
class InFlight:
    """An element whose copies have been started. It may be dropped at any time.

    Args:
        local: the components, on the replicas' devices.
        arrivals: what of them may not be there yet.
    """

    local: LocalBatch
    arrivals: Sequence[_Arrival] = ()


class DeviceCopies:
    """Brings elements to the replicas' devices in two halves, so that later elements travel while one is used.

    CUDA copies beside the computation only from pinned memory. ``DataLoader(pin_memory=True)`` pins in a thread of
    its own; a tensor that is not pinned yet is pinned by ``start``. What lies on its replica's device is left alone.
    Where one copy of the model serves several replicas, their values stay on the host until ``run`` sends them at once.

    Args:
        placement: the replicas of this process.
        to_device: whether anything is copied; else elements stay where the dataset put them.
    """

    def __init__(self, placement: Placement, to_device: bool) -> None:  # noqa: FBT001
        self._devices = [tensor_device(device) for device in placement.devices]
        is_together = placement.replicas_per_copy > 1
        self._is_needed = to_device and not is_together and any(device.type != "cpu" for device in self._devices)

    @property
    def is_needed(self) -> bool:
        """Whether there is an accelerator to copy to, so that it is of use to start elements ahead."""
        return self._is_needed

    def start(self, local: LocalBatch) -> InFlight:
        """Begin an element's copies.

        Args:
            local: the components for this process's replicas. They may change as soon as this returns, unless they
                were in pinned memory before.

        Returns:
            What ``finish`` takes.
        """
        if not self._is_needed:
            return InFlight(local)
        rows = [[column[i] for column in local.columns] for i in range(len(self._devices))]
        arrivals = [_send(row, device) for row, device in zip(rows, self._devices, strict=True)]
        sent = LocalBatch(list(zip(*rows, strict=True)), local.shares, local.spec)
        return InFlight(sent, [arrival for arrival in arrivals if arrival is not None])

    def finish(self, in_flight: InFlight, step: int | None = None) -> Any:
        """Build the element that the user gets: on the replicas' devices, tagged with its shares.

        What the calling thread's current streams are given from now on comes after the copies.

        Args:
            in_flight: what ``start`` returned.
            step: the element's number, for its tags.

        Returns:
            The batch with ``PerReplica`` leaves, or with plain ones if this process has one replica.
        """
        for arrival in in_flight.arrivals:
            _receive(arrival)
        local = in_flight.local
        leaves = []
        tags = local.shares if step is None else _number(local.shares, step)
        for column, shares in zip(local.columns, tags, strict=True):
            values = [as_given(leaf) for leaf in column]
            leaf = values[0] if len(values) == 1 or values[0] is None else PerReplica(values)
            leaves.append(leaf if shares is None else set_shares(leaf, shares))
        return tree.unflatten(local.spec, leaves)


def _number(tags: Sequence[BatchShares | None], step: int) -> list[BatchShares | None]:
    numbered = {tag: None if tag is None else BatchShares(tag.shares, step) for tag in set(tags)}
    return [numbered[tag] for tag in tags]


def _send(row: list[Any], device: torch.device) -> _Arrival | None:
    """Replace the tensors of one replica's row by copies on their way; return what to wait for, if there is any."""
    moving = [i for i, leaf in enumerate(row) if isinstance(leaf, Tensor) and leaf.device != device]
    if device.type == "cpu":
        return None
    for i, leaf in enumerate(row):
        if isinstance(leaf, (Examples, Splittable)):  # of any number of tensors: copied here and now
            row[i] = leaf.to(device)
    if not moving:
        return None
    module = accelerator_module(device)
    if module is None:
        for i in moving:
            row[i] = row[i].to(device)  # waits: without an event nothing else says when the copy is there
        return None
    stream = _side_stream(device)
    with module.stream(stream):
        for i in moving:
            # torch keeps pinned memory until the copies from it are done, then gives it to the next element that is
            # pinned, and reads other memory before it returns
            row[i] = _pinned(row[i], device).to(device, non_blocking=True)
    return _Arrival([row[i] for i in moving], device, stream.record_event())


def _receive(arrival: _Arrival) -> None:
    stream = accelerator_module(arrival.device).current_stream(arrival.device)
    stream.wait_event(arrival.event)
    for copy in arrival.copies:
        for part in _parts(copy):
            part.record_stream(stream)  # else its memory could be filled anew while this stream still reads it


def _pinned(leaf: Tensor, device: torch.device) -> Tensor:
    is_plain = type(leaf) is Tensor and leaf.layout is torch.strided and not leaf.is_nested and not leaf.requires_grad
    is_wanted = kind_of(device).pins_memory and leaf.is_cpu and is_plain and leaf.numel() > 0
    return leaf.pin_memory() if is_wanted and not leaf.is_pinned() else leaf


def _parts(tensor: Tensor) -> list[Tensor]:
    """Return the strided tensors that a tensor consists of."""
    if tensor.layout is torch.sparse_coo:
        return [tensor._indices(), tensor._values()]
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        return [tensor.crow_indices(), tensor.col_indices(), tensor.values()]
    if tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        return [tensor.ccol_indices(), tensor.row_indices(), tensor.values()]
    if tensor.layout is torch.jagged:
        parts = [tensor.values(), tensor.offsets(), tensor.lengths()]  # type: ignore[attr-defined]
        return [part for part in parts if part is not None]
    return [tensor.values() if tensor.is_nested else tensor]


@functools.cache
def _side_stream(device: torch.device) -> Any:
    return accelerator_module(device).Stream(device)
