"""Sums of gradients that begin while ``backward`` still computes others.

They are a wager, which the sum at ``step`` settles. After the step of one optimizer, all ranks expect the one that came
next the last time, and bring its gradients in the same buckets, in the same order. A rank copies a bucket's gradients
and starts its sum when as many backward passes have reached its parameters as in the last step. At the step the ranks
tell each other how many buckets they have started, and which of them hold gradients that have changed since. All start
what one of them has started, and wait for it. The sums that are good on every rank are taken; everything else is summed
as if nothing had been started.

So nothing here has to be right for the result to be right, except that a changed gradient is noticed: each backward
pass gives it a new mark, each change in place another version, and a change through ``p.grad.data``, which has no
version, other sums of its elements, each times a fixed random number. Unlike plain sums these change with a gradient
whose elements add up to 0, too, when it is scaled, clamped or negated.
"""

from __future__ import annotations

import atexit
import functools
import threading
import weakref
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from torchstrategy.collectives.packing import pack, plan_buckets, unpack
from torchstrategy.collectives.process_group import WorkerGroup
from torchstrategy.errors import DisagreementError
from torchstrategy.replicas.marks import is_marked, own_mark

__all__ = ["EarlyReport", "EarlySums"]

#: Smaller than the buckets of sums at ``step``, so that there is something to overlap.
_BUCKET_BYTES = 4 << 20
#: A parameter that had no gradient in so many steps leaves its bucket.
_MAX_IDLE = 8
#: After so many steps in a row in which a gradient had changed, they are sums at ``step`` for a while: twice as long
#: each time, up to this number of steps.
_MAX_PAUSE = 256
#: Accelerators compare sums of elements in so many first steps, and then in every so-and-so-many-th one only, because
#: reading them waits for the device.
_NUM_COMPARED = 3
_COMPARED_EVERY = 100
#: So many elements are added up to one number; so many are multiplied at a time, to stay in the processor's cache.
_ROW_NUMBERS = 4 << 10
_PART_NUMBERS = 256 << 10
_OPERATION = "the sum of gradients"
_all: weakref.WeakSet[EarlySums] = weakref.WeakSet()


class EarlyReport(NamedTuple):
    """What one rank has started, as the ranks tell each other at a sum.

    Args:
        schedule: the number of the optimizer whose gradients are summed; they are counted by first sum.
        flight: the number of the buckets that could be started; 0 if there are none.
        num_started: how many buckets have been started.
        stale: a mask of the buckets whose sums are of no use.
    """

    schedule: int
    flight: int = 0
    num_started: int = 0
    stale: int = 0


class _Schedule:
    """What is known of one list of parameters, equal on all ranks but for ``references``, ``expected``, ``is_edited``.

    Args:
        number: counts the lists.
        parameters: the list.
        device_types: those whose gradients can be summed early.
    """

    def __init__(self, number: int, parameters: Sequence[Tensor], device_types: Collection[str]) -> None:
        self.number = number
        self.references = [weakref.ref(parameter) for parameter in parameters]
        #: Shapes, dtypes and devices, also if a rank has dropped the parameters already.
        self.like = [torch.empty_like(parameter.detach(), device="meta") for parameter in parameters]
        self.devices = [parameter.device for parameter in parameters]
        one_of_each = {device.type: device for device in self.devices}
        #: For each parameter, whether its gradient can be summed early.
        self.can_travel = [
            d.type in device_types and d == one_of_each[d.type] and like.numel() > 0
            for d, like in zip(self.devices, self.like, strict=True)
        ]
        self.following: _Schedule | None = None
        self.num_sums = 0
        self.idle = [_MAX_IDLE] * len(parameters)  # for each parameter, how many sums ago it had a gradient
        self.buckets: list[list[int]] = []
        self.bucket_of: dict[int, int] = {}  # by id of the parameter
        self.num_failures = 0
        self.pause = 0
        self.num_flights = 0
        #: For each parameter, how many backward passes reached it before the last sum.
        self.expected = [0] * len(parameters)
        #: Whether this rank has changed a gradient past torch's version counter.
        self.is_edited = False

    def is_of(self, parameters: Sequence[Tensor]) -> bool:
        return all(ref() is parameter for ref, parameter in zip(self.references, parameters, strict=True))

    def is_alive(self) -> bool:
        return all(ref() is not None for ref in self.references)

    def note_sum(self, summed: Sequence[int]) -> bool:
        """Take notice of which gradients were there; say whether other buckets are needed."""
        self.num_sums += 1
        self.idle = [count + 1 for count in self.idle]
        for k in summed:
            self.idle[k] = 0
        travelling = {k for bucket in self.buckets for k in bucket}
        has_new = any(self.can_travel[k] and k not in travelling for k in summed)
        return self.num_sums > 1 and (has_new or any(self.idle[k] == _MAX_IDLE for k in travelling))

    def note_outcome(self, *, is_good: bool) -> None:
        """Take notice of whether the sums that were started early could be taken."""
        self.num_failures = 0 if is_good else self.num_failures + 1
        self.pause = 0 if is_good else min(1 << self.num_failures - 1, _MAX_PAUSE) - 1


@dataclass
class _Bucket:
    """Gradients that travel together."""

    indices: list[int]
    missing: int  # backward passes that are still to come
    flat: Tensor | None = None
    wait: Callable[[], None] | None = None
    marks: list[object | None] = field(default_factory=list)  # of the gradients when they were copied
    totals: Tensor | None = None  # what `_totals` returns for them


@dataclass
class _Flight:
    """The buckets of the optimizer that is expected to step next."""

    number: int
    schedule: _Schedule
    buckets: list[_Bucket]
    num_started: int = 0
    is_halted: bool = False


class EarlySums:
    """Starts sums of gradients during ``backward``, and settles them at the step.

    Args:
        workers: the processes, each with one replica.
        bucket_bytes: upper size in bytes of a bucket, if it is below 4 MiB.
    """

    def __init__(self, workers: WorkerGroup, bucket_bytes: int) -> None:
        self._workers = workers
        self._bucket_bytes = min(bucket_bytes, _BUCKET_BYTES)
        self._device_types = workers.early_device_types
        self._lock = threading.Lock()  # autograd has a thread for each device
        self._passes: dict[int, int] = {}  # backward passes since the last sum, by id of the parameter, last one last
        self._schedules: dict[tuple[str, tuple[int, ...]], _Schedule] = {}
        self._num_schedules = 0
        self._num_flights = 0
        self._last: _Schedule | None = None
        self._current: _Schedule | None = None
        self._flight: _Flight | None = None
        self._is_settling = False
        self._is_under_way = False  # whether there are sums that nobody has waited for
        self._is_off = False
        _all.add(self)

    def note_backward(self, parameter: Tensor) -> None:
        """Take notice of a gradient to which a backward pass has added, and start what is complete."""
        key = id(parameter)
        with self._lock:
            self._passes[key] = self._passes.pop(key, 0) + 1
            flight = self._flight
            number = None if flight is None else flight.schedule.bucket_of.get(key)
            if flight is None or number is None or self._is_settling:
                return
            flight.buckets[number].missing -= 1
            while flight.num_started < len(flight.buckets) and not flight.is_halted:
                bucket = flight.buckets[flight.num_started]
                if bucket.missing > 0:
                    return
                if _can_start(flight.schedule, bucket) and _marks(flight.schedule, bucket) is not None:
                    self._start(flight, bucket)
                else:
                    flight.is_halted = True

    def report(self, plan: str, parameters: Sequence[Tensor]) -> EarlyReport:
        """Return what the other ranks must know at a sum.

        Args:
            plan: stands for the parameters' shapes and dtypes.
            parameters: whose gradients are to be summed.
        """
        with self._lock:
            self._is_settling = True  # until `finish` has waited for what is reported here
            self._current = self._schedule_of(plan, parameters)
            flight = self._flight
            if flight is None:
                return EarlyReport(self._current.number)
            stale = 0
            if flight.schedule is self._current:
                for k, bucket in enumerate(flight.buckets):
                    is_fresh = _can_start if bucket.flat is None else _is_fresh
                    stale |= (not is_fresh(flight.schedule, bucket)) << k
            return EarlyReport(self._current.number, flight.number, flight.num_started, stale)

    def finish(self, reports: Sequence[EarlyReport]) -> dict[int, Tensor]:
        """Wait for what any rank has started; every rank calls this after each report.

        Args:
            reports: of all ranks.

        Returns:
            The sums that can be taken, by position of the parameter, parts of buckets.

        Raises:
            DisagreementError: an earlier error has left the ranks with different sums.
        """
        num_started = max(report.num_started for report in reports)
        if num_started == 0:
            self._is_settling = False
            return {}
        with self._lock:
            flight, self._flight = self._flight, None
            if flight is None or len({report.flight for report in reports}) > 1:
                raise DisagreementError(
                    "The ranks have started different sums of gradients: an earlier error did not reach all of them at "
                    "the same point. Start the job again."
                )
            stale = 0
            for report in reports:
                stale |= report.stale
            if len({report.schedule for report in reports}) > 1 or flight.schedule is not self._current:
                stale = -1  # another optimizer than the expected one
            while flight.num_started < num_started:
                self._start(flight, flight.buckets[flight.num_started])
        sums: dict[int, Tensor] = {}
        for k, bucket in enumerate(flight.buckets[:num_started]):
            if bucket.wait is None or bucket.flat is None:
                raise RuntimeError(f"Bucket {k} of {num_started} was not started.")
            bucket.wait()
            if bucket.flat.is_cuda:  # a thread of autograd has allocated it, maybe on another stream
                bucket.flat.record_stream(torch.cuda.current_stream(bucket.flat.device))
            if not stale >> k & 1:
                like = [flight.schedule.like[index] for index in bucket.indices]
                sums.update(zip(bucket.indices, unpack(bucket.flat, like, keep_formats=True), strict=True))
        self._is_settling = self._is_under_way = False
        flight.schedule.note_outcome(is_good=not stale & (1 << num_started) - 1)
        return sums

    def prepare(self, reports: Sequence[EarlyReport], summed: Sequence[int]) -> None:
        """Get ready for the sum that will come next; every rank calls this after each sum.

        Args:
            reports: of all ranks.
            summed: the positions of the parameters whose dense gradients have been summed, equal on all ranks.
        """
        current = self._current
        if current is None or not summed:
            return
        with self._lock:
            self._is_off = self._is_off or len({report.schedule for report in reports}) > 1
            self._flight = None
            if self._is_off:
                return
            order = self._take_passes(current)
            if self._last is not None:
                self._last.following = current
            self._last = current
        if current.note_sum(summed):
            self._plan_buckets(current, order)
        with self._lock:
            if current.following is not None:
                self._expect(current.following)

    def leave(self) -> None:
        """Let the program end, also in the middle of a sum."""
        if self._is_under_way:
            self._workers.leave_early_sums()

    def _schedule_of(self, plan: str, parameters: Sequence[Tensor]) -> _Schedule:
        key = (plan, tuple(map(id, parameters)))
        schedule = self._schedules.get(key)
        if schedule is None or not schedule.is_of(parameters):
            self._schedules = {k: s for k, s in self._schedules.items() if s.is_alive()}
            self._num_schedules += 1
            schedule = self._schedules[key] = _Schedule(self._num_schedules, parameters, self._device_types)
        return schedule

    def _take_passes(self, schedule: _Schedule) -> list[int]:
        """Begin to count anew; return the positions of the parameters in the order in which they were complete."""
        keys = [id(reference()) for reference in schedule.references]
        places = {key: place for place, key in enumerate(self._passes)}
        schedule.expected = [self._passes.pop(key, 0) for key in keys]
        count = len(keys)
        return sorted(range(count), key=lambda k: (places.get(keys[k], len(places)), count - k))

    def _plan_buckets(self, schedule: _Schedule, order: Sequence[int]) -> None:
        """Divide the gradients that travel over buckets, in rank 0's order."""
        types = [d.type if can else "" for d, can in zip(schedule.devices, schedule.can_travel, strict=True)]
        rows = self._workers.exchange(_OPERATION, [order if self._workers.rank == 0 else None, types])
        if any(row[1] != types for row in rows):
            schedule.can_travel = [False] * len(types)
        used = [k for k in rows[0][0] if schedule.can_travel[k] and schedule.idle[k] < _MAX_IDLE]
        schedule.buckets = []
        for device_type in sorted(self._device_types):
            indices = [k for k in used if types[k] == device_type]
            buckets = plan_buckets([schedule.like[k] for k in indices], self._bucket_bytes)
            schedule.buckets += [[indices[i] for i in bucket] for bucket in buckets]
        place = {k: i for i, k in enumerate(used)}
        schedule.buckets.sort(key=lambda bucket: place[bucket[-1]])  # those of another dtype may be complete sooner
        numbers = {k: number for number, bucket in enumerate(schedule.buckets) for k in bucket}
        schedule.bucket_of = {id(schedule.references[k]()): number for k, number in numbers.items()}

    def _expect(self, schedule: _Schedule) -> None:
        """Let the gradients of an optimizer be summed as soon as they are there."""
        if schedule.pause > 0:
            schedule.pause -= 1
            return
        if not schedule.buckets:
            return
        done = [self._passes.get(id(reference()), 0) for reference in schedule.references]
        buckets = [
            _Bucket(indices, sum(schedule.expected[k] - done[k] for k in indices)) for indices in schedule.buckets
        ]
        self._num_flights += 1
        self._flight = _Flight(self._num_flights, schedule, buckets)

    def _start(self, flight: _Flight, bucket: _Bucket) -> None:
        schedule = flight.schedule
        if flight.num_started == 0:
            schedule.num_flights += 1
        grads = _gradients(schedule, bucket)
        with torch.no_grad():
            parts = []
            for k, grad in zip(bucket.indices, grads, strict=True):
                like = schedule.like[k]
                if grad is None or not _fits(grad, like, schedule.devices[k]):
                    grad = torch.zeros(like.shape, dtype=like.dtype, device=schedule.devices[k])
                parts.append(grad)
            bucket.flat = pack(parts, [schedule.like[k] for k in bucket.indices])
            bucket.marks = _marks(schedule, bucket) or []
            if _always_compares(schedule, bucket) or _compares_now(schedule.num_flights):
                bucket.totals = _totals(grads)
        self._is_under_way = True
        bucket.wait = self._workers.start_early_sum(bucket.flat, _OPERATION)
        flight.num_started += 1


def _gradients(schedule: _Schedule, bucket: _Bucket) -> list[Tensor | None]:
    parameters = [schedule.references[k]() for k in bucket.indices]
    return [None if parameter is None else parameter.grad for parameter in parameters]


def _fits(grad: Tensor, like: Tensor, device: torch.device) -> bool:
    is_dense = grad.layout is torch.strided
    return is_dense and grad.dtype is like.dtype and grad.device == device and grad.shape == like.shape


def _can_start(schedule: _Schedule, bucket: _Bucket) -> bool:
    """Say whether the gradients of a bucket can be copied as they are."""
    for k in bucket.indices:
        parameter = schedule.references[k]()
        if parameter is None or is_marked(parameter):
            return False
        if parameter.grad is not None and not _fits(parameter.grad, schedule.like[k], schedule.devices[k]):
            return False
    return True


def _marks(schedule: _Schedule, bucket: _Bucket) -> list[object | None] | None:
    """Return the marks of a bucket's gradients; ``None`` if one was made or changed by anything but ``backward``."""
    marks: list[object | None] = []
    for k in bucket.indices:
        parameter = schedule.references[k]()
        if parameter is None:
            return None
        marks.append(None if parameter.grad is None else own_mark(parameter))
        if parameter.grad is not None and marks[-1] is None:
            return None
    return marks


def _is_fresh(schedule: _Schedule, bucket: _Bucket) -> bool:
    """Say whether the gradients of a bucket are still what was copied."""
    marks = _marks(schedule, bucket)
    if schedule.is_edited or marks is None:
        return False
    if any(mark is not copied for mark, copied in zip(marks, bucket.marks, strict=True)):
        return False
    if bucket.totals is None or _equal(bucket.totals, _totals(_gradients(schedule, bucket))):
        return True
    schedule.is_edited = not _always_compares(schedule, bucket)
    return False


def _always_compares(schedule: _Schedule, bucket: _Bucket) -> bool:
    """Say whether sums of elements show every change that has no version: reading them costs an accelerator a wait."""
    return schedule.devices[bucket.indices[0]].type == "cpu"


def _compares_now(num_flights: int) -> bool:
    """Say whether an accelerator compares sums of elements in a step."""
    return num_flights <= _NUM_COMPARED or num_flights % _COMPARED_EVERY == 0


def _totals(grads: Sequence[Tensor | None]) -> Tensor:
    """Return numbers that change with the elements of gradients of one dtype and device: sums of weighted elements."""
    sums: list[Tensor] = []
    for grad in grads:
        if grad is None or grad.layout is not torch.strided:  # one that is sparse is not copied
            continue
        for part in torch.split(_in_one_dimension(grad.detach()), _PART_NUMBERS):
            wide = part.float() if part.dtype in (torch.float16, torch.bfloat16) else part
            weights = _weights(wide.dtype, wide.device)
            length = wide.numel() - wide.numel() % _ROW_NUMBERS
            if length:
                sums.append((wide[:length].view(-1, _ROW_NUMBERS) * weights).sum(1))
            if length < wide.numel():
                rest = wide[length:]
                sums.append((rest * weights[: rest.numel()]).sum().view(1))
    return torch.cat(sums) if sums else torch.zeros(1)


def _in_one_dimension(grad: Tensor) -> Tensor:
    """Return the elements in the order in which they are in memory, if possible as a view."""
    numbers = torch.view_as_real(grad.resolve_conj()) if grad.is_complex() else grad
    if numbers.is_contiguous():
        return numbers.view(-1)
    return numbers.permute(sorted(range(numbers.dim()), key=numbers.stride, reverse=True)).reshape(-1)


@functools.cache
def _weights(dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return fixed numbers between 1 and 2, random ones so that elements in some pattern do not cancel out."""
    own = torch.Generator("cpu").manual_seed(0)
    return (1 + torch.rand(_ROW_NUMBERS, generator=own, dtype=torch.float64, device="cpu")).to(dtype).to(device)


def _equal(first: Tensor, second: Tensor) -> bool:
    """Compare sums of elements; those that are no number count as equal."""
    if first.shape != second.shape:
        return False
    return torch.equal(first, second) or bool((first == second).logical_or(first.isnan() & second.isnan()).all())


@atexit.register
def _leave_all() -> None:
    for early in _all:
        early.leave()
