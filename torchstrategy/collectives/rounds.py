"""Which processes belong together in a store that outlives them: those of one round of their launcher.

``torchrun`` keeps one store for all rounds of a job, and says nothing in a worker's environment that differs between
rounds and is equal on all hosts: each host counts its own workers' failures only, and one that comes later begins at 0.
So rank 0 of each round opens it in the store, and the others enter the newest one, as long as rank 0 says there that it
waits for them: who comes before rank 0 finds an earlier round.
"""

from __future__ import annotations

import os
import time

from torch.distributed import Store  # type: ignore[attr-defined]

from torchstrategy.base.job import Job
from torchstrategy.base.log import logger
from torchstrategy.collectives.joining import store_of_job
from torchstrategy.errors import DeadlineExceededError

__all__ = ["PATIENCE_S", "REQUEST_S", "enter_round", "mark_as_of_one_round", "wait_in_round"]

_POLL_S = 0.02
#: When a process that waits for others says so.
PATIENCE_S = 10.0
#: What each request costs the store; hundreds of processes ask it.
REQUEST_S = 50e-6
_NUMBER = "torchstrategy/rounds"
_ONE = "torchstrategy/one_round"


def mark_as_of_one_round(store: Store) -> None:
    """Let those who come to a store know that nobody was there before them, in an earlier round."""
    store.set(_ONE, "")


def wait_in_round(own: Store, job: Job, launcher: int) -> None:
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
                f"the same order.{others}"
            )
        if time.monotonic() > say_at:
            say_at = deadline
            logger.warning("Waiting for rank 0 to make its strategy.")
        time.sleep(max(_POLL_S, job.size * REQUEST_S))


def _check_launcher(pid: int) -> None:
    """Check that this process's launcher is there: an orphan must not meet the processes of a later round."""
    if os.getppid() != pid:
        raise RuntimeError("This process's launcher has ended, so it takes part in no further round of the job.")
