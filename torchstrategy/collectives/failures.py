"""Who failed, who left and where each rank is: what the processes of a job tell each other beside their collectives.

A rank that fails says so over the control plane before it raises. The others know within milliseconds, also while
their main threads are blocked in a collective, which then raises an error that names the rank.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Collection, Sequence
from types import TracebackType
from typing import Any

from torch.distributed import Store  # type: ignore[attr-defined]

from torchstrategy import patches
from torchstrategy.base import log
from torchstrategy.base.job import heartbeat_seconds, tell_launcher
from torchstrategy.base.log import add_note, logger
from torchstrategy.base.names import named_ranks
from torchstrategy.base.stalls import Requests, Stall, stack_of_program
from torchstrategy.collectives.control import ControlPlane
from torchstrategy.collectives.native_groups import NativeGroups
from torchstrategy.collectives.notices import (
    CUT_OFF,
    UNMET,
    Answers,
    Failures,
    Message,
    describe,
    describe_places,
    lost_record,
    ranks_of,
)
from torchstrategy.errors import DeadlineExceededError, DisagreementError, ReplicaFailedError

__all__ = ["FailureWatch"]

_ANSWER_S, _FELLOWS_S = 2.0, 10.0
_FRESH_S = 0.5  # answers to others' questions that are so new need not be asked for again
_MAX_TEXT, _MAX_END = 2000, 300
_LEFT = "has ended its program"
_DIED = "does not answer: its process has died (its connection closed)"
_SILENT = (
    "does not answer: stopped or cut off (no sign of life for {:g} s, which TORCHSTRATEGY_HEARTBEAT_S sets; it may be "
    "alive all the same)"
)
_NO_ANSWER = "does not answer (killed, stopped, cut off, or native code keeps its interpreter)"
_WITH_A_VERB = ("has", "does", "can't")  # begins that the summary says, too

Record = dict[str, Any]


class FailureWatch:
    """Reports this rank's failure and learns of the others'; one for each process of a job.

    Args:
        store: where the processes find one another; with a prefix of its own.
        rank: this process's id.
        hosts: for each rank the number of its host.
        address: this process's address, as the others can reach it.
        timeout_s: seconds in which all processes must be connected.
        thread: the thread whose stack the others are shown; ``None`` means the calling one.

    Raises:
        OSError: another process can't be reached.
    """

    def __init__(
        self, store: Store, rank: int, hosts: Sequence[int], address: str, timeout_s: float, thread: int | None = None
    ) -> None:
        self._rank = rank
        self._size = len(hosts)
        self._main_thread = threading.get_ident() if thread is None else thread
        #: What this rank is doing, for the others' error messages.
        self.position = "start-up"
        #: How many collectives this rank has begun, in all groups.
        self.num_collectives = 0
        self._most_passed = sys.maxsize  # the first one that this rank has given up comes next
        self._changed = threading.Condition()
        self._failures = Failures(self._size)
        self._first: Record | None = None
        self._num_told = 0  # of this rank's messages, how many all others have
        self._silent: set[int] = set()
        self._absent: dict[int, str] = {}  # ranks that left or died
        self._question = self._own_question = 0  # the latest one of all ranks, and of this one
        self._asked_at = 0.0
        self._answers = Answers(self._size)
        #: What has to be ended when a rank is lost, because nobody looks while an accelerator waits for it.
        self.natives = NativeGroups(lambda: self.failure)
        self._is_closed = False
        self._ending = _LEFT
        self._requests: Requests | None = None
        with self._changed:  # what comes in at once has to wait until there is a plane to answer over
            self._plane = ControlPlane(
                store,
                rank,
                hosts,
                address,
                on_message=self._receive,
                on_lost=self._lose,
                on_back=self._find_again,
                timeout_s=timeout_s,
            )
        self._previous_hook = sys.excepthook
        self._forget_end = patches.watch_end(self._on_uncaught, self._tell_end, self.close, self._main_thread)

    @property
    def failure(self) -> Record | None:
        """The first failure in the job that this rank knows of."""
        silent = sorted(self._silent)
        if self._first is None and silent:
            first, *others = silent
            how = _SILENT.format(heartbeat_seconds())
            if others:
                how += f"; nor {'does' if len(others) == 1 else 'do'} {named_ranks(others)}"
            return lost_record(first, how)
        return self._first or self.natives.failure

    def report(self, operation: str, error: BaseException, replica_id: int | None = None) -> None:
        """Tell the other ranks that this one failed, and wait until they know (at most 2 s)."""
        if isinstance(error, (ReplicaFailedError, DisagreementError)):  # which are raised on every rank
            return
        if self._failures.begun_by(self._rank) is not None:
            return
        record = {
            "rank": self._rank,
            "replica": replica_id,
            "operation": operation[:_MAX_TEXT],
            "error": log.name_error(error)[:_MAX_TEXT],
            "num_collectives": self.num_collectives,
            "num_passed": self._num_passed,
            "is_deadline": isinstance(error, DeadlineExceededError),
        }
        with self._changed:
            self._failures.note(1 << self._rank, self._failures.round, record)
            self._tell(record)

    def report_lost(self, how: str, gone: Collection[int]) -> None:
        """Tell the other ranks, as ``report`` does, that this one has lost another, which they may still reach.

        Args:
            how: in which operation, and why, as a part of a sentence.
            gone: who had ended by then.
        """
        with self._changed:
            ends = "".join(f". Rank {rank} {self._absent[rank]}" for rank in sorted(gone))
            counts = {"num_collectives": self.num_collectives, "num_passed": self._num_passed}
            self._tell({**lost_record(self._rank, how[:_MAX_TEXT] + ends), **counts})

    def _tell(self, record: Record) -> None:
        """Send this rank's failure to the others, and wait until they know; the lock is held."""
        self._first = self._first or record
        counts = record["num_collectives"], record["num_passed"]
        number = self._plane.post("failed", [self._failures.round, *counts], record)
        self._wait(lambda: self._num_told >= number, _ANSWER_S)

    @property
    def _num_passed(self) -> int:
        return min(self.num_collectives, self._most_passed)

    def note_given_up(self) -> None:
        """Take notice that this rank leaves its latest collective before the end."""
        self._most_passed = min(self._most_passed, self.num_collectives - 1)

    def is_past(self, number: int) -> bool:
        """Say whether there are failures, all of ranks that had got through a collective before.

        Args:
            number: how many collectives had begun with it, in all groups.
        """
        first = self._first
        if first is None:
            return False
        with self._changed:
            return min(int(first["num_passed"]), self._failures.least_passed) >= number

    def recover(self) -> bool:
        """Go on after a failure that all ranks had at the same point, as when all raise the same error in ``run``.

        If this rank has failed, it waits for the others to fail or to begin another collective, at most 10 s.

        Returns:
            Whether the failure is over: no rank waits for another one.
        """
        with self._changed:
            failures = self._failures
            self._say_aware(failures.round)  # others may wait to know whether this rank has gone on
            begun = failures.begun_by(self._rank)
            if begun is None or self.natives.failure is not None:
                return False
            # The others may be about to fail as well, unless they are in a later collective already.
            self._wait(lambda: failures.are_of_all() or bool(self._absent) or failures.is_any_past(begun), _FELLOWS_S)
            if not failures.end_round():
                return False
            self._first = failures.first
            return self._first is None

    def _say_aware(self, round_: int) -> None:
        """Let the others know how many collectives this rank had begun when it knew of a failure; the lock is held."""
        if self._failures.note_aware(1 << self._rank, round_, self.num_collectives):
            self._plane.post("aware", [round_, self.num_collectives])

    def wait_for_report(self, seconds: float) -> Record | None:
        """Return the failure that another rank reported, giving it a moment to arrive; at once if a rank has left."""
        with self._changed:
            self._wait(lambda: self.failure is not None or bool(self._absent), seconds)
        return self.failure

    @property
    def gone(self) -> frozenset[int]:
        """The ranks that have ended or died."""
        return frozenset(self._absent)

    @property
    def unmet(self) -> str:
        """What to say of a call, ``{}``, that ranks which have ended by themselves don't make; empty without such."""
        ends = [how for how in self._absent.values() if how.startswith(_LEFT)]
        return (UNMET if _LEFT in ends else "can't complete {}") if ends else ""

    def where_is_everyone(self, gone: Collection[int] = ()) -> str:
        """Ask every rank what it is doing.

        Args:
            gone: who had ended when this rank noticed something; others may have ended since because of that.

        Returns:
            A sentence about the ranks that left or do not answer, if there are any; which ranks have arrived where this
            one waits; then the place of each rank, and the stack of each one that is elsewhere and answers.
        """
        return describe_places(self._ask_all(), self._rank, gone)[0]

    def stall(self, seconds: float) -> Stall | None:
        """Ask every rank what it is doing, because this one has waited for long.

        Args:
            seconds: how long.

        Returns:
            What there is to say; ``None`` if a rank before this one waits at the same place, and says it.
        """
        lines = self._ask_all()
        text, arrived = describe_places(lines, self._rank)
        if min(arrived) != self._rank:
            return None
        return self._stall_of(f"No progress for {seconds:.0f} s: rank {self._rank} waits", lines, text, arrived)

    def snapshot(self) -> Stall:
        """Ask every rank what it is doing, because somebody wants to know."""
        lines = self._ask_all()
        return self._stall_of(f"Rank {self._rank} is", lines, *describe_places(lines, self._rank))

    def _stall_of(self, begin: str, lines: list[list[str]], text: str, arrived: list[int]) -> Stall:
        stacks = []
        for rank, (place, *stack) in enumerate(lines):
            frames = stack_of_program(self._main_thread) if rank == self._rank else stack
            stacks += [f"--- rank {rank}: {place}", *(f"  {frame}" for frame in frames)]
        summary = text.partition("Where each rank is:")[0]
        others = [(rank, place) for rank, (place, *_) in enumerate(lines) if rank not in arrived]
        elsewhere = [f"rank {rank} is {place}" for rank, place in others if not place.startswith(_WITH_A_VERB)]
        ends = f"{'; '.join(elsewhere)}." if elsewhere else ""
        return Stall(f"{begin} {self.position}. {summary}{ends}".rstrip(), stacks)

    def _ask_all(self) -> list[list[str]]:
        """Return for each rank where it is, or that it does not answer, and the lines of its stack."""
        with self._changed:
            # When all ask at once, as at a deadline, one answer of each rank is enough.
            if self._own_question == self._question or time.monotonic() > self._asked_at + _FRESH_S:
                self._hear_question(self._question + 1)
                self._plane.post("where?", self._question)
            self._own_question = question = self._question

            def have_all_answered() -> bool:
                absent = self._absent.keys()
                return all(r in absent or self._plane.relays(r) & absent for r in self._answers.missing(question))

            self._wait(have_all_answered, _ANSWER_S)
            answered = {**self._answers.since(question), self._rank: self.position[:_MAX_TEXT]}
            reached = answered.keys()
            missing = [rank for rank in range(self._size) if rank not in reached]
            unknown = {r: _NO_ANSWER if self._plane.relays(r) <= reached else CUT_OFF for r in missing}
            answers = {**unknown, **self._absent, **answered}
            answers |= dict.fromkeys(self._silent - reached, _SILENT.format(heartbeat_seconds()))
        return [answers[rank].splitlines() for rank in range(self._size)]

    def _hear_question(self, number: int) -> None:
        """Answer where this rank is, unless it has done so; the lock is held."""
        if number > self._question:
            self._question, self._asked_at = number, time.monotonic()
            text = "\n".join([self.position[:_MAX_TEXT], *stack_of_program(self._main_thread)])
            self._answers.add(1 << self._rank, number, text)
            self._plane.post("where", [number, text])

    def answer_requests(self, job: str) -> None:
        """Let ``torchstrategy doctor --job`` ask where everyone is.

        Args:
            job: how the job is called there.
        """
        about = {"job": job, "rank": self._rank, "size": self._size}
        self._requests = Requests.answer(about, self.snapshot)

    def close(self) -> None:
        """Stop watching; the other ranks learn that this one left."""
        if self._is_closed:
            return
        self._is_closed = True
        if self._requests is not None:
            self._requests.close()
        self._forget_end()
        self.natives.close()
        self._plane.close(self._ending)  # the others have heard of it, and may have what is on its way
        self.natives.abort()

    # --- in the control plane's thread

    def _receive(self, by: int, message: Message) -> None:
        kind, body = message["kind"], message["body"]
        with self._changed:
            if kind == "where?":
                self._hear_question(body)
            elif kind == "failed":
                self._learn(by, body[0], message["own"])
            elif kind == "told":
                self._num_told = body
            elif kind == "aware":
                self._failures.note_aware(by, *body)
            elif kind == "where":
                self._answers.add(by, *body)
            elif kind == "left":
                self._absent |= dict.fromkeys(ranks_of(by), str(body or _LEFT))
            self._changed.notify_all()

    def _learn(self, by: int, round_: int, record: Record) -> None:
        self._failures.note(by, round_, record)
        self._say_aware(round_)
        if round_ == self._failures.round and self._first is None:
            self._first = record
            log.log_apart(logger.error, describe(record))
            self.natives.note_failure(has_died=False)

    def _lose(self, rank: int, *, closed: bool) -> None:
        with self._changed:
            # Others may have missed this rank while it was stopped; it knows better.
            if rank == self._rank or rank in self._absent or (rank in self._silent and not closed):
                return
            if closed:
                self._silent.discard(rank)
                self._absent[rank] = _DIED
                self._first = self._first or lost_record(rank, _DIED)
            else:
                self._silent.add(rank)
            self._changed.notify_all()
        self.natives.note_failure(has_died=closed)
        log.log_apart(logger.error, "Rank %d %s.", rank, _DIED if closed else _SILENT.format(heartbeat_seconds()))

    def _find_again(self, rank: int) -> None:
        with self._changed:
            if rank not in self._silent:
                return
            self._silent.discard(rank)
        log.log_apart(logger.warning, "Rank %d answers again.", rank)

    # --- elsewhere

    def _wait(self, condition: Callable[[], bool], seconds: float) -> None:
        """Wait for a condition that the control plane's thread brings about; the lock is held."""
        deadline = time.monotonic() + seconds
        while not condition() and self._plane.is_connected:
            remaining = deadline - time.monotonic()
            if remaining <= 0:
                return
            self._changed.wait(min(remaining, 0.2))

    def _on_uncaught(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        self._tell_end(error)
        is_others = isinstance(error, ReplicaFailedError)
        is_of_all = isinstance(error, DisagreementError) or log.is_raised_by_all(error)  # of whom one shows the calls
        if (is_others or (is_of_all and self._rank)) and not log.shows_all_frames():
            has_failed = not is_others or (self.failure or {}).get("operation")  # else it left, died or was cut off
            whose = f"; the traceback is {'the other rank' if is_others else 'rank 0'}'s" if has_failed else ""
            add_note(error, f"At {log.line_of_program(trace)}{whose}.")
            trace = None
        if not is_others and isinstance(error, Exception):
            tell_launcher(error, trace)
        log.show_uncaught(self._previous_hook, kind, error, trace)

    def _tell_end(self, error: BaseException) -> None:
        """Let the others know what ends this rank's program."""
        self._ending = f"has ended its program after {log.name_error(error).splitlines()[0]}"[:_MAX_END].rstrip(".")
        # KeyboardInterrupt goes to all ranks of a terminal by itself; a forked child has no connections.
        if isinstance(error, Exception) and self._plane.is_connected:
            self.report(f"its program ({self.position})", error)
