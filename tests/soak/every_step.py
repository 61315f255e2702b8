"""Kills one rank of a job at each of its steps in turn, and starts the job again from its last checkpoint.

``python -m tests.soak.every_step fit 4 50`` kills 50 times in a job of 50 steps and 4 workers: every attempt one step
later, another rank, and in turn before it meets the others, in the backward pass, after the update and in the save.
"""

from __future__ import annotations

import argparse
import random
import statistics
import tempfile
from pathlib import Path

from tests.soak.attempts import Failure, Runner, unbroken
from tests.soak.jobs import PLACES, Job, Plan


def prove(kind: str, size: int, num_kills: int, folder: Path, seed: int = 0) -> Runner:
    """Kill at each step, and check what comes out in the end.

    Args:
        kind: of the job.
        size: number of workers.
        num_kills: number of steps, which is even, and of kills.
        folder: for files.
        seed: says before which of the calls for files the chief is killed.

    Raises:
        Failure: a promise was not kept.
    """
    draw = random.Random(seed)
    job = Job(kind, num_kills)
    expected = unbroken(job, size, folder / "unbroken")
    runner = Runner(job, size, folder / "killed")
    for step in range(num_kills):
        rank, place = step % size, PLACES[step // size % len(PLACES)]
        plan = Plan("kill", rank, step, place)
        if (rank, place) == (0, "save"):
            plan = Plan("kill in a save", 0, step, place, at=draw.randint(1, 15))
        if runner.attempt(plan):
            raise Failure(f"{plan} did not come")
    if not runner.attempt():
        raise Failure("the last attempt has ended early")
    runner.check_end(expected)
    return runner


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("kind", choices=("fit", "loop"))
    parser.add_argument("size", type=int, help="number of workers")
    parser.add_argument("num_kills", type=int, help="number of kills and of steps")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        runner = prove(arguments.kind, arguments.size, arguments.num_kills, Path(folder), arguments.seed)
    notice, recover = zip(*((times.notice, times.recover) for times in runner.times if times.recover), strict=True)
    print(
        f"{arguments.kind}, {arguments.size} workers: killed at each of {arguments.num_kills} steps; the weights are "
        f"those of the unbroken job. Noticed after {statistics.median(notice):.3f} s, at most {max(notice):.3f} s; all "
        f"had made a step again after {statistics.median(recover):.2f} s, at most {max(recover):.2f} s."
    )


if __name__ == "__main__":
    main()
