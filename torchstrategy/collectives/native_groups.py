"""Groups for which only the accelerator waits, as it does for NCCL: made, in one order, ended with a lost rank.

The calling thread goes on as soon as a collective is in the accelerator's queue. It may wait for that later, in
``item()`` or ``synchronize()``, where it can't look whether another rank is gone; and an accelerator that waits for a
lost rank does so for good. So the failure watch ends the groups from a thread (``NativeGroups``), after which the queue
goes on with whatever is in memory. Nobody can take back what the program has put into the queue by then, such as an
optimizer's step. Therefore each result is united with a byte of the host's memory, which the accelerator reads when it
gets there: 0, or 255 once the group has been ended, which turns numbers into NaN.

A strategy has one such group, and all its collectives on accelerators take it in the same order on all ranks: two
groups whose order is free may wait for each other.
"""

from __future__ import annotations

import functools
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from datetime import timedelta
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]

from torchstrategy.base.devices import accelerator_module, kind_of
from torchstrategy.base.log import logger
from torchstrategy.base.options import CommunicationImplementation
from torchstrategy.collectives.backends import C10dBackend, Wait
from torchstrategy.collectives.connections import Ask, Check
from torchstrategy.collectives.notices import Message

__all__ = ["EarlyOrder", "NativeBackend", "NativeGroups", "in_turn", "make_native_backend", "raise_broken"]

#: How long the collectives that a failed rank has begun may be under way.
_ON_ITS_WAY_S = 5.0
#: How long the program's end waits for other ranks that are still to join its last collectives.
_END_S = 60.0
_ABORT_S = 5.0
_LOOK_S = 0.2
_OWN = {"nccl": "ProcessGroupNCCL", "xccl": "ProcessGroupXCCL"}
_P = ParamSpec("_P")
_T = TypeVar("_T")


class EarlyOrder(Protocol):
    """Starts sums early, in one order on all ranks; see ``EarlySums``."""

    def catch_up(self, number: int) -> None:
        """Start sums until this rank has begun so many of them, because another one has."""


class _TakesTurns(Protocol):
    @property
    def turn(self) -> AbstractContextManager[object]: ...


_Group = TypeVar("_Group", bound=_TakesTurns)


def in_turn(method: Callable[Concatenate[_Group, _P], _T]) -> Callable[Concatenate[_Group, _P], _T]:
    """Let a method hold its object's ``turn``, so that nothing else starts between its record and its data."""

    @functools.wraps(method)
    def call(self: _Group, /, *args: _P.args, **kwargs: _P.kwargs) -> _T:
        with self.turn:
            return method(self, *args, **kwargs)

    return call


class NativeBackend(C10dBackend):
    """A process group such as NCCL's, between accelerators of different processes.

    Args:
        group: the process group.
        route: what traces call it.
        device: this process's.
    """

    def __init__(self, group: Any, route: str, device: torch.device) -> None:
        super().__init__(group, route)
        self.device_type = device.type
        #: Whether the group was ended before its time.
        self.is_aborted = False
        self._lock = threading.Lock()
        self._spoils = torch.zeros((), dtype=torch.uint8, device="cpu", pin_memory=kind_of(device).pins_memory)
        self._reached: torch.Event | None = None

    def abort(self) -> None:
        """End everything that waits for other ranks, and spoil its results; returns after some seconds at most."""
        with self._lock:
            if self.is_aborted:
                return
            self.is_aborted = True
        self._spoils.fill_(255)  # before the accelerator goes on
        thread = threading.Thread(target=self._end, name="torchstrategy-abort", daemon=True)
        thread.start()
        thread.join(_ABORT_S)

    def is_blocked(self) -> bool:
        """Say whether the accelerator has not come to the end of the collectives that it was told to wait for."""
        try:
            return self._reached is not None and not self._reached.query()
        except RuntimeError:  # of the accelerator, after an error in its queue
            return True

    def _end(self) -> None:
        try:
            self._group.abort()
        except (RuntimeError, AttributeError) as error:
            logger.warning("%s can't be ended, and may wait until its own time limit: %s", self.route, error)

    def _start(self, results: Sequence[Tensor], operation: str, *arguments: Any) -> Wait:
        try:
            work = getattr(self._group, operation)(*arguments)
        except RuntimeError as error:
            if self.is_aborted or isinstance(error, dist.DistError):
                return functools.partial(raise_broken, str(error))
            raise
        return functools.partial(self._wait, work, results)

    def _wait(self, work: Any, results: Sequence[Tensor], check: Check) -> None:
        try:
            check()
        except BaseException:
            self.abort()  # the accelerator would wait for the lost rank, and the process could not end
            raise
        try:
            work.wait()  # with a time limit NCCL would block this thread, and give up for good at its end
        except RuntimeError as error:
            if self.is_aborted or isinstance(error, dist.DistError):
                raise ConnectionError(str(error)) from error
            raise
        if self.is_aborted:
            raise ConnectionError(f"{self.route} was ended in the middle of it")
        self._spoil(results)

    def _spoil(self, results: Sequence[Tensor]) -> None:
        device = results[0].device
        spoils = self._spoils.to(device, non_blocking=True)
        with torch.no_grad():
            for result in results:
                result.view(-1).view(torch.uint8).bitwise_or_(spoils)
        if module := accelerator_module(device):
            self._reached = self._reached or torch.Event(device)
            self._reached.record(module.current_stream(device))


class NativeGroups:
    """The native groups of a process, which one thread ends when a rank is lost.

    Args:
        find_failure: returns the failure that the ranks have not outlived, if there is one.
    """

    def __init__(self, find_failure: Callable[[], Message | None]) -> None:
        self._find_failure = find_failure
        self._groups: weakref.WeakSet[NativeBackend] = weakref.WeakSet()
        self._lock = threading.Lock()
        self._is_watched = False
        self._has_died = threading.Event()
        #: Why the groups are ended; what was read from the accelerator since may be wrong.
        self.failure: Message | None = None

    def add(self, group: NativeBackend | None) -> None:
        """Take up a group, if there is one, as long as somebody uses it."""
        if group is not None:
            self._groups.add(group)

    def note_failure(self, *, has_died: bool) -> None:
        """End the groups: at once if a rank has died, or else if an accelerator waits for longer than data travels.

        A rank that has failed may have begun the same collectives before, and all ranks may fail alike and go on.
        """
        with self._lock:
            if not self._groups or self.failure is not None:
                return
            if has_died:
                self.failure = self._find_failure()
                self._has_died.set()
            if not self._is_watched:
                self._is_watched = True
                threading.Thread(target=self._watch, name="torchstrategy-failed", daemon=True).start()

    def close(self) -> None:
        """Wait until other ranks have what they need of this one's last collectives, unless one is lost."""
        deadline = time.monotonic() + _END_S
        while self._are_blocked() and self._find_failure() is None and time.monotonic() < deadline:
            time.sleep(_LOOK_S / 10)

    def abort(self) -> None:
        """End the groups; returns after some seconds at most."""
        for group in tuple(self._groups):
            group.abort()

    def _are_blocked(self) -> bool:
        return any(group.is_blocked() for group in tuple(self._groups))

    def _watch(self) -> None:
        start = time.monotonic()
        while not self._has_died.wait(_LOOK_S):
            are_late = time.monotonic() > start + _ON_ITS_WAY_S and self._are_blocked()
            with self._lock:
                failure = self._find_failure()
                if failure is None:
                    self._is_watched = False
                    return
                if are_late:
                    self.failure = failure
                    break
        self.abort()


def make_native_backend(
    implementation: CommunicationImplementation | str,
    device: torch.device,
    store: Store,
    rank: int,
    size: int,
    timeout: timedelta,
    ask: Ask,
) -> NativeBackend | None:
    """Make the process group that ``torch.distributed`` has for a kind of accelerator; every rank calls this.

    Args:
        implementation: as ``choose_implementation`` returns it.
        device: this process's; the others' are of the same kind.
        store: where the ranks find each other; with a prefix of the strategy's own.
        rank: this process's position in the group.
        size: processes in the group.
        timeout: after which the backend gives up.
        ask: as in ``Rendezvous``.

    Returns:
        The group, connected where the backend can do so ahead; ``None`` if there is none for the kind, or another
        implementation is asked for.

    Raises:
        RuntimeError: the backend can't make it.
    """
    name = kind_of(device).native_backend
    if not name or implementation not in (CommunicationImplementation.AUTO, CommunicationImplementation.NCCL):
        return None
    try:
        group = ask(functools.partial(_make, name, device, PrefixStore(name, store), rank, size, timeout))
    except dist.DistBackendError as error:
        raise RuntimeError(f"Rank {rank} can't make a group of {name!r} on {device}: {error}") from error
    return NativeBackend(group, name.upper() if name in _OWN else name, device)


def _make(name: str, device: torch.device, store: Store, rank: int, size: int, timeout: timedelta) -> Any:
    if own := _OWN.get(name):
        made = getattr(dist, own)
        options = made.Options()
        options._timeout = timeout
        group = made(store, rank, size, options)
    else:
        group = _made_by_plugin(name, store, rank, size, timeout)
    # Otherwise at the first collective, where a rank that has failed before would leave the others in native code.
    if connect := getattr(group, "eager_connect_single_device", None):
        connect(device)
    return group


def _made_by_plugin(name: str, store: Store, rank: int, size: int, timeout: timedelta) -> Any:
    plugin = dist.Backend._plugins[name.upper()]
    if not plugin.extended_api:
        return plugin.creator_fn(store, rank, size, timeout)
    described = dist.distributed_c10d._DistributedBackendOptions()  # type: ignore[attr-defined]
    described.store, described.timeout, described.group_id = store, timeout, name
    described.group_rank, described.group_size = rank, size
    described.global_ranks_in_group = list(range(size))
    return plugin.creator_fn(described, None)


def raise_broken(reason: str, check: Check) -> None:
    """Be the ``Wait`` of what could not start, because a connection was lost before."""
    check()
    raise ConnectionError(reason)
