"""What a test of ``make test`` may cost: half a second of CPU time, or a mark.

``slow`` tests run elsewhere; ``end_to_end`` ones, some sixty that were picked, start processes or train whole programs,
and run in ``make test`` all the same. Of any other test is counted what this process computes for it, its children that
it has waited for, and processes from the server of processes that still live. One of these that has ended is not seen;
its start counts.
"""

from __future__ import annotations

import multiprocessing.process
import os
import resource
import time
from typing import NamedTuple

BUDGET_S = 0.5
#: A test fails far above its budget only: processors are not equally fast, and tests beside it take their caches.
LIMIT_S = 4 * BUDGET_S
START_S = 0.15
MARKS = ("slow", "end_to_end")
#: Whether a test fails that costs too much: where processes come warm from a server, which a plain ``pytest`` has not.
is_enforced = False
_TICKS = os.sysconf("SC_CLK_TCK")
_num_started = 0


class Cost(NamedTuple):
    """What had been computed at some moment.

    Args:
        own: CPU seconds of this process and of children that it has waited for.
        living: of its living processes that the server has started, by pid.
        num_started: how many the server of processes has started for it.
    """

    own: float
    living: dict[int, float]
    num_started: int


def cost() -> Cost:
    """Return what has been computed up to now."""
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    served = [p.pid for p in list(multiprocessing.process._children) if p._popen.method == "forkserver"]
    living = {pid: seconds for pid in served if (seconds := _seconds_of(pid)) is not None}
    return Cost(time.process_time() + children.ru_utime + children.ru_stime, living, _num_started)


def since(before: Cost) -> float:
    """Return the CPU seconds since a moment."""
    now = cost()
    living = sum(seconds - before.living.get(pid, 0.0) for pid, seconds in now.living.items())
    num_ended = len(before.living) + now.num_started - before.num_started - len(now.living)
    return now.own - before.own + living + START_S * max(0, num_ended)


def watch_starts() -> None:
    """Count the processes that this one starts from now on."""
    plain = multiprocessing.process.BaseProcess.start

    def start(process):
        global _num_started
        plain(process)
        _num_started += process._popen.method == "forkserver"  # others are this process's children

    multiprocessing.process.BaseProcess.start = start


def _seconds_of(pid: int) -> float | None:
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8") as file:
            fields = file.read().rpartition(")")[2].split()
    except OSError:  # it has ended, or the system has no such files
        return None
    return sum(map(int, fields[11:15])) / _TICKS
