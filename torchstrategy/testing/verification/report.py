"""What ``verify_replication`` returns and prints."""

from __future__ import annotations

from dataclasses import dataclass, field

from torchstrategy.testing.verification.causes import UNDECIDED, Cause, constant_divisor, find_causes
from torchstrategy.testing.verification.deviations import Deviation
from torchstrategy.testing.verification.records import Run

__all__ = ["Comparison", "VerificationReport", "compare"]

_NUM_SHOWN = 6


@dataclass
class Comparison:
    """One run beside that of one replica."""

    title: str
    num_steps: int
    deviations: list[Deviation] = field(default_factory=list)
    causes: list[Cause] = field(default_factory=list)
    error: str | None = None

    @property
    def ok(self) -> bool:
        """Whether every number is that of one replica."""
        return self.num_steps > 0 and not (self.deviations or self.causes or self.error)

    @property
    def is_undecided(self) -> bool:
        """Whether numbers differ, but only for causes that leave open whether the program is right."""
        return bool(self.causes) and self.error is None and {cause.kind for cause in self.causes} <= UNDECIDED

    def __str__(self) -> str:
        if self.ok:
            return f"{self.title}: right in all {self.num_steps} steps"
        what = "CAN'T BE COMPARED" if self.is_undecided else "WRONG"
        lines = [f"{self.title}: {what if self.num_steps or self.error else 'no step was recorded'}"]
        lines += [f"  cause: {cause}" for cause in self.causes]
        if not self.is_undecided:
            lines += [f"  {deviation}" for deviation in self.deviations[:_NUM_SHOWN]]
            if len(self.deviations) > _NUM_SHOWN:
                lines.append(f"  and {len(self.deviations) - _NUM_SHOWN} more")
        if self.error:
            lines += ["  the program failed:", *(f"    {line}" for line in self.error.strip().splitlines()[-8:])]
        return "\n".join(lines)


@dataclass
class VerificationReport:
    """Says whether several replicas give the numbers of one, and if not, where and why.

    Its text is the readable report.
    """

    comparisons: list[Comparison]

    @property
    def ok(self) -> bool:
        """Whether every number of every run is that of one replica."""
        return bool(self.comparisons) and all(comparison.ok for comparison in self.comparisons)

    @property
    def causes(self) -> list[Cause]:
        """The causes that were found, of all runs."""
        return [cause for comparison in self.comparisons for cause in comparison.causes]

    @property
    def kinds(self) -> set[str]:
        """The kinds of the causes."""
        return {cause.kind for cause in self.causes}

    def __str__(self) -> str:
        return "\n".join(map(str, self.comparisons))


def compare(reference: Run, runs: list[Run]) -> VerificationReport:
    """Compare runs with that of one replica.

    Args:
        reference: the run with one replica.
        runs: the runs with several.

    Returns:
        The report.
    """
    alone = Comparison(reference.title, reference.num_steps, [], constant_divisor(reference), reference.error)
    comparisons = [] if alone.ok else [alone]
    for run in runs:
        found, causes = find_causes(run, reference) if reference.replicas and run.replicas else ([], [])
        steps = min(run.num_steps, reference.num_steps)
        comparison = Comparison(run.title, steps, found, causes, run.error)
        if run.error is None and reference.error is None and run.num_steps != reference.num_steps:
            text = f"{run.num_steps} steps where one replica makes {reference.num_steps}"
            comparison.causes.append(Cause("another number of steps", steps, text))
        comparisons.append(comparison)
    return VerificationReport(comparisons)
