"""Collectives between processes, over process groups of the library's own.

Before any data moves, every rank brings a record of what it is about to do (sequence number, operation, signature,
call site) over a small gloo group. Ranks that disagree all raise an error that says what each one brought; gloo itself
returns garbage or aborts. The user's default process group is neither needed nor touched.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]

from torchstrategy.collectives.call_site import call_site
from torchstrategy.collectives.failures import FailureWatch, describe
from torchstrategy.collectives.packing import pack, unpack
from torchstrategy.errors import DeadlineExceededError, DisagreementError, InvalidArgumentError, ReplicaFailedError
from torchstrategy.options import CommunicationImplementation, CommunicationOptions

__all__ = ["WorkerGroup"]

_RECORD_BYTES = 512
_HEADER_BYTES = 8
_POLL = timedelta(milliseconds=500)
_DEFAULT_TIMEOUT_S = 1800.0

Signature = list[list[Any]]


class WorkerGroup:
    """The processes of one strategy, seen from one of them.

    Args:
        store: the job's key-value store, with a prefix of this group's own.
        rank: this process's id.
        size: number of processes.
        device_type: ``"cuda"`` carries data over NCCL, anything else over gloo.
        options: implementation and timeout.

    Raises:
        ValueError: NCCL is asked for with CPU devices.
    """

    def __init__(self, store: Store, rank: int, size: int, device_type: str, options: CommunicationOptions) -> None:
        self.rank = rank
        self.size = size
        self._timeout_s = options.timeout_seconds or _DEFAULT_TIMEOUT_S
        self._sequence = 0
        # The clone is a connection of its own: the watcher must not wait behind another request.
        own_connection = store.clone()  # type: ignore[attr-defined]
        self.watch = FailureWatch(PrefixStore("watch", own_connection), rank, size)
        # Our own deadline comes first: it can say who did not arrive.
        timeout = timedelta(seconds=self._timeout_s + 60)
        self._control: Any = dist.ProcessGroupGloo(PrefixStore("control", store), rank, size, timeout)
        self.implementation = _choose(options.implementation, device_type)
        self._data: Any
        if self.implementation is CommunicationImplementation.NCCL:
            nccl_options = dist.ProcessGroupNCCL.Options()
            self._data = dist.ProcessGroupNCCL(PrefixStore("data", store), rank, size, nccl_options)
        else:
            self._data = dist.ProcessGroupGloo(PrefixStore("data", store), rank, size, timeout)
        self._send = torch.zeros(_RECORD_BYTES, dtype=torch.uint8)
        self._received = torch.zeros(size, _RECORD_BYTES, dtype=torch.uint8)

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
        site = call_site()
        self.watch.position = f"in {operation} (collective number {self._sequence}) at {site}"
        body = json.dumps([self._sequence, operation, site, payload], separators=(",", ":")).encode()
        records = self._all_gather_bytes(body, operation)
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
        return [row[3] for row in rows]

    def agree(self, operation: str, signature: Any, what: str) -> None:
        """Check that all ranks bring the same signature.

        Raises:
            InvalidArgumentError: they do not.
        """
        brought = self.exchange(operation, signature)
        if any(other != brought[0] for other in brought):
            raise InvalidArgumentError(
                f"{operation}: the ranks must bring the same {what}.\n"
                + "\n".join(f"  rank {rank}: {value}" for rank, value in enumerate(brought))
            )

    def all_reduce(self, tensors: Sequence[Tensor], operation: str) -> list[Tensor]:
        """Return the sum over ranks of each tensor.

        Raises:
            InvalidArgumentError: number, shapes or dtypes differ between ranks.
        """
        self.agree(operation, _signature(tensors), "number, shapes and dtypes of tensors")
        groups: dict[tuple[torch.dtype, torch.device], list[int]] = {}
        for index, tensor in enumerate(tensors):
            groups.setdefault((tensor.dtype, tensor.device), []).append(index)
        results: list[Tensor] = list(tensors)
        for indices in groups.values():
            members = [tensors[i] for i in indices]
            flat = pack(members)
            self.sum_(flat, operation)
            for i, summed in zip(indices, unpack(flat, members), strict=True):
                results[i] = summed
        return results

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
        self._wait(self._data.allgather([outputs], [padded]), operation)
        return [out[: shape.numel()].view(shape) for out, shape in zip(outputs, shapes, strict=True)]

    def broadcast(self, tensors: Sequence[Tensor], operation: str) -> None:
        """Overwrite the tensors with rank 0's.

        Raises:
            InvalidArgumentError: number, shapes or dtypes differ between ranks.
        """
        self.agree(operation, _signature(tensors), "number, shapes and dtypes of tensors")
        options = dist.BroadcastOptions()
        options.rootRank = 0
        for tensor in tensors:
            if tensor.numel():
                data = tensor.detach().contiguous()
                self._wait(self._data.broadcast([data], options), operation)
                with torch.no_grad():
                    tensor.copy_(data)

    def broadcast_object(self, operation: str, payload: Any) -> Any:
        """Return rank 0's payload (anything JSON can hold) on every rank."""
        return self.exchange(operation, payload if self.rank == 0 else None)[0]

    def sum_(self, tensor: Tensor, operation: str) -> None:
        """Sum a contiguous tensor over ranks in place; the caller has checked that the ranks agree."""
        self._wait(self.start_sum(tensor), operation)

    def start_sum(self, tensor: Tensor) -> Any:
        """Start ``sum_`` and return the work to give to ``finish``."""
        options = dist.AllreduceOptions()
        options.reduceOp = dist.ReduceOp.SUM  # type: ignore[assignment]
        return self._data.allreduce([tensor], options)

    def finish(self, work: Any, operation: str) -> None:
        """Wait for a started collective; errors as in ``exchange``."""
        self._wait(work, operation)

    def barrier(self, operation: str) -> None:
        """Wait until every rank is here."""
        self.exchange(operation, None)

    def report_failure(self, operation: str, error: BaseException, replica_id: int) -> None:
        """Tell the other ranks that this one failed, unless the error is their failure."""
        if not isinstance(error, (ReplicaFailedError, DisagreementError, DeadlineExceededError)):
            self.watch.report(operation, error, replica_id)

    def close(self) -> None:
        """Leave the group."""
        self.watch.close()

    def _all_gather_bytes(self, body: bytes, operation: str) -> list[bytes]:
        room = _RECORD_BYTES - _HEADER_BYTES
        buffer = self._send.numpy()
        head = len(body).to_bytes(_HEADER_BYTES, "little") + body[:room]
        buffer[: len(head)] = memoryview(head)
        buffer[len(head) :] = 0
        self._wait(self._control._allgather_base(self._received.view(-1), self._send), operation)
        rows = [row.tobytes() for row in self._received.numpy()]
        lengths = [int.from_bytes(row[:_HEADER_BYTES], "little") for row in rows]
        longest = max(lengths)
        if longest <= room:
            return [row[_HEADER_BYTES : _HEADER_BYTES + n] for row, n in zip(rows, lengths, strict=True)]
        send = torch.zeros(longest, dtype=torch.uint8)
        send.numpy()[: len(body)] = memoryview(body)
        received = torch.zeros(self.size, longest, dtype=torch.uint8)
        self._wait(self._control._allgather_base(received.view(-1), send), operation)
        return [row.tobytes()[:n] for row, n in zip(received.numpy(), lengths, strict=True)]

    def _wait(self, work: Any, operation: str) -> None:
        """Wait in slices, so that another rank's failure ends the wait."""
        deadline = time.monotonic() + self._timeout_s
        while True:
            self._raise_if_failed(operation)
            try:
                work.wait(_POLL)
                return
            except RuntimeError as error:
                if work.is_completed():
                    self._raise_lost(operation, error)
            if time.monotonic() > deadline:
                where = "\n".join(self.watch.where_is_everyone())
                raise DeadlineExceededError(
                    f"{operation} did not complete within {self._timeout_s:g} s. Where each rank is:\n{where}"
                )

    def _raise_if_failed(self, operation: str) -> None:
        failure = self.watch.failure
        if failure is None:
            return
        if failure["rank"] == self.rank:
            raise ReplicaFailedError(
                f"{operation} can't be carried out: this rank failed earlier ({failure['error']}), and the other "
                "ranks have ended. Start the job again."
            )
        raise ReplicaFailedError(f"{describe(failure)}\n(This rank was waiting for it in {operation}.)")

    def _raise_lost(self, operation: str, error: RuntimeError) -> None:
        self.watch.wait_for_report(1.0)
        self._raise_if_failed(operation)
        where = "\n".join(self.watch.where_is_everyone())
        raise ReplicaFailedError(
            f"{operation}: the connection to another rank broke. Where each rank is:\n{where}\n({error})"
        ) from error


def _choose(implementation: CommunicationImplementation, device_type: str) -> CommunicationImplementation:
    if implementation is CommunicationImplementation.AUTO:
        nccl = device_type == "cuda" and dist.is_nccl_available()
        return CommunicationImplementation.NCCL if nccl else CommunicationImplementation.RING
    if implementation is CommunicationImplementation.NCCL and device_type != "cuda":
        raise ValueError(
            f"CommunicationImplementation.NCCL needs GPUs, but the replicas are on {device_type!r}. Use RING or AUTO."
        )
    return implementation


def _signature(tensors: Sequence[Tensor]) -> Signature:
    return [[list(tensor.shape), str(tensor.dtype)] for tensor in tensors]
