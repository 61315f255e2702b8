"""Collectives between processes: tensors whose records have been compared. They travel over backends of ``routes``.

``join`` makes a strategy's processes come together: which devices each one brings, and that all are set up alike.

The user's default process group is neither needed nor touched.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.distributed import DistError, PrefixStore  # type: ignore[attr-defined]

from torchstrategy.base import __version__
from torchstrategy.base.devices import accelerator_module, check_alike
from torchstrategy.base.job import Job
from torchstrategy.base.labels import label
from torchstrategy.base.log import info_once, set_rank, show_info, warning_once
from torchstrategy.base.names import difference_of_ranks
from torchstrategy.base.options import CommunicationOptions
from torchstrategy.collectives.backends import (
    DataBackend,
    SumBackend,
    Wait,
    from_bytes,
    outlive_program,
    route_of,
    to_bytes,
)
from torchstrategy.collectives.cross_device_ops import CrossDeviceOps, HierarchicalCopyAllReduce
from torchstrategy.collectives.native_groups import EarlyOrder, in_turn, make_native_backend, raise_broken
from torchstrategy.collectives.record_group import RecordGroup, check_equal
from torchstrategy.collectives.rendezvous import Rendezvous, meet, raise_lost_store
from torchstrategy.collectives.routes import (
    Routes,
    backends_during_backward,
    choose_implementation,
    make_routes,
    usable_compression,
    wants_overlap,
)
from torchstrategy.collectives.shared_memory import SharedMemoryBackend
from torchstrategy.collectives.summing import (
    as_addable,
    as_bytes,
    copy_out,
    group_by_layout,
    is_addable,
    pack,
    plan_buckets,
    sum_columns,
    unpack,
    unpack_copies,
)
from torchstrategy.errors import DisagreementError, InvalidArgumentError, OpError

if TYPE_CHECKING:
    from torchstrategy.xla.runtime import TpuRuntime

__all__ = ["WorkerGroup", "join"]

_DEFAULT_TIMEOUT_S = 1800.0
_GRACE_S = 3.0
_BROADCAST_BYTES = 32 << 20
_ADDED_AS = {torch.int16: torch.int32}  # gloo can't add these; NCCL neither
_CONNECTING = "making the connections of a strategy"


class WorkerGroup(RecordGroup):
    """The processes of one strategy, seen from one of them.

    Args:
        rendezvous: the processes.
        devices: of this process's replicas; GPUs let ``AUTO`` take NCCL.
        options: implementation and timeout.
        hierarchical: whether processes of one host share memory for tensors on the CPU, also if ``RING`` is asked
            for; ``None`` leaves it to the implementation, ``False`` forbids it.
        runtime: this process's XLA device, if it drives one; it has been started.

    Raises:
        ValueError: NCCL is asked for with CPU devices, or a communication that is not registered.
        RuntimeError: the processes bring different numbers or kinds of devices, or don't drive one XLA device each.
        ReplicaFailedError: another rank failed or is gone.
        DeadlineExceededError: not all ranks arrived in time.
    """

    def __init__(
        self,
        rendezvous: Rendezvous,
        devices: Sequence[torch.device],
        options: CommunicationOptions,
        *,
        hierarchical: bool | None = None,
        runtime: TpuRuntime | None = None,
    ) -> None:
        device_type = devices[0].type
        self.implementation = choose_implementation(options.implementation, device_type)
        timeout_s = options.deadline_seconds or _DEFAULT_TIMEOUT_S
        super().__init__(rendezvous, _CONNECTING, timeout_s)
        # Our own deadline comes first: it can say who did not arrive. The process can't end while gloo waits.
        timeout = timedelta(seconds=timeout_s + _GRACE_S)
        exchange = functools.partial(self.exchange, _CONNECTING)
        check_alike(exchange([str(device) for device in devices]))  # or some would make a native group, and others not
        place = rendezvous.store, self.rank, self.size
        self._native = native = make_native_backend(self.implementation, devices[0], *place, timeout, rendezvous.ask)
        self.watch.natives.add(native)
        make = functools.partial(
            make_routes,
            self.implementation,
            records=self._records,
            exchange=exchange,
            check=self._checker(_CONNECTING),
            timeout=timeout,
            hierarchical=hierarchical,
        )
        self.routes = self.gradient_routes = make(rendezvous).with_native(native, self.size)
        #: How sums of gradients become smaller; ``None`` if they don't.
        self.compression = usable_compression(options.gradient_compression, self.routes, device_type)
        overlaps = runtime is None and wants_overlap(options.overlap, self.compression, self.routes)
        overlaps = overlaps and len(devices) == 1 and device_type in backends_during_backward(self.routes)
        if isinstance(self.compression, str) or overlaps:
            own = rendezvous._replace(store=PrefixStore("gradients", rendezvous.store))
            made = make(own, compression=self.compression)
            self.gradient_routes = made.with_native(native, self.size, self.compression)
        self._early = backends_during_backward(self.gradient_routes) if overlaps else {}
        #: Held by who starts an early sum, and by collectives that must have the same place among these on all ranks.
        self.turn = threading.RLock()
        self.early: Callable[[], EarlyOrder | None] = lambda: None
        if options.overlap and device_type not in self._early:
            warning_once(
                "Sums of gradients don't begin during `backward`: overlap=True has an effect with one replica in each "
                "process, on CPUs and over NCCL, and neither with PowerSGD nor with a registered communication nor on "
                "XLA devices nor in 16 bits over NCCL."
            )
        if runtime is not None:
            agree = functools.partial(self.exchange, "the launch of a collective between XLA devices", None)
            self.routes.add_xla(runtime, exchange, agree)
        show_info()
        set_rank(self.rank)
        ways = "; ".join(self.routes.lines)
        info_once(f"Communication between {self.size} processes ({self.communication}): {ways}.")
        if self.compression is not None:
            ways = "; ".join(self.gradient_routes.lines)
            info_once(f"Gradients between processes are compressed ({self.compression}): {ways}.")

    @property
    def communication(self) -> str:
        """The name of the implementation."""
        return self.implementation if isinstance(self.implementation, str) else self.implementation.name

    @in_turn
    def all_reduce(self, tensors: Sequence[Tensor], operation: str) -> list[Tensor]:
        """Return the sum over ranks of each tensor, each in memory of its own.

        Raises:
            InvalidArgumentError: number, shapes or dtypes differ between ranks.
        """
        signatures = [_signature(tensor) for tensor in tensors]
        groups = group_by_layout(tensors)
        data = self._with_record(tensors, groups)
        brought, parts = self._exchange(operation, signatures, data)
        check_equal(brought, operation, "number, shapes and dtypes of tensors")
        results = list(tensors)
        offset = 0
        for dtype, indices in groups:
            members = [tensors[i] for i in indices]
            if members[0].is_sparse:
                sums = [self.sum_sparse(member, operation) for member in members]
            elif data is None:
                sums = self._sum_dense(members, _ADDED_AS.get(dtype, dtype), operation)
            else:
                start, offset = offset, offset + sum(member.nbytes for member in members)
                columns = [from_bytes(part[start:offset], dtype) for part in parts]
                sums = sum_columns(columns, members)
            for i, summed in zip(indices, sums, strict=True):
                results[i] = summed
        return results

    def _sum_dense(self, members: Sequence[Tensor], added_as: torch.dtype, operation: str) -> list[Tensor]:
        if len(members) == 1:
            summed = members[0].detach().to(added_as, copy=True, memory_format=torch.contiguous_format)
            self.start_sum(summed, operation)()
            return [summed.to(members[0].dtype)]
        flat = pack(members).to(added_as)
        self.start_sum(flat, operation)()
        return unpack_copies(flat, members)

    def sum_sparse(self, tensor: Tensor, operation: str) -> Tensor:
        """Return the sum over ranks of a sparse COO tensor; the caller has checked that the ranks agree."""
        indices = self.all_gather_tensors(tensor._indices().t().contiguous(), operation)
        values = self.all_gather_tensors(tensor._values(), operation)
        # A rank without entries may have another number of sparse dimensions.
        parts = [(i, v) for i, v in zip(indices, values, strict=True) if len(v)]
        if not parts:
            return tensor
        columns = [torch.cat(column) for column in zip(*parts, strict=True)]
        return torch.sparse_coo_tensor(columns[0].t(), columns[1], tensor.shape, check_invariants=False).coalesce()

    @in_turn
    def all_gather_tensors(self, tensor: Tensor, operation: str) -> list[Tensor]:
        """Return every rank's tensor; shapes may differ, dtypes may not.

        Raises:
            InvalidArgumentError: the dtypes differ.
        """
        limit = self.routes.with_record_bytes if tensor.is_cpu else 0
        data = to_bytes(tensor) if tensor.is_cpu and tensor.nbytes <= limit else None
        infos, parts = self._exchange(operation, [list(tensor.shape), str(tensor.dtype)], data)
        if any(info[1] != infos[0][1] for info in infos):
            lines = difference_of_ranks([info[1] for info in infos])
            raise InvalidArgumentError(f"{operation}: the ranks must bring the same dtype.\n{lines}")
        shapes = [torch.Size(info[0]) for info in infos]
        longest = max(shape.numel() for shape in shapes)
        if limit and longest * tensor.element_size() <= limit:
            return [from_bytes(part, tensor.dtype).view(shape) for part, shape in zip(parts, shapes, strict=True)]
        if longest == 0:
            return [tensor.new_empty(shape) for shape in shapes]
        padded = tensor.new_zeros(longest)
        padded[: tensor.numel()] = tensor.reshape(-1)
        outputs = [torch.empty_like(padded) for _ in range(self.size)]
        own = as_bytes(padded)
        backend = self._backend_of(own)
        self._finish(backend.start_all_gather([as_bytes(out) for out in outputs], own), operation, backend, own.nbytes)
        return [out[: shape.numel()].view(shape) for out, shape in zip(outputs, shapes, strict=True)]

    @in_turn
    def broadcast(self, tensors: Sequence[Tensor], operation: str) -> None:
        """Overwrite the tensors with rank 0's.

        Raises:
            InvalidArgumentError: number, shapes or dtypes differ between ranks.
        """
        self.agree(operation, [_signature(tensor) for tensor in tensors], "number, shapes and dtypes of tensors")
        for bucket in plan_buckets(tensors, _BROADCAST_BYTES):
            members = [tensors[i] for i in bucket]
            flat = pack(members)
            if flat.numel() == 0:
                continue
            own = as_bytes(flat)
            backend = self._backend_of(own)
            self._finish(backend.start_broadcast(own), operation, backend, own.nbytes)
            with torch.no_grad():
                for tensor, value in zip(members, unpack(flat, members), strict=True):
                    tensor.copy_(value)

    def start_sum(self, tensor: Tensor, operation: str) -> Callable[[], None]:
        """Start to sum a contiguous tensor over ranks in place; the caller has checked that the ranks agree.

        Returns:
            A function that waits for the end; errors as in ``exchange``.
        """
        return self._start_sum(self._backend_of(tensor), tensor, operation)

    def start_gradient_sum(self, tensor: Tensor, operation: str) -> Callable[[], None]:
        """Do as ``start_sum`` over the ways of gradients, on which they may become smaller."""
        return self._start_sum(self._backend_of(tensor, self.gradient_routes), tensor, operation)

    def sums_in_place(self, tensors: Sequence[Tensor]) -> bool:
        """Say whether gradients of one dtype and device need no bucket that stays; the same on all ranks."""
        routes = self.gradient_routes
        is_small = sum([tensor.nbytes for tensor in tensors]) <= routes.small_bytes
        is_on_host = tensors[0].is_cpu and "cpu" not in routes.accelerators  # which stand-ins of accelerators are
        return is_on_host and (is_small or isinstance(routes.large, SharedMemoryBackend))

    def sum_in_place(self, tensors: Sequence[Tensor], operation: str) -> None:
        """Replace such contiguous gradients by their sums over ranks; the caller has checked that the ranks agree."""
        num_bytes = sum([tensor.nbytes for tensor in tensors])
        backend = self.gradient_routes.host_backend_of(num_bytes)
        if isinstance(backend, SharedMemoryBackend):
            self._finish(backend.start_sum_of(tensors), operation, backend, num_bytes)
            return
        numbers = as_addable(tensors)
        flat = torch.cat(numbers)
        self._finish(backend.start_sum(flat), operation, backend, num_bytes)
        copy_out(flat, numbers)

    def _backend_of(self, tensor: Tensor, routes: Routes | None = None) -> DataBackend:
        """Return what carries a tensor, after the early sums that another rank has begun before it on accelerators."""
        if self.num_early < self._most_early and not tensor.is_cpu and (early := self.early()):
            early.catch_up(self._most_early)
        return (routes or self.routes).backend_of(tensor)

    @property
    def early_device_types(self) -> frozenset[str]:
        """The types of devices whose gradients can be summed by ``start_early_sum``."""
        return frozenset(self._early)

    def start_early_sum(self, tensor: Tensor, operation: str) -> Callable[[], None]:
        """Do as ``start_gradient_sum`` while this rank computes and perhaps makes other collectives.

        No other sum of gradients may start before all early ones have been waited for, in their order.
        """
        backend = self._early[tensor.device.type]
        self.num_early += backend is self._native
        try:
            return self._start_sum(backend, tensor, operation)
        except RuntimeError as error:  # a lost rank; it is told where the sum is waited for, not in `backward`
            return functools.partial(
                self._finish, functools.partial(raise_broken, str(error)), operation, backend, tensor.nbytes
            )

    def refuse_spoiled(self, operation: str, error: Exception | None = None) -> None:
        """Raise if collectives of accelerators were ended because a rank is lost: what was read since is of no use.

        Args:
            operation: what would use it.
            error: what the program got in its place.

        Raises:
            ReplicaFailedError: they were.
        """
        if isinstance(error, (OpError, DisagreementError)) or self._native is None:
            return
        if isinstance(error, RuntimeError):
            self.watch.wait_for_report(1.0)  # the accelerator may have heard of it first
        if self.watch.natives.failure is not None:
            self._raise_if_failed(f"{operation}, {self.watch.position}")

    def leave_early_sums(self) -> None:
        """Let the program end although early sums are under way, which other ranks may never join."""
        for backend in self._early.values():
            outlive_program(backend)

    def _start_sum(self, backend: SumBackend, tensor: Tensor, operation: str) -> Callable[[], None]:
        return functools.partial(self._finish, backend.start_sum(tensor), operation, backend, tensor.nbytes)

    def _with_record(self, tensors: Sequence[Tensor], groups: Sequence[tuple[torch.dtype, list[int]]]) -> bytes | None:
        """Return the bytes of tensors that are small enough to travel with the record; ``None`` if they are not."""
        limit = self.routes.with_record_bytes
        if limit == 0 or any(tensor.is_sparse or not tensor.is_cpu for tensor in tensors):
            return None
        if sum(tensor.nbytes for tensor in tensors) > limit or not all(is_addable(dtype) for dtype, _ in groups):
            return None
        return b"".join(to_bytes(tensors[i]) for _, indices in groups for i in indices)

    def _finish(self, wait: Wait, operation: str, backend: SumBackend, num_bytes: int) -> None:
        with label("move", operation, num_bytes, "bytes by", route_of(backend)):
            self._guarded(operation, wait, [f"{num_bytes:,} bytes"])


def _signature(tensor: Tensor) -> str:
    layout = ", sparse" if tensor.is_sparse else ""
    device = "" if tensor.device.type == "cpu" else f" on {tensor.device.type}"
    return f"{tensor.dtype}{list(tensor.shape)}{layout}{device}"


def join(
    job: Job,
    own: tuple[torch.device, ...],
    options: CommunicationOptions,
    strategy: str,
    ops: CrossDeviceOps | None,
    runtime: TpuRuntime | None = None,
) -> WorkerGroup:
    """Meet the other processes of a job.

    Args:
        job: the processes.
        own: this process's devices.
        options: how they communicate.
        strategy: the strategy's class, which must be the same everywhere.
        ops: the user's choice of cross-device operations; ``HierarchicalCopyAllReduce`` means that the processes of a
            host share memory also where gloo is asked for.
        runtime: the device of a process that drives one XLA device; it has been started.

    Returns:
        The processes of the strategy.

    Raises:
        DisagreementError: the processes are not set up alike.
        RuntimeError: they bring different numbers or kinds of devices, or can't meet.
        DeadlineExceededError: one did not come.
        ReplicaFailedError: one failed.
    """
    description = {
        "cluster": str(job.cluster_spec.as_dict()),
        "torchstrategy": __version__,
        "torch": torch.__version__,
        "strategy": strategy,
        "communication options": str(options),
        "cross_device_ops": type(ops).__name__,
    }
    if runtime is not None:
        description["XLA"] = runtime.name
    rendezvous = meet(job, description, options.deadline_seconds)
    if module := accelerator_module(own[0]):
        module.set_device(own[0])
    hierarchical = True if isinstance(ops, HierarchicalCopyAllReduce) else None
    try:
        workers = WorkerGroup(rendezvous, own, options, hierarchical=hierarchical, runtime=runtime)
    except DistError as error:
        raise_lost_store(job, rendezvous.watch, error)
    workers.exchange(f"joining the {strategy}", None)  # from here on all ranks have made all connections
    return workers
