"""Gradients are summed over replicas at ``optimizer.step()``, or earlier by ``sum_gradients``.

``p.grad`` stays a replica's own until then. A global step hook of torch finds every ``step()``; each summed gradient is
marked on the tensor itself, so that nothing is summed twice. Parameters without a gradient on any replica keep
``grad is None``. Before any data moves, the processes exchange one record: what they sum, which gradients are
there, dense or sparse, and which buffers changed.
"""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from torchstrategy.collectives.call_site import call_site
from torchstrategy.collectives.cross_device_ops import CrossDeviceOps
from torchstrategy.collectives.packing import in_format_of, memory_order
from torchstrategy.collectives.process_group import WorkerGroup
from torchstrategy.devices import Placement, tensor_device
from torchstrategy.errors import DisagreementError, DivergenceError
from torchstrategy.gradients.dense import DenseSums, sum_in_buckets
from torchstrategy.gradients.early import EarlyReport, EarlySums
from torchstrategy.log import warn_once
from torchstrategy.options import CommunicationOptions, ReduceOp
from torchstrategy.replicas.buffers import BufferSync
from torchstrategy.replicas.clone import Slot
from torchstrategy.replicas.marks import check_can_be_summed, is_marked, mark, own_mark, was_edited
from torchstrategy.values import PerReplica

__all__ = [
    "GradientSum",
    "GradientSummer",
    "optimizer_parameters",
]

#: How far the sums of equal parameters may be apart, in parts of the sum of absolute values.
_RELATIVE_TOLERANCE = 1e-5
#: To sum in double precision, torch makes a copy in double precision: of so many elements at a time.
_PART_NUMBERS = 1 << 18


class GradientSum(NamedTuple):
    """What one replica brings to a sum of gradients.

    Args:
        parameters: the optimizer's parameters, in its order.
        had_examples: whether the replica's share of the batch was not empty.
        step: the number of the batch in its iteration, if it is known.
    """

    parameters: list[Tensor]
    had_examples: bool
    step: int | None = None


class _Record(NamedTuple):
    """What one process has, as bit masks over parameters and buffers, and which sums it has compressed before."""

    plan: str
    dense: int
    sparse: int
    marked: int
    buffers: int
    weights: tuple[float, ...]
    step: int | None
    low_rank: int = 0
    early: EarlyReport | None = None

    def encode(self) -> list[Any]:
        masks = [f"{mask:x}" for mask in (self.dense, self.sparse, self.marked, self.buffers)]
        return [self.plan, *masks, list(self.weights), self.step, self.low_rank, self.early]

    @classmethod
    def decode(cls, row: Sequence[Any]) -> _Record:
        dense, sparse, marked, buffers = (int(mask, 16) for mask in row[1:5])
        early = None if row[8] is None else EarlyReport(*row[8])
        return cls(row[0], dense, sparse, marked, buffers, tuple(row[5]), row[6], row[7], early)


class GradientSummer:
    """Sums gradients, and averages buffers, over the replicas of one strategy.

    Args:
        placement: where the replicas are.
        ops: combines the tensors of this process's replicas.
        workers: the processes; ``None`` if there is only this one.
        options: bucket size.
        buffers: the buffers that travel along.
        check_every: number of sums between two comparisons of the processes' parameters; the first two sums of an
            optimizer always compare.
    """

    def __init__(
        self,
        placement: Placement,
        ops: CrossDeviceOps,
        workers: WorkerGroup | None,
        options: CommunicationOptions,
        buffers: BufferSync,
        check_every: int,
    ) -> None:
        self._placement = placement
        self._ops = ops
        self._workers = workers
        self._options = options
        self._buffers = buffers
        self._check_every = check_every
        self._dense = DenseSums(placement, ops, workers, options)
        self._early: EarlySums | None = None
        if workers is not None and workers.early_device_types:
            self._early = EarlySums(workers, options.bucket_bytes)
        self._plans: dict[tuple[Any, ...], str] = {}
        self._num_sums: Counter[str] = Counter()
        self._num_calls = 0

    def __call__(self, parts: Sequence[GradientSum]) -> list[None]:
        """Sum the gradients of corresponding parameters in place of each replica's own.

        Raises:
            RuntimeError: the replicas' optimizers differ, or some replicas have summed a gradient and others not.
            InvalidArgumentError: the processes' optimizers differ.
            DivergenceError: the processes' parameters differ.
        """
        self._look_for_edits(parts)
        columns = list(zip(*(part.parameters for part in parts), strict=False))
        if any(len(part.parameters) != len(columns) for part in parts):
            raise RuntimeError(
                "The replicas' optimizers have different numbers of parameters: "
                f"{[len(part.parameters) for part in parts]}. Change parameter groups outside `run`."
            )
        slots = self._buffers.candidates()
        record = self._describe(columns, slots, parts)
        records = self._exchange(record, columns)
        dense = sparse = marked = changed = 0
        weights: list[float] = []
        for row in records:
            dense, sparse = dense | row.dense, sparse | row.sparse
            marked, changed = marked | row.marked, changed | row.buffers
            weights += row.weights
        if any(row.marked != marked for row in records):
            raise RuntimeError(
                "Some replicas have already summed gradients that others have not. Every replica must call "
                "`sum_gradients` for the same optimizers."
            )
        with torch.no_grad():
            todo = [k for k in range(len(columns)) if (dense | sparse) >> k & 1 and not marked >> k & 1]
            only_sparse = [k for k in todo if not dense >> k & 1]
            travelling = [k for k in todo if dense >> k & 1]
            taken = self._take_early(columns, records, travelling)
            self._sum_dense(columns, [k for k in travelling if k not in taken])
            for k in only_sparse:
                self._sum_sparse(columns[k])
            self._sync_buffers([slot for k, slot in enumerate(slots) if changed >> k & 1], weights)
        if changed:
            self._buffers.mark_synchronised(slots)
        for k in todo:
            for parameter in columns[k]:
                mark(parameter)
        if self._early is not None and columns:
            self._early.prepare(_early_reports(records), [k for k in travelling if not sparse >> k & 1])
        return [None] * len(parts)

    def note_backward(self, parameter: Tensor) -> None:
        """Take notice of a replica's backward pass that has added to a parameter's gradient."""
        if self._early is not None:
            self._early.note_backward(parameter)

    def sync_buffers(self) -> None:
        """Synchronise all changed buffers without gradients."""
        self([GradientSum([], had_examples=True)] * len(self._placement.devices))

    def _look_for_edits(self, parts: Sequence[GradientSum]) -> None:
        """Warn of gradients that were clipped before the sum; only now and then, for it may wait for an accelerator."""
        self._num_calls += 1
        if self._num_calls > 10 and self._num_calls % self._check_every:
            return
        edited = [p for part in parts for p in part.parameters if was_edited(p)]
        if edited:
            warn_once(
                "A gradient was changed in place between `backward` and its sum over replicas. If it was clipped, "
                "this replica's part was clipped and not the gradient of the whole batch: call "
                "`ts.get_replica_context().sum_gradients(optimizer)` before `clip_grad_norm_` or `clip_grad_value_`. "
                f"(A factor that is the same on all replicas does no harm.) The sum was made at {call_site()}."
            )

    def _describe(
        self, columns: Sequence[Sequence[Tensor]], slots: Sequence[Slot], parts: Sequence[GradientSum]
    ) -> _Record:
        dense = sparse = marked = 0
        for k, column in enumerate(columns):
            present = [parameter.grad for parameter in column if parameter.grad is not None]
            for parameter in column:
                check_can_be_summed(k, parameter)
            marks = [is_marked(parameter) for parameter in column]
            if any(marks) and not all(marks):
                raise RuntimeError(
                    f"Some replicas have already summed the gradient of parameter {k} (shape "
                    f"{tuple(column[0].shape)}) and others have not. Every replica must call `sum_gradients` for the "
                    "same optimizers, and none may run `backward` again before `optimizer.step()`."
                )
            sparse |= any(grad.is_sparse for grad in present) << k
            dense |= any(not grad.is_sparse for grad in present) << k
            marked |= all(marks) << k
        changed = 0
        for k, is_changed in enumerate(self._buffers.changed(slots)):
            changed |= is_changed << k
        plan = "" if self._workers is None else self._plan(columns)
        weights = tuple(float(part.had_examples) for part in parts)
        low_rank = 0 if self._dense.low_rank is None else self._dense.low_rank.state([column[0] for column in columns])
        early = self._early.report(plan, [column[0] for column in columns]) if self._early and columns else None
        return _Record(plan, dense, sparse, marked, changed, weights, parts[0].step, low_rank, early)

    def _plan(self, columns: Sequence[Sequence[Tensor]]) -> str:
        """Return a hash of the parameters' shapes, dtypes and memory formats."""
        layout = tuple((tuple(p.shape), str(p.dtype), memory_order(p)) for p, *_ in columns)
        plan = self._plans.get(layout)
        if plan is None:
            plan = self._plans[layout] = hashlib.sha256(repr(layout).encode()).hexdigest()[:16]
        return plan

    def _exchange(self, record: _Record, columns: Sequence[Sequence[Tensor]]) -> list[_Record]:
        if self._workers is None:
            return [record]
        operation = "the sum of gradients" if columns else "sync_buffers"
        records = [_Record.decode(row) for row in self._workers.exchange(operation, record.encode())]
        if any(row.plan != record.plan for row in records):
            layout = [[list(p.shape), str(p.dtype), *_format_name(p)] for p, *_ in columns]
            self._workers.agree(operation, layout, "parameters (shapes, dtypes and memory formats)")
        if len({row.step for row in records} - {None}) > 1:
            raise DisagreementError(
                "The ranks sum gradients of different batches of a dataset:\n"
                + "\n".join(f"  rank {rank}: batch {row.step} of its iteration" for rank, row in enumerate(records))
                + "\nA rank has left out a batch, or read one more. Every rank must run its function on every element, "
                "also where its share is empty."
            )
        if self._dense.low_rank is not None and any(row.low_rank != record.low_rank for row in records):
            self._dense.low_rank.forget([column[0] for column in columns])
        if columns:
            self._num_sums[record.plan] += 1
            count = self._num_sums[record.plan]
            if count <= 2 or count % self._check_every == 0:
                self._compare_parameters([column[0] for column in columns], self._workers)
        return records

    def _compare_parameters(self, parameters: Sequence[Tensor], workers: WorkerGroup) -> None:
        """Raise unless the parameters have equal sums on all ranks (replicas of one process are compared elsewhere)."""
        with torch.no_grad():
            sums = _checksums(parameters)
        rows = workers.exchange("the comparison of parameters between ranks", sums)
        for k, parameter in enumerate(parameters):
            totals, sizes = zip(*(row[k] for row in rows), strict=True)
            largest = max(abs(size) for size in sizes)
            if max(totals) - min(totals) > _RELATIVE_TOLERANCE * largest or _only_some_nan(totals):
                raise DivergenceError(
                    f"Parameter {k} of an optimizer (shape {tuple(parameter.shape)}) differs between the ranks before "
                    f"its gradients are summed; the sums of its elements are {list(totals)}. Every rank must change "
                    "parameters in the same way: load weights on all ranks, not on the chief only."
                )

    def _take_early(
        self, columns: Sequence[Sequence[Tensor]], records: Sequence[_Record], indices: Sequence[int]
    ) -> set[int]:
        """Take the sums that have begun during ``backward``; return the positions of their parameters."""
        if self._early is None or not columns:
            return set()
        sums = self._early.finish(_early_reports(records))
        taken = sums.keys() & set(indices)
        for k in taken:
            parameter = columns[k][0]
            parameter.grad = in_format_of(sums[k].data, parameter)
        return taken

    def _sum_dense(self, columns: Sequence[Sequence[Tensor]], indices: Sequence[int]) -> None:
        if not indices:
            return
        chosen = [columns[k] for k in indices]
        rows = [[_dense_gradient(parameter) for parameter in column] for column in chosen]
        may_overwrite = [all(_is_ours(parameter) for parameter in column) for column in chosen]
        sums = self._dense(indices, [column[0] for column in chosen], rows, may_overwrite)
        for column, row in zip(chosen, sums, strict=True):
            for parameter, total in zip(column, row, strict=True):
                # `data` has a version of its own: the parts of a bucket share one.
                parameter.grad = in_format_of(total.data, parameter)

    def _sum_sparse(self, column: Sequence[Tensor]) -> None:
        present = [parameter.grad for parameter in column if parameter.grad is not None]
        grads = present or [torch.zeros_like(column[0], layout=torch.sparse_coo)]
        first = grads[0].device
        indices = torch.cat([grad._indices().to(first) for grad in grads], 1)
        values = torch.cat([grad._values().to(first) for grad in grads])
        total = torch.sparse_coo_tensor(indices, values, column[0].shape, check_invariants=False)
        if self._workers is not None:
            total = self._workers.sum_sparse(total, "the sum of sparse gradients")
        total = total.coalesce()
        for parameter, device in zip(column, self._placement.devices, strict=True):
            parameter.grad = total.to(tensor_device(device), copy=True)

    def _sync_buffers(self, slots: Sequence[Slot], weights: Sequence[float]) -> None:
        count = sum(weights)
        if not slots or count == 0:
            return
        placement = self._placement
        own = [weights[i] / count for i in placement.local_replica_ids]
        parts = [self._buffers.contributions(slot, own, holds_first=placement.first_replica == 0) for slot in slots]
        if len(placement.devices) > 1:
            pairs = [(PerReplica(part), placement.devices) for part in parts]
            parts = [list(value.values) for value in self._ops.batch_reduce(ReduceOp.SUM, pairs, self._options)]
        if self._workers is not None:
            firsts = [part[0] for part in parts]
            totals, _ = sum_in_buckets(self._workers.start_sum, firsts, self._options.bucket_bytes)
            parts = [[total] * len(placement.devices) for total in totals]
        for slot, totals in zip(slots, parts, strict=True):
            self._buffers.store(slot, totals)


def _format_name(parameter: Tensor) -> list[str]:
    order = memory_order(parameter)
    return [] if order is None else [f"axes {list(order)} in memory"]


def _early_reports(records: Sequence[_Record]) -> list[EarlyReport]:
    return [record.early for record in records if record.early is not None]


def optimizer_parameters(optimizer: Optimizer) -> list[Tensor]:
    """Return an optimizer's parameters in its order."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _checksums(parameters: Sequence[Tensor]) -> list[list[float]]:
    """Return of each tensor the sum of its elements and that of their absolute values; waits once for each device."""
    by_device: dict[torch.device, list[int]] = {}
    for k, parameter in enumerate(parameters):
        by_device.setdefault(parameter.device, []).append(k)
    sums: list[list[float]] = [[]] * len(parameters)
    for indices in by_device.values():
        rows = torch.stack([_checksum(parameters[k]) for k in indices]).tolist()
        for k, row in zip(indices, rows, strict=True):
            sums[k] = row
    return sums


def _checksum(parameter: Tensor) -> Tensor:
    values = torch.view_as_real(parameter) if parameter.is_complex() else parameter
    parts: Sequence[Tensor] = [values]
    if values.dim() and values.device.type != "xla":  # which fuses the copy with the sums
        parts = torch.split(values, max(1, _PART_NUMBERS * len(values) // max(1, values.numel())))
    sums = []
    for part in parts:
        wide = part.double()
        sums.append(torch.stack([wide.sum(), wide.abs().sum()]))
    return torch.stack(sums).sum(0)


def _only_some_nan(values: Sequence[float]) -> bool:
    return len({math.isnan(value) for value in values}) > 1


def _is_ours(parameter: Tensor) -> bool:
    """Say whether ``_dense_gradient`` is a new tensor, or as ``backward`` made it: the program may keep other ones."""
    return parameter.grad is None or parameter.grad.is_sparse or own_mark(parameter) is not None


def _dense_gradient(parameter: Tensor) -> Tensor:
    grad = parameter.grad
    if grad is None:
        return torch.zeros_like(parameter)
    return grad.to_dense() if grad.is_sparse else grad
