"""The ways in which the data of collectives travels between processes: gloo, messages, levels.

A backend moves bytes and adds numbers, nothing else: that the ranks agree has been checked, and errors are put into
words by ``WorkerGroup``. Shared memory, and groups for which only accelerators wait, have modules of their own.
"""

from __future__ import annotations

import abc
import ctypes
import functools
import os
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import AllgatherOptions, AllToAllOptions  # type: ignore[attr-defined]

from torchstrategy.collectives.connections import Check
from torchstrategy.collectives.records import Records, by_rank
from torchstrategy.collectives.summing import as_addable, in_a_row, sum_in_order

__all__ = [
    "C10dBackend",
    "DataBackend",
    "HierarchicalBackend",
    "MessageBackend",
    "StagedBackend",
    "SumBackend",
    "Wait",
    "from_bytes",
    "gloo_backend",
    "outlive_program",
    "route_of",
    "to_bytes",
]

_POLL = timedelta(milliseconds=500)
_MARK = b"#"  # no record begins so
#: Within one sum gloo's pieces wait for each other, which leaves a link with some delay idle. 38 MB between two hosts
#: at 1 Gbit/s with 5 ms of delay took 0.50 s at once, and 0.37 s in several parts that travel at a time.
_GLOO_PART_BYTES = 12 << 20
_GLOO_THREADS = 4

Wait = Callable[[Check], None]


class SumBackend(Protocol):
    """Sums over the ranks of a group; see ``DataBackend``."""

    def start_sum(self, tensor: Tensor) -> Wait:
        """Start to replace a contiguous tensor by its sum over ranks; every rank must get the same bits."""


class DataBackend(SumBackend, Protocol):
    """Collectives over the ranks of a group; every rank starts the same ones in the same order.

    Each method returns a function that waits for the end. It is given a ``check`` to call before it waits and at least
    once a second meanwhile: the check raises when another rank has failed or the time is up, and the function lets that
    error pass. A rank whose connection breaks raises ``ConnectionError``.
    """

    def start_all_gather(self, outputs: Sequence[Tensor], tensor: Tensor) -> Wait:
        """Start to copy each rank's ``tensor`` to its place in ``outputs``; ``uint8`` of one length on all ranks."""

    def start_broadcast(self, tensor: Tensor) -> Wait:
        """Start to overwrite ``tensor``, of ``uint8``, with rank 0's."""


class C10dBackend:
    """A process group of ``torch.distributed``, such as gloo's or one of the user's.

    Args:
        group: the process group.
        route: what traces call it.
        part_bytes: size in bytes of the parts in which a larger tensor is summed, all at once; 0 means in one.
    """

    def __init__(self, group: Any, route: str = "torch.distributed", part_bytes: int = 0) -> None:
        self._group = group
        self.route = route
        self._part_bytes = part_bytes

    def start_sum(self, tensor: Tensor) -> Wait:
        """See ``DataBackend``."""
        options = dist.AllreduceOptions()
        options.reduceOp = dist.ReduceOp.SUM  # type: ignore[assignment]
        numbers = torch.view_as_real(tensor) if tensor.is_complex() else tensor
        if not self._part_bytes or tensor.nbytes <= self._part_bytes:
            return self._start([tensor], "allreduce", [numbers], options)
        parts = numbers.view(-1).tensor_split(-(-tensor.nbytes // self._part_bytes))
        return functools.partial(_wait_for_all, [self._start([p], "allreduce", [p], options) for p in parts])

    def start_all_gather(self, outputs: Sequence[Tensor], tensor: Tensor) -> Wait:
        """See ``DataBackend``."""
        return self._start(outputs, "allgather", [list(outputs)], [tensor], AllgatherOptions())

    def start_broadcast(self, tensor: Tensor) -> Wait:
        """See ``DataBackend``."""
        options = dist.BroadcastOptions()
        options.rootRank = 0
        return self._start([tensor], "broadcast", [tensor], options)

    def start_all_to_all(self, output: Tensor, tensor: Tensor) -> Wait:
        """Start to give each rank its part of ``tensor``; parts of one length, as in ``output``, follow each other."""
        return self._start([output], "alltoall_base", output, tensor, [], [], AllToAllOptions())

    def outlive_program(self) -> None:
        """Never end the group: gloo would wait for what is under way, and a rank that is stopped does not answer."""
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._group))

    def _start(self, results: Sequence[Tensor], operation: str, *arguments: Any) -> Wait:
        del results
        return functools.partial(_wait_in_slices, getattr(self._group, operation)(*arguments))


def gloo_backend(store: Any, rank: int, size: int, timeout: timedelta, address: str) -> C10dBackend:
    """Return gloo's process group over the network that the ranks have met on.

    Left alone gloo looks up the host's own name, which may lead to the loopback or to another network. The variable
    ``GLOO_SOCKET_IFNAME`` still decides where it is set. Two ranks connect when they first send to each other: sums and
    broadcasts need some log P connections of a rank, where all at the start would be P.

    Args:
        store: where the ranks find each other; with a prefix of the group's own.
        rank: this process's position in the group.
        size: processes in the group.
        timeout: after which gloo gives up.
        address: of this process, as the others can reach it.
    """
    interfaces = [name for name in os.environ.get("GLOO_SOCKET_IFNAME", "").split(",") if name]
    options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    create = functools.partial(dist.ProcessGroupGloo.create_device, lazy_init=True)
    options._devices = [create(interface=name) for name in interfaces] or [create(hostname=address)]
    options._timeout = timeout
    options._threads = _GLOO_THREADS
    return C10dBackend(dist.ProcessGroupGloo(store, rank, size, options), "gloo", _GLOO_PART_BYTES)


class _WaitingBackend(abc.ABC):
    """A backend that does all its work when the end is waited for."""

    def start_sum(self, tensor: Tensor) -> Wait:
        """See ``DataBackend``."""
        (numbers,) = as_addable([tensor])
        return functools.partial(self._sum, numbers)

    def start_all_gather(self, outputs: Sequence[Tensor], tensor: Tensor) -> Wait:
        """See ``DataBackend``."""
        return functools.partial(self._gather, outputs, tensor)

    def start_broadcast(self, tensor: Tensor) -> Wait:
        """See ``DataBackend``."""
        return functools.partial(self._broadcast, tensor)

    @abc.abstractmethod
    def _sum(self, numbers: Tensor, check: Check) -> None: ...

    @abc.abstractmethod
    def _gather(self, outputs: Sequence[Tensor], tensor: Tensor, check: Check) -> None: ...

    @abc.abstractmethod
    def _broadcast(self, tensor: Tensor, check: Check) -> None: ...


class MessageBackend(_WaitingBackend):
    """Small tensors in messages: one hop, and every rank adds up by itself. Tensors are on the CPU.

    Args:
        records: the connections.
    """

    route = "messages"

    def __init__(self, records: Records) -> None:
        self._records = records

    def _sum(self, numbers: Tensor, check: Check) -> None:
        bodies = self._exchange(to_bytes(numbers), check)
        sum_in_order([from_bytes(body, numbers.dtype) for body in bodies], numbers)

    def _gather(self, outputs: Sequence[Tensor], tensor: Tensor, check: Check) -> None:
        bodies = self._exchange(to_bytes(tensor), check)
        for output, body in zip(outputs, bodies, strict=True):
            output.copy_(from_bytes(body, output.dtype))

    def _broadcast(self, tensor: Tensor, check: Check) -> None:
        # Every rank sends as much as rank 0, because lengths are compared.
        tensor.copy_(from_bytes(self._exchange(to_bytes(tensor), check)[0], tensor.dtype))

    def _exchange(self, data: bytes, check: Check) -> list[bytes]:
        check()
        bodies = by_rank(self._records.start(_MARK + data, check)(check))
        if any(not body.startswith(_MARK) or len(body) != len(data) + len(_MARK) for body in bodies):
            raise ConnectionError("the ranks lost step: some send data where others don't")
        return [body[len(_MARK) :] for body in bodies]


class HierarchicalBackend(_WaitingBackend):
    """Collectives within each host, then between the hosts' first ranks, then back. Tensors are on the CPU.

    Args:
        hosts: for each rank the number of its host.
        rank: this process's id.
        local: between this host's processes; ``None`` if this rank is alone on its host.
        leaders: between the hosts' first ranks, in the order of hosts; ``None`` if this rank is none of them.
    """

    route = "shared memory and network"

    def __init__(self, hosts: Sequence[int], rank: int, local: DataBackend | None, leaders: DataBackend | None) -> None:
        self._members = [[r for r, host in enumerate(hosts) if host == number] for number in range(max(hosts) + 1)]
        self._host = hosts[rank]
        self._local = local
        self._leaders = leaders

    def outlive_program(self) -> None:
        """See ``C10dBackend``."""
        for backend in (self._local, self._leaders):
            outlive_program(backend)

    def _sum(self, numbers: Tensor, check: Check) -> None:
        if self._local is not None:
            self._local.start_sum(numbers)(check)
        if self._leaders is not None:
            self._leaders.start_sum(numbers)(check)
        if self._local is not None:
            self._local.start_broadcast(numbers.view(torch.uint8))(check)

    def _gather(self, outputs: Sequence[Tensor], tensor: Tensor, check: Check) -> None:
        length = tensor.numel()
        most = max(map(len, self._members))
        everything = tensor.new_empty((len(self._members), most, length))
        own = everything[self._host]
        if self._local is None:
            own[0].copy_(tensor)
        else:
            self._local.start_all_gather(list(own[: len(self._members[self._host])]), tensor)(check)
        if self._leaders is not None:
            rows = list(everything.view(len(self._members), -1))
            self._leaders.start_all_gather(rows, rows[self._host].clone())(check)
        if self._local is not None:
            self._local.start_broadcast(everything.view(-1))(check)
        for host, members in enumerate(self._members):
            for position, rank in enumerate(members):
                outputs[rank].copy_(everything[host, position])

    def _broadcast(self, tensor: Tensor, check: Check) -> None:
        if self._leaders is not None:
            self._leaders.start_broadcast(tensor)(check)
        if self._local is not None:
            self._local.start_broadcast(tensor)(check)


class StagedBackend:
    """Carries tensors of accelerators, of any dtype, through the CPU, over a backend that knows only that.

    Args:
        backend: the backend.
    """

    def __init__(self, backend: DataBackend) -> None:
        self._backend = backend
        self.route = f"the CPU and {route_of(backend)}"

    def start_sum(self, tensor: Tensor) -> Wait:
        """See ``DataBackend``."""
        staged = tensor.cpu()
        return functools.partial(_then_copy, self._backend.start_sum(staged), [tensor], [staged])

    def start_all_gather(self, outputs: Sequence[Tensor], tensor: Tensor) -> Wait:
        """See ``DataBackend``."""
        staged = [torch.empty_like(output, device="cpu") for output in outputs]
        wait = self._backend.start_all_gather([one.view(torch.uint8) for one in staged], tensor.cpu().view(torch.uint8))
        return functools.partial(_then_copy, wait, outputs, staged)

    def start_broadcast(self, tensor: Tensor) -> Wait:
        """See ``DataBackend``."""
        staged = tensor.cpu()
        wait = self._backend.start_broadcast(staged.view(torch.uint8))
        return functools.partial(_then_copy, wait, [tensor], [staged])


def route_of(backend: SumBackend) -> str:
    """Return what traces call a backend's way."""
    return getattr(backend, "route", type(backend).__name__)


def outlive_program(backend: object) -> None:
    """Let the program end while a backend's sums are under way; backends that don't mind have no such method."""
    method = getattr(backend, "outlive_program", None)
    if method is not None:
        method()


def to_bytes(tensor: Tensor) -> bytes:
    """Return the bytes of a tensor on the CPU."""
    return in_a_row(tensor).view(torch.uint8).numpy().tobytes()


def from_bytes(data: bytes, dtype: torch.dtype) -> Tensor:
    """Return a tensor of one dimension, in memory of its own."""
    return torch.frombuffer(bytearray(data), dtype=dtype) if data else torch.empty(0, dtype=dtype, device="cpu")


def _wait_in_slices(work: Any, check: Check) -> None:
    while True:
        check()
        start = time.monotonic()
        try:
            work.wait(_POLL)
            return
        except RuntimeError as error:
            # An error that comes before the slice is over is no time-out. A later one may be: what was completed just
            # after it says at once in the next slice how it ended.
            if time.monotonic() - start < _POLL.total_seconds() / 2:
                raise ConnectionError(str(error)) from error


def _wait_for_all(waits: Sequence[Wait], check: Check) -> None:
    for wait in waits:
        wait(check)


def _then_copy(wait: Wait, targets: Sequence[Tensor], sources: Sequence[Tensor], check: Check) -> None:
    wait(check)
    for target, source in zip(targets, sources, strict=True):
        target.copy_(source)
