"""Sums of gradients that begin while ``backward`` still computes others.

They are a wager, which the sum at ``step`` settles. After the step of one optimizer, all ranks expect the one that came
next the last time, and bring its gradients in the same buckets, in the same order. A rank copies a bucket's gradients
and starts its sum when as many backward passes have reached its parameters as in the last step. At the step the ranks
tell each other how many buckets they have started, and which of them hold gradients that have changed since. All start
what one of them has started, and wait for it. The sums that are good on every rank are taken; everything else is summed
as if nothing had been started.

So nothing here has to be right for the result to be right, except that a changed gradient is noticed, see
``early_buckets``.
"""

from __future__ import annotations

import atexit
import weakref
from collections.abc import Sequence
from typing import NamedTuple, NoReturn

from torch import Tensor

from torchstrategy.collectives.process_group import WorkerGroup
from torchstrategy.errors import DisagreementError
from torchstrategy.gradients.early_buckets import EarlyBucket, EarlyPlan, OpenBuckets
from torchstrategy.gradients.ledger import GradientLedger
from torchstrategy.gradients.plan import Plan

__all__ = ["EarlyReport", "EarlySums"]

_PLANNING = "the plan of the sums of gradients"
_all: weakref.WeakSet[EarlySums] = weakref.WeakSet()


class EarlyReport(NamedTuple):
    """What one rank has started, as the ranks tell each other at a sum.

    Args:
        plan: the number of the optimizer whose gradients are summed; they are counted by first sum.
        opened: the number of the buckets that could be started; 0 if there are none.
        num_started: how many buckets have been started.
        stale: a mask of the buckets whose sums are of no use.
    """

    plan: int
    opened: int = 0
    num_started: int = 0
    stale: int = 0


class EarlySums:
    """Starts sums of gradients during ``backward``, and settles them at the step.

    Args:
        workers: the processes, each with one replica.
        bucket_bytes: upper size in bytes of a bucket, if it is below those of the kind of device (``early_bytes``).
        ledger: what the gradients are.
    """

    def __init__(self, workers: WorkerGroup, bucket_bytes: int, ledger: GradientLedger) -> None:
        self._workers = workers
        self._ledger = ledger
        self._bucket_bytes = bucket_bytes
        self._device_types = workers.early_device_types
        self._lock = workers.turn  # autograd has a thread for each device
        workers.early = weakref.ref(self)
        self._passes: dict[int, int] = {}  # backward passes since the last sum, by id of the parameter, last one last
        #: As long as there are the plans.
        self._plans: weakref.WeakKeyDictionary[Plan, EarlyPlan] = weakref.WeakKeyDictionary()
        self._num_opened = 0
        self._last: EarlyPlan | None = None
        self._current: EarlyPlan | None = None
        self._opened: OpenBuckets | None = None
        self._is_settling = False
        self._is_under_way = False  # whether there are sums that nobody has waited for
        self._is_off = False
        ledger.early = weakref.ref(self)
        _all.add(self)

    def note_backward(self, parameter: Tensor) -> None:
        """Take notice of a gradient to which a backward pass has added, and start what is complete."""
        key = id(parameter)
        with self._lock:
            self._passes[key] = self._passes.pop(key, 0) + 1
            opened = self._opened
            number = None if opened is None else opened.plan.bucket_of.get(key)
            if opened is None or number is None or self._is_settling:
                return
            opened.buckets[number].missing -= 1
            while opened.num_started < len(opened.buckets) and not opened.is_halted:
                bucket = opened.buckets[opened.num_started]
                if bucket.missing > 0:
                    return
                if bucket.fill_with_own():
                    self._start(opened, bucket)
                else:
                    opened.is_halted = True

    def report(self, plan: Plan, parameters: Sequence[Tensor]) -> EarlyReport:
        """Return what the other ranks must know at a sum.

        Args:
            plan: the parameters' plan.
            parameters: whose gradients are to be summed.
        """
        with self._lock:
            self._is_settling = True  # until `finish` has waited for what is reported here
            self._current = self._plan_of(plan, parameters)
            opened = self._opened
            if opened is None:
                return EarlyReport(self._current.number)
            stale = 0
            if opened.plan is self._current:
                for k, bucket in enumerate(opened.buckets):
                    stale |= (not bucket.is_good()) << k
            return EarlyReport(self._current.number, opened.number, opened.num_started, stale)

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
            opened, self._opened = self._opened, None
            if opened is None or len({report.opened for report in reports}) > 1:
                self._disagree()
            stale = 0
            for report in reports:
                stale |= report.stale
            if len({report.plan for report in reports}) > 1 or opened.plan is not self._current:
                stale = -1  # another optimizer than the expected one
            while opened.num_started < num_started:
                self._join_next(opened)
        sums: dict[int, Tensor] = {}
        for k, bucket in enumerate(opened.buckets[:num_started]):
            bucket.finish()
            if not stale >> k & 1:
                sums.update(zip(bucket.indices, bucket.sums(), strict=True))
        self._is_settling = self._is_under_way = False
        opened.plan.note_outcome(is_good=not stale & (1 << num_started) - 1)
        return sums

    def catch_up(self, number: int) -> None:
        """Start what another rank has started on accelerators before a collective that takes the same way.

        Args:
            number: how many sums have been started there, since the job began.

        Raises:
            DisagreementError: an earlier error has left the ranks with different sums.
        """
        with self._lock:
            opened = self._opened
            while self._workers.num_early < number:
                if opened is None or opened.num_started == len(opened.buckets):
                    self._disagree()
                self._join_next(opened)

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
            self._is_off = self._is_off or len({report.plan for report in reports}) > 1
            self._opened = None
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

    def _plan_of(self, plan: Plan, parameters: Sequence[Tensor]) -> EarlyPlan:
        own = self._plans.get(plan)
        if own is None:
            own = self._plans[plan] = EarlyPlan(plan, parameters, self._device_types, self._ledger)
        return own

    def _take_passes(self, plan: EarlyPlan) -> list[int]:
        """Begin to count anew; return the positions of the parameters in the order in which they were complete."""
        keys = [id(reference()) for reference in plan.references]
        places = {key: place for place, key in enumerate(self._passes)}
        plan.expected = [self._passes.pop(key, 0) for key in keys]
        count = len(keys)
        return sorted(range(count), key=lambda k: (places.get(keys[k], len(places)), count - k))

    def _plan_buckets(self, plan: EarlyPlan, order: Sequence[int]) -> None:
        """Divide the gradients that travel over buckets, in rank 0's order."""
        types = plan.travelling_types()
        rows = self._workers.exchange(_PLANNING, [order if self._workers.rank == 0 else None, types])
        if any(row[1] != types for row in rows):
            plan.can_travel = [False] * len(types)
        plan.plan_buckets(rows[0][0], self._bucket_bytes)

    def _expect(self, plan: EarlyPlan) -> None:
        """Let the gradients of an optimizer be summed as soon as they are there."""
        if plan.pause > 0:
            plan.pause -= 1
            return
        if plan.buckets:
            self._num_opened += 1
            self._opened = OpenBuckets(self._num_opened, plan, plan.open_buckets(self._passes))

    def _join_next(self, opened: OpenBuckets) -> None:
        bucket = opened.buckets[opened.num_started]
        bucket.fill_with_any()
        self._start(opened, bucket)

    def _disagree(self) -> NoReturn:
        # What only some ranks have started is still on its way, and the next sums would meet it.
        self._workers.give_up("the ranks started different sums of gradients")
        raise DisagreementError(
            "The ranks have started different sums of gradients: an earlier error did not reach all of them at the "
            "same point. Start the job again."
        )

    def _start(self, opened: OpenBuckets, bucket: EarlyBucket) -> None:
        if opened.num_started == 0:
            opened.plan.num_opened += 1
        self._is_under_way = True
        bucket.start(self._workers.start_early_sum)
        opened.num_started += 1


@atexit.register
def _leave_all() -> None:
    for early in list(_all):
        early.leave()
