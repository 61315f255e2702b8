"""Who belongs together in a job's store, and the wait until all of them are there.

``torchrun`` keeps one store for all rounds of a job, and says nothing in a worker's environment that differs between
rounds and is equal on all hosts: each host counts its own workers' failures only, and one that comes later begins at 0.
So rank 0 of each round opens it in the store, and the others enter the newest one, as long as rank 0 says there that it
waits for them: who comes before rank 0 finds an earlier round.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import time
from collections.abc import Mapping, Sequence
from typing import NoReturn

from torch.distributed import DistError, Store  # type: ignore[attr-defined]

from torchstrategy.base.job import Job
from torchstrategy.base.log import logger
from torchstrategy.collectives.failures import FailureWatch
from torchstrategy.collectives.joining import DIFFERS, ENDED, Roll, end_of, store_of_job
from torchstrategy.collectives.notices import Message, describe
from torchstrategy.errors import DeadlineExceededError, DisagreementError, ReplicaFailedError

__all__ = [
    "AGAIN_S",
    "PATIENCE_S",
    "enter_round",
    "mark_as_of_one_round",
    "named",
    "raise_gone",
    "raise_if_failed",
    "wait_for_all",
]

_ROUND_POLL_S = 0.02
_POLL_S = 0.01
_LAST_WORDS_S = 3.0
_LAUNCHER_S = 0.5
#: When a process that waits for others says so, and after how long it says it again.
PATIENCE_S, AGAIN_S = 10.0, 60.0
# What each request costs the store; hundreds of processes ask it.
_REQUEST_S = 50e-6
_NUMBER = "torchstrategy/rounds"
_ONE = "torchstrategy/one_round"


def mark_as_of_one_round(store: Store) -> None:
    """Let those who come to a store know that nobody was there before them, in an earlier round."""
    store.set(_ONE, "")


def _wait_in_round(own: Store, job: Job, launcher: int) -> None:
    """Let the others know that rank 0 waits; called by each rank again and again while it does.

    Args:
        own: the round's part of the store.
        job: the processes.
        launcher: pid of this process's parent, when it began to wait.

    Raises:
        RuntimeError: the launcher has ended.
    """
    _check_launcher(launcher)
    if job.rank == 0:
        own.add("waits", 1)


def enter_round(store: Store, job: Job, deadline: float) -> int:
    """Open a round as rank 0, or enter the newest one in which rank 0 waits.

    Args:
        store: of the launcher.
        job: the processes.
        deadline: of the monotonic clock.

    Returns:
        The round's number, from 1; 0 in a store that is of one round.

    Raises:
        DeadlineExceededError: rank 0 did not wait in a round of so many processes.
        RuntimeError: this process's launcher has ended.
    """
    if store.check([_ONE]):
        return 0
    if job.rank == 0:
        number = int(store.add(_NUMBER, 1))
        store_of_job(store, number).set("size", str(job.size))
        return number
    launcher, size = os.getppid(), 0
    last = (0, 0)
    say_at = time.monotonic() + PATIENCE_S
    while True:
        number = int(store.add(_NUMBER, 0))
        own = store_of_job(store, number)
        if number and own.check(["size"]):
            size = int(own.get("size"))
            seen = number, int(own.add("waits", 0))
            if size == job.size and seen[0] == last[0] and seen[1] > last[1]:
                return number
            last = seen
        _check_launcher(launcher)
        if time.monotonic() > deadline:
            others = f" (The last ones that met were {size} processes, and these are {job.size}.)" if size else ""
            raise DeadlineExceededError(
                "Rank 0 did not make its strategy in time. Every process must start, and make the same strategies in "
                f"the same order.{_why_absent(job)}{others}"
            )
        if time.monotonic() > say_at:
            say_at += AGAIN_S
            logger.warning("Waiting for rank 0 to make its strategy.%s", _why_absent(job))
        time.sleep(max(_ROUND_POLL_S, job.size * _REQUEST_S))


def _check_launcher(pid: int) -> None:
    """Check that this process's launcher is there: an orphan must not meet the processes of a later round."""
    if os.getppid() != pid:
        raise RuntimeError("This process's launcher has ended, so it takes part in no further round of the job.")


def wait_for_all(
    store: Store,
    job: Job,
    description: Mapping[str, str],
    timeout_s: float,
    watch: FailureWatch | None = None,
    roll: Roll | None = None,
) -> bool:
    """Wait until all processes are here, and compare what they say about themselves as they come.

    Each one is compared with the first that came, by a hash, and counted. So each asks the store for a few short
    entries, however many there are: one that differs says so, and the count, which all watch, tells it.

    Args:
        store: of this meeting; each one begins with an empty store.
        job: the processes.
        description: what must be equal everywhere, by name.
        timeout_s: seconds to wait for the others.
        watch: knows of failures once all have joined; ``None`` while they gather.
        roll: who is there while they gather.

    Returns:
        Whether this process came last, and so knows before all others that they are here.

    Raises:
        DisagreementError: another process describes itself differently.
        DeadlineExceededError: another process did not come.
        ReplicaFailedError: another process failed, or has ended.
    """
    raise_if_failed(watch)
    num_arrived = int(store.add("arrived", 1 if _is_as_first(store, job, description) else DIFFERS))
    is_last = num_arrived % ENDED == job.size
    # Read only if something is wrong.
    store.append("here", f"{job.rank} ")  # type: ignore[attr-defined]
    deadline = time.monotonic() + timeout_s
    say_at = time.monotonic() + PATIENCE_S
    launcher = os.getppid()
    while True:
        is_late = time.monotonic() > deadline
        if roll is not None and job.hosted:
            _wait_in_round(store, job, launcher)
        if num_arrived >= DIFFERS:
            _raise_difference(store, job, description)
        raise_if_failed(watch)
        if num_arrived % ENDED >= job.size:
            return is_last
        if roll is not None:
            _look_who_is_gone(store, job, roll, num_arrived)
        gone = [] if watch is None or not watch.gone else [r for r in _missing(store, job) if r in watch.gone]
        if watch is not None and gone:
            raise ReplicaFailedError(f"{named(job, gone[0])} has ended its program.\n(This rank was {watch.position}.)")
        if is_late:
            names = ", ".join(named(job, rank) for rank in _missing(store, job))
            where = _why_absent(job) if watch is None else f" {watch.where_is_everyone()}"
            raise DeadlineExceededError(
                f"{names} did not make its strategy within {timeout_s:g} s. Every process must start, and make the "
                f"same strategies in the same order.{where}"
            )
        if time.monotonic() > say_at:
            say_at += AGAIN_S
            missing = _missing(store, job)
            if missing and (job.rank == 0 or 0 in missing):
                names = ", ".join(named(job, rank) for rank in missing)
                logger.warning("Waiting for %s to make its strategy.%s", names, "" if watch else _why_absent(job))
        time.sleep(max(_POLL_S, job.size * _REQUEST_S))
        num_arrived = int(store.add("arrived", 0))


def _look_who_is_gone(store: Store, job: Job, roll: Roll, num_arrived: int) -> None:
    """Raise if a rank has died before all have come; what its launcher says of it goes before what the others see.

    If all have come, they have errors of their own, or ``_in_time`` finds who is gone.
    """
    failure = end_of(store, num_arrived)
    if failure is None and roll.failure is not None:
        time.sleep(_LAUNCHER_S if job.hosted else 0.0)
        failure = end_of(store, store.add("arrived", 0)) or roll.failure
    if failure is not None and (absent := _missing(store, job)):
        roll.tell(failure)
        raise_gone(job, failure, absent)


def raise_gone(job: Job, failure: Message, missing: Sequence[int] = ()) -> NoReturn:
    """Raise what says which rank is gone, and which ones have not come.

    Args:
        job: the processes.
        failure: what is known of it, as in ``lost_record``.
        missing: the ranks that are not here.

    Raises:
        DeadlineExceededError: that rank has waited for too long.
        ReplicaFailedError: it failed or has died.
    """
    text = describe(failure).replace(f"Rank {failure['rank']}", named(job, failure["rank"]), 1)
    absent = ", ".join(named(job, rank) for rank in missing if rank != failure["rank"])
    if failure["operation"] is None:
        text += " Its own output says why, or the kernel's log."
    if absent:
        text += f" Not here yet: {absent}."
    kind = DeadlineExceededError if failure.get("is_deadline") else ReplicaFailedError
    raise kind(f"{text}\n(This rank was waiting for the others to start.)")


def _missing(store: Store, job: Job) -> list[int]:
    """Return who is not here yet."""
    here = set(map(int, store.get("here").split()))
    return [rank for rank in range(job.size) if rank not in here]


def _is_as_first(store: Store, job: Job, description: Mapping[str, str]) -> bool:
    """Say whether this process describes itself as the first one that came; be the first if there is none."""
    own = json.dumps([job.rank, description], sort_keys=True)
    mark = hashlib.sha256(json.dumps(description, sort_keys=True).encode()).hexdigest()
    first, theirs = store.compare_set("first", "", f"{job.rank} {mark}").decode().split()
    if int(first) == job.rank:
        store.set("as first", own)
    elif theirs != mark:
        store.compare_set("differs", "", own)
    return theirs == mark


def _raise_difference(store: Store, job: Job, description: Mapping[str, str]) -> NoReturn:
    """Raise what differs between this process and another one.

    Raises:
        DisagreementError: always.
    """
    first, differing = json.loads(store.get("as first")), json.loads(store.get("differs"))
    other, theirs = first if differing[1] == description else differing
    rows = [
        f"  {name}: rank {job.rank} has {description.get(name, 'nothing')}, rank {other} has "
        f"{theirs.get(name, 'nothing')}"
        for name in {**description, **theirs}
        if description.get(name) != theirs.get(name)
    ]
    # The store may end with this process: let the others read what they need to say the same.
    deadline = time.monotonic() + _LAST_WORDS_S
    with contextlib.suppress(DistError):  # it has ended
        num_told = store.add("told", 1)
        while num_told < job.size and time.monotonic() < deadline:
            time.sleep(max(_POLL_S, job.size * _REQUEST_S))
            num_told = store.add("told", 0)
    raise DisagreementError(
        "The processes of this job are not set up alike:\n"
        + "\n".join(rows)
        + "\nStart all of them with the same cluster, library versions, strategy and options."
    )


def raise_if_failed(watch: FailureWatch | None) -> None:
    """Raise if a rank has failed, unless all had that failure at the same point.

    Raises:
        ReplicaFailedError: it has.
    """
    if watch is not None and watch.failure is not None and not watch.recover():
        raise ReplicaFailedError(f"{describe(watch.failure)}\n(This rank was {watch.position}.)")


def _why_absent(job: Job) -> str:
    return (
        f" A process that does not come was not started, can't reach {job.address}:{job.port}, or its program has not "
        "come to its strategy: it may hang before, or take long, as to read data."
    )


def named(job: Job, rank: int) -> str:
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
