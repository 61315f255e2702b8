"""What the processes of a group tell each other before data moves, and the errors of those that don't fit together.

Every rank brings a record of what it is about to do (sequence number, operation, signature, call site) over connections
of the library's own. Ranks that disagree all raise an error that says what each one brought; gloo itself returns
garbage or aborts. A user's small tensors travel in the same message.
"""

from __future__ import annotations

import itertools
import json
import os
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, NoReturn, TypeVar

from torch.distributed import PrefixStore  # type: ignore[attr-defined]

from torchstrategy.base.labels import label
from torchstrategy.base.log import call_site, warn_once
from torchstrategy.base.stalls import Waiting, watch_for_stalls
from torchstrategy.collectives.connections import Check
from torchstrategy.collectives.failures import describe
from torchstrategy.collectives.records import connect_records
from torchstrategy.collectives.rendezvous import Rendezvous
from torchstrategy.errors import (
    DeadlineExceededError,
    DisagreementError,
    InvalidArgumentError,
    OpError,
    ReplicaFailedError,
)

__all__ = ["RecordGroup", "check_equal"]

# How long data of a rank that has failed may be under way.
_ON_ITS_WAY_S = 5.0
_MOST_NAMED = 4  # tensors in an error

_Result = TypeVar("_Result")


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
        self.rank = rendezvous.rank
        self.size = rendezvous.size
        self.watch = rendezvous.watch
        self._timeout_s = timeout_s
        self._sequence = 0
        self._started: Callable[[], list[Any]] | None = None
        self._waiting = Waiting(self.watch.stall)
        watch_for_stalls(self._waiting)
        self._operations: set[str] = set()  # that were completed once
        self._broken = ""
        self._broken_as: type[OpError] = ReplicaFailedError  # as tf, which raises the first error again
        self._process = os.getpid()
        #: The names of the program's threads that have made collectives.
        self._threads: set[str] = set()
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

    def _exchange(self, operation: str, payload: Any, data: bytes | None = None) -> tuple[list[Any], list[bytes]]:
        """Exchange payloads, and data that travels along; a rank that brings none has empty data."""
        return self._start_exchange(operation, payload, data)()

    def _start_exchange(
        self, operation: str, payload: Any, data: bytes | None = None
    ) -> Callable[[], tuple[list[Any], list[bytes]]]:
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
        where = f"{operation} (collective number {self._sequence}) at {site}"
        self.watch.position = f"in {where}"
        head = json.dumps([self._sequence, operation, site, payload], separators=(",", ":")).encode() + b"\n"
        body = head + data if data else head
        self._checker(operation)()
        receive = self._guarded(operation, lambda check: self._records.start(body, check), payload)
        self.watch.position = f"after the start of {where}"

        def finish() -> tuple[list[Any], list[bytes]]:
            self.watch.position = f"in {where}"
            self._waiting.begin(is_first=operation not in self._operations)
            try:
                with label("wait", operation, len(body), "bytes in a message"):
                    bodies = self._guarded(operation, receive, payload)
            finally:
                self._waiting.end()
            self._operations.add(operation)
            self.watch.position = f"after {where}"
            return self._read(bodies, head, payload)

        return finish

    def _read(self, bodies: list[bytes], head: bytes, payload: Any) -> tuple[list[Any], list[bytes]]:
        """Return the payloads and data of the ranks' bodies, after a comparison of what the ranks are doing."""
        if all(body.startswith(head) for body in bodies):
            return [payload] * self.size, [body[len(head) :] for body in bodies]
        _, operation, site, _ = json.loads(head)
        if any(not body.startswith(b"[") for body in bodies):
            self.give_up(f"the ranks lost step in {operation}")
            raise DisagreementError(f"{operation}: this rank compares records while another one sends data.")
        # JSON has no line breaks.
        records, _, parts = zip(*(body.partition(b"\n") for body in bodies), strict=True)
        rows = [json.loads(record) for record in records]
        if any(row[:2] != rows[0][:2] for row in rows):
            raise DisagreementError(
                "The ranks are not in the same collective:\n"
                + "\n".join(f"  rank {r}: {row[1]} (number {row[0]}) at {row[2]}" for r, row in enumerate(rows))
                + "\nEvery rank must make the same collective calls in the same order: look for a call that only "
                "some ranks make, such as one inside `if rank == 0:`." + self._about_threads()
            )
        if any(row[2] != site for row in rows):  # it may be meant, so this is no error
            warn_once(
                f"The ranks meet in {operation}, but from different lines:\n"
                + "\n".join(f"  rank {r}: {row[2]}" for r, row in enumerate(rows))
                + "\nIf a rank has left out a call, or made one more, values of different calls are combined. Every "
                "rank must make the same collective calls in the same order."
            )
        return [row[3] for row in rows], list(parts)

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
        gone = self.watch.gone  # others end because of that
        self._broken = f"the connection to another rank broke in {operation}"
        reason = str(error).partition(". This is typically")[0]  # gloo goes on with advice
        where = f"{operation}{_about(brought)} at {call_site()}"
        how = f"has lost its connection to another rank in {where}: {reason}"
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
        raise InvalidArgumentError(f"{operation}: the ranks must bring the same {what}.\n{_differences(brought)}")


def _about(brought: Any) -> str:
    """Say what tensors a rank has brought to an operation, if the payload says it."""
    match brought:
        case [[*shape], str(dtype)]:
            return f" ({dtype}{shape})"
        case [str(), *_] if all(isinstance(one, str) for one in brought):
            more = f" and {len(brought) - _MOST_NAMED} more" if len(brought) > _MOST_NAMED else ""
            return f" ({', '.join(brought[:_MOST_NAMED])}{more})"
    return ""


def _differences(brought: Sequence[Any]) -> str:
    """Say what each rank brought; of long lists only the number of entries and the first difference."""
    if not all(isinstance(value, list) for value in brought):
        return "\n".join(f"  rank {rank}: {value}" for rank, value in enumerate(brought))
    columns = list(itertools.zip_longest(*brought, fillvalue="nothing"))
    index, column = next((i, column) for i, column in enumerate(columns) if any(v != column[0] for v in column))
    lines = [f"  rank {rank}: {value} ({len(brought[rank])} in all)" for rank, value in enumerate(column)]
    return "\n".join([f"The first difference is at position {index}:", *lines])
