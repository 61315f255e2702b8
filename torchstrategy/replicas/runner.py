"""One persistent thread for each replica of this process, taking turns between merge points.

The caller's thread is the conductor: it resumes a replica, waits until the replica finishes, fails or reaches a merge
point, and goes on to the next one. When all replicas wait at a merge point, the conductor runs the merge function. With
``concurrent`` it resumes all replicas at once instead.
"""

from __future__ import annotations

import contextvars
import functools
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

from torchstrategy.log import logger

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
        concurrent: run the replicas at the same time instead of in turns.
        turns: told on the caller's thread of each turn's start and end.
    """

    def __init__(self, num_replicas: int, turns: Turns, *, concurrent: bool) -> None:
        self._num_replicas = num_replicas
        self._concurrent = concurrent
        self._turns = turns
        self._threads: list[_ReplicaThread] = []
        weakref.finalize(self, _end, self._threads).atexit = False
        #: The replica whose turn it is; autograd threads of accelerators have no context of their own.
        self.current: int | None = None

    def run(self, tasks: Sequence[Callable[[], Any]], name: Callable[[int], str]) -> list[Any]:
        """Call each task on its replica's thread and return the results.

        Args:
            tasks: one call for each replica.
            name: says which replica a local id is, for error messages.

        Returns:
            The results in the order of replicas.

        Raises:
            RuntimeError: the replicas reached different numbers or kinds of merge points.
        """
        threads = self._ready_threads()
        for thread, task in zip(threads, tasks, strict=True):
            context = contextvars.copy_context()
            thread.task = functools.partial(context.run, task)
            thread.done, thread.aborted = False, False
            thread.result = thread.error = thread.request = None
        try:
            while True:
                self._round(threads)
                self._raise_first_error(threads, name)
                if all(thread.done for thread in threads):
                    break
                self._merge(threads, name)
        except BaseException:
            self._abort(threads)
            raise
        results = [thread.result for thread in threads]
        for thread in threads:
            thread.result = None
        return results

    def merge(self, local_id: int, request: MergeRequest) -> Any:
        """Meet the other replicas; called in a replica function."""
        thread = threading.current_thread()
        if isinstance(thread, _ReplicaThread):  # of this runner, or left over from a run that was interrupted
            return thread.merge(request)
        return self._threads[local_id].merge(request)  # autograd's thread of an accelerator

    def close(self) -> None:
        """End the threads."""
        _end(self._threads)

    def _ready_threads(self) -> list[_ReplicaThread]:
        if not self._threads:
            self._threads += [_ReplicaThread(i) for i in range(self._num_replicas)]
        return self._threads

    def _round(self, threads: Sequence[_ReplicaThread]) -> None:
        """Let every replica run up to its next merge point or its end."""
        if self._concurrent:
            for thread in threads:
                thread.resume()
            for thread in threads:
                thread.wait_paused()
            return
        for i, thread in enumerate(threads):
            self._turns.starts(i)
            self.current = i
            try:
                thread.resume()
                thread.wait_paused()
            finally:
                self.current = None
                self._turns.ends(i, failed=thread.error is not None)
            if thread.error is not None:
                return  # as tf: the replicas after a failed one are not started

    def _raise_first_error(self, threads: Sequence[_ReplicaThread], name: Callable[[int], str]) -> None:
        for i, thread in enumerate(threads):
            if thread.error is not None:
                error, thread.error = thread.error, None
                note = f"Raised by {name(i)}."
                if hasattr(error, "add_note"):
                    error.add_note(note)
                else:  # Python 3.10
                    logger.error(note)
                raise error

    def _merge(self, threads: Sequence[_ReplicaThread], name: Callable[[int], str]) -> None:
        requests = [thread.request for thread in threads]
        kinds = [None if thread.done or request is None else request.kind
                 for thread, request in zip(threads, requests, strict=True)]  # fmt: skip
        if any(kind != kinds[0] for kind in kinds):
            rows = "\n".join(
                f"  {name(i)}: {'returned' if kind is None else f'waits in {kind}'}" for i, kind in enumerate(kinds)
            )
            raise RuntimeError(
                "Some replicas made a different number of merge_call()s, or of different kinds (all_reduce, "
                f"all_gather, optimizer.step and the like count):\n{rows}\n"
                "Every replica must make the same ones in the same order, whatever its share of the batch."
            )
        present = [request for request in requests if request is not None]
        merged = present[0].fn([request.payload for request in present])
        for thread, value in zip(threads, merged, strict=True):
            thread.merged = value

    def _abort(self, threads: Sequence[_ReplicaThread]) -> None:
        """Unwind the replicas that wait; after an interrupt leave the running ones to unwind by themselves."""
        orderly = all(thread.paused for thread in threads)
        for thread in threads:
            thread.aborted = True
            thread.discarded = not orderly
        for thread in threads:
            if thread.done or not thread.paused:
                continue
            if thread.request is None:  # its turn never came
                thread.task, thread.done = None, True
                continue
            while not thread.done:  # a `finally` of the user's may reach another merge point
                thread.resume()
                thread.wait_paused()
            thread.error = None
        if not orderly:
            self._threads.clear()


def _end(threads: list[_ReplicaThread]) -> None:
    for thread in threads:
        if thread.done:
            thread.task = None
            thread.resume()
    threads.clear()
