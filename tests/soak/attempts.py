"""Runs jobs of ``jobs.py`` attempt by attempt, and judges what all their ranks have said."""

from __future__ import annotations

import collections
import json
import re
import shutil
from collections.abc import Mapping, Sequence
from multiprocessing import forkserver
from pathlib import Path
from typing import Any, NamedTuple

import torchstrategy as ts
from tests.multi_worker.lost import blamed
from tests.soak import jobs
from tests.soak.jobs import Job, Plan
from torchstrategy.testing.processes import process_context

#: After these a rank is silent, and its launcher must end it.
SILENT = ("stop", "hang")
#: After these the attempt goes on; after a full disk only where that is asked for.
SPARED = ("slow", "pause", "stall", "jump")
#: Of these the others say who it was, and blame nobody else.
NAMED = ("kill", "stop", "exit", "error", *jobs.FILE_KINDS)
#: After these it may be said that the rank does not answer, and of no other rank, and after no other kind.
GONE = ("kill", "stop", "kill in a save", "torn write")
#: After these the others know only when their deadline passes, or hear it by chance.
UNTOLD = ("hang", "lost", "torn")
DEADLINE_S = 6.0
#: In attempts in which a rank hangs or is stalled for long: a first collective may take five times as long.
STALL_S = 0.5
#: A stall of so many seconds must be said: that patience, the time for answers, and some for a busy machine.
LONG_STALL_S = 5 * STALL_S + 2.0 + 2.0
_STALL = "TORCHSTRATEGY_STALL_S sets after"
_LOST = re.compile(r"Rank (\d+) does not answer:")
_REPORT = re.compile(
    r"No progress for \d+ s: rank \d+ waits in (?P<operation>.+) \(collective number \d+\) at (?P<site>\S+ \(.+?\))\. "
    r".*?Not arrived: ranks? (?P<late>[\d, ]+)\..* Stacks: (?P<stacks>\S+) \(TORCHSTRATEGY"
)
_LATE = re.compile(r"^(?P<operation>.+) did not complete within .*?Not arrived: ranks? (?P<late>[\d, ]+)\.")


def warm_up() -> None:
    """Have attempts forked from a process that has imported what ``fit`` needs, if no other server runs yet."""
    process_context().set_forkserver_preload(["torchstrategy.fit.compiled_loss", "torch._dynamo", "tests.soak.jobs"])
    forkserver._forkserver.ensure_running()  # not the module's function: `tests.isolated` has a server of its own


class Times(NamedTuple):
    """How long a fault that ended an attempt took.

    Args:
        kind: the fault's.
        notice: until the last of the other ranks had ended, in seconds.
        recover: until all ranks of the next attempt had made a step; ``None`` if there was no further step.
    """

    kind: str
    notice: float
    recover: float | None


class Failure(AssertionError):
    """A promise that was not kept."""


class Runner:
    """A job whose attempts end, until it is done.

    Args:
        job: the job.
        size: how many workers it has.
        folder: for its files.
        launcher: of ``ProcessPool``.
    """

    def __init__(self, job: Job, size: int, folder: Path, launcher: str = "TF_CONFIG") -> None:
        self.job = job
        self.folder = folder
        self.times: list[Times] = []
        self.num_struck: collections.Counter[str] = collections.Counter()
        self._size = size
        self._launcher = launcher
        self._ended: tuple[str, float, float] | None = None  # kind, when it struck, until when it was noticed
        warm_up()
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)

    def attempt(self, *plans: Plan, timeout_s: float = 60.0) -> bool:
        """Run an attempt; return whether the job is done.

        Raises:
            Failure: a rank does not end, or ended though nothing had happened that ends it, or blames the wrong one.
        """
        before, num_chars = [len(rows) for rows in self.said()], [len(log) for log in self._logs()]
        silent = [plan.rank for plan in plans if plan.kind in SILENT]
        job = self.job
        if any(plan.kind in UNTOLD for plan in plans):
            job = job._replace(deadline_s=DEADLINE_S)
        if any(is_long(plan) for plan in plans):
            job = job._replace(stall_s=STALL_S)
        with ts.testing.ProcessPool(self._size, launcher=self._launcher) as pool:
            outcomes = pool.outcomes(jobs.run, job, self.folder, plans, silent=silent, timeout_s=timeout_s)
        said = [rows[begin:] for rows, begin in zip(self.said(), before, strict=True)]
        logs = [log[begin:] for log, begin in zip(self._logs(), num_chars, strict=True)]
        self._note_recovery(said)
        struck = {(rank, row[1]): row[-1] for rank, rows in enumerate(said) for row in rows if row[0] == "struck"}
        self.num_struck.update(plan.kind for plan in plans if (plan.rank, plan.kind) in struck)
        happened = [plan for plan in plans if (plan.rank, plan.kind) in struck]
        self.check_lost(happened, logs)
        if job.stall_s is None:
            self._check(not any(_STALL in log for log in logs), f"a stall was reported; {plans}")
        for plan in happened:
            # What came after it has waited for its end; else the attempt may have ended, and nobody had to wait.
            ended = struck[plan.rank, plan.kind] + plan.seconds
            is_over = any(row[0] == "step" and row[-1] > ended for row in said[plan.rank])
            if plan.kind == "stall" and is_long(plan) and is_over:
                self.check_stall(plan, logs)
        ending = [plan for plan in happened if self.ends(plan)]
        if all(outcome.error is None for outcome in outcomes):
            self._check(not ending, f"{ending} went by unnoticed")
            return True
        errors = {rank: row for rank, rows in enumerate(said) for row in rows if row[0] == "error"}
        self._check(bool(ending), f"the attempt ended though nothing had happened that ends it: {plans}, {errors}")
        (plan,) = ending
        others = [rank for rank in range(self._size) if rank != plan.rank]
        for rank in others:
            self._check(rank in errors, f"after {plan} rank {rank} did not say why it ended: {outcomes[rank].error!r}")
            named = blamed(errors[rank][2])
            is_right = named == {plan.rank}
            self._check(plan.kind not in NAMED or is_right, f"after {plan} rank {rank} blames {named}: {errors[rank]}")
        if plan.kind == "hang":
            self.check_stall(plan, logs, {rank: errors[rank][2] for rank in others})
        # A rank that is killed in a save is so some time after it has said that it will be.
        is_late = plan.kind in jobs.FILE_KINDS and plan.kind != "full disk"
        at = outcomes[plan.rank].at if is_late else struck[plan.rank, plan.kind]
        self._ended = plan.kind, at, max(0.0, *(errors[rank][-1] - at for rank in others))
        return False

    def check_lost(self, happened: Sequence[Plan], logs: Sequence[str]) -> None:
        """Check that nobody is called dead or cut off who was neither killed nor stopped.

        Args:
            happened: the faults of the attempt.
            logs: what each rank has logged, its error included.

        Raises:
            Failure: somebody is.
        """
        gone = {plan.rank for plan in happened if plan.kind in GONE}
        for rank, log in enumerate(logs):
            for line in log.splitlines():
                lost = {int(number) for number in _LOST.findall(line)}
                self._check(lost <= gone, f"a false death: of {happened} rank {rank} says: {line[:500]}")

    def check_stall(self, plan: Plan, logs: Sequence[str], errors: Mapping[int, str] | None = None) -> None:
        """Check that the rank that does not go on is named, with the collective in which the others wait for it.

        Args:
            plan: why it does not.
            logs: what each rank has logged.
            errors: of those who have waited until the deadline, by rank.

        Raises:
            Failure: it is not, or an error names another one.
        """
        reports = [match for log in logs for match in _REPORT.finditer(log)]
        right = [match for match in reports if plan.rank in _ranks(match)]  # others may be late, too, for a moment
        self._check(bool(right), f"nobody has said of {plan} that the others wait for it: {[m[0] for m in reports]}")
        self._check(all("jobs.py:" in match["site"] for match in right), f"not called here: {[m[0] for m in right]}")
        for rank, error in (errors or {}).items():
            late = _LATE.match(error)
            is_right = late is not None and _ranks(late) == {plan.rank}
            self._check(is_right, f"after {plan} rank {rank} does not say who was late: {error}")
            operations = {match["operation"] for match in right}
            self._check(late and late["operation"] in operations, f"it was said of {operations}; rank {rank}: {error}")
        if plan.kind == "hang":  # its stack is in the file
            stacks = [(self.folder / Path(match["stacks"]).name).read_text() for match in right]
            own = [text.partition(f"--- rank {plan.rank}: ")[2].partition("\n--- rank ")[0] for text in stacks]
            self._check(any("faults.py" in text for text in own), f"the stack of {plan} is missing: {own}")

    def _logs(self) -> list[str]:
        paths = [self.folder / f"log-{rank}" for rank in range(self._size)]
        return [path.read_text(errors="replace") if path.exists() else "" for path in paths]

    def said(self) -> list[list[Any]]:
        """Return what each rank has said in all attempts."""
        paths = [self.folder / f"said-{rank}" for rank in range(self._size)]
        return [[json.loads(row) for row in path.read_text().splitlines()] if path.exists() else [] for path in paths]

    @property
    def num_made(self) -> int:
        """In how many steps any rank has been so far."""
        return max((row[1] for rows in self.said() for row in rows if row[0] == "step"), default=0)

    def check_end(self, expected: list[Any]) -> None:
        """Check the weights, and that each example was seen once in each epoch on the way to them.

        Raises:
            Failure: they are others, or it was not.
        """
        seen: list[list[int]] = [[] for _ in range(self.job.num_steps)]
        for rank, rows in enumerate(self.said()):
            steps: dict[int, list[int]] = {}
            for row in rows:
                if row[0] == "restored":  # what was made after the checkpoint does not count
                    steps = {number: ids for number, ids in steps.items() if number <= row[1]}
                elif row[0] == "step":
                    self._check(row[1] == len(steps) + 1, f"rank {rank} makes step {row[1]} after {len(steps)}")
                    steps[row[1]] = row[2]
            self._check(len(steps) == self.job.num_steps, f"rank {rank} made {len(steps)} steps")
            self._check(rows[-1][0] == "result" and rows[-1][1] == expected, f"rank {rank} has other weights")
            for number, ids in steps.items():
                seen[number - 1] += ids
        half = self.job.num_steps // 2
        for epoch in (seen[:half], seen[half:]):
            ids = sorted(number for step in epoch for number in step)
            self._check(ids == list(range(jobs.num_examples(self.job))), f"the examples of an epoch are {ids}")

    def ends(self, plan: Plan) -> bool:
        """Say whether an attempt ends by a fault."""
        return plan.kind not in SPARED and not (plan.kind == "full disk" and self.job.kind == "fit")

    def _note_recovery(self, said: Sequence[Sequence[Any]]) -> None:
        if self._ended is None:
            return
        kind, at, notice = self._ended
        firsts = [next((row[-1] for row in rows if row[0] == "step"), None) for rows in said]
        recover = None if None in firsts else max(firsts) - at
        self.times.append(Times(kind, notice, recover))
        self._ended = None

    def _check(self, is_kept: object, what: str) -> None:
        if not is_kept:
            raise Failure(what)


def is_long(plan: Plan) -> bool:
    """Say whether a fault lasts so long that it must be said who does not go on."""
    return plan.kind == "hang" or (plan.kind == "stall" and plan.seconds >= LONG_STALL_S)


def _ranks(match: re.Match[str]) -> set[int]:
    return set(map(int, match["late"].split(",")))


def unbroken(job: Job, size: int, folder: Path) -> list[Any]:
    """Run a job without faults; return the weights.

    Raises:
        Failure: it does not end, or its ranks disagree.
    """
    runner = Runner(job, size, folder)
    runner.attempt()
    weights: list[Any] = runner.said()[0][-1][1]
    runner.check_end(weights)
    return weights
