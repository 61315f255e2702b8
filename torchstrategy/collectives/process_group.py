"""Collectives between processes, over process groups of the library's own.

Before any data moves, every rank brings a record of what it is about to do (sequence number, operation, signature,
call site) over connections of the library's own. Ranks that disagree all raise an error that says what each one
brought; gloo itself returns garbage or aborts. The user's default process group is neither needed nor touched.
"""

from __future__ import annotations

import functools
import itertools
import json
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import PrefixStore  # type: ignore[attr-defined]

from torchstrategy.collectives.call_site import call_site
from torchstrategy.collectives.failures import describe
from torchstrategy.collectives.packing import pack, plan_buckets, unpack
from torchstrategy.collectives.records import RecordMesh
from torchstrategy.collectives.rendezvous import Meeting
from torchstrategy.errors import DeadlineExceededError, DisagreementError, InvalidArgumentError, ReplicaFailedError
from torchstrategy.log import warn_once
from torchstrategy.options import CommunicationImplementation, CommunicationOptions

__all__ = ["WorkerGroup"]

_POLL = timedelta(milliseconds=500)
_DEFAULT_TIMEOUT_S = 1800.0
_GRACE_S = 3.0
_BROADCAST_BYTES = 32 << 20
# gloo can't add these; NCCL neither.
_ADDED_AS = {torch.int16: torch.int32}


class WorkerGroup:
    """The processes of one strategy, seen from one of them.

    Args:
        meeting: the processes.
        device_type: ``"cuda"`` carries data over NCCL, anything else over gloo.
        options: implementation and timeout.

    Raises:
        ValueError: NCCL is asked for with CPU devices.
    """

    def __init__(self, meeting: Meeting, device_type: str, options: CommunicationOptions) -> None:
        store, rank, size = meeting.store, meeting.rank, meeting.size
        self.rank = rank
        self.size = size
        self._timeout_s = options.timeout_seconds or _DEFAULT_TIMEOUT_S
        self._sequence = 0
        self._broken = ""
        self.watch = meeting.watch
        self._records = RecordMesh(PrefixStore("records", store), meeting.host, rank, size, self._timeout_s)
        # Our own deadline comes first: it can say who did not arrive. gloo's must follow soon, because the process
        # can't end while gloo waits.
        timeout = timedelta(seconds=self._timeout_s + _GRACE_S)
        self._data: Any = dist.ProcessGroupGloo(PrefixStore("data", store), rank, size, timeout)
        self._nccl: Any = None
        self.implementation = _choose(options.implementation, device_type)
        if self.implementation is CommunicationImplementation.NCCL:
            nccl_options = dist.ProcessGroupNCCL.Options()
            self._nccl = dist.ProcessGroupNCCL(PrefixStore("nccl", store), rank, size, nccl_options)

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
        self._sequence += 1
        self.watch.num_collectives += 1
        site = call_site()
        self.watch.position = f"in {operation} (collective number {self._sequence}) at {site}"
        body = json.dumps([self._sequence, operation, site, payload], separators=(",", ":")).encode()
        records = self._exchange_bytes(body, operation)
        self.watch.position = f"after {operation} (collective number {self._sequence}) at {site}"
        if all(record == body for record in records):
            return [payload] * self.size
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
        return [row[3] for row in rows]

    def report_failure(self, operation: str, error: BaseException) -> None:
        """Tell the other ranks that this one failed, so that none waits for it."""
        self.watch.report(operation, error)

    def agree(self, operation: str, signature: Any, what: str) -> None:
        """Check that all ranks bring the same signature.

        Raises:
            InvalidArgumentError: they do not.
        """
        brought = self.exchange(operation, signature)
        if any(other != brought[0] for other in brought):
            raise InvalidArgumentError(f"{operation}: the ranks must bring the same {what}.\n{_differences(brought)}")

    def all_reduce(self, tensors: Sequence[Tensor], operation: str) -> list[Tensor]:
        """Return the sum over ranks of each tensor, each in memory of its own.

        Raises:
            InvalidArgumentError: number, shapes or dtypes differ between ranks.
        """
        self.agree(operation, [_signature(tensor) for tensor in tensors], "number, shapes and dtypes of tensors")
        groups: dict[tuple[torch.dtype, torch.device], list[int]] = {}
        results: list[Tensor] = list(tensors)
        for index, tensor in enumerate(tensors):
            if tensor.is_sparse:
                results[index] = self.sum_sparse(tensor, operation)
            else:
                groups.setdefault((tensor.dtype, tensor.device), []).append(index)
        for (dtype, _), indices in groups.items():
            members = [tensors[i] for i in indices]
            flat = pack(members).to(_ADDED_AS.get(dtype, dtype))
            self.start_sum(flat, operation)()
            for i, summed in zip(indices, unpack(flat, members), strict=True):
                results[i] = summed.to(dtype, copy=True)  # a view of `flat` would make in-place changes an error
        return results

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
        infos = self.exchange(operation, [list(tensor.shape), str(tensor.dtype)])
        if any(info[1] != infos[0][1] for info in infos):
            lines = "\n".join(f"  rank {rank}: {info[1]}" for rank, info in enumerate(infos))
            raise InvalidArgumentError(f"{operation}: the ranks must bring the same dtype.\n{lines}")
        shapes = [torch.Size(info[0]) for info in infos]
        longest = max(shape.numel() for shape in shapes)
        if longest == 0:
            return [tensor.new_empty(shape) for shape in shapes]
        padded = tensor.new_zeros(longest)
        padded[: tensor.numel()] = tensor.reshape(-1)
        outputs = [torch.empty_like(padded) for _ in range(self.size)]
        # As bytes, because not every backend knows every dtype.
        as_bytes = [out.view(torch.uint8) for out in outputs]
        self._wait_data(self._group_of(tensor).allgather([as_bytes], [padded.view(torch.uint8)]), tensor, operation)
        return [out[: shape.numel()].view(shape) for out, shape in zip(outputs, shapes, strict=True)]

    def broadcast(self, tensors: Sequence[Tensor], operation: str) -> None:
        """Overwrite the tensors with rank 0's.

        Raises:
            InvalidArgumentError: number, shapes or dtypes differ between ranks.
        """
        self.agree(operation, [_signature(tensor) for tensor in tensors], "number, shapes and dtypes of tensors")
        options = dist.BroadcastOptions()
        options.rootRank = 0
        for bucket in plan_buckets(tensors, _BROADCAST_BYTES):
            members = [tensors[i] for i in bucket]
            flat = pack(members)
            if flat.numel() == 0:
                continue
            self._wait_data(self._group_of(flat).broadcast([flat.view(torch.uint8)], options), flat, operation)
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
        options = dist.AllreduceOptions()
        options.reduceOp = dist.ReduceOp.SUM  # type: ignore[assignment]
        numbers = torch.view_as_real(tensor) if tensor.is_complex() else tensor
        work = self._group_of(tensor).allreduce([numbers], options)
        return functools.partial(self._wait_data, work, tensor, operation)

    def _group_of(self, tensor: Tensor) -> Any:
        return self._nccl if tensor.is_cuda and self._nccl is not None else self._data

    def _exchange_bytes(self, body: bytes, operation: str) -> list[bytes]:
        check = self._checker(operation)
        check()
        try:
            return self._records.exchange(body, check)
        except ConnectionError as error:
            self._raise_lost(operation, error)
        except BaseException:
            self._broken = self._broken or f"{operation} was given up"
            raise

    def _wait_data(self, work: Any, tensor: Tensor, operation: str) -> None:
        if tensor.is_cuda and self._nccl is not None:
            # Only the GPU waits. (With a time limit NCCL would block this thread, and give up for good at its end.)
            self._raise_if_failed(operation)
            work.wait()
        else:
            self._wait(work, operation)

    def _wait(self, work: Any, operation: str) -> None:
        """Wait in slices, so that another rank's failure ends the wait."""
        check = self._checker(operation)
        while True:
            check()
            try:
                work.wait(_POLL)
                return
            except RuntimeError as error:
                if work.is_completed():
                    self._raise_lost(operation, error)

    def _checker(self, operation: str) -> Callable[[], None]:
        """Return a function that raises when another rank has failed or the time is up."""
        deadline = time.monotonic() + self._timeout_s

        def check() -> None:
            self._raise_if_failed(operation)
            if time.monotonic() > deadline:
                self._broken = f"{operation} did not complete within {self._timeout_s:g} s"
                raise DeadlineExceededError(f"{self._broken}. {self.watch.where_is_everyone()}")

        return check

    def _raise_if_failed(self, operation: str) -> None:
        failure = self.watch.failure
        if failure is None and not self._broken:
            return
        if failure is None:
            raise ReplicaFailedError(f"{operation} can't be carried out: earlier, {self._broken}. Start the job again.")
        if not self._broken and self.watch.recover():
            return
        if failure["rank"] == self.rank:
            raise ReplicaFailedError(
                f"{operation} can't be carried out: this rank failed earlier, and others did not, so that the ranks "
                f"are no longer at the same point. Start the job again. The failure was: {failure['error']}"
            )
        raise ReplicaFailedError(f"{describe(failure)}\n(This rank was waiting for it in {operation}.)") from None

    def _raise_lost(self, operation: str, error: Exception) -> NoReturn:
        self.watch.wait_for_report(1.0)
        self._raise_if_failed(operation)
        self._broken = f"the connection to another rank broke in {operation}"
        reason = str(error).partition(". This is typically")[0]  # gloo goes on with advice
        raise ReplicaFailedError(
            f"{operation}: the connection to another rank broke. {self.watch.where_is_everyone()}\n({reason})"
        ) from None


def _choose(implementation: CommunicationImplementation, device_type: str) -> CommunicationImplementation:
    if implementation is CommunicationImplementation.AUTO:
        nccl = device_type == "cuda" and dist.is_nccl_available()
        return CommunicationImplementation.NCCL if nccl else CommunicationImplementation.RING
    if implementation is CommunicationImplementation.NCCL and device_type != "cuda":
        raise ValueError(
            f"CommunicationImplementation.NCCL needs GPUs, but the replicas are on {device_type!r}. Use RING or AUTO."
        )
    return implementation


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
