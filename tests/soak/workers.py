"""Runs of a job of several workers that are hit again and again, each to the weights of an unbroken one."""

from __future__ import annotations

import functools
import random
from pathlib import Path
from typing import Any

import torchstrategy as ts
from tests.soak.attempts import LONG_STALL_S, SPARED, UNTOLD, Runner, unbroken
from tests.soak.jobs import FILE_KINDS, Job, Plan
from torchstrategy.testing.faults import flip_byte_of

NUM_STEPS = 16
#: How often each kind is drawn that ends an attempt, or that is for the chief's files.
KINDS = {
    "kill": 8,
    "kill in a save": 3,
    "torn write": 2,
    "full disk": 2,
    "stop": 1,
    "error": 2,
    "exit": 1,
    "hang": 1,
    "lost": 1,
    "torn": 1,
}
FLIP = 0.15
#: The share of stalls that are so long that somebody must say so.
LONG = 0.1


class Run:
    """One job.

    Args:
        folder: for its files.
        seed: says which job it is, and what goes wrong and when.
        heartbeat_s: of the processes.
    """

    def __init__(self, folder: Path, seed: int, heartbeat_s: float) -> None:
        self._draw = random.Random(seed)
        self._heartbeat_s = heartbeat_s
        self._size = self._draw.choice([2, 2, 2, 3, 4])
        self._job = Job(self._draw.choice(["fit", "fit", "loop"]), NUM_STEPS, self._draw.choice([1, 1, 2, 3]))
        self._folder = folder
        self._runner = Runner(self._job, self._size, folder / "job", self._draw.choice(["TF_CONFIG", "torchrun"]))
        self.num_struck = self._runner.num_struck
        self.times = self._runner.times

    def run(self) -> None:
        """Train to the end.

        Raises:
            Failure: a promise was not kept.
        """
        expected = _expected(self._job, self._size, self._folder / "unbroken")
        runner = self._runner
        while runner.num_made < NUM_STEPS - 1:
            plan = self._draw_plan()
            if runner.attempt(*self._draw_spared(plan.step, may_last=plan.kind not in UNTOLD), plan):
                break
            if runner.ends(plan) and self._draw.random() < FLIP:
                self._flip()
        else:
            runner.attempt(*self._draw_spared(NUM_STEPS - 1))
        runner.check_end(expected)

    def _draw_plan(self) -> Plan:
        draw, made = self._draw, self._runner.num_made
        (kind,) = draw.choices(list(KINDS), list(KINDS.values()))
        step = draw.randint(made, min(made + 4, NUM_STEPS - 1))
        if kind in FILE_KINDS:
            step += (-step - 1) % self._job.save_every  # to one that ends with a save
            return Plan(kind, 0, step, "save", at=draw.randint(1, 3 if kind == "full disk" else 15))
        place = draw.choice(["before", "backward", "update"])
        return Plan(kind, draw.randrange(self._size), step, place)

    def _draw_spared(self, last: int, *, may_last: bool = True) -> list[Plan]:
        """Return faults after which the attempt goes on; none lasts long where there is a deadline."""
        draw, seconds = self._draw, self._heartbeat_s
        plans = []
        for kind in draw.sample(SPARED, draw.choice([0, 0, 1, 2])):
            length = {
                "slow": draw.uniform(0.01, 0.05),
                "pause": draw.uniform(0.05, 0.25) * seconds,
                "stall": draw.uniform(0.1, 1.5) * seconds,
                "jump": draw.choice([-1, 1]) * draw.uniform(1, 12) * 3600,
            }[kind]
            if kind == "stall" and draw.random() < LONG and may_last:
                length = LONG_STALL_S
            step = draw.randint(min(self._runner.num_made, last), last)
            plans.append(Plan(kind, draw.randrange(self._size), step, draw.choice(["before", "update"]), length))
        return plans

    def _flip(self) -> None:
        """Change a byte of the newest checkpoint, if there is one before it."""
        folder = self._folder / "job" / "checkpoints"
        latest = ts.train.latest_checkpoint(folder)
        if latest is not None and len(list(folder.glob("*.pt"))) > 1:
            flip_byte_of(f"{latest}.pt", "weight")
            self.num_struck["flipped byte"] += 1


@functools.cache
def _expected(job: Job, size: int, folder: Path) -> Any:
    return unbroken(job, size, folder)
