"""What the processes of a group tell each other before data moves, and the errors of those that don't fit together.

Every rank brings a record of what it is about to do (sequence number, operation, signature, call site) over connections
of the library's own. Ranks that disagree all raise an error that says what each one brought; gloo itself returns
garbage or aborts. A user's small tensors travel in the same message.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, NamedTuple, NoReturn, TypeVar

from torch.distributed import PrefixStore  # type: ignore[attr-defined]

from torchstrategy.base.labels import label
from torchstrategy.base.log import call_site, raised_by_all, warn_once
from torchstrategy.base.names import difference_of_ranks, named_ranks, tensors_of
from torchstrategy.base.stalls import Waiting, watch_for_stalls
from torchstrategy.collectives.connections import Check
from torchstrategy.collectives.notices import describe
from torchstrategy.collectives.records import Group, Unite, connect_records
from torchstrategy.collectives.rendezvous import Rendezvous
from torchstrategy.errors import (
    DeadlineExceededError,
    DisagreementError,
    InvalidArgumentError,
    OpError,
    ReplicaFailedError,
)

__all__ = ["RecordGroup", "check_equal"]

_ON_ITS_WAY_S = 5.0  # how long data of a rank that has failed may be under way

_Result = TypeVar("_Result")


class _Row(NamedTuple):
    payload: Any
    data: bytes
    ranks: Sequence[int]


class RecordGroup:
    """The processes of one strategy as they exchange records, seen from one of them.

    Args:
        rendezvous: the processes.
        operation: what they are connected for, as an error message should call it.
        timeout_s: seconds in which all ranks must arrive in an operation.

    Raises:
        ReplicaFailedError: another rank failed or is gone.
        DeadlineExceededError: not all ranks arrived in time.
    """

    def __init__(self, rendezvous: Rendezvous, operation: str, timeout_s: float) -> None:
        self.rank, self.size, self._whose = rendezvous.rank, rendezvous.size, rendezvous.whose
        self.watch = rendezvous.watch
        self._timeout_s = timeout_s
        self._sequence = 0
        #: How many sums this rank has begun early where other collectives take the same way; and any rank has.
        self.num_early = self._most_early = 0
        self._started: Callable[[], object] | None = None
        self._noted, self._known = list[str](), set[str]()  # collectives since the last record; once compared
        self._waiting = Waiting(self.watch.stall)
        watch_for_stalls(self._waiting)
        self._operations: set[str] = set()  # that were completed once
        self._broken = ""
        self._broken_as: type[OpError] = ReplicaFailedError  # as tf, which raises the first error again
        self._process = os.getpid()
        self._threads: set[str] = set()  # of the program that have made collectives, by name
        store = PrefixStore("records", rendezvous.store)
        check = self._checker(operation)
        try:
            self._records = connect_records(
                store, rendezvous.host, self.rank, self.size, rendezvous.hosts, timeout_s, check, rendezvous.ask
            )
        except OSError as error:
            self._raise_lost(operation, error)

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
        return _spread(self._start_exchange(operation, payload)(), 0)

    def unite(
        self, operation: str, payload: Any, masks: Sequence[int], counts: Sequence[float]
    ) -> tuple[list[Any], list[int], list[float]]:
        """Do as ``exchange``, and unite what differs between ranks that do the same, so that messages stay short.

        Args:
            operation: what this rank is doing, as an error message should call it.
            payload: anything JSON can hold, which is equal on most ranks.
            masks: numbers, not negative, whose bits mean something; as many on all ranks.
            counts: numbers to be added up; as many on all ranks.

        Returns:
            The payloads in the order of ranks; then of each mask the bits that any rank has set; then the sums of the
            counts, to the bit the same on all ranks. Errors as in ``exchange``.
        """
        return self._united(self._start_exchange(operation, payload, _encode(masks, counts), _unite)())

    def start_sum_of_numbers(self, operation: str, counts: Sequence[float]) -> Callable[[], list[float]]:
        """Send this rank's numbers, so that nobody waits for them who needs them later.

        Args:
            operation: what this rank is doing, as an error message should call it.
            counts: numbers to be added up; as many on all ranks.

        Returns:
            A function that waits for the others' and returns the sums; errors as in ``unite``, and
            ``InvalidArgumentError`` where ranks bring more than others. The next collective waits, too, if it is first.
        """
        finish = self._start_exchange(operation, len(counts), _encode((), counts), _unite)
        sums: Future[list[float]] = Future()

        def result() -> list[float]:
            if not sums.done():
                self._started = None
                try:
                    check_equal(_spread(rows := finish(), 0), operation, "count of numbers")
                    sums.set_result(self._united(rows)[2])
                except BaseException as error:
                    sums.set_exception(error)
                    raise
            return sums.result()

        self._started = result
        return result

    def _united(self, rows: list[_Row]) -> tuple[list[Any], list[int], list[float]]:
        return _spread(rows, 0), *_decode(functools.reduce(_unite, [row.data for row in rows]))

    def broadcast_object(self, operation: str, payload: Any) -> Any:
        """Return rank 0's payload (anything JSON can hold) on every rank; errors as in ``exchange``."""
        return self.exchange(operation, payload if self.rank == 0 else None)[0]

    def agree(self, operation: str, signature: Any, what: str) -> None:
        """Check that all ranks bring the same signature; other errors as in ``exchange``.

        Args:
            operation: what this rank is doing, as an error message should call it.
            signature: anything JSON can hold.
            what: what the signatures are, in the plural.

        Raises:
            InvalidArgumentError: they are not the same.
        """
        check_equal(self.exchange(operation, signature), operation, what)

    def note(self, operation: str, signature: str) -> None:
        """Begin what the ranks compare with the next record; a new one, and one of 1000, now. Errors: as ``agree``."""
        collective = f"{operation}, {signature}"
        if collective in self._known and len(self._noted) < 1000:
            self._checker(operation)()
            self._noted.append(collective)
            return
        self.agree(operation, signature, "shapes and dtypes")
        self._known.add(collective)

    def report_failure(self, operation: str, error: BaseException) -> None:
        """Tell the other ranks that this one failed, so that none waits for it."""
        self.watch.report(operation, error)

    def give_up(self, reason: str) -> None:
        """Refuse everything that follows, because the ranks are no longer at the same point.

        Args:
            reason: what has happened, as a part of a sentence.
        """
        self._broken = self._broken or reason
        self.watch.note_given_up()

    def _exchange(self, operation: str, payload: Any, data: bytes | None) -> tuple[list[Any], list[bytes]]:
        """Exchange payloads, and data that travels along; a rank that brings none has empty data."""
        rows = self._start_exchange(operation, payload, data)()
        return _spread(rows, 0), _spread(rows, 1)

    def _start_exchange(
        self, operation: str, payload: Any, data: bytes | None = None, unite: Unite | None = None
    ) -> Callable[[], list[_Row]]:
        if self._process != os.getpid():
            raise RuntimeError(
                f"{operation} was called in a process that os.fork has made of rank {self.rank} (multiprocessing with "
                "the start method 'fork' does that, too). The connections to the other ranks are those of the process "
                "that was forked. Make collectives there only, or start processes by 'spawn' or 'forkserver'."
            )
        self._threads.add(threading.current_thread().name)
        if self._started is not None:  # messages are read in the order in which they are sent
            self._started()
        self._sequence += 1
        self.watch.num_collectives += 1
        site = call_site()
        where = f"{operation}{self._whose} (collective number {self._sequence}) at {site}"
        self.watch.position = f"in {where}"
        noted, self._noted = self._noted, []
        before = noted and hashlib.sha256(repr(noted).encode()).hexdigest()
        says = [self._sequence, operation, site, payload, before, self.num_early]
        head = json.dumps(says, separators=(",", ":")).encode() + b"\n"
        body = head + data if data else head
        self._checker(operation)()
        receive = self._guarded(operation, lambda check: self._records.start(body, check, unite), payload)
        self.watch.position = f"after the start of {where}"

        def finish() -> list[_Row]:
            self.watch.position = f"in {where}"
            self._waiting.begin(is_first=operation not in self._operations)
            try:
                with label("wait", operation, len(body), "bytes in a message"):
                    groups = self._guarded(operation, receive, payload)
            finally:
                self._waiting.end()
            self._operations.add(operation)
            self.watch.position = f"after {where}"
            return self._read(groups, head, payload, noted)

        return finish

    def _read(self, groups: list[Group], head: bytes, payload: Any, noted: list[str]) -> list[_Row]:
        """Return what the ranks have brought, after a comparison of what they are doing."""
        if all(body.startswith(head) for body, _ in groups):
            return [_Row(payload, body[len(head) :], ranks) for body, ranks in groups]
        _, operation, site, *_ = json.loads(head)
        if any(not body.startswith(b"[") for body, _ in groups):
            self.give_up(f"the ranks lost step in {operation}")
            raise DisagreementError(f"{operation}: this rank compares records while another one sends data.")
        records, _, parts = zip(*(body.partition(b"\n") for body, _ in groups), strict=True)  # JSON has no line breaks
        rows = [json.loads(record) for record in records]
        who = [named_ranks(ranks) for _, ranks in groups]
        if any(row[:2] != rows[0][:2] for row in rows):
            raise DisagreementError(
                "The ranks are not in the same collective:\n"
                + "\n".join(f"  {who[r]}: {row[1]} (number {row[0]}) at {row[2]}" for r, row in enumerate(rows))
                + "\nEvery rank must make the same collective calls in the same order: look for a call that only "
                "some ranks make, such as one inside `if rank == 0:`." + self._about_threads()
            )
        if any(row[4] != rows[0][4] for row in rows):
            self._refuse_unlike(operation, noted)
        self._most_early = max(self._most_early, *[row[5] for row in rows])
        if any(row[2] != site for row in rows):  # it may be meant, so this is no error
            warn_once(
                f"The ranks meet in {operation}, but from different lines:\n"
                + "\n".join(f"  {who[r]}: {row[2]}" for r, row in enumerate(rows))
                + "\nIf a rank has left out a call, or made one more, values of different calls are combined. Every "
                "rank must make the same collective calls in the same order."
            )
        return [_Row(row[3], data, ranks) for row, data, (_, ranks) in zip(rows, parts, groups, strict=True)]

    def _refuse_unlike(self, operation: str, noted: list[str]) -> NoReturn:
        text = difference_of_ranks(self.exchange(f"telling apart what came before {operation}", noted))
        self.give_up(f"the ranks made different collectives before {operation}")
        raise DisagreementError(
            f"The ranks made different collectives before {operation} at {call_site()}. {text}\nEvery rank must call "
            "the same layers in the same order, and run the backward pass. Weights are as they were, but running "
            "statistics may be wrong: start again from the last checkpoint."
        )

    def _about_threads(self) -> str:
        if len(self._threads) < 2:
            return ""
        return (
            f" Collectives of this rank come from {len(self._threads)} threads ({', '.join(sorted(self._threads))}), "
            "whose order may differ from rank to rank: make them in one thread."
        )

    def _guarded(self, operation: str, act: Callable[[Check], _Result], brought: Any) -> _Result:
        """Do what depends on other ranks, and turn a lost connection into an error that says who is missing.

        Args:
            operation: as in ``exchange``.
            act: does it.
            brought: the payload, or as a list what tensors there are.
        """
        try:
            return act(self._checker(operation, self.watch.num_collectives))
        except ConnectionError as error:
            self.watch.note_given_up()
            self._raise_lost(operation, error, brought)
        except BaseException:
            self.give_up(f"{operation} was given up")
            raise

    def _checker(self, operation: str, number: int | None = None) -> Check:
        """Return a function that raises when another rank has failed or the time is up.

        Args:
            operation: as in ``exchange``.
            number: of the collective whose end is waited for. A rank that failed after it has sent what is needed for
                it, so that all ranks get through it, no matter which of them runs first.
        """
        deadline = time.monotonic() + self._timeout_s
        known_at: float | None = None

        def check() -> None:
            nonlocal known_at
            if number is not None and not self._broken and self.watch.is_past(number):
                known_at = known_at or time.monotonic()
                if time.monotonic() - known_at < _ON_ITS_WAY_S:
                    return
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
                f"are no longer at the same point. Start the job again. The failure was: "
                f"{failure['error'] if failure['operation'] else describe(failure)}"
            )
        if failure.get("is_deadline"):  # another rank has waited longer, for the same one
            text = failure["error"].partition(": ")[2]
            raise DeadlineExceededError(
                f"{text}\n(Rank {failure['rank']} says so. This rank was in {operation}.)"
            ) from None
        raise ReplicaFailedError(f"{describe(failure)}\n(This rank was waiting for it in {operation}.)") from None

    def _raise_lost(self, operation: str, error: Exception, brought: Any = None) -> NoReturn:
        self.watch.wait_for_report(1.0)  # if the other rank has died, that says more
        self._raise_if_failed(operation)
        self._broken = f"the connection to another rank broke in {operation}"
        reason = str(error).partition(". This is typically")[0]  # gloo goes on with advice
        gone, where = self.watch.gone, f"{operation}{tensors_of(brought)} at {call_site()}"  # others end because of it
        how = f"has lost its connection to another rank in {where}: {reason}"
        how = self.watch.unmet.format(where) or how
        self.watch.report_lost(how, gone)
        raise ReplicaFailedError(f"Rank {self.rank} {how}. {self.watch.where_is_everyone(gone)}") from None


def check_equal(brought: Sequence[Any], operation: str, what: str) -> None:
    """Check that what the ranks have brought is the same.

    Args:
        brought: one value for each rank.
        operation: what the ranks are doing, as an error message should call it.
        what: what the values are, in the plural.

    Raises:
        InvalidArgumentError: they differ.
    """
    if any(other != brought[0] for other in brought):
        lines = difference_of_ranks(brought)
        raise raised_by_all(InvalidArgumentError(f"{operation}: the ranks must bring the same {what}.\n{lines}"))


def _encode(masks: Sequence[int], counts: Sequence[float]) -> bytes:
    return json.dumps([f"{mask:x}" for mask in masks]).encode() + b"\n" + json.dumps(counts).encode()


def _decode(data: bytes) -> tuple[list[int], list[float]]:
    masks, counts = map(json.loads, data.split(b"\n"))
    return [int(mask, 16) for mask in masks], counts


def _unite(one: bytes, other: bytes) -> bytes:
    """Return for two ranks, or groups of ranks, what ``RecordGroup.unite`` says of both."""
    (masks, counts), (more, more_counts) = one.split(b"\n"), other.split(b"\n")
    sums = [count + another for count, another in zip(json.loads(counts), json.loads(more_counts), strict=True)]
    if masks == more:  # as nearly always
        return masks + b"\n" + json.dumps(sums).encode()
    return _encode([mask | also for mask, also in zip(_decode(one)[0], _decode(other)[0], strict=True)], sums)


def _spread(rows: Sequence[_Row], place: int) -> list[Any]:
    """Return for each rank what its group has brought."""
    if len(rows) == 1:
        return [rows[0][place]] * len(rows[0].ranks)
    found = {rank: row[place] for row in rows for rank in row.ranks}
    return [found[rank] for rank in range(len(found))]
