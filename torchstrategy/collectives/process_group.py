"""Collectives between processes: records, checks and errors. Data travels over planes, which ``routes`` chooses.

Before any data moves, every rank brings a record of what it is about to do (sequence number, operation, signature,
call site) over connections of the library's own. Ranks that disagree all raise an error that says what each one
brought; gloo itself returns garbage or aborts. A user's small tensors travel in the same message. The user's default
process group is neither needed nor touched.
"""

from __future__ import annotations

import functools
import itertools
import json
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from datetime import timedelta
from typing import Any, NoReturn, TypeVar

import torch
from torch import Tensor
from torch.distributed import PrefixStore  # type: ignore[attr-defined]

from torchstrategy.collectives.call_site import call_site
from torchstrategy.collectives.connections import Check
from torchstrategy.collectives.data_planes import SumPlane, Wait, from_bytes, outlive_program, route_of, to_bytes
from torchstrategy.collectives.failures import describe
from torchstrategy.collectives.packing import pack, plan_buckets, unpack
from torchstrategy.collectives.records import connect_records
from torchstrategy.collectives.rendezvous import Meeting
from torchstrategy.collectives.routes import (
    choose_implementation,
    make_routes,
    planes_during_backward,
    usable_compression,
    wants_overlap,
)
from torchstrategy.collectives.summing import is_addable, sum_in_order
from torchstrategy.errors import (
    DeadlineExceededError,
    DisagreementError,
    InvalidArgumentError,
    OpError,
    ReplicaFailedError,
)
from torchstrategy.labels import label
from torchstrategy.log import info_once, set_rank, show_info, warn_once, warning_once
from torchstrategy.options import CommunicationOptions
from torchstrategy.xla.runtime import TpuRuntime

__all__ = ["WorkerGroup"]

_Result = TypeVar("_Result")
_DEFAULT_TIMEOUT_S = 1800.0
_GRACE_S = 3.0
_BROADCAST_BYTES = 32 << 20
# gloo can't add these; NCCL neither.
_ADDED_AS = {torch.int16: torch.int32}


class WorkerGroup:
    """The processes of one strategy, seen from one of them.

    Args:
        meeting: the processes.
        device_type: of the replicas; ``"cuda"`` lets ``AUTO`` take NCCL.
        options: implementation and timeout.
        hierarchical: whether processes of one host share memory for tensors on the CPU, also if ``RING`` is asked
            for; ``None`` leaves it to the implementation, ``False`` forbids it.
        runtime: this process's XLA device, if it drives one; it has been started.
        num_local: replicas in this process; sums start during ``backward`` if there is one.

    Raises:
        ValueError: NCCL is asked for with CPU devices, or a communication that is not registered.
        RuntimeError: the processes don't drive one XLA device each.
    """

    def __init__(
        self,
        meeting: Meeting,
        device_type: str,
        options: CommunicationOptions,
        *,
        hierarchical: bool | None = None,
        runtime: TpuRuntime | None = None,
        num_local: int = 1,
    ) -> None:
        self.implementation = choose_implementation(options.implementation, device_type)
        self.rank = meeting.rank
        self.size = meeting.size
        self._timeout_s = options.deadline_seconds or _DEFAULT_TIMEOUT_S
        self._sequence = 0
        self._started: Callable[[], list[Any]] | None = None
        self._broken = ""
        self._broken_as: type[OpError] = ReplicaFailedError  # as tf, which raises the first error again
        self.watch = meeting.watch
        operation = "making the connections of a strategy"
        check = self._checker(operation)
        store = PrefixStore("records", meeting.store)
        try:
            self._records = connect_records(
                store, meeting.host, self.rank, self.size, meeting.hosts, self._timeout_s, check, meeting.ask
            )
        except OSError as error:
            self._raise_lost(operation, error)
        # Our own deadline comes first: it can say who did not arrive. gloo's must follow soon, because the process
        # can't end while gloo waits.
        timeout = timedelta(seconds=self._timeout_s + _GRACE_S)
        exchange = functools.partial(self.exchange, operation)
        make = functools.partial(
            make_routes,
            self.implementation,
            records=self._records,
            exchange=exchange,
            check=check,
            timeout=timeout,
            hierarchical=hierarchical,
        )
        self.routes = self.gradient_routes = make(meeting)
        #: How sums of gradients become smaller; ``None`` if they don't.
        self.compression = usable_compression(options.gradient_compression, self.routes, device_type)
        # The ranks make the next planes together; that they bring as many devices is not known yet.
        overlaps = runtime is None and wants_overlap(options.overlap, self.compression, self.routes)
        overlaps = overlaps and all(count == 1 for count in exchange(num_local))
        if isinstance(self.compression, str) or overlaps:
            own = meeting._replace(store=PrefixStore("gradients", meeting.store))
            self.gradient_routes = make(own, compression=self.compression)
        self._early = planes_during_backward(self.gradient_routes) if overlaps else {}
        if options.overlap and not overlaps:
            warning_once(
                "Sums of gradients don't begin during `backward`: overlap=True has an effect with one replica in each "
                "process, and neither with PowerSGD nor with a registered communication nor on XLA devices."
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

    def exchange(self, operation: str, payload: Any) -> list[Any]:
        """Give every rank every rank's payload, after checking that all are in the same operation.

        Args:
            operation: what this rank is doing, as an error message should call it.
            payload: anything JSON can hold; a few hundred bytes travel in one message.

        Returns:
            The payloads in the order of ranks.

        Raises:
            DisagreementError: another rank is in another operation.
            ReplicaFailedError: another rank failed or is gone.
            DeadlineExceededError: not all ranks arrived in time.
        """
        return self._exchange(operation, payload)[0]

    def start_exchange(self, operation: str, payload: Any) -> Callable[[], list[Any]]:
        """Send this rank's payload, so that nobody waits for it who needs it later.

        Args:
            operation: what this rank is doing, as an error message should call it.
            payload: anything JSON can hold, of up to a few hundred bytes.

        Returns:
            A function that waits for the others' payloads and returns all, in the order of ranks; errors as in
            ``exchange``. The next collective waits for them too, and raises these errors, if it comes first.
        """
        finish = self._start_exchange(operation, payload)
        payloads: Future[list[Any]] = Future()

        def result() -> list[Any]:
            if not payloads.done():
                self._started = None
                try:
                    payloads.set_result(finish()[0])
                except BaseException as error:
                    payloads.set_exception(error)
                    raise
            return payloads.result()

        self._started = result
        return result

    def _exchange(self, operation: str, payload: Any, data: bytes | None = None) -> tuple[list[Any], list[bytes]]:
        """Exchange payloads, and data that travels along; a rank that brings none has empty data."""
        return self._start_exchange(operation, payload, data)()

    def _start_exchange(
        self, operation: str, payload: Any, data: bytes | None = None
    ) -> Callable[[], tuple[list[Any], list[bytes]]]:
        if self._started is not None:  # messages are read in the order in which they are sent
            self._started()
        self._sequence += 1
        self.watch.num_collectives += 1
        site = call_site()
        where = f"{operation} (collective number {self._sequence}) at {site}"
        self.watch.position = f"in {where}"
        head = json.dumps([self._sequence, operation, site, payload], separators=(",", ":")).encode() + b"\n"
        body = head + data if data else head
        self._checker(operation)()
        receive = self._guarded(operation, lambda check: self._records.start(body, check))
        self.watch.position = f"after the start of {where}"

        def finish() -> tuple[list[Any], list[bytes]]:
            self.watch.position = f"in {where}"
            with label("wait", operation, len(body), "bytes in a message"):
                bodies = self._guarded(operation, receive)
            self.watch.position = f"after {where}"
            return self._read(bodies, head, payload)

        return finish

    def _read(self, bodies: list[bytes], head: bytes, payload: Any) -> tuple[list[Any], list[bytes]]:
        """Return the payloads and data of the ranks' bodies, after a comparison of what the ranks are doing."""
        if all(body.startswith(head) for body in bodies):
            return [payload] * self.size, [body[len(head) :] for body in bodies]
        _, operation, site, _ = json.loads(head)
        if any(not body.startswith(b"[") for body in bodies):
            self._broken = f"the ranks lost step in {operation}"
            raise DisagreementError(f"{operation}: this rank compares records while another one sends data.")
        # JSON has no line breaks.
        records, _, parts = zip(*(body.partition(b"\n") for body in bodies), strict=True)
        rows = [json.loads(record) for record in records]
        if any(row[:2] != rows[0][:2] for row in rows):
            raise DisagreementError(
                "The ranks are not in the same collective:\n"
                + "\n".join(f"  rank {r}: {row[1]} (number {row[0]}) at {row[2]}" for r, row in enumerate(rows))
                + "\nEvery rank must make the same collective calls in the same order: look for a call that only "
                "some ranks make, such as one inside `if rank == 0:`."
            )
        if any(row[2] != site for row in rows):  # it may be meant, so this is no error
            warn_once(
                f"The ranks meet in {operation}, but from different lines:\n"
                + "\n".join(f"  rank {r}: {row[2]}" for r, row in enumerate(rows))
                + "\nIf a rank has left out a call, or made one more, values of different calls are combined. Every "
                "rank must make the same collective calls in the same order."
            )
        return [row[3] for row in rows], list(parts)

    def report_failure(self, operation: str, error: BaseException) -> None:
        """Tell the other ranks that this one failed, so that none waits for it."""
        self.watch.report(operation, error)

    def agree(self, operation: str, signature: Any, what: str) -> None:
        """Check that all ranks bring the same signature.

        Raises:
            InvalidArgumentError: they do not.
        """
        _check_equal(self.exchange(operation, signature), operation, what)

    def all_reduce(self, tensors: Sequence[Tensor], operation: str) -> list[Tensor]:
        """Return the sum over ranks of each tensor, each in memory of its own.

        Raises:
            InvalidArgumentError: number, shapes or dtypes differ between ranks.
        """
        signatures = [_signature(tensor) for tensor in tensors]
        groups = _group(tensors)
        data = self._with_record(tensors, groups)
        brought, parts = self._exchange(operation, signatures, data)
        _check_equal(brought, operation, "number, shapes and dtypes of tensors")
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
                sums = _add_columns(columns, members)
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
        return _unpack_copies(flat, members)

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

    def all_gather_tensors(self, tensor: Tensor, operation: str) -> list[Tensor]:
        """Return every rank's tensor; shapes may differ, dtypes may not.

        Raises:
            InvalidArgumentError: the dtypes differ.
        """
        limit = self.routes.with_record_bytes if tensor.is_cpu else 0
        data = to_bytes(tensor) if tensor.is_cpu and tensor.nbytes <= limit else None
        infos, parts = self._exchange(operation, [list(tensor.shape), str(tensor.dtype)], data)
        if any(info[1] != infos[0][1] for info in infos):
            lines = "\n".join(f"  rank {rank}: {info[1]}" for rank, info in enumerate(infos))
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
        own = _as_bytes(padded)
        plane = self.routes.plane_of(own)
        self._finish(plane.start_all_gather([_as_bytes(out) for out in outputs], own), operation, plane, own)
        return [out[: shape.numel()].view(shape) for out, shape in zip(outputs, shapes, strict=True)]

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
            own = _as_bytes(flat)
            plane = self.routes.plane_of(own)
            self._finish(plane.start_broadcast(own), operation, plane, own)
            with torch.no_grad():
                for tensor, value in zip(members, unpack(flat, members), strict=True):
                    tensor.copy_(value)

    def broadcast_object(self, operation: str, payload: Any) -> Any:
        """Return rank 0's payload (anything JSON can hold) on every rank."""
        return self.exchange(operation, payload if self.rank == 0 else None)[0]

    def start_sum(self, tensor: Tensor, operation: str) -> Callable[[], None]:
        """Start to sum a contiguous tensor over ranks in place; the caller has checked that the ranks agree.

        Returns:
            A function that waits for the end; errors as in ``exchange``.
        """
        return self._start_sum(self.routes.plane_of(tensor), tensor, operation)

    def start_gradient_sum(self, tensor: Tensor, operation: str) -> Callable[[], None]:
        """Do as ``start_sum`` over the ways of gradients, on which they may become smaller."""
        return self._start_sum(self.gradient_routes.plane_of(tensor), tensor, operation)

    @property
    def early_device_types(self) -> frozenset[str]:
        """The types of devices whose gradients can be summed by ``start_early_sum``."""
        return frozenset(self._early)

    def start_early_sum(self, tensor: Tensor, operation: str) -> Callable[[], None]:
        """Do as ``start_gradient_sum`` while this rank computes and perhaps makes other collectives.

        No other sum of gradients may start before all early ones have been waited for, in their order.
        """
        plane = self._early[tensor.device.type]
        try:
            return self._start_sum(plane, tensor, operation)
        except RuntimeError as error:  # a lost rank; it is told where the sum is waited for, not in `backward`
            return functools.partial(self._finish, functools.partial(_raise_lost, str(error)), operation, plane, tensor)

    def leave_early_sums(self) -> None:
        """Let the program end although early sums are under way, which other ranks may never join."""
        for plane in self._early.values():
            outlive_program(plane)

    def _start_sum(self, plane: SumPlane, tensor: Tensor, operation: str) -> Callable[[], None]:
        return functools.partial(self._finish, plane.start_sum(tensor), operation, plane, tensor)

    def _with_record(self, tensors: Sequence[Tensor], groups: Sequence[tuple[torch.dtype, list[int]]]) -> bytes | None:
        """Return the bytes of tensors that are small enough to travel with the record; ``None`` if they are not."""
        limit = self.routes.with_record_bytes
        if limit == 0 or any(tensor.is_sparse or not tensor.is_cpu for tensor in tensors):
            return None
        if sum(tensor.nbytes for tensor in tensors) > limit or not all(is_addable(dtype) for dtype, _ in groups):
            return None
        return b"".join(to_bytes(tensors[i]) for _, indices in groups for i in indices)

    def _guarded(self, operation: str, act: Callable[[Check], _Result]) -> _Result:
        try:
            return act(self._checker(operation))
        except ConnectionError as error:
            self._raise_lost(operation, error)
        except BaseException:
            self._broken = self._broken or f"{operation} was given up"
            raise

    def _finish(self, wait: Wait, operation: str, plane: SumPlane, tensor: Tensor) -> None:
        try:
            with label("move", operation, tensor.nbytes, "bytes by", route_of(plane)):
                wait(self._checker(operation))
        except ConnectionError as error:
            self._raise_lost(operation, error)
        except BaseException:
            self._broken = self._broken or f"{operation} was given up"
            raise

    def _checker(self, operation: str) -> Check:
        """Return a function that raises when another rank has failed or the time is up."""
        deadline = time.monotonic() + self._timeout_s

        def check() -> None:
            self._raise_if_failed(operation)
            if time.monotonic() > deadline:
                self._broken = f"{operation} did not complete within {self._timeout_s:g} s"
                self._broken_as = DeadlineExceededError
                raise DeadlineExceededError(f"{self._broken}. {self.watch.where_is_everyone()}")

        return check

    def _raise_if_failed(self, operation: str) -> None:
        failure = self.watch.failure
        if failure is None and not self._broken:
            return
        if failure is None:
            raise self._broken_as(f"{operation} can't be carried out: earlier, {self._broken}. Start the job again.")
        if not self._broken and self.watch.recover():
            return
        if failure["rank"] == self.rank:
            raise self._broken_as(
                f"{operation} can't be carried out: this rank failed earlier, and others did not, so that the ranks "
                f"are no longer at the same point. Start the job again. The failure was: {failure['error']}"
            )
        if failure.get("is_deadline"):  # another rank has waited longer, for the same one
            text = failure["error"].partition(": ")[2]
            raise DeadlineExceededError(
                f"{text}\n(Rank {failure['rank']} says so. This rank was in {operation}.)"
            ) from None
        raise ReplicaFailedError(f"{describe(failure)}\n(This rank was waiting for it in {operation}.)") from None

    def _raise_lost(self, operation: str, error: Exception) -> NoReturn:
        self.watch.wait_for_report(1.0)
        self._raise_if_failed(operation)
        self._broken = f"the connection to another rank broke in {operation}"
        reason = str(error).partition(". This is typically")[0]  # gloo goes on with advice
        raise ReplicaFailedError(
            f"{operation}: the connection to another rank broke. {self.watch.where_is_everyone()}\n({reason})"
        ) from None


def _raise_lost(reason: str, check: Check) -> None:
    check()
    raise ConnectionError(reason)


def _group(tensors: Sequence[Tensor]) -> list[tuple[torch.dtype, list[int]]]:
    """Return the positions of tensors of each dtype, device and layout, in an order that all ranks share."""
    groups: dict[tuple[torch.dtype, torch.device, bool], list[int]] = {}
    for index, tensor in enumerate(tensors):
        groups.setdefault((tensor.dtype, tensor.device, tensor.is_sparse), []).append(index)
    return [(key[0], indices) for key, indices in groups.items()]


def _add_columns(columns: Sequence[Tensor], members: Sequence[Tensor]) -> list[Tensor]:
    """Return the sums of what each rank brought, in the shapes of ``members``."""
    if len(members) == 1:
        summed = torch.empty(members[0].shape, dtype=members[0].dtype)
        sum_in_order(columns, summed.view(-1))
        return [summed]
    flat = torch.empty_like(columns[0])
    sum_in_order(columns, flat)
    return _unpack_copies(flat, members)


def _as_bytes(flat: Tensor) -> Tensor:
    """Return the bytes of a buffer, because not every backend knows every dtype; XLA does, but has no such views."""
    return flat if flat.device.type == "xla" else flat.view(torch.uint8)


def _unpack_copies(flat: Tensor, members: Sequence[Tensor]) -> list[Tensor]:
    """Return the parts of a buffer in memory of their own; views would make in-place changes an error."""
    return [part.to(member.dtype, copy=True) for part, member in zip(unpack(flat, members), members, strict=True)]


def _check_equal(brought: Sequence[Any], operation: str, what: str) -> None:
    if any(other != brought[0] for other in brought):
        raise InvalidArgumentError(f"{operation}: the ranks must bring the same {what}.\n{_differences(brought)}")


def _signature(tensor: Tensor) -> str:
    layout = ", sparse" if tensor.is_sparse else ""
    device = "" if tensor.device.type == "cpu" else f" on {tensor.device.type}"
    return f"{tensor.dtype}{list(tensor.shape)}{layout}{device}"


def _differences(brought: Sequence[Any]) -> str:
    """Say what each rank brought; of long lists only the number of entries and the first difference."""
    if not all(isinstance(value, list) for value in brought):
        return "\n".join(f"  rank {rank}: {value}" for rank, value in enumerate(brought))
    columns = list(itertools.zip_longest(*brought, fillvalue="nothing"))
    index, column = next((i, column) for i, column in enumerate(columns) if any(v != column[0] for v in column))
    lines = [f"  rank {rank}: {value} ({len(brought[rank])} in all)" for rank, value in enumerate(column)]
    return "\n".join([f"The first difference is at position {index}:", *lines])
