"""Which way the data of each tensor takes between processes; and the backends that programs register."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]

from torchstrategy.base.devices import kind_of
from torchstrategy.base.log import warning_once
from torchstrategy.base.options import CommunicationImplementation, PowerSGD, register_implementation_name
from torchstrategy.collectives.backends import (
    C10dBackend,
    DataBackend,
    HierarchicalBackend,
    MessageBackend,
    StagedBackend,
    SumBackend,
    gloo_backend,
    route_of,
)
from torchstrategy.collectives.compression import compressed
from torchstrategy.collectives.connections import Check
from torchstrategy.collectives.native_groups import NativeBackend
from torchstrategy.collectives.records import MAX_MESH_SIZE, Records
from torchstrategy.collectives.rendezvous import Rendezvous
from torchstrategy.collectives.shared_memory import SharedMemoryBackend, share_memory
from torchstrategy.collectives.threaded_backend import ThreadedBackend
from torchstrategy.collectives.xla_backend import XlaBackend

if TYPE_CHECKING:
    from torchstrategy.xla.runtime import TpuRuntime

__all__ = [
    "Routes",
    "backends_during_backward",
    "choose_implementation",
    "make_registered_backend",
    "make_routes",
    "register_communication",
    "usable_compression",
    "wants_overlap",
]

Factory = Callable[[Store, int, int, timedelta], Any]

_OPERATIONS = ("start_sum", "start_all_gather", "start_broadcast")
_C10D_OPERATIONS = ("allreduce", "allgather", "broadcast")
_factories: dict[str, Factory] = {}


def register_communication(name: str, factory: Factory) -> None:
    """Give a way of communication between processes a name, for ``CommunicationOptions(implementation=name)``.

    It then carries the data of all collectives between the processes of a strategy: tensors on whatever device the
    replicas have. The library's own checks come first, over its own connections: when an operation starts, all ranks
    are in it with equal shapes and dtypes.

    Args:
        name: any name but ``auto``, ``ring`` and ``nccl``; letter case does not count. Register it on every process.
        factory: called as ``factory(store, rank, size, timeout)`` when a strategy is made, with a store of the
            strategy's own, in which the processes can find each other, and a ``datetime.timedelta``. It returns a c10d
            process group, as creators of ``torch.distributed.Backend.register_backend`` do, or an object with three
            methods:

            - ``start_sum(tensor)`` replaces a contiguous tensor by its sum over ranks; every rank must get the same
              bits, or the replicas drift apart;
            - ``start_all_gather(outputs, tensor)`` copies the tensor of each rank to its place in the list; ``uint8``;
            - ``start_broadcast(tensor)`` overwrites a ``uint8`` tensor with rank 0's.

            Each returns a function ``wait(check)``, which returns when the result is there. It calls ``check()`` first
            and then at least once a second while it waits, and lets pass what that raises: another rank has failed, or
            the time is up. A broken connection is a ``ConnectionError``.

    Raises:
        ValueError: the name is taken or empty.
        TypeError: ``name`` is no string, or ``factory`` can't be called.

    Example:
        >>> import torch.distributed as dist
        >>> ts.experimental.register_communication("plain-gloo", dist.ProcessGroupGloo)
        >>> ts.experimental.CommunicationOptions(implementation="plain-gloo").implementation
        'plain-gloo'
    """
    if not callable(factory):
        raise TypeError(f"factory must be callable as factory(store, rank, size, timeout). Received: {factory!r}")
    if isinstance(name, str) and name.lower() in _factories:
        raise ValueError(f"The name {name!r} is taken. Taken are: {', '.join(sorted(_factories))}.")
    _factories[register_implementation_name(name)] = factory


def make_registered_backend(name: str, store: Store, rank: int, size: int, timeout: timedelta) -> DataBackend:
    """Make a registered communication.

    Raises:
        ValueError: nothing is registered under the name.
        RuntimeError: its factory failed.
        TypeError: what it returned lacks an operation.
    """
    factory = _factories.get(name.lower())
    if factory is None:
        raise ValueError(
            f"No communication is registered as {name!r} in this process. Registered are: "
            f"{', '.join(sorted(_factories)) or 'none'}. Every process must call "
            "ts.experimental.register_communication."
        )
    try:
        made = factory(store, rank, size, timeout)
    except Exception as error:
        raise RuntimeError(
            f"The factory of the communication {name!r} failed on rank {rank}: {type(error).__name__}: {error}"
        ) from error
    if all(callable(getattr(made, operation, None)) for operation in _C10D_OPERATIONS):
        return C10dBackend(made, name)
    lacking = [operation for operation in _OPERATIONS if not callable(getattr(made, operation, None))]
    if lacking:
        raise TypeError(
            f"The factory of the communication {name!r} returned {made!r}, which is no c10d process group (with "
            f"{', '.join(_C10D_OPERATIONS)}) and lacks {', '.join(lacking)}."
        )
    return made  # type: ignore[no-any-return]


#: Up to this size in bytes tensors of the CPU travel in messages: a user's with the record that comes before each
#: collective, gradients in one of their own. Measured between 2 / 3 / 4 processes of one host, medians in µs (the
#: table of sizes that recipes/benchmarks/training.py prints):
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
    """The backends of one group.

    Args:
        small: carries CPU tensors of up to ``small_bytes``.
        large: carries larger CPU tensors.
        small_bytes: size in bytes; 0 means that ``large`` carries everything.
        takes_accelerators: ``large`` takes tensors of accelerators, too; otherwise they go through the CPU.
        accelerators: what carries the tensors of a type of device, such as ``"cuda"``, by that type.
        with_record_bytes: up to this size in bytes a user's CPU tensors travel with the record.
        lines: one sentence for each class of tensors.
        network: what carries data that leaves a host or shares no memory there: ``gloo``, the name of what accelerators
            have, such as ``NCCL``, or the quoted name of a way of the user's; empty if there is no such data.
    """

    small: DataBackend
    large: DataBackend
    small_bytes: int = 0
    takes_accelerators: bool = False
    accelerators: dict[str, DataBackend] = field(default_factory=dict)
    with_record_bytes: int = 0
    lines: list[str] = field(default_factory=list)
    network: str = ""

    @property
    def is_registered(self) -> bool:
        """Whether everything travels over a way of the user's."""
        return self.network.startswith(("'", '"'))

    def backend_of(self, tensor: Tensor) -> DataBackend:
        """Return what carries a tensor; every rank must ask for one of the same size and kind of device."""
        backend = self.accelerators.get(tensor.device.type)
        if backend is not None:
            return backend
        backend = self.host_backend_of(tensor.nbytes)
        takes_it = self.takes_accelerators and backend is self.large
        if self.network == "gloo":
            takes_it = takes_it and kind_of(tensor.device).is_read_by_gloo
        return backend if takes_it or tensor.is_cpu else StagedBackend(backend)

    def host_backend_of(self, num_bytes: int) -> DataBackend:
        """Return what carries a tensor of so many bytes once it is on the CPU."""
        return self.small if num_bytes <= self.small_bytes else self.large

    def with_native(self, native: NativeBackend | None, size: int, compression: str | PowerSGD | None = None) -> Routes:
        """Take up NCCL, or its like, for tensors on the replicas' accelerators; return these routes.

        Args:
            native: carries them; ``None`` changes nothing.
            size: number of ranks.
            compression: as ``usable_compression`` returns it.
        """
        if native is not None:
            backend = self.accelerators[native.device_type] = compressed(native, size, compression)
            self.network = native.route
            what = kind_of(native.device_type).tf_name or f"{native.device_type} device"
            self.lines.insert(0, f"tensors on {what}s over {route_of(backend)}")
        return self

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
            self.accelerators[runtime.device.type] = XlaBackend(runtime, ordinals, agree, self.host_backend_of)
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
    if kind_of(device_type).is_traced and implementation is not CommunicationImplementation.AUTO:
        raise ValueError(
            f"XLA devices communicate by XLA's own collectives, not by {implementation}. Use "
            "CommunicationImplementation.AUTO."
        )
    if implementation is CommunicationImplementation.AUTO and kind_of(device_type).native_backend == "nccl":
        return CommunicationImplementation.NCCL
    if implementation is CommunicationImplementation.NCCL and kind_of(device_type).collectives != "nccl":
        raise ValueError(
            f"CommunicationImplementation.NCCL needs GPUs, but the replicas are on {device_type!r}. Use RING or AUTO."
        )
    if implementation is CommunicationImplementation.NCCL and not kind_of(device_type).native_backend:
        raise ValueError("CommunicationImplementation.NCCL needs a torch that was built with NCCL. Use RING or AUTO.")
    return implementation


def make_routes(
    implementation: CommunicationImplementation | str,
    rendezvous: Rendezvous,
    records: Records,
    exchange: Exchange,
    check: Check,
    timeout: timedelta,
    *,
    hierarchical: bool | None,
    compression: str | PowerSGD | None = None,
) -> Routes:
    """Make the backends of a group; every rank calls this with the same arguments.

    Args:
        implementation: as ``choose_implementation`` returns it.
        rendezvous: the processes.
        records: their connections.
        exchange: gives every rank every rank's payload.
        check: called while waiting; may raise to end the wait.
        timeout: after which gloo gives up.
        hierarchical: whether processes of one host share memory; ``None`` means unless ``RING`` is asked for.
        compression: as ``usable_compression`` returns it: how sums become smaller on the network.

    Returns:
        The routes.
    """
    store, rank, size, hosts = rendezvous.store, rendezvous.rank, rendezvous.size, rendezvous.hosts
    if isinstance(implementation, str):
        backend = _make_registered(implementation, rendezvous, exchange, timeout)
        lines = [f"all tensors over {implementation!r}"]
        return Routes(backend, backend, takes_accelerators=True, lines=lines, network=repr(implementation))
    is_ring = implementation is CommunicationImplementation.RING
    if hierarchical is None:
        hierarchical = not is_ring
    shared = share_memory(exchange, rank, hosts, check) if hierarchical and len(set(hosts)) < size else ""
    if isinstance(shared, str):
        if shared and rank == 0:
            warning_once(f"The processes of a host can't share memory, so gloo carries their tensors. ({shared})")
        own = PrefixStore("data", store)
        gloo = rendezvous.ask(functools.partial(gloo_backend, own, rank, size, timeout, rendezvous.host))
        large = compressed(gloo, size, compression)
        lines = [f"tensors over {route_of(large)}"]
        routes = Routes(large, large, takes_accelerators=large is gloo, lines=lines, network="gloo")
    else:
        routes = _over_shared_memory(shared, rendezvous, timeout, compression)
    if not is_ring and not isinstance(compression, str):  # how a number is rounded must not depend on its bucket
        # A tree of ranks passes a message on several times, together with those of the others.
        limit = _MESSAGE_BYTES if size <= MAX_MESH_SIZE else _MESSAGE_BYTES // size
        routes.small, routes.small_bytes, routes.with_record_bytes = MessageBackend(records), limit, limit
        routes.lines.insert(0, f"up to {limit:,} bytes in messages")
    return routes


def _make_registered(name: str, rendezvous: Rendezvous, exchange: Exchange, timeout: timedelta) -> DataBackend:
    """Make a registered communication on all ranks or on none."""
    own_error: Exception | None = None
    try:
        store = PrefixStore(f"data/{name}", rendezvous.store)
        backend = make_registered_backend(name, store, rendezvous.rank, rendezvous.size, timeout)
    except (ValueError, RuntimeError, TypeError) as error:
        own_error = error
    errors = exchange("" if own_error is None else str(own_error))
    if own_error is not None:
        raise own_error
    for rank, text in enumerate(errors):
        if text:
            raise RuntimeError(f"Rank {rank} could not make the communication {name!r}: {text}")
    return backend


def usable_compression(asked: str | PowerSGD | None, routes: Routes, device_type: str) -> str | PowerSGD | None:
    """Return how sums of gradients between processes become smaller, and say so where they can't.

    Args:
        asked: the choice of ``CommunicationOptions``.
        routes: of the processes.
        device_type: of the replicas.
    """
    if asked is None:
        return None
    if kind_of(device_type).is_traced:
        reason = "XLA sums the gradients of its devices"
    elif not routes.network:
        reason = "the processes share their host's memory, and no gradient travels over a network"
    elif isinstance(asked, str) and routes.is_registered:
        reason = f"{routes.network} is not known to let ranks exchange parts of tensors, as gloo and NCCL do"
    else:
        return asked
    warning_once(f"Gradients are not compressed: gradient_compression={asked!r} has no effect, because {reason}.")
    return None


def wants_overlap(asked: bool | None, compression: str | PowerSGD | None, routes: Routes) -> bool:  # noqa: FBT001
    """Say whether sums of gradients begin during ``backward``, if each process has one replica.

    Args:
        asked: the choice of ``CommunicationOptions``.
        compression: as ``usable_compression`` returns it.
        routes: of the processes.
    """
    if isinstance(compression, PowerSGD) or routes.is_registered:
        return False  # PowerSGD needs all gradients at once; a registered way may not stand a second group
    return bool(routes.network) if asked is None else asked


def backends_during_backward(routes: Routes) -> dict[str, SumBackend]:
    """Return what carries sums while the program computes, by type of device.

    Args:
        routes: of gradients. On CPUs their order against that of other collectives is free, so nothing else takes them;
            ``WorkerGroup`` sees to one order on accelerators.
    """
    works_alone = isinstance(routes.large, C10dBackend)
    backends: dict[str, SumBackend] = {"cpu": routes.large if works_alone else ThreadedBackend(routes.large)}
    return backends | {kind: one for kind, one in routes.accelerators.items() if isinstance(one, C10dBackend)}


def _over_shared_memory(
    local: SharedMemoryBackend | None, rendezvous: Rendezvous, timeout: timedelta, compression: str | PowerSGD | None
) -> Routes:
    hosts = rendezvous.hosts
    num_hosts = len(set(hosts))
    if num_hosts == 1 and local is not None:
        return Routes(local, local, lines=["tensors through shared memory"])
    leaders: DataBackend | None = None
    if hosts.index(hosts[rendezvous.rank]) == rendezvous.rank:
        store = PrefixStore("leaders", rendezvous.store)
        gloo = rendezvous.ask(
            functools.partial(gloo_backend, store, hosts[rendezvous.rank], num_hosts, timeout, rendezvous.host)
        )
        leaders = compressed(gloo, num_hosts, compression)
    backend = HierarchicalBackend(hosts, rendezvous.rank, local, leaders)
    way = f"gloo as {compression}" if isinstance(compression, str) else "gloo"
    lines = [f"tensors through shared memory in each of {num_hosts} hosts and over {way} between them"]
    return Routes(backend, backend, lines=lines, network="gloo")
