"""The other end of recipes/benchmarks/training.py: carries out blocks of training steps, and says what they took.

It needs nothing but the standard library, because TensorFlow's environment need not have more.
"""

from __future__ import annotations

import json
import re
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple


class Program(NamedTuple):
    """A training program that is ready to run."""

    step: Callable[[], object]  #: one training step, done when it returns
    num_parameters: int


def serve(build: Callable[[str], Program], version: str, record: Callable[[Program, str], None] | None = None) -> None:
    """Answer requests until there are no more; each has the name of a way to train and a number of steps.

    The first block of a way includes building it. Later ones begin with a step that is not timed: in it the ranks meet,
    and what others have pushed out of the caches comes back.

    Args:
        build: makes the program of a way.
        version: of the framework.
        record: writes a trace of a program that was built into a folder, if a request names one as ``trace``.
    """
    programs: dict[str, Program] = {}
    tell(version=version)
    for line in sys.stdin:
        request = json.loads(line)
        way = request["way"]
        if "trace" in request:
            record(programs[way], request["trace"])
            tell()
            continue
        started = time.perf_counter()
        if way in programs:
            programs[way].step()
            started = time.perf_counter()
        else:
            programs[way] = build(way)
        for _ in range(request["steps"]):
            programs[way].step()
        seconds = time.perf_counter() - started
        tell(seconds=seconds, peak=memory("VmHWM"), held=memory("Pss"), parameters=programs[way].num_parameters)


def tell(**figures: Any) -> None:
    """Print an answer."""
    print(json.dumps(figures), flush=True)


def memory(name: str) -> int:
    """Return what Linux counts of this process's memory, in bytes; 0 where there is no Linux.

    Args:
        name: ``"VmHWM"``, the most that it ever had (``ru_maxrss`` would be at least what the process that started this
            one had), or ``"Pss"``, what it has now, with pages that several processes have shared out between them.
    """
    source = Path("/proc/self", "smaps_rollup" if name == "Pss" else "status")
    found = re.search(rf"{name}:\s+(\d+) kB", source.read_text()) if source.exists() else None
    return 1024 * int(found[1]) if found else 0
