"""Gradients are summed over replicas at ``optimizer.step()``, or earlier by ``sum_gradients``.

``p.grad`` stays a replica's own until then. A global step hook of torch finds every ``step()``; a ledger knows which
gradients are summed already. Parameters without a gradient on any replica keep ``grad is None``. Before any data moves,
the processes exchange one record: what they sum, which gradients are there, dense or sparse, and which buffers changed.
"""

from __future__ import annotations

import operator
import weakref
from collections.abc import Collection, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.optim import Optimizer

from torchstrategy.base.devices import Placement, is_capturing, tensor_device
from torchstrategy.base.log import call_site, warn_once
from torchstrategy.base.names import lines_of_ranks
from torchstrategy.base.options import CommunicationOptions, ReduceOp
from torchstrategy.base.values import PerReplica
from torchstrategy.collectives.cross_device_ops import CrossDeviceOps
from torchstrategy.collectives.process_group import WorkerGroup
from torchstrategy.collectives.summing import in_format_of
from torchstrategy.errors import DisagreementError
from torchstrategy.gradients.dense import OPERATION, DenseSums, sum_in_buckets
from torchstrategy.gradients.early import EarlyReport, EarlySums
from torchstrategy.gradients.ledger import GradientLedger
from torchstrategy.gradients.mean_losses import NUM_LOOKS, MeanLossCheck
from torchstrategy.gradients.notes import State
from torchstrategy.gradients.plan import Look, Plan, Plans, describe_layout, look_at
from torchstrategy.gradients.sharded_states import StateShard
from torchstrategy.gradients.sync_check import compare_between_ranks, names_of
from torchstrategy.replicas.buffers import BufferSync
from torchstrategy.replicas.divergence import check_rows, hyper_parameters
from torchstrategy.replicas.divergence import digest as digest_of
from torchstrategy.replicas.fingerprints import fingerprints
from torchstrategy.replicas.module_tensors import Slot

__all__ = [
    "GradientSum",
    "GradientSummer",
    "doubt",
]


#: In so many first sums of a strategy one looks at gradients that the program has changed.
_NUM_LOOKS_AT_EDITS = 10
_Value = TypeVar("_Value")


class GradientSum(NamedTuple):
    """What one replica brings to a sum of gradients.

    Args:
        parameters: the optimizer's parameters, in its order, without those that FSDP2 has divided, and sums.
        had_examples: whether the replica's share of the batch was not empty.
        run: the replica's context.
        step: the number of the batch in its iteration, if it is known.
        is_fresh: whether all gradients are the replica's own, whatever they look like.
        uses_applied: whether a sum that a step has used may be used again as it is.
        optimizer: the replica's, whose hyper-parameters must be the others'; ``None`` if only buffers are summed,
            or one copy steps for all replicas.
        shard: what this rank has of the optimizer's states, if they are split over ranks.
        is_divided: whether FSDP2 has divided some of the optimizer's parameters.
    """

    parameters: list[Tensor]
    had_examples: bool
    run: Any = None
    step: int | None = None
    is_fresh: bool = False
    uses_applied: bool = False
    optimizer: Optimizer | None = None
    shard: StateShard | None = None
    is_divided: bool = False


class _Record(NamedTuple):
    """What the processes must know of each other at a sum: what most of them agree in, and what is united.

    Args:
        plan: digest of the parameters' layout.
        number: of the optimizer, as they are counted.
        step: the number of the batch in its iteration, if it is known.
        doubts: the position of each gradient that may be a sum, whether it is one if all replicas hold the same, and
            its fingerprint on each local replica.
        rates: digest of the optimizer's hyper-parameters.
        writes: how often the optimizer's parameters were written to.
        low_rank: digest of the state of sums of low rank.
        early: the plan and the number of what was started early.
        buffers: digest of which buffers there are.
        reduced: fingerprints of gradients that may be the program's own sums, if all local replicas hold the same.
        shard: of an optimizer whose states are split over ranks, how often this rank's part was loaded, and how many of
            its steps did not come to their end.
    """

    plan: str
    number: int
    step: int | None
    doubts: list[list[Any]]
    rates: int = 0
    writes: int = 0
    low_rank: int = 0
    early: list[int] | None = None
    buffers: int = 0
    reduced: list[int] | None = None
    shard: list[int] | None = None


class _Masks(NamedTuple):
    """What processes have, as bit masks over parameters, buffers and what was started early; united by OR."""

    dense: int = 0
    sparse: int = 0
    marked: int = 0
    unmarked: int = 0
    buffers: int = 0
    started: int = 0
    stale: int = 0


class _Found(NamedTuple):
    """The records of all processes, their masks united, and how many of all replicas had examples."""

    records: list[_Record]
    masks: _Masks
    num_with_examples: int

    def early(self) -> list[EarlyReport]:
        """Return for each plan that a process has started what all have."""
        plans = dict.fromkeys(tuple(record.early) for record in self.records if record.early is not None)
        num_started = self.masks.started.bit_length()
        return [EarlyReport(plan, opened, num_started, self.masks.stale) for plan, opened in plans]


class GradientSummer:
    """Sums gradients, and averages buffers, over the replicas of one strategy.

    Args:
        placement: where the replicas are.
        ops: combines the tensors of this process's replicas.
        workers: the processes; ``None`` if there is only this one.
        options: bucket size.
        buffers: the buffers that travel along.
        ledger: what the gradients are.
        check_every: number of sums of an optimizer between two comparisons of the processes' parameters; its first
            two sums always compare.
    """

    def __init__(
        self,
        placement: Placement,
        ops: CrossDeviceOps,
        workers: WorkerGroup | None,
        options: CommunicationOptions,
        buffers: BufferSync,
        ledger: GradientLedger,
        check_every: int,
    ) -> None:
        self._placement = placement
        self._ops = ops
        self._workers = workers
        self._options = options
        self._buffers = buffers
        self.ledger = ledger
        self._check_every = check_every
        self._dense = DenseSums(placement, ops, workers, options)
        #: Sums that begin during ``backward``, if any do.
        self.early: EarlySums | None = None
        if workers is not None and workers.early_device_types:
            self.early = EarlySums(workers, options.bucket_bytes, ledger)
        self._plans = Plans()
        #: Of optimizers whose parameters FSDP2 has divided, all of them: plans of none.
        self._all_divided: weakref.WeakKeyDictionary[Optimizer, Plan] = weakref.WeakKeyDictionary()
        #: Looks at the losses that the replicas differentiate.
        self.mean_losses = MeanLossCheck()
        #: For each local replica, whether it had examples since buffers were brought together.
        self._had_examples = [False] * len(placement.devices)
        self._num_calls = 0

    def __call__(self, parts: Sequence[GradientSum]) -> list[None]:
        """Sum the gradients of corresponding parameters in place of each replica's own.

        Raises:
            RuntimeError: the replicas' optimizers differ, or some replicas have summed a gradient and others not.
            InvalidArgumentError: the processes' optimizers differ.
            DivergenceError: the processes' parameters differ.
        """
        self._look_for_edits(parts)
        count = len(parts[0].parameters)
        if any(len(part.parameters) != count for part in parts):
            raise RuntimeError(
                "The replicas' optimizers have different numbers of parameters: "
                f"{[len(part.parameters) for part in parts]}. Change parameter groups outside `run`."
            )
        firsts = parts[0].parameters
        plan, looks = self._look_at(parts)
        # Whose buffers go with divided parameters isn't known: at times their modules show others.
        slots = self._buffers.candidates(0 if plan is None or parts[0].is_divided else plan.number, firsts)
        record, masks = self._describe(plan, slots, parts, looks)
        found = self._exchange(record, masks, plan, parts)
        if plan is None and parts[0].is_divided and (optimizer := parts[0].optimizer) is not None:
            plan = self._all_divided.setdefault(optimizer, Plan(0, (), ()))
        if plan is not None:
            self._look_at_losses(plan, parts)
        dense, sparse, marked, unmarked, changed, *_ = found.masks
        if self._workers is not None and any(row.buffers != record.buffers for row in found.records):
            slots, changed = self._buffers.common(slots, _positions(masks.buffers), self._workers.exchange)
        if marked & unmarked:
            k = _positions(marked & unmarked)[0]
            raise RuntimeError(_summed_by_some(k, firsts[k]))
        _refuse_own_sums([row.reduced for row in found.records])
        edited = _settle_doubts([row.doubts for row in found.records], firsts)
        todo = (dense | sparse) & ~(marked | edited)
        with torch.no_grad():
            early = found.early()
            taken = self._take_early(firsts, early, _positions(todo & dense))
            self._sum_dense(parts, [k for k in _positions(todo & dense) if k not in taken], looks)
            columns = {id(firsts[k]): [part.parameters[k] for part in parts] for k in _positions(todo & ~dense)}
            for column in columns.values():  # one for each parameter, which may be there twice
                self._sum_sparse(column)
            self._sync_buffers([slots[k] for k in _positions(changed)], parts, found)
        if changed:
            self._buffers.mark_synchronised(slots)
        summed = _positions(todo | edited)
        for part in parts:
            self.ledger.note_sum([part.parameters[k] for k in summed], part.run)
        if self.early is not None and firsts:
            self.early.prepare(early, _positions(todo & dense & ~sparse))
        return [None] * len(parts)

    def sync_buffers(self) -> None:
        """Synchronise all changed buffers without gradients."""
        self([GradientSum([], had_examples=has) for has in self._had_examples])

    def note_examples(self, contexts: Sequence[Any]) -> None:
        """Note which replicas have examples in a run that begins."""
        for context in contexts:
            if not self._had_examples[context.local_id]:
                self._had_examples[context.local_id] = context._num_own_examples != 0

    def _look_at(self, parts: Sequence[GradientSum]) -> tuple[Plan | None, list[Look]]:
        """Return the plan of the first local replica's parameters, and what gradients each replica has."""
        firsts = parts[0].parameters
        plan = self._plans.last_of(firsts) if firsts else None
        looks = [look_at(part.parameters, plan, self.ledger) for part in parts]
        if firsts and (plan is None or not looks[0].fits):
            plan = self._plans.of(firsts)
            looks.clear()  # they hold the gradients, which would look as if the program did
            looks = [look_at(part.parameters, plan, self.ledger) for part in parts]
        return plan, looks

    def _look_for_edits(self, parts: Sequence[GradientSum]) -> None:
        """Warn of gradients that were used before the sum.

        Of clipped ones only now and then, for it may wait for an accelerator.
        """
        self._num_calls += 1
        if self._looks_at_edits() and self._are_edited(parts):
            warn_once(
                "A gradient was changed in place between `backward` and its sum over replicas. If it was clipped, "
                "this replica's part was clipped and not the gradient of the whole batch: call "
                "`ts.get_replica_context().sum_gradients(optimizer)` before `clip_grad_norm_` or `clip_grad_value_`. "
                f"(A factor that is the same on all replicas does no harm.) The sum was made at {call_site()}.",
                of=self,
            )
        if cleared_at := self.ledger.cleared_at:
            self.ledger.cleared_at = ""
            warn_once(
                "Parameters were changed between `backward` and `zero_grad`, and their gradients were not summed over "
                "the replicas. If the change was computed from the gradients, as by SAM's `first_step`, each replica "
                "has made another one: call `ts.get_replica_context().sum_gradients(optimizer)` before it. (A change "
                f"that is the same on all replicas does no harm.) They were cleared at {cleared_at}.",
                of=self,
            )

    def _looks_at_edits(self) -> bool:
        return self._num_calls <= _NUM_LOOKS_AT_EDITS or self._num_calls % self._check_every == 0

    def _are_edited(self, parts: Sequence[GradientSum]) -> bool:
        return any(self.ledger.was_edited(parameter) for part in parts for parameter in part.parameters)

    def _look_at_losses(self, plan: Plan, parts: Sequence[GradientSum]) -> None:
        """Take notice of a sum of an optimizer's gradients, in the first of which losses are looked at."""
        is_new = plan.num_sums == 0
        plan.num_sums += 1
        if plan.num_sums <= NUM_LOOKS:
            parameters = [parameter for part in parts for parameter in part.parameters]
            is_edited = self._are_edited(parts) or any(map(self.ledger.was_replaced, parameters))
            self.mean_losses.before_sum(parameters, is_new=is_new, is_edited=is_edited)

    def _describe(
        self, plan: Plan | None, slots: Sequence[Slot], parts: Sequence[GradientSum], looks: Sequence[Look]
    ) -> tuple[_Record, _Masks]:
        """Return what the processes must know."""
        firsts = parts[0].parameters
        dense = sparse = marked = 0
        doubts: list[list[Any]] = []
        for look in looks:
            dense, sparse = dense | look.dense, sparse | look.sparse
        are_as_made = not sparse and all(look.are_as_made for look in looks)
        if not are_as_made:
            columns = zip(*[look.gradients for look in looks], strict=True)
            states = zip(*[self._states(part) for part in parts], strict=True)
            for k, (column, found) in enumerate(zip(columns, states, strict=True)):
                present = [grad for grad in column if grad is not None]
                if not present or found.count(State.LOCAL) == len(found):
                    continue
                is_summed = found[0] is State.SUMMED
                if any((state is State.SUMMED) != is_summed for state in found):
                    raise RuntimeError(_summed_by_some(k, firsts[k]))
                if all(state in (State.EDITED, State.DOUBTFUL) for state in found):
                    doubts.append([k, State.DOUBTFUL not in found, *fingerprints(present)])
                marked |= is_summed << k
        changed = 0
        for k, is_changed in enumerate(self._buffers.changed(slots)):
            changed |= is_changed << k
        reduced = None if are_as_made else self._sums_of_the_program(parts)
        buffers = 0 if self._workers is None else self._buffers.digest(slots)
        low_rank = 0 if self._dense.low_rank is None else self._dense.low_rank.state(firsts)
        early = self.early.report(plan, firsts) if self.early and plan is not None else None
        digest, number = ("", 0) if plan is None else (plan.digest, plan.number)
        step, optimizer, shard = parts[0].step, parts[0].optimizer, parts[0].shard
        rates = writes = 0
        if optimizer is not None and self._workers is not None:
            rates, writes = digest_of(optimizer), sum([parameter._version for parameter in firsts])
            writes -= 0 if shard is None else shard.num_writes
        unmarked = ((1 << len(firsts)) - 1) & ~marked
        masks = _Masks(dense, sparse, marked, unmarked, changed)
        loads = None if shard is None else [shard.num_loads, shard.num_unfinished]
        begun = None
        if early is not None:
            begun = [early.plan, early.opened]
            masks = masks._replace(started=(1 << early.num_started) - 1, stale=early.stale)
        return _Record(digest, number, step, doubts, rates, writes, low_rank, begun, buffers, reduced, loads), masks

    def _sums_of_the_program(self, parts: Sequence[GradientSum]) -> list[int] | None:
        """Return fingerprints of the gradients that the program may have summed itself.

        On accelerators, for which that waits, only now and then, as of what was clipped.

        Sums are equal on all replicas. So if one is not, all are the replicas' own, whatever was done to them.
        """
        waits = self._placement.devices[0].type != "cpu" and not self._looks_at_edits()
        if waits or any(part.is_fresh for part in parts):
            return None
        rows = []
        for part in parts:
            if not getattr(part.run, "_has_all_reduced", False):
                return None
            assigned = [p.grad for p in part.parameters if self.ledger.is_the_programs(p) and p.grad is not None]
            rows.append(fingerprints([grad for grad in assigned if not grad.is_sparse and _tells(grad)]))
        return list(rows[0]) if all(row == rows[0] for row in rows) else None

    def _states(self, part: GradientSum) -> list[State]:
        """Say of each of a replica's gradients whether it is to be summed."""
        if part.is_fresh:
            return [State.LOCAL] * len(part.parameters)
        return self.ledger.states(part.parameters, part.run, uses_applied=part.uses_applied)

    def _exchange(self, record: _Record, masks: _Masks, plan: Plan | None, parts: Sequence[GradientSum]) -> _Found:
        firsts, optimizer, shard = parts[0].parameters, parts[0].optimizer, parts[0].shard
        count = sum(part.had_examples for part in parts)
        if self._workers is None:
            return _Found([record], masks, count)
        if self._placement.devices[0].type != "cpu" and is_capturing():
            raise RuntimeError(
                f"A CUDA graph is being captured at {call_site()}, where gradients are to be summed over processes. "
                "A replayed graph could not ask the other ranks what they sum. Capture forward and backward only; "
                "after the replay call `sum_gradients(optimizer, fresh=True)` and `optimizer.step()`."
            )
        operation = OPERATION if firsts else "sync_buffers"
        rows, united, (num_with_examples,) = self._workers.unite(operation, record, masks, [count])
        distinct = {id(row): _Record(*row) for row in rows}  # few: equal ones come as one object
        records = [distinct[id(row)] for row in rows]
        if any(row.plan != record.plan for row in records):
            self._workers.agree(operation, describe_layout(firsts), "parameters (shapes, dtypes and memory formats)")
        if len({row.number for row in records}) > 1:
            raise DisagreementError(
                "The ranks sum the gradients of different optimizers, whose parameters have equal shapes:\n"
                + lines_of_ranks([f"optimizer number {row.number}" for row in records])
                + "\n(counted by their first steps). Every rank must step the same optimizers in the same order."
            )
        if len({row.step for row in records} - {None}) > 1:
            raise DisagreementError(
                "The ranks sum gradients of different batches of a dataset:\n"
                + lines_of_ranks([f"batch {row.step} of its iteration" for row in records])
                + "\nA rank has left out a batch, or read one more. Every rank must run its function on every element, "
                "also where its share is empty."
            )
        if optimizer is not None and len({row.rates for row in records}) > 1:
            check_rows(
                self._workers.exchange("the comparison of hyper-parameters", hyper_parameters(optimizer)), call_site()
            )
        if self._dense.low_rank is not None and any(row.low_rank != record.low_rank for row in records):
            self._dense.low_rank.forget(firsts)
        is_due = plan is not None and plan.is_due([row.writes for row in records], self._check_every)
        if (shard is not None and shard.must_compare([row.shard for row in records])) or is_due:
            compare_between_ranks(firsts, self._workers, lambda k: names_of(self._buffers.record, firsts)[k])
        return _Found(records, _Masks(*united), int(num_with_examples))

    def _take_early(
        self, parameters: Sequence[Tensor], reports: Sequence[EarlyReport], indices: Sequence[int]
    ) -> Collection[int]:
        """Take the sums that have begun during ``backward``; return the positions of their parameters."""
        if self.early is None or not parameters:
            return ()
        sums = self.early.finish(reports)
        taken = sums.keys() & set(indices)
        for k in taken:
            parameters[k].grad = in_format_of(sums[k].data, parameters[k])
        return taken

    def _sum_dense(self, parts: Sequence[GradientSum], indices: Sequence[int], looks: Sequence[Look]) -> None:
        if not indices:
            return
        chosen = [_at(indices, part.parameters) for part in parts]
        gradients = [_at(indices, look.gradients) for look in looks]
        may, *others = [_at(indices, look.may_overwrite) for look in looks]
        for other in others:
            may = list(map(operator.and_, may, other))
        rows: list[Sequence[Tensor]] = []
        for look, row, parameters in zip(looks, gradients, chosen, strict=True):
            if look.are_all_dense:
                rows.append(row)  # type: ignore[arg-type]
            else:
                rows.append([_dense(grad, parameter) for grad, parameter in zip(row, parameters, strict=True)])
        sums = self._dense(indices, chosen[0], rows, may)
        for parameters, row, totals in zip(chosen, gradients, sums, strict=True):
            for parameter, grad, total, was_allowed in zip(parameters, row, totals, may, strict=True):
                if total is grad and was_allowed:
                    continue  # it was added up in its own memory
                own = total.data  # which has a version of its own: the parts of a bucket share one
                parameter.grad = own if own.stride() == parameter.stride() else in_format_of(own, parameter)

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

    def _sync_buffers(self, slots: Sequence[Slot], parts: Sequence[GradientSum], found: _Found) -> None:
        """Average buffers over the replicas that had examples."""
        had_examples, count = [part.had_examples for part in parts], found.num_with_examples
        if not self._buffers.leaves_others:
            self._had_examples = [False] * len(parts)
        if count == 0 and not parts[0].parameters:  # nor is it known who had in the runs before
            had_examples, count = [True] * len(parts), self._placement.num_replicas
        if not slots or count == 0:
            return
        placement = self._placement
        own = [has / count for has in had_examples]
        rows = [self._buffers.contributions(slot, own, holds_first=placement.first_replica == 0) for slot in slots]
        if len(placement.devices) > 1:
            pairs = [(PerReplica(row), placement.devices) for row in rows]
            rows = [list(value.values) for value in self._ops.batch_reduce(ReduceOp.SUM, pairs, self._options)]
        if self._workers is not None:
            firsts = [row[0] for row in rows]
            totals, _ = sum_in_buckets(self._workers.start_sum, firsts, self._options.bucket_bytes)
            rows = [[total] * len(placement.devices) for total in totals]
        self._buffers.store(slots, rows, had_examples)


def _summed_by_some(k: int, parameter: Tensor) -> str:
    return (
        f"Some replicas have already summed the gradient of parameter {k} (shape {tuple(parameter.shape)}) and others "
        "have not. Every replica must call `sum_gradients` for the same optimizers, clear gradients by "
        "`optimizer.zero_grad()` and not in place, and not run `backward` again before `optimizer.step()`. (The sum "
        f"was to be made at {call_site()}.)"
    )


def _tells(grad: Tensor) -> bool:
    """Say whether a gradient has numbers that replicas could differ in: zeros and NaN are the same on all."""
    return bool((grad.detach().nan_to_num(0.0) != 0).any())


def _at(indices: Sequence[int], values: Sequence[_Value]) -> Sequence[_Value]:
    """Return the values at some positions, which rise."""
    return values if len(indices) == len(values) else [values[k] for k in indices]


def _dense(grad: Tensor | None, parameter: Tensor) -> Tensor:
    """Return what a replica adds to the sum of dense gradients, in memory as its parameter if it is new."""
    if grad is None:
        return torch.zeros_like(parameter)
    return in_format_of(grad.to_dense(), parameter) if grad.is_sparse else grad


def _positions(mask: int) -> list[int]:
    """Return the places of the bits that are set."""
    if not mask & (mask + 1):  # all up to the highest one
        return list(range(mask.bit_length()))
    return [k for k, bit in enumerate(f"{mask:b}"[::-1]) if bit == "1"]


def _settle_doubts(rows: Sequence[Sequence[Sequence[Any]]], parameters: Sequence[Tensor]) -> int:
    """Return a mask of the gradients that are sums already, although the program has changed or replaced them.

    Sums are equal on all replicas, to the bit. So gradients that differ are the replicas' own; equal ones may be both.

    Args:
        rows: of each process, the position of each gradient that may be a sum, whether it is one if all replicas hold
            the same, and its fingerprint on each of its replicas.
        parameters: the first local replica's.

    Raises:
        RuntimeError: all replicas hold the same, and nothing tells what it is.
    """
    if any(row != rows[0] for row in rows) or any(len(set(found)) > 1 for _, _, *found in rows[0]):
        return 0
    for k, is_edited, *_ in rows[0]:
        if not is_edited:
            raise RuntimeError(doubt(k, parameters[k]))
    return sum(1 << k for k, *_ in rows[0])


def _refuse_own_sums(rows: Sequence[list[int] | None]) -> None:
    """Refuse gradients that the program seems to have summed itself, of which each process brings fingerprints."""
    if rows[0] and all(row == rows[0] for row in rows):
        raise RuntimeError(
            "Gradients that this run has changed or assigned are the same on all replicas, and it has called "
            "`all_reduce`. If they are sums or means over the replicas, which must not be added up once more, call "
            "`ts.get_replica_context().mark_summed(optimizer)` before `optimizer.step()`; if they are the replicas' "
            f"own, `sum_gradients(optimizer, fresh=True)`. (The sum was to be made at {call_site()}.)"
        )


def doubt(k: int, parameter: Tensor) -> str:
    """Return what to say of a gradient of which nothing tells whether it is a sum."""
    return (
        f"Nothing tells whether the gradient of parameter {k} (shape {tuple(parameter.shape)}) is new: an earlier "
        "sum over replicas was used by a step, or replaced by the program, no `backward` has added to it since, and "
        "all replicas hold the same. If these are new gradients of the replicas (written past autograd, by `.data`, a "
        "kernel or a replayed graph), call `ts.get_replica_context().sum_gradients(optimizer, fresh=True)` before "
        "`optimizer.step()`. If they are meant as the sum (a second step on one gradient, a sum that the program has "
        "replaced), call `ts.get_replica_context().mark_summed(optimizer)` before it. Else clear them first, by "
        f"`optimizer.zero_grad()`. (The sum was to be made at {call_site()}.)"
    )
