"""Where the processes of a job meet: its key-value store, and the meeting before each process group is made."""

from __future__ import annotations

import contextlib
import functools
import ipaddress
import itertools
import json
import os
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, wait
from datetime import timedelta
from pathlib import Path
from typing import NamedTuple, NoReturn, TypeVar

from torch.distributed import (  # type: ignore[attr-defined]
    DistError,
    DistStoreError,
    PrefixStore,
    Store,
    TCPStore,
)

from torchstrategy import patches
from torchstrategy.base import addresses
from torchstrategy.base.job import Job
from torchstrategy.base.log import call_site, logger
from torchstrategy.collectives.connections import Ask, lookup_name
from torchstrategy.collectives.failures import FailureWatch
from torchstrategy.collectives.joining import Roll, store_of_job
from torchstrategy.collectives.notices import describe
from torchstrategy.collectives.rounds import (
    AGAIN_S,
    PATIENCE_S,
    enter_round,
    named,
    raise_gone,
    raise_if_failed,
    wait_for_all,
)
from torchstrategy.errors import DeadlineExceededError, DisagreementError, ReplicaFailedError

__all__ = ["Rendezvous", "meet", "raise_lost_store"]

_TIMEOUT_S = 300.0
_KNOCK_S = 0.05
_SOON_S = 1.0
_LAUNCHER_ENDED_S = 5.0
_STUCK_S = 12.0  # longer than anything else that a wait for the store does once it knows of a failure
_GRACE_S = 5.0
T = TypeVar("T")
_groups: Counter[tuple[str, int, int]] = Counter()


class Rendezvous(NamedTuple):
    """The processes that make one group, seen from one of them.

    Args:
        store: the job's key-value store, with a prefix of this group's own.
        watch: tells and learns of failures; one for all groups of the process.
        rank: this process's id.
        size: number of processes.
        host: this process's address, as the others can reach it.
        hosts: for each rank the number of its host, counted by first rank.
        ask: returns what a call returns that asks the store, and ends the wait for a store that is stopped.
        whose: what tells operations of a further strategy of the process from those of the first one.
    """

    store: Store
    watch: FailureWatch
    rank: int
    size: int
    host: str
    hosts: tuple[int, ...]
    ask: Ask = lambda call: call()
    whose: str = ""


class _Joined(NamedTuple):
    #: Its prefix is that of this attempt of the job.
    store: Store
    watch: FailureWatch
    address: str
    hosts: tuple[int, ...]


def meet(job: Job, description: Mapping[str, str], timeout_s: float | None = None) -> Rendezvous:
    """Wait until every process of the job makes its n-th group, as this one does.

    Args:
        job: the processes.
        description: what must be equal everywhere, by name, such as versions and options.
        timeout_s: seconds to wait for the others; ``None`` means 300.

    Returns:
        The rendezvous.

    Raises:
        RuntimeError: the store can't be reached, or this process joins a job that has already begun.
        DisagreementError: another process describes itself differently.
        DeadlineExceededError: another process did not come.
        ReplicaFailedError: another process failed, or has ended.
    """
    key = (job.address, job.port, job.attempt)
    timeout_s = timeout_s or _TIMEOUT_S
    description = {"number of processes": str(job.size), **description}
    watch = None
    try:
        store, watch, address, hosts = _join(_FirstRendezvous(job, description, timeout_s))
        _groups[key] += 1
        own = PrefixStore(str(_groups[key]), store)
        watch.position = f"making its strategy number {_groups[key]} at {call_site()}"
        ask = functools.partial(_in_time, job=job, timeout_s=timeout_s, watch=watch)
        ask(functools.partial(wait_for_all, own, job, description, timeout_s, watch))
    except DistError as error:
        raise_lost_store(job, watch, error)
    whose = f" of strategy number {_groups[key]}" if _groups[key] > 1 else ""
    return Rendezvous(own, watch, job.rank, job.size, address, hosts, ask, whose)


def raise_lost_store(job: Job, watch: FailureWatch | None, error: DistError) -> NoReturn:
    """Raise what explains an error of the job's store.

    Raises:
        ReplicaFailedError: a process failed.
        RuntimeError: none is known to.
    """
    if watch is not None:
        watch.wait_for_report(1.0)
        raise_if_failed(watch)
    raise RuntimeError(
        f"{named(job, job.rank)} lost the job's store at {job.address}:{job.port}, which {_keeper(job)} keeps: {error}"
    ) from error


class _FirstRendezvous:
    """A job as the key of a cache, with what only its first rendezvous needs."""

    def __init__(self, job: Job, description: Mapping[str, str], timeout_s: float) -> None:
        self.job = job
        self.description = description
        self.timeout_s = timeout_s
        self._key = (job.address, job.port, job.attempt, job.rank, job.size)

    def __hash__(self) -> int:
        return hash(self._key)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _FirstRendezvous) and other._key == self._key


@functools.cache
def _join(rendezvous: _FirstRendezvous) -> _Joined:
    """Connect to the store and to the other processes, once for each job."""
    job, timeout_s = rendezvous.job, rendezvous.timeout_s
    roll = Roll(job.rank, job.size)
    # Up to three waits of that length: for the store, for the others, for their connections.
    connect = functools.partial(_connect, rendezvous, roll, threading.get_ident())
    try:
        return _in_time(connect, job, 3 * timeout_s, roll=roll)
    except DistError:  # the one who keeps the store may have died
        if failure := roll.wait_for_failure(1.0):
            raise_gone(job, failure)
        raise
    except (DisagreementError, ReplicaFailedError):  # the others know as much
        raise
    except BaseException as error:
        roll.fail(error)
        raise
    finally:
        roll.leave()


def _connect(rendezvous: _FirstRendezvous, roll: Roll, thread: int) -> _Joined:
    job, timeout_s = rendezvous.job, rendezvous.timeout_s
    store = _in_time(functools.partial(_open_store, job, timeout_s), job, timeout_s)
    attempt = 0  # the store is this attempt's own
    if job.hosted and job.size > 1:
        attempt = enter_round(store, job, time.monotonic() + timeout_s)
    own = store_of_job(store, attempt)
    if own.add(f"joined/{job.rank}", 1) > 1:
        raise RuntimeError(
            f"{named(job, job.rank)} has joined this job before. A process can't come back alone: end all of them and "
            "start the job again, from its last checkpoint. (If this is another job, two of them use the address "
            f"{job.address}:{job.port}.)"
        )
    address = _own_address(job.address, job.port)
    if job.size > 1:
        roll.join(own, address)
    own.append("cards", json.dumps([job.rank, _host_identity(), address]) + "\n")  # type: ignore[attr-defined]
    is_last = wait_for_all(own, job, rendezvous.description, timeout_s, roll=roll)
    hosts = _hosts_of_all(own, job, is_last=is_last)
    try:
        watch = FailureWatch(PrefixStore("control", own), job.rank, hosts, address, timeout_s, thread)
    except OSError as error:
        kind = DeadlineExceededError if isinstance(error, TimeoutError) else RuntimeError
        raise kind(
            f"{named(job, job.rank)}, which the others reach at {address}, can't connect to all of them: {error}"
        ) from error
    watch.answer_requests(f"{job.address}:{job.port}")
    return _Joined(PrefixStore(f"torchstrategy/{attempt}", store), watch, address, hosts)


def _hosts_of_all(own: Store, job: Job, *, is_last: bool) -> tuple[int, ...]:
    """Return for each rank the number of its host.

    The last rank that came reads all cards and writes what follows from them, which the others read.

    Raises:
        RuntimeError: a process can't be reached from other hosts; on all ranks.
    """
    summary = b""
    if not is_last:
        with contextlib.suppress(DistStoreError):  # that rank is stopped; whoever connects to it will name it
            summary = own.get("hosts")
    if not summary:
        cards = sorted(map(json.loads, own.get("cards").splitlines()))
        own.set("hosts", _summary(job, [name for _, name, _ in cards], [address for _, _, address in cards]))
        summary = own.get("hosts")
    error, runs = json.loads(summary)
    if error is not None:
        raise RuntimeError(error)
    return tuple(first + i for first, count, hosts in runs for i in range(hosts) for _ in range(count))


def _summary(job: Job, names: Sequence[str], addresses: Sequence[str]) -> str:
    """Return what is wrong with the ranks' hosts, or how many ranks one after the other are on which host."""
    try:
        hosts = _number_hosts(job, names, addresses)
    except RuntimeError as error:
        return json.dumps([str(error), []])
    runs = [(host, len(list(ranks))) for host, ranks in itertools.groupby(hosts)]
    # Hosts that follow each other with as many ranks are one entry: first host, ranks of each, number of hosts.
    entries = []
    for (_, count), group in itertools.groupby(enumerate(runs), lambda item: (item[1][0] - item[0], item[1][1])):
        members = [host for _, (host, _) in group]
        entries.append([members[0], count, len(members)])
    return json.dumps([None, entries])


def _number_hosts(job: Job, names: Sequence[str], addresses: Sequence[str]) -> tuple[int, ...]:
    """Return for each rank the number of its host.

    Raises:
        RuntimeError: a process can't be reached from other hosts.
    """
    numbers = {name: number for number, name in enumerate(dict.fromkeys(names))}
    for rank, address in enumerate(addresses):
        if len(numbers) > 1 and ipaddress.ip_address(address).is_loopback:
            raise RuntimeError(
                f"{named(job, rank)} knows itself as {address}, which processes on other hosts can't reach: "
                f"{job.address} resolves to it there. Name that host in {job.source} by an address of its network, or "
                "mend its name in /etc/hosts."
            )
    return tuple(numbers[name] for name in names)


def _open_store(job: Job, timeout_s: float) -> Store:
    # multi_tenant: a default process group of the user's may share the port.
    is_master = job.rank == 0 and not job.hosted
    where = f"{job.address}:{job.port}"
    try:
        if is_master:
            patches.allow_files()
        else:
            _reach(job, timeout_s)
        return TCPStore(
            job.address,
            job.port,
            job.size,
            is_master,
            timeout=timedelta(seconds=timeout_s),
            multi_tenant=True,
            wait_for_workers=False,
            master_listen_fd=addresses.listen_at(job.address, job.port) if is_master else None,
        )
    except (DistError, OSError) as error:
        reason = str(error).partition("\nException raised from")[0].rstrip(". ")
        if is_master:
            raise RuntimeError(
                f"{named(job, 0)} can't keep the job's store at {where}: {reason}. Is another program using the port, "
                "or an earlier run that has not ended? Is the address one of this host's?"
            ) from None
        raise RuntimeError(
            f"{named(job, job.rank)} can't reach the job's store at {where} within {timeout_s:g} s: {reason}. "
            f"{_keeper(job).capitalize()} keeps it: did it start, and do all processes know the same address? "
            f"({job.source} says so.)"
        ) from None


def _reach(job: Job, timeout_s: float) -> None:
    """Wait until something listens at the store's address; torch's client would print a page each time it fails.

    Raises:
        OSError: nothing does; also if the name does not resolve.
    """
    start = time.monotonic()
    say_at = start + PATIENCE_S
    while True:
        remaining = start + timeout_s - time.monotonic()
        try:
            socket.create_connection((lookup_name(job.address), job.port), timeout=max(0.1, remaining)).close()
            return
        except OSError as error:
            # A launcher listens before it starts a process.
            is_over = job.hosted and isinstance(error, ConnectionRefusedError)
            if time.monotonic() > start + (min(timeout_s, _LAUNCHER_ENDED_S) if is_over else timeout_s):
                raise
        if time.monotonic() > say_at:
            say_at += AGAIN_S
            logger.warning("Waiting for %s to listen at %s:%d.", _keeper(job), job.address, job.port)
        time.sleep(_KNOCK_S)


def _in_time(
    call: Callable[[], T], job: Job, timeout_s: float, watch: FailureWatch | None = None, roll: Roll | None = None
) -> T:
    """Return what a call returns that asks the store.

    A store's client waits without end for one that is stopped, or for another program, and can't be interrupted. So a
    thread makes the call, and is left behind if the call has not noticed by itself that the time is up.

    Raises:
        DeadlineExceededError: the time is up.
        ReplicaFailedError: another process failed.
    """
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(call())
        except BaseException as error:  # noqa: BLE001 - it is raised where it is waited for
            future.set_exception(error)

    threading.Thread(target=run, name="torchstrategy-store", daemon=True).start()
    deadline = time.monotonic() + timeout_s + _GRACE_S
    failed_at = float("inf")
    while not wait([future], timeout=0.5).done:
        now = time.monotonic()
        failure = None if watch is None else watch.failure
        failed_at = float("inf") if failure is None else min(failed_at, now)
        if failure is not None and watch is not None and now > failed_at + _STUCK_S:
            raise ReplicaFailedError(f"{describe(failure)}\n(This rank was {watch.position}.)")
        if roll is not None and roll.failure is not None and not wait([future], timeout=_SOON_S).done:
            raise_gone(job, roll.failure)
        if now > deadline:
            where = "" if watch is None else f" {watch.where_is_everyone()}"
            raise DeadlineExceededError(
                f"The job's store at {job.address}:{job.port} does not answer within {timeout_s:g} s. "
                f"{_keeper(job).capitalize()} keeps it: is that stopped or cut off, or does another program use the "
                f"port?{where}"
            )
    return future.result()


def _keeper(job: Job) -> str:
    return "the launcher" if job.hosted else named(job, 0)


def _host_identity() -> str:
    """Return what is equal for two processes exactly if they share a kernel, a network, process ids and memory."""
    parts = [socket.gethostname()]
    with contextlib.suppress(OSError):  # not Linux: the name has to do
        parts.append(Path("/proc/sys/kernel/random/boot_id").read_text().strip())
        parts.append(os.readlink("/proc/self/ns/net"))
        parts.append(os.readlink("/proc/self/ns/pid"))
        parts.append(str(os.stat("/dev/shm").st_dev))
    return "|".join(parts)


def _own_address(address: str, port: int) -> str:
    """Return the address of the interface that leads to the store; nothing is sent."""
    reason: OSError | None = None
    try:
        for family, kind, _, _, target in socket.getaddrinfo(lookup_name(address), port, type=socket.SOCK_DGRAM):
            try:
                with socket.socket(family, kind) as probe:
                    probe.connect(target)
                    return str(probe.getsockname()[0])
            except OSError as error:  # such as IPv6 where there is none
                reason = error
    except OSError as error:
        reason = error
    raise RuntimeError(f"No interface of this host leads to {address}: {reason}")
