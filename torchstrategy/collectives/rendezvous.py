"""Where the processes of a job meet: its key-value store, and the meeting before each process group is made."""

from __future__ import annotations

import functools
import socket
import time
from collections import Counter
from datetime import timedelta
from typing import NamedTuple

from torch.distributed import DistError, PrefixStore, Store, TCPStore  # type: ignore[attr-defined]

from torchstrategy.collectives.call_site import call_site
from torchstrategy.collectives.failures import FailureWatch, describe
from torchstrategy.errors import DeadlineExceededError, ReplicaFailedError

__all__ = ["Meeting", "meet"]

_TIMEOUT_S = 300.0
_POLL_S = 0.01
_groups: Counter[tuple[str, int, int]] = Counter()


class Meeting(NamedTuple):
    """The processes that make one group, seen from one of them.

    Args:
        store: the job's key-value store, with a prefix of this group's own.
        watch: tells and learns of failures; one for all groups of the process.
        rank: this process's id.
        size: number of processes.
        host: this process's address, as the others can reach it.
    """

    store: Store
    watch: FailureWatch
    rank: int
    size: int
    host: str


def meet(
    address: str, port: int, rank: int, size: int, *, hosted: bool, attempt: int, timeout_s: float | None = None
) -> Meeting:
    """Wait until every process of the job makes its n-th group, as this one does.

    Args:
        address: host of the store.
        port: port of the store.
        rank: this process's id; rank 0 hosts the store unless the launcher does.
        size: number of processes.
        hosted: whether the launcher hosts the store.
        attempt: how often the launcher has restarted the job.
        timeout_s: seconds to wait for the others; ``None`` means 300.

    Returns:
        The meeting.

    Raises:
        RuntimeError: the store can't be reached.
        DeadlineExceededError: another process did not come.
        ReplicaFailedError: another process failed.
    """
    key = (address, port, attempt)
    timeout_s = timeout_s or _TIMEOUT_S
    try:
        store, watch = _join(address, port, rank, size, hosted=hosted, attempt=attempt)
        _groups[key] += 1
        own = PrefixStore(f"torchstrategy/{attempt}/{_groups[key]}", store)
        watch.position = f"making its strategy number {_groups[key]} at {call_site()}"
        _wait_for_all(own, watch, rank, size, timeout_s)
    except DistError as error:
        raise RuntimeError(
            f"Rank {rank} can't reach the job's store at {address}:{port}: {error}. Did all processes start, with the "
            "same MASTER_ADDR and MASTER_PORT?"
        ) from error
    return Meeting(own, watch, rank, size, _own_address(address, port))


@functools.cache
def _join(address: str, port: int, rank: int, size: int, *, hosted: bool, attempt: int) -> tuple[Store, FailureWatch]:
    # multi_tenant: a default process group of the user's may share the port.
    is_master = rank == 0 and not hosted
    timeout = timedelta(seconds=_TIMEOUT_S)
    store = TCPStore(address, port, size, is_master, timeout=timeout, multi_tenant=True, wait_for_workers=False)
    # The clone is a connection of its own: the watcher must not wait behind another request.
    own_connection = store.clone()  # type: ignore[attr-defined]
    watch_store = PrefixStore(f"torchstrategy/{attempt}/watch", own_connection)
    return store, FailureWatch(watch_store, rank, size, None if hosted else 0)


def _wait_for_all(store: Store, watch: FailureWatch, rank: int, size: int, timeout_s: float) -> None:
    _raise_if_failed(watch)
    store.set(f"here/{rank}", "1")
    keys = [f"here/{other}" for other in range(size)]
    deadline = time.monotonic() + timeout_s
    while not store.check(keys):
        _raise_if_failed(watch)
        if time.monotonic() > deadline:
            missing = [str(other) for other, key in enumerate(keys) if not store.check([key])]
            raise DeadlineExceededError(
                f"Rank {', '.join(missing)} did not make its strategy within {timeout_s:g} s. Every rank must make the "
                f"same strategies in the same order. {watch.where_is_everyone()}"
            )
        time.sleep(_POLL_S)


def _raise_if_failed(watch: FailureWatch) -> None:
    if watch.failure is not None and not watch.recover():
        raise ReplicaFailedError(f"{describe(watch.failure)}\n(This rank was {watch.position}.)")


def _own_address(address: str, port: int) -> str:
    """Return the address of the interface that leads to the store; nothing is sent."""
    family, kind, _, _, target = socket.getaddrinfo(address, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(target)
        return str(probe.getsockname()[0])
