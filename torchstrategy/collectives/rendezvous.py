"""Where the processes of a job meet: its key-value store, and the meeting before each process group is made."""

from __future__ import annotations

import contextlib
import functools
import ipaddress
import json
import os
import socket
import time
from collections import Counter
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import NamedTuple

from torch.distributed import DistError, PrefixStore, Store, TCPStore  # type: ignore[attr-defined]

from torchstrategy.cluster_resolver.job import Job
from torchstrategy.collectives.call_site import call_site
from torchstrategy.collectives.failures import FailureWatch, describe
from torchstrategy.errors import DeadlineExceededError, DisagreementError, ReplicaFailedError

__all__ = ["Meeting", "meet"]

_TIMEOUT_S = 300.0
_POLL_S = 0.01
_LAST_WORDS_S = 3.0
_groups: Counter[tuple[str, int, int]] = Counter()


class Meeting(NamedTuple):
    """The processes that make one group, seen from one of them.

    Args:
        store: the job's key-value store, with a prefix of this group's own.
        watch: tells and learns of failures; one for all groups of the process.
        rank: this process's id.
        size: number of processes.
        host: this process's address, as the others can reach it.
        hosts: for each rank the number of its host, counted by first rank.
    """

    store: Store
    watch: FailureWatch
    rank: int
    size: int
    host: str
    hosts: tuple[int, ...]


class _Joined(NamedTuple):
    store: Store
    watch: FailureWatch
    hosts: tuple[int, ...]


def meet(job: Job, description: Mapping[str, str], timeout_s: float | None = None) -> Meeting:
    """Wait until every process of the job makes its n-th group, as this one does.

    Args:
        job: the processes.
        description: what must be equal everywhere, by name, such as versions and options.
        timeout_s: seconds to wait for the others; ``None`` means 300.

    Returns:
        The meeting.

    Raises:
        RuntimeError: the store can't be reached, or this process joins a job that has already begun.
        DisagreementError: another process describes itself differently.
        DeadlineExceededError: another process did not come.
        ReplicaFailedError: another process failed.
    """
    key = (job.address, job.port, job.attempt)
    timeout_s = timeout_s or _TIMEOUT_S
    description = {"number of processes": str(job.size), **description}
    try:
        store, watch, hosts = _join(_FirstMeeting(job, description, timeout_s))
        _groups[key] += 1
        own = PrefixStore(f"torchstrategy/{job.attempt}/{_groups[key]}", store)
        watch.position = f"making its strategy number {_groups[key]} at {call_site()}"
        _wait_for_all(own, job, description, timeout_s, watch)
    except DistError as error:
        raise RuntimeError(
            f"{_name(job, job.rank)} lost the job's store at {job.address}:{job.port}, which {_keeper(job)} keeps: "
            f"{error}"
        ) from error
    return Meeting(own, watch, job.rank, job.size, _own_address(job.address, job.port), hosts)


class _FirstMeeting:
    """A job as the key of a cache, with what only its first meeting needs."""

    def __init__(self, job: Job, description: Mapping[str, str], timeout_s: float) -> None:
        self.job = job
        self.description = description
        self.timeout_s = timeout_s
        self._key = (job.address, job.port, job.attempt, job.rank, job.size)

    def __hash__(self) -> int:
        return hash(self._key)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _FirstMeeting) and other._key == self._key


@functools.cache
def _join(meeting: _FirstMeeting) -> _Joined:
    """Connect to the store and to the other processes, once for each job."""
    job, timeout_s = meeting.job, meeting.timeout_s
    store = _open_store(job, timeout_s)
    own = PrefixStore(f"torchstrategy/{job.attempt}/job", store)
    if own.add(f"joined/{job.rank}", 1) > 1:
        raise RuntimeError(
            f"{_name(job, job.rank)} has joined this job before. A process can't come back alone: end all of them and "
            "start the job again, from its last checkpoint. (If this is another job, two of them use the address "
            f"{job.address}:{job.port}.)"
        )
    own.set(f"host/{job.rank}", _host_identity())
    _wait_for_all(own, job, meeting.description, timeout_s)
    names = [own.get(f"host/{rank}").decode() for rank in range(job.size)]
    numbers = {name: number for number, name in enumerate(dict.fromkeys(names))}
    hosts = tuple(numbers[name] for name in names)
    address = _own_address(job.address, job.port)
    if len(numbers) > 1 and ipaddress.ip_address(address).is_loopback:
        raise RuntimeError(
            f"{_name(job, job.rank)} knows itself as {address}, which processes on other hosts can't reach: "
            f"{job.address} resolves to it here. Name this host in {job.source} by an address of its network, or mend "
            "its name in /etc/hosts."
        )
    watch = FailureWatch(PrefixStore("control", own), job.rank, hosts, address, timeout_s)
    return _Joined(store, watch, hosts)


def _open_store(job: Job, timeout_s: float) -> Store:
    # multi_tenant: a default process group of the user's may share the port.
    is_master = job.rank == 0 and not job.hosted
    where = f"{job.address}:{job.port}"
    try:
        return TCPStore(
            job.address,
            job.port,
            job.size,
            is_master,
            timeout=timedelta(seconds=timeout_s),
            multi_tenant=True,
            wait_for_workers=False,
        )
    except DistError as error:
        reason = str(error).partition("\nException raised from")[0].rstrip(". ")
        if is_master:
            raise RuntimeError(
                f"{_name(job, 0)} can't keep the job's store at {where}: {reason}. Is another program using the port, "
                "or an earlier run that has not ended? Is the address one of this host's?"
            ) from None
        raise RuntimeError(
            f"{_name(job, job.rank)} can't reach the job's store at {where} within {timeout_s:g} s: {reason}. "
            f"{_keeper(job).capitalize()} keeps it: did it start, and do all processes know the same address? "
            f"({job.source} says so.)"
        ) from None


def _wait_for_all(
    store: Store, job: Job, description: Mapping[str, str], timeout_s: float, watch: FailureWatch | None = None
) -> None:
    """Wait until all processes are here, and compare what they say about themselves as they come."""
    _raise_if_failed(watch)
    store.set(f"here/{job.rank}", json.dumps(description))
    missing = [rank for rank in range(job.size) if rank != job.rank]
    deadline = time.monotonic() + timeout_s
    while missing:
        for rank in list(missing):
            if store.check([f"here/{rank}"]):
                missing.remove(rank)
                _compare(store, job, description, rank)
        _raise_if_failed(watch)
        if missing and time.monotonic() > deadline:
            names = ", ".join(_name(job, rank) for rank in missing)
            where = "" if watch is None else f" {watch.where_is_everyone()}"
            raise DeadlineExceededError(
                f"{names} did not make its strategy within {timeout_s:g} s. Every process must start, and make the "
                f"same strategies in the same order.{where}"
            )
        if missing:
            time.sleep(_POLL_S)


def _compare(store: Store, job: Job, description: Mapping[str, str], other: int) -> None:
    """Check that another process describes itself as this one does.

    Raises:
        DisagreementError: it does not.
    """
    theirs = json.loads(store.get(f"here/{other}"))
    names = [name for name in {**description, **theirs} if description.get(name) != theirs.get(name)]
    if not names:
        return
    rows = [
        f"  {name}: rank {job.rank} has {description.get(name, 'nothing')}, rank {other} has "
        f"{theirs.get(name, 'nothing')}"
        for name in names
    ]
    # The store may end with this process: let the other one read what it needs to say the same.
    store.add(f"differs/{job.rank}/{other}", 1)
    deadline = time.monotonic() + _LAST_WORDS_S
    while not store.check([f"differs/{other}/{job.rank}"]) and time.monotonic() < deadline:
        time.sleep(_POLL_S)
    raise DisagreementError(
        "The processes of this job are not set up alike:\n"
        + "\n".join(rows)
        + "\nStart all of them with the same cluster, library versions, strategy and options."
    )


def _raise_if_failed(watch: FailureWatch | None) -> None:
    if watch is not None and watch.failure is not None and not watch.recover():
        raise ReplicaFailedError(f"{describe(watch.failure)}\n(This rank was {watch.position}.)")


def _name(job: Job, rank: int) -> str:
    """Return a rank with its task and address, where the cluster says them."""
    tasks = [
        (job_name, index)
        for job_name in ("chief", "worker")
        if job_name in job.cluster_spec.jobs
        for index in job.cluster_spec.task_indices(job_name)
    ]
    if len(tasks) != job.size or job.task_type is None:
        return f"Rank {rank}"
    task_type, task_id = tasks[rank]
    return f"Rank {rank} ({task_type} {task_id} at {job.cluster_spec.task_address(task_type, task_id)})"


def _keeper(job: Job) -> str:
    return "the launcher" if job.hosted else _name(job, 0)


def _host_identity() -> str:
    """Return what is equal for two processes exactly if they share a kernel, a network and shared memory."""
    parts = [socket.gethostname()]
    with contextlib.suppress(OSError):  # not Linux: the name has to do
        parts.append(Path("/proc/sys/kernel/random/boot_id").read_text().strip())
        parts.append(os.readlink("/proc/self/ns/net"))
        parts.append(str(os.stat("/dev/shm").st_dev))
    return "|".join(parts)


def _own_address(address: str, port: int) -> str:
    """Return the address of the interface that leads to the store; nothing is sent."""
    family, kind, _, _, target = socket.getaddrinfo(address, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(target)
        return str(probe.getsockname()[0])
