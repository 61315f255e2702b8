"""One worker as the coordinator sees it: connection, what it knows, what it is running.

Every method runs on the control loop's thread, so there are no locks. Whatever was sent before a worker was lost and
is answered afterwards belongs to an older generation and is not heard.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, Protocol

from torchstrategy.base import log
from torchstrategy.base.log import logger
from torchstrategy.errors import UnavailableError
from torchstrategy.ps.coordinator.closures import Closure, ClosureQueue
from torchstrategy.ps.coordinator.per_worker import Resource, Resources
from torchstrategy.ps.results import decode_error, decode_result
from torchstrategy.ps.states import PeerState, WorkerState, follow
from torchstrategy.ps.transport.messages import FencedError, Message, rebuild_error

__all__ = ["Worker", "add_note"]

_RETRY_S = 0.2
_MAX_RETRY_S = 10.0
#: A worker is told what it may forget when it knows more definitions than this, and twice as many as it needs.
_MIN_KNOWN = 256


class WorkersCluster(Protocol):
    """What a worker needs of the cluster that it belongs to."""

    queue: ClosureQueue
    resources: Resources
    configuration: Callable[[int], Message]
    unneeded: Callable[[Iterable[str]], list[str]]
    absorb: Callable[[Message], None]

    @property
    def is_closed(self) -> bool:
        """Whether the program has closed it, or ends."""

    def changed(self, worker: Worker) -> None:
        """Note that a worker can take more, or less, than before."""

    def call_later(self, seconds: float, fn: Callable[[], None]) -> None:
        """Call a function on the loop's thread after some seconds."""

    def failed(self, closure: Closure, error: Exception) -> None:
        """End a closure, and the round with it."""

    def queue_error(self, error: Exception) -> None:
        """Let the next call of the program raise an error that no closure raised."""

    def may_pass(self, worker: Worker, error: Exception) -> bool:
        """Say whether an error of a worker that is there may be gone at the next try."""

    def not_prepared(self, worker: Worker, error: Exception, *, was_told: bool) -> bool:
        """Note that a worker could not be configured, and say whether the program was told; it is tried again."""

    def ps_failed(self, worker: Worker, closure: Closure, ps: int, error: Exception) -> None:
        """Run a closure again for which a parameter server did not answer, unless that is gone."""

    def refused(self, worker: Worker, reason: str, *, is_final: bool = False) -> None:
        """Tell the program, as it can't get better by waiting."""


class Worker:
    """Handles what comes from one worker, and gives it closures.

    Args:
        cluster: whose worker it is.
        index: its task index.
        address: its ``host:port``.
    """

    def __init__(self, cluster: WorkersCluster, index: int, address: str) -> None:
        self._cluster = cluster
        self.index = index
        self.name = f"/job:worker/task:{index} at {address}"
        self.state = WorkerState.AWAITED
        self._reason = ""  # of the state
        self.in_flight: dict[int, Closure] = {}
        self._peer: Any = None
        self._generation = 0
        self._num_awaited = 0
        self._num_failures = 0  # to be configured
        self._was_told = False  # the program, of such a failure
        self._num_failed = 0  # functions, over this connection
        self.num_retries = 0  # of resources
        self._since = time.monotonic()
        self._known: set[str] = set()
        self._max_known = _MIN_KNOWN
        self._retried: set[int] = set()  # resources that are tried again
        self._failed: dict[int, Exception] = {}  # resources that this worker could not make, and why

    @property
    def can_run(self) -> bool:
        """Whether it takes closures."""
        return self.state is WorkerState.READY and not self._num_awaited

    def describe(self) -> str:
        """Say what it is doing."""
        state = self._said
        if self._peer is not None and self._peer.state is PeerState.CONNECTING:
            state = f"not connected yet, {self._peer.reason}"
        elif self.state is WorkerState.READY and self._num_awaited:
            state = "making its datasets, or waiting to try something again"
        return f"{self.name}: {state}, for {time.monotonic() - self._since:.0f} s"

    def attach(self, peer: Any) -> None:
        """Take the connection, as soon as it is tried to make it."""
        self._peer = peer

    # --- called by the loop

    def ready(self, peer: Any, welcome: dict[str, Any]) -> None:
        """Bring a worker up to date that has connected, for the first time or again."""
        self._peer = peer
        if welcome.get("job") == "ps":
            reason = "it is a parameter server and no worker; do all tasks have the same cluster?"
            self._refuse(reason, is_final=False)
            return
        self._leave(WorkerState.PREPARING)
        self._num_failures, self._was_told = 0, False
        self._prepare()
        self._cluster.changed(self)

    def lost(self, peer: Any, reason: str) -> None:  # noqa: ARG002 - there is one
        """Let others run what the worker was running."""
        if self.state not in (WorkerState.PREPARING, WorkerState.READY):
            return
        num_running = len(self.in_flight)
        self._leave(WorkerState.LOST, reason)
        self._lose_values()
        if self._cluster.is_closed:
            return
        then = f" {num_running} of its functions will run again." if num_running else ""
        logger.warning("%s was lost: %s.%s It may come back.", self.name, reason.rstrip("."), then)
        self._cluster.changed(self)

    def refused(self, peer: Any, reason: str) -> None:  # noqa: ARG002
        """Tell the program that the worker does not want it."""
        self._refuse(reason, is_final=False)

    def message(self, peer: Any, message: Message) -> None:  # noqa: ARG002
        """Note a message that nobody asked for."""
        logger.debug("%s sent an unexpected %r.", self.name, message.kind)

    # --- called by the cluster

    def run(self, closure: Closure) -> None:
        """Send a closure, after the definitions that the worker lacks."""
        for number in closure.resources:
            if number in self._failed:
                self._cluster.failed(closure, self._failed[number])
                return
        self.in_flight[closure.number] = closure
        closure.since = time.monotonic()
        self._define(closure.definitions)
        self._send(closure.message(self._num_failed), partial(self._ended, closure))
        if len(self._known) > self._max_known:
            self._forget_unneeded()

    def make(self, resource: Resource) -> None:
        """Make a dataset or an iterator on the worker; closures wait until it is there."""
        if self.state is not WorkerState.READY:
            return  # it is made when the worker is there
        self._define(resource.definitions)
        self._ask(resource.message(), partial(self._made, resource))

    def forget(self, resources: list[int]) -> None:
        """Drop datasets and iterators that the program dropped."""
        if self.state is WorkerState.READY:
            self._send(Message("forget", {"keys": [], "resources": resources}), lambda _: None)

    def _forget_unneeded(self) -> None:
        """Drop definitions of functions and objects that the program dropped; what was sent before still has them."""
        keys = self._cluster.unneeded(self._known)
        self._known.difference_update(keys)
        self._max_known = max(_MIN_KNOWN, 2 * len(self._known))
        self._send(Message("forget", {"keys": keys, "resources": []}), lambda _: None)

    def cancel(self, numbers: list[int]) -> None:
        """Take back closures that the worker has not begun."""
        self._send(Message("cancel", {"closures": numbers}), lambda _: None)

    def pause(self, seconds: float) -> None:
        """Give it no closures for a while."""
        self._after(seconds, lambda: None)

    def pause_while(self, lasts: Callable[[], bool]) -> None:
        """Give it no closures as long as something lasts."""
        self._after(_RETRY_S, lambda: self.pause_while(lasts) if lasts() else None)

    def ask_for_stacks(self, then: Callable[[str], None]) -> None:
        """Call a function with the stacks of the worker's threads."""

        def answered(reply: Any) -> None:
            failure = _failure(reply)
            then(reply.fields.get("text", "") if failure is None else f"no stacks: {failure}")

        self._send(Message("stacks", {}), answered)

    # --- preparing

    def _prepare(self) -> None:
        self._ask(self._cluster.configuration(self.index), self._configured)

    def _configured(self, reply: Any) -> None:
        failure = _failure(reply)
        if failure is not None:
            self._num_failures += 1
            self._was_told = self._cluster.not_prepared(self, failure, was_told=self._was_told)
            self._after(min(0.5 * 2**self._num_failures, _MAX_RETRY_S), self._prepare)
            return
        self._enter(WorkerState.READY)
        logger.info("%s is ready.", self.name)
        for resource in list(self._cluster.resources):
            self.make(resource)

    def _made(self, resource: Resource, reply: Any) -> None:
        failure = _failure(reply)
        if failure is None:
            resource.values[self.index]._settle(partial(_stays_there, resource.name))
            self._make_again(resource)
            return
        if resource.of in self._retried:
            return  # it is made when its dataset is there
        if resource.of in self._failed:
            failure = self._failed[resource.of]  # of the dataset, which was reported
        elif self._cluster.may_pass(self, failure):
            self._retried.add(resource.id)
            self._after(_RETRY_S, partial(self.make, resource))
            return
        else:
            told = f"{type(failure).__name__}: {failure}"
            add_note(failure, f"It was raised when {self.name} made {resource.name}.")
            workers = resource.failed_on.setdefault(told, set())
            if not workers or self.index in workers:
                self._cluster.queue_error(failure)
            workers.add(self.index)  # on a further worker it is no news; functions that need it there get it
        self._failed[resource.id] = failure
        resource.values[self.index]._settle(error=failure)
        self._make_again(resource)

    def _make_again(self, dataset: Resource) -> None:
        """Make the iterators of a dataset that had to be tried several times."""
        if dataset.id in self._retried:
            self._retried.discard(dataset.id)
            for resource in list(self._cluster.resources):
                if resource.of == dataset.id:
                    self.make(resource)

    def _define(self, definitions: Sequence[Message]) -> None:
        for definition in definitions:
            key = definition.fields["key"]
            if key not in self._known:
                self._known.add(key)
                self._known.difference_update(definition.fields["replaces"])  # the worker drops these
                self._send(definition, partial(self._defined, key))

    def _defined(self, key: str, reply: Any) -> None:
        failure = _failure(reply)
        if failure is None:
            return
        self._known.discard(key)
        add_note(failure, f"It was raised when {self.name} read a definition of the program.")
        for closure in [c for c in self.in_flight.values() if c.has_definition(key)]:
            del self.in_flight[closure.number]  # its own answer comes later and is not heard
            self._cluster.failed(closure, failure)
        self._cluster.changed(self)

    # --- answers

    def _ended(self, closure: Closure, reply: Any) -> None:
        if isinstance(reply, Message) and reply.kind == "failed":
            self._num_failed += 1
        if self.in_flight.pop(closure.number, None) is None:
            return
        self._since = time.monotonic()
        for other in self.in_flight.values():
            other.since = self._since  # the next one begins now
            break
        try:
            self._judge(closure, reply)
        except Exception as error:  # noqa: BLE001 - of taking in what came; the closure must not be lost
            self._cluster.failed(closure, error)
        self._cluster.changed(self)

    def _judge(self, closure: Closure, reply: Any) -> None:
        cluster = self._cluster
        failure = _failure(reply)
        if failure is not None:
            cluster.failed(closure, failure)
        elif reply.kind == "done":
            cluster.absorb(reply)
            cluster.queue.finish(closure, partial(decode_result, reply))
        elif reply.kind == "cancelled":
            cluster.queue.put_back([closure])
        else:
            error = decode_error(reply.fields)
            add_note(error, f"It was raised in {closure.name}, which {self.name} ran.")
            ps = reply.fields.get("ps")
            if ps is None:
                cluster.failed(closure, error)
            else:
                cluster.ps_failed(self, closure, ps, error)

    # --- sending

    def _send(self, message: Message, then: Callable[[Any], None]) -> None:
        """Send a request; the answer counts if the worker was not lost in between."""
        generation = self._generation

        def answered(reply: Any) -> None:
            if generation != self._generation:
                return
            if isinstance(reply, UnavailableError) and self._peer.state is not PeerState.READY:
                self.lost(self._peer, self._peer.reason)
                return
            if isinstance(_failure(reply), FencedError):
                self._refuse(str(_failure(reply)), is_final=True)
                return
            then(reply)

        try:
            self._peer.request(message, answered)
        except (TypeError, ValueError) as error:  # too large
            answered(error)

    def _ask(self, message: Message, then: Callable[[Any], None]) -> None:
        """Send a request and run no closures until it is answered."""
        self._num_awaited += 1

        def answered(reply: Any) -> None:
            self._num_awaited -= 1
            then(reply)
            self._cluster.changed(self)

        self._send(message, answered)

    def _after(self, seconds: float, fn: Callable[[], None]) -> None:
        """Run no closures for a while, then call a function."""
        generation = self._generation
        self._num_awaited += 1

        def call() -> None:
            if generation == self._generation:
                self._num_awaited -= 1
                fn()
                self._cluster.changed(self)

        self._cluster.call_later(seconds, call)

    def _enter(self, state: WorkerState, reason: str = "") -> None:
        """Go to another state; nothing else changes it."""
        self.state, self._reason = follow(self.state, state), reason
        self._since = time.monotonic()

    @property
    def _said(self) -> str:
        return f"{self.state.value} ({self._reason})" if self._reason else self.state.value

    def _leave(self, state: WorkerState, reason: str = "") -> None:
        """Go to another state, forget what the worker knew, and give back its closures."""
        self._enter(state, reason)
        self._generation += 1
        self._num_awaited = self.num_retries = self._num_failed = 0
        self._known.clear()
        self._retried.clear()
        self._failed.clear()
        closures, self.in_flight = list(self.in_flight.values()), {}
        for closure in closures[:1]:  # the others had not begun
            closure.num_losses += 1
            if closure.num_losses > 1:
                logger.warning("%d workers were lost while they ran %s.", closure.num_losses, closure.name)
        self._cluster.queue.put_back(closures)

    def _refuse(self, reason: str, *, is_final: bool) -> None:
        self._leave(WorkerState.REFUSED, reason)
        self._lose_values()
        self._cluster.refused(self, reason, is_final=is_final)

    def _lose_values(self) -> None:
        """Say of the datasets and iterators that they are gone, until they are made again."""
        error = UnavailableError(f"{self.name}: {self._said}.")
        for resource in self._cluster.resources:
            resource.values[self.index]._settle(error=error)


def _failure(reply: Any) -> Exception | None:
    """Return why a request has failed, ``None`` if it has not."""
    if isinstance(reply, Exception):
        return reply
    if reply.kind != "error":
        return None
    return decode_error(reply.fields) if "traceback" in reply.fields else rebuild_error(reply)


def add_note(error: Exception, note: str) -> None:
    """Add a line to an error, before the traceback in its notes."""
    log.add_note(error, note)
    if hasattr(error, "__notes__"):
        error.__notes__.insert(0, error.__notes__.pop())


def _stays_there(name: str) -> Any:
    raise TypeError(f"{name} can't be fetched: it is on its worker. Give it to a scheduled function as an argument.")
