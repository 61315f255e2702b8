"""Which way the data of each tensor takes between processes, by size, device and where the processes are."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed import PrefixStore  # type: ignore[attr-defined]

from torchstrategy.collectives.connections import Check
from torchstrategy.collectives.data_planes import (
    DataPlane,
    HierarchicalPlane,
    MessagePlane,
    NcclPlane,
    StagedPlane,
    gloo_plane,
)
from torchstrategy.collectives.records import MAX_MESH_SIZE, Records
from torchstrategy.collectives.registry import make_registered_plane
from torchstrategy.collectives.rendezvous import Meeting
from torchstrategy.collectives.shared_memory import SharedMemoryPlane, share_memory
from torchstrategy.collectives.xla_plane import XlaPlane
from torchstrategy.log import warning_once
from torchstrategy.options import CommunicationImplementation
from torchstrategy.xla.runtime import TpuRuntime

__all__ = ["Routes", "choose_implementation", "make_routes"]

#: Up to this size in bytes tensors of the CPU travel in messages: a user's with the record that comes before each
#: collective, gradients in one of their own. Measured between 2 / 3 / 4 processes of one host, medians in µs (the
#: table of sizes that recipes/benchmark.py prints):
#:
#:     bytes   gloo                message            shared memory
#:     4 Ki    2570 / 5367 / 6042  122 / 289 / 468    166 / 385 / 532
#:     16 Ki   1414 / 3906 / 7121  133 / 315 / 528    190 / 375 / 573
#:     64 Ki   2022 / 5432 / 6909  239 / 622 / 1029   179 / 444 / 572
#:     1 Mi    1199 / 6061 / 8328                     309 / 849 / 1230
#:     40 M    30658 / 78341 / 95594                  12685 / 28092 / 49508
#:
#: Between 2 hosts of 2 processes (on the same two cores), gloo against two levels: 9114 and 1665 at 64 Ki, 7339 and
#: 3416 at 1 Mi, 113038 and 103998 at 40 M.
_MESSAGE_BYTES = 16 << 10

Exchange = Callable[[Any], list[Any]]


@dataclass
class Routes:
    """The planes of one group.

    Args:
        small: carries CPU tensors of up to ``small_bytes``.
        large: carries larger CPU tensors.
        small_bytes: size in bytes; 0 means that ``large`` carries everything.
        takes_accelerators: ``large`` takes tensors of accelerators, too; otherwise they go through the CPU.
        accelerators: what carries the tensors of a type of device, such as ``"cuda"``, by that type.
        with_record_bytes: up to this size in bytes a user's CPU tensors travel with the record.
        lines: one sentence for each class of tensors.
    """

    small: DataPlane
    large: DataPlane
    small_bytes: int = 0
    takes_accelerators: bool = False
    accelerators: dict[str, DataPlane] = field(default_factory=dict)
    with_record_bytes: int = 0
    lines: list[str] = field(default_factory=list)

    def plane_of(self, tensor: Tensor) -> DataPlane:
        """Return what carries a tensor; every rank must ask for one of the same size and kind of device."""
        plane = self.accelerators.get(tensor.device.type)
        if plane is not None:
            return plane
        plane = self.host_plane_of(tensor)
        return plane if tensor.is_cpu or (self.takes_accelerators and plane is self.large) else StagedPlane(plane)

    def host_plane_of(self, tensor: Tensor) -> DataPlane:
        """Return what carries a tensor once it is on the CPU."""
        is_small = tensor.numel() * tensor.element_size() <= self.small_bytes
        return self.small if is_small else self.large

    def add_xla(self, runtime: TpuRuntime, exchange: Exchange, agree: Callable[[], object]) -> None:
        """Take up XLA's own collectives for tensors on the runtime's device; every rank calls this.

        Virtual devices of several processes are not connected: their tensors go through the CPU.

        Args:
            runtime: this process's device.
            exchange: gives every rank every rank's payload.
            agree: waits until every rank is about to launch the same collective; raises if one has failed.

        Raises:
            RuntimeError: the processes don't drive one device each.
        """
        self.takes_accelerators = False
        places = exchange([runtime.connects_processes, runtime.ordinal])
        if all(is_connected for is_connected, _ in places):
            ordinals = [ordinal for _, ordinal in places]
            self.accelerators[runtime.device.type] = XlaPlane(runtime, ordinals, agree, self.host_plane_of)
            self.lines.insert(0, "tensors on XLA devices by XLA's collectives")
        else:
            self.lines.insert(0, f"tensors on XLA's virtual {runtime.hardware} devices through the CPU")


def choose_implementation(
    implementation: CommunicationImplementation | str, device_type: str
) -> CommunicationImplementation | str:
    """Return the implementation, with ``AUTO`` resolved for GPUs.

    Raises:
        ValueError: NCCL is asked for without GPUs, or another one than ``AUTO`` for XLA devices.
    """
    if device_type == "xla" and implementation is not CommunicationImplementation.AUTO:
        raise ValueError(
            f"XLA devices communicate by XLA's own collectives, not by {implementation}. Use "
            "CommunicationImplementation.AUTO."
        )
    if implementation is CommunicationImplementation.AUTO and device_type == "cuda" and dist.is_nccl_available():
        return CommunicationImplementation.NCCL
    if implementation is CommunicationImplementation.NCCL and device_type != "cuda":
        raise ValueError(
            f"CommunicationImplementation.NCCL needs GPUs, but the replicas are on {device_type!r}. Use RING or AUTO."
        )
    return implementation


def make_routes(
    implementation: CommunicationImplementation | str,
    meeting: Meeting,
    records: Records,
    exchange: Exchange,
    check: Check,
    timeout: timedelta,
    *,
    hierarchical: bool | None,
) -> Routes:
    """Make the planes of a group; every rank calls this with the same arguments.

    Args:
        implementation: as ``choose_implementation`` returns it.
        meeting: the processes.
        records: their connections.
        exchange: gives every rank every rank's payload.
        check: called while waiting; may raise to end the wait.
        timeout: after which gloo and NCCL give up.
        hierarchical: whether processes of one host share memory; ``None`` means unless ``RING`` is asked for.

    Returns:
        The routes.
    """
    store, rank, size, hosts = meeting.store, meeting.rank, meeting.size, meeting.hosts
    if isinstance(implementation, str):
        plane = _make_registered(implementation, meeting, exchange, timeout)
        return Routes(plane, plane, takes_accelerators=True, lines=[f"all tensors over {implementation!r}"])
    is_ring = implementation is CommunicationImplementation.RING
    if hierarchical is None:
        hierarchical = not is_ring
    shared = share_memory(exchange, rank, hosts, check) if hierarchical and len(set(hosts)) < size else ""
    if isinstance(shared, str):
        if shared and rank == 0:
            warning_once(f"The processes of a host can't share memory, so gloo carries their tensors. ({shared})")
        own = PrefixStore("data", store)
        large = meeting.ask(functools.partial(gloo_plane, own, rank, size, timeout, meeting.host))
        routes = Routes(large, large, takes_accelerators=True, lines=["tensors over gloo"])
    else:
        routes = _over_shared_memory(shared, meeting, timeout)
    if not is_ring:
        # A tree of ranks passes a message on several times, together with those of the others.
        limit = _MESSAGE_BYTES if size <= MAX_MESH_SIZE else _MESSAGE_BYTES // size
        routes.small, routes.small_bytes, routes.with_record_bytes = MessagePlane(records), limit, limit
        routes.lines.insert(0, f"up to {limit:,} bytes in messages")
    if implementation is CommunicationImplementation.NCCL:
        nccl_options = dist.ProcessGroupNCCL.Options()
        nccl_options._timeout = timeout
        group = dist.ProcessGroupNCCL(PrefixStore("nccl", store), rank, size, nccl_options)
        routes.accelerators["cuda"] = NcclPlane(group)
        routes.lines.insert(0, "tensors on GPUs over NCCL")
    return routes


def _make_registered(name: str, meeting: Meeting, exchange: Exchange, timeout: timedelta) -> DataPlane:
    """Make a registered communication on all ranks or on none."""
    own_error: Exception | None = None
    try:
        store = PrefixStore(f"data/{name}", meeting.store)
        plane = make_registered_plane(name, store, meeting.rank, meeting.size, timeout)
    except (ValueError, RuntimeError, TypeError) as error:
        own_error = error
    errors = exchange("" if own_error is None else str(own_error))
    if own_error is not None:
        raise own_error
    for rank, text in enumerate(errors):
        if text:
            raise RuntimeError(f"Rank {rank} could not make the communication {name!r}: {text}")
    return plane


def _over_shared_memory(local: SharedMemoryPlane | None, meeting: Meeting, timeout: timedelta) -> Routes:
    hosts = meeting.hosts
    num_hosts = len(set(hosts))
    if num_hosts == 1 and local is not None:
        return Routes(local, local, lines=["tensors through shared memory"])
    leaders = None
    if hosts.index(hosts[meeting.rank]) == meeting.rank:
        store = PrefixStore("leaders", meeting.store)
        leaders = meeting.ask(
            functools.partial(gloo_plane, store, hosts[meeting.rank], num_hosts, timeout, meeting.host)
        )
    plane = HierarchicalPlane(hosts, meeting.rank, local, leaders)
    lines = [f"tensors through shared memory in each of {num_hosts} hosts and over gloo between them"]
    return Routes(plane, plane, lines=lines)
