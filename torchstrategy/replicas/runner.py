"""The replicas of this process, taking turns between merge points.

Replica 0 runs on the caller's thread. When it reaches a merge point, the others run up to theirs, each on a persistent
thread of its own, and the merge function is called; waking a thread on another core costs some 40 µs, so replicas that
never meet all run on the caller's thread. With ``concurrent`` the others' threads run at the same time as replica 0.

A replica that raises ends the run, but not before the others have come as far: to their next merge point or to their
end, as they would in processes of their own. So all of them have made a step, or none has.
"""

from __future__ import annotations

import contextvars
import functools
import os
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

from torchstrategy.base.log import note_replica
from torchstrategy.base.stalls import Stall, Waiting, stacks_of_threads, watch_for_stalls

__all__ = ["MergeRequest", "Runner", "Turns"]


class MergeRequest(NamedTuple):
    """What a replica brings to a merge point.

    Args:
        kind: the operation, for error messages; all replicas must bring the same.
        fn: gets the list of the replicas' payloads and returns one result for each.
        payload: this replica's part.
    """

    kind: str
    fn: Callable[[list[Any]], Sequence[Any]]
    payload: Any


class _Aborted(BaseException):
    """Unwinds a replica that waits at a merge point which will not happen."""


class _ReplicaThread(threading.Thread):
    def __init__(self, local_id: int) -> None:
        super().__init__(name=f"torchstrategy-replica-{local_id}", daemon=True)
        self.local_id = local_id
        self.task: Callable[[], Any] | None = None
        self.result: Any = None
        self.error: BaseException | None = None
        self.request: MergeRequest | None = None
        self.merged: Any = None
        self.aborted = False
        self.done = True
        self.paused = True  # the conductor's view: it has not been resumed since it last paused
        self.discarded = False
        self._resume = threading.Lock()
        self._paused = threading.Lock()
        self._resume.acquire()
        self._paused.acquire()
        self.start()

    def resume(self) -> None:
        self.paused = False
        self._resume.release()

    def wait_paused(self) -> None:
        self._paused.acquire()
        self.paused = True

    def merge(self, request: MergeRequest) -> Any:
        """Called on this thread: wait until the conductor has merged."""
        if self.aborted:
            raise _Aborted
        self.request = request
        self._paused.release()
        self._resume.acquire()
        self.request = None
        if self.aborted:
            raise _Aborted
        merged, self.merged = self.merged, None
        return merged

    def run(self) -> None:
        while True:
            self._resume.acquire()
            task = self.task
            if task is None:
                return
            try:
                self.result = task()
            except _Aborted:
                pass
            except BaseException as error:  # noqa: BLE001 - re-raised by the conductor
                self.error = error
            self.task = task = None
            self.done = True
            self._paused.release()
            if self.discarded:
                return


class Turns(Protocol):
    """What wants to know whose turn it is."""

    def starts(self, local_id: int) -> None:
        """Prepare for a replica's turn."""

    def ends(self, local_id: int, *, failed: bool) -> None:
        """Clean up after a replica's turn."""


class Runner:
    """Runs one function call for each replica.

    Args:
        num_replicas: replicas of this process.
        turns: told of each turn's start and end.
        call_merge: calls a merge function on the list of payloads, in cross-replica context.
        concurrent: run the replicas at the same time instead of in turns.
    """

    def __init__(
        self,
        num_replicas: int,
        turns: Turns,
        call_merge: Callable[[Callable[[list[Any]], Sequence[Any]], list[Any]], Sequence[Any]],
        *,
        concurrent: bool,
    ) -> None:
        self._num_replicas = num_replicas
        self._concurrent = concurrent
        self._turns = turns
        self._call_merge = call_merge
        self._tasks: Sequence[Callable[[], Any]] = ()
        self._name: Callable[[int], str] = str
        self._others: Sequence[_ReplicaThread] = ()  # those that a merge point of this run has started
        self._failure: BaseException | None = None
        self._abandoned = False
        #: Whether a replica on the caller's thread has raised.
        self._has_raised = False
        self._threads: list[_ReplicaThread] = []
        self._process = os.getpid()
        weakref.finalize(self, _end, self._threads).atexit = False
        #: The replica whose turn it is; autograd threads of accelerators have no context of their own.
        self.current: int | None = None
        self._caller, self._has_run = threading.current_thread(), False
        stall = weakref.WeakMethod(self._stall)
        self._waiting = Waiting(lambda seconds: method(seconds) if (method := stall()) is not None else None)

    def run(self, tasks: Sequence[Callable[[], Any]], name: Callable[[int], str]) -> list[Any]:
        """Call each task as its replica and return the results.

        Args:
            tasks: one call for each replica.
            name: says which replica a local id is, for error messages.

        Returns:
            The results in the order of replicas.

        Raises:
            RuntimeError: the replicas reached different numbers or kinds of merge points.
        """
        self._tasks, self._name, self._others, self._failure, self._abandoned = tasks, name, (), None, False
        self._has_raised = False
        if not self._has_run:
            watch_for_stalls(self._waiting)
        self._caller = threading.current_thread()
        self._waiting.begin(is_first=not self._has_run)
        try:
            if self._concurrent:
                self._start()
                self._resume()
            results = [self._turn_here(0)]
            if not self._others:
                return results + [self._turn_here(i) for i in range(1, self._num_replicas)]
            self._wait_for_others()
            waiting = [None if thread.done else thread.request for thread in self._others]
            if any(waiting):
                raise self._mismatch([None, *waiting])
            return results + _take_results(self._others)
        except BaseException as error:
            try:
                if self._has_raised and isinstance(error, Exception) and not self._concurrent:
                    self._let_others_follow()
            finally:
                self._abort(self._others)
            raise
        finally:
            self._tasks, self._others, self._failure = (), (), None
            self._waiting.end()
            self._has_run = True

    def merge(self, local_id: int, request: MergeRequest) -> Any:
        """Meet the other replicas; called in a replica function."""
        thread = threading.current_thread()
        if isinstance(thread, _ReplicaThread):  # of this runner, or left over from a run that was interrupted
            return thread.merge(request)
        # The caller's thread, or autograd's thread of an accelerator.
        waiting = [thread for thread in self._others if thread.local_id == local_id]
        return waiting[0].merge(request) if waiting else self._merge_here(local_id, request)

    def _stall(self, seconds: float) -> Stall:
        """Say which replica does not go on; called in another thread."""
        others, late = list(self._others), [] if self.current is None else [self.current]
        if self._concurrent:
            late = [] if self._abandoned else [0]  # the caller's thread, where it does not wait for the others
            late += [thread.local_id for thread in others if not thread.done and thread.request is None]
        names = ", ".join(map(self._name, late)) or "the caller of run"
        return Stall(
            f"No progress for {seconds:.0f} s in run: {names} has not come to the end, or to where all replicas meet "
            f"(a gradient's sum, merge_call and the like), which the others wait for.",
            stacks_of_threads([self._caller, *others]),
        )

    def close(self) -> None:
        """End the threads."""
        _end(self._threads)

    def _turn_here(self, local_id: int) -> Any:
        """Run a replica on this thread to its end."""
        failed = True
        self._waiting.begin(is_first=not self._has_run)
        self._turns.starts(local_id)
        self.current = None if self._concurrent else local_id
        try:
            result = contextvars.copy_context().run(self._tasks[local_id])
            failed = False
            return result
        except _Aborted:
            if self._failure is None:
                raise
            raise self._failure from None
        except BaseException as error:
            self._has_raised = True
            note_replica(error, self._name(local_id))
            raise
        finally:
            self.current = None
            self._turns.ends(local_id, failed=failed)

    def _let_others_follow(self) -> None:
        """Let the others use what the last merge point gave to all; their own errors don't count.

        As in tf, replicas that have not begun do not begin.
        """
        for thread in self._others:
            if not thread.done:
                self._give_turn(thread)

    def _merge_here(self, local_id: int, request: MergeRequest) -> Any:
        """Wait until the others are at their merge points, and merge; an error unwinds this replica first."""
        if self._failure is not None:  # a `finally` of the user's, in a run that has failed
            raise _Aborted
        self.current = None
        try:
            self._turns.ends(local_id, failed=False)
            if local_id > 0:  # the replicas before it have returned on this thread
                raise self._mismatch([None] * local_id + [request])
            if not self._others:
                self._start()
            self._wait_for_others()
            merged = self._merged([request, *(None if thread.done else thread.request for thread in self._others)])
            for thread, value in zip(self._others, merged[1:], strict=True):
                thread.merged = value
            if self._concurrent:
                self._resume()
        except BaseException as error:  # noqa: BLE001 - raised when the replica is unwound
            self._failure = error
            raise _Aborted from None
        finally:
            self._waiting.begin(is_first=not self._has_run)
            self._turns.starts(local_id)
            self.current = None if self._concurrent else local_id
        return merged[0]

    def _start(self) -> None:
        """Give the other replicas' tasks to their threads."""
        if self._process != os.getpid():  # a fork, in which there is no thread but the one that made it
            self._threads.clear()
        if not self._threads:
            self._process = os.getpid()
            self._threads += [_ReplicaThread(i) for i in range(1, self._num_replicas)]
        for thread in self._threads:
            thread.task = functools.partial(contextvars.copy_context().run, self._tasks[thread.local_id])
            thread.done, thread.aborted = False, False
            thread.result = thread.error = thread.request = None
        self._others = tuple(self._threads)

    def _resume(self) -> None:
        for thread in self._others:
            thread.resume()

    def _wait_for_others(self) -> None:
        """Wait until all others are at their next merge point or end, in turns after having let each go on.

        Raises:
            BaseException: the first error of one of them.
        """
        for thread in self._others:
            if self._concurrent:
                self._wait(thread)
            else:
                self._give_turn(thread)
        for thread in self._others:
            if thread.error is not None:
                error, thread.error = thread.error, None
                note_replica(error, self._name(thread.local_id))
                raise error

    def _give_turn(self, thread: _ReplicaThread) -> None:
        self._waiting.begin(is_first=not self._has_run)
        self._turns.starts(thread.local_id)
        self.current = thread.local_id
        try:
            thread.resume()
            self._wait(thread)
        finally:
            self.current = None
            self._turns.ends(thread.local_id, failed=thread.error is not None)

    def _wait(self, thread: _ReplicaThread) -> None:
        """Wait until a thread pauses; an interrupt meanwhile means that nobody will."""
        self._abandoned = True
        thread.wait_paused()
        self._abandoned = False

    def _merged(self, requests: Sequence[MergeRequest | None]) -> Sequence[Any]:
        """Call the merge function on what all replicas bring; ``None`` stands for a replica that has returned."""
        present = [request for request in requests if request is not None]
        if len(present) < len(requests) or any(request.kind != present[0].kind for request in present):
            raise self._mismatch(requests)
        self._waiting.end()  # what waits for other processes says so itself
        return self._call_merge(present[0].fn, [request.payload for request in present])

    def _mismatch(self, requests: Sequence[MergeRequest | None]) -> RuntimeError:
        rows = "\n".join(
            f"  {self._name(i)}: {'returned' if request is None else f'waits in {request.kind}'}"
            for i, request in enumerate(requests)
        )
        return RuntimeError(
            "Some replicas made a different number of merge_call()s, or of different kinds (all_reduce, all_gather, "
            f"optimizer.step and the like count):\n{rows}\n"
            "Every replica must make the same ones in the same order, whatever its share of the batch."
        )

    def _abort(self, threads: Sequence[_ReplicaThread]) -> None:
        """Unwind the other replicas; after an interrupt of the wait for them leave them to unwind by themselves."""
        for thread in threads:
            thread.aborted = True
        interrupt = self._wait_for_running(threads)
        orderly = all(thread.paused for thread in threads)
        for thread in threads:
            thread.discarded = not orderly
            if thread.paused:
                _unwind(thread)
        if not orderly:
            self._threads.clear()
        if interrupt is not None:
            raise interrupt

    def _wait_for_running(self, threads: Sequence[_ReplicaThread]) -> BaseException | None:
        """Wait until no thread is running; return what interrupted that."""
        try:
            for thread in threads:
                if not thread.paused and not self._abandoned:
                    self._wait(thread)
        except BaseException as error:  # noqa: BLE001 - raised when the others are unwound
            return error
        return None


def _unwind(thread: _ReplicaThread) -> None:
    if not thread.done and thread.request is None:  # its turn never came
        thread.task, thread.done = None, True
    while not thread.done:  # a `finally` of the user's may reach another merge point
        thread.resume()
        thread.wait_paused()
    thread.result = thread.error = thread.merged = None


def _end(threads: list[_ReplicaThread]) -> None:
    for thread in threads:
        if thread.done:
            thread.task = None
            thread.resume()
    threads.clear()


def _take_results(threads: Sequence[_ReplicaThread]) -> list[Any]:
    results = [thread.result for thread in threads]
    for thread in threads:
        thread.result = None
    return results
