"""Verifies an unchanged script: runs it with one replica and with several, and compares every optimizer step."""

from __future__ import annotations

import argparse
import dataclasses
import re
import signal
import sys
import tempfile
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from torchstrategy.testing.verification.api import Comparison, VerificationReport, compare
from torchstrategy.testing.verification.causes import OTHER_EXAMPLES, OWN_RANDOM, Cause, find_causes
from torchstrategy.testing.verification.deviations import load
from torchstrategy.testing.verification.script_launch import log_path, start
from torchstrategy.testing.verification.script_process import EXITED, ScriptRun, record_path
from torchstrategy.testing.verification.script_recorder import Setup

__all__ = ["ScriptError", "Start", "run", "verify_script"]

# Whole numbers are left out: numbers of replicas, batches and steps may well differ.
_NUMBER = re.compile(r"(?<![\w.])[-+]?(?:\d+\.\d*(?:[eE][-+]?\d+)?|\d+[eE][-+]?\d+|nan|inf)(?![\w.])")


@dataclass(frozen=True)
class PrintedDifference:
    """A number that is printed otherwise: the line without its numbers, which of such lines, and which number of it."""

    pattern: str
    occurrence: int
    position: int
    line: str
    value: float
    expected: float

    @property
    def place(self) -> tuple[str, int, int]:
        """Where it is, for comparing with other runs."""
        return self.pattern, self.occurrence, self.position


def printed_differences(mine: str, right: str, tolerance: float) -> list[PrintedDifference]:
    """Return the numbers with a decimal point or an exponent that differ in lines which are alike apart from them.

    Args:
        mine: what one run printed.
        right: what the run printed that it is compared with.
        tolerance: how far numbers may be apart, relative to their size; the last printed digit may differ by one.
    """
    known = _by_pattern(right)
    found = []
    for pattern, lines in _by_pattern(mine).items():
        for occurrence, (line, other) in enumerate(zip(lines, known.get(pattern, []), strict=False)):
            pairs = zip(_NUMBER.findall(line), _NUMBER.findall(other), strict=True)
            for position, (a, b) in enumerate(pairs):
                if not _is_close(a, b, tolerance):
                    found.append(PrintedDifference(pattern, occurrence, position, line, float(a), float(b)))
    return found


def _by_pattern(text: str) -> dict[str, list[str]]:
    lines = defaultdict(list)
    for line in text.splitlines():
        if _NUMBER.search(line):
            lines[_NUMBER.sub("#", line).strip()].append(line.strip())
    return lines


def _is_close(a: str, b: str, tolerance: float) -> bool:
    first, second = float(a), float(b)
    if a == b or (first != first and second != second):
        return True
    digit = max(_last_digit(a), _last_digit(b))
    return abs(first - second) <= 1.5 * digit + tolerance * max(abs(first), abs(second))


def _last_digit(text: str) -> float:
    mantissa, _, exponent = text.lower().partition("e")
    _, _, decimals = mantissa.partition(".")
    return float(10.0 ** (int(exponent or 0) - len(decimals)))


Start = Callable[[Sequence[Setup], float], "list[str | None]"]

_REPLICATED = {"MirroredStrategy", "MultiWorkerMirroredStrategy"}
#: What takes causes away, by how these begin; of random numbers it is dropout's alone.
_OPTIONS = {rf"{OWN_RANDOM}: .*\(\w*dropout\w*\)": "--no-dropout", OTHER_EXAMPLES: "--no-shuffle"}
_OF_TYPES = re.compile(r"dtype|float|double", re.IGNORECASE)  # what torch says of types that don't go together
_SEEDS = (
    "Seed what it draws (torch.manual_seed, random.seed, a generator of its own), and let nothing depend on the time"
)


class ScriptError(RuntimeError):
    """A script can't be verified; the message says why, and what to do."""


@dataclasses.dataclass
class ScriptReport(VerificationReport):
    """Says whether a script gives the numbers of one replica with several.

    Args:
        comparisons: one for each way in which the script was run.
        heading: what was run, and how.
    """

    heading: str = ""

    @property
    def is_undecided(self) -> bool:
        """Whether it can't be said; nothing is wrong, but a run failed before that, or computes what has no like."""
        rest = [part for part in self.comparisons if not part.ok]
        return bool(rest) and all(part.is_undecided or not (part.causes or part.deviations) for part in rest)

    def __str__(self) -> str:
        options = [o for pattern, o in _OPTIONS.items() if any(re.match(pattern, str(cause)) for cause in self.causes)]
        hints = (f"With {option} the numbers can be compared." for option in options)
        return "\n".join([self.heading, super().__str__(), *hints])


@dataclasses.dataclass
class _Runner:
    """Runs the script; ``number`` is how many replicas it is compared with."""

    setup: Setup
    number: int
    timeout_s: float
    start: Start
    again: ScriptRun | None = None

    def run(self, size: int = 1, **changes: Any) -> ScriptRun:
        """Run the script in so many processes, with changes of the setup."""
        with tempfile.TemporaryDirectory(prefix="torchstrategy_verify_") as folder:
            setup = dataclasses.replace(self.setup, folder=folder, size=size, **changes)
            setups = [dataclasses.replace(setup, rank=rank) for rank in range(size)]
            reasons = self.start(setups, self.timeout_s)
            run = ScriptRun(size * setup.replicas, size)
            for own, reason in zip(setups, reasons, strict=True):
                path = record_path(folder, own.rank)
                if path.exists():
                    part = cast("ScriptRun", load(path.read_bytes()))
                    if part.error is not None and part.error.startswith(EXITED) and log_path(own).exists():
                        part.error += "\n" + log_path(own).read_text(encoding="utf-8", errors="replace")
                    _merge(run, part)
                else:
                    run.error = run.error or reason
        return run

    def repeat(self, reference: ScriptRun) -> ScriptRun:
        """Run the script with one replica once more, and see that it does the same.

        Raises:
            ScriptError: it does not.
        """
        if self.again is None:
            self.again = self.run()
            _check_repeats(self.again, reference)
        return self.again


def verify_script(
    script: str,
    arguments: Sequence[str] = (),
    *,
    replicas: int = 2,
    steps: int = 100,
    timeout_s: float = 600.0,
    per_replica_batch: bool = False,
    without: Sequence[str] = (),
    start: Start = start,
) -> ScriptReport:
    """Run a script with one replica and with several, and say where the numbers differ and why.

    Args:
        script: the program's file.
        arguments: its own arguments.
        replicas: how many replicas it is run with.
        steps: how many optimizer steps are recorded at most; the script is ended after them.
        timeout_s: seconds that a run may take.
        per_replica_batch: whether a global batch that grows with the number of replicas is meant, and no deviation.
        without: ``"dropout"`` and ``"shuffling"`` are left out of all runs, so that they can be compared.
        start: starts the processes of a run.

    Returns:
        The report.

    Raises:
        ScriptError: there is no such script, it fails with one replica, makes no optimizer step, can't be run with
            several replicas, or does not repeat itself.
    """
    if not Path(script).is_file():
        raise ScriptError(f"There is no file {script!r}.")
    if replicas < 2:
        raise ScriptError(f"--replicas must be at least 2: one replica is what they are compared with. Got: {replicas}")
    if steps < 1:
        raise ScriptError(f"--steps must be at least 1. Got: {steps}")
    setup = Setup(script, tuple(arguments), "", max_steps=steps, without=tuple(without))
    runner = _Runner(setup, replicas, timeout_s, start)
    reference = _run_alone(runner)
    has_strategy = _has_strategy(script, reference)
    ways = [(1, replicas, False), (replicas, 1, True)] if has_strategy else [(replicas, 1, True)]
    comparisons: list[Comparison] = []
    for size, local, is_job in ways:
        run = runner.run(size, replicas=local, is_job=is_job)
        if run.error is None:
            _check_number(script, run, replicas, has_strategy=has_strategy)
        comparisons += [
            part for part in _compare(runner, reference, run, may_grow=per_replica_batch) if part not in comparisons
        ]
    return ScriptReport(comparisons, _heading(script, runner, reference, has_strategy=has_strategy))


def _run_alone(runner: _Runner) -> ScriptRun:
    """Run the script with one replica: in double precision, where rounding is no question, if it can do with that."""
    run = runner.run()
    if run.error is not None and _OF_TYPES.search(run.error):
        runner.setup = dataclasses.replace(runner.setup, dtype="float32")
        run = runner.run()
    if run.error is not None:
        raise ScriptError(f"The script fails with one replica:\n{_end_of(run.error)}")
    if not run.num_steps:
        raise ScriptError(
            f"{runner.setup.script} made no step that torch's optimizers tell of after a forward pass of a module. It "
            "must train in the process that it is started in, by torch.optim's optimizers. If it goes on from a "
            "checkpoint that is at its end, give it another folder."
        )
    if run.is_cut:  # the others make as many
        runner.setup = dataclasses.replace(runner.setup, max_steps=run.num_steps, max_bytes=float("inf"))
    return run


def _has_strategy(script: str, run: ScriptRun) -> bool:
    if _REPLICATED & set(run.strategies):
        return True
    others = set(run.strategies) - {"DefaultStrategy"}
    if others:
        raise ScriptError(
            f"{script} makes a {' and a '.join(sorted(others))}, which can't be given several replicas here. "
            "Use ts.MirroredStrategy() or ts.MultiWorkerMirroredStrategy()."
        )
    return False


def _check_number(script: str, run: ScriptRun, number: int, *, has_strategy: bool) -> None:
    if not has_strategy and run.world_size != number:
        raise ScriptError(
            f"{script} can't be run with {number} replicas: it makes no strategy of torchstrategy, and its processes "
            f"did not come together by torch.distributed, though RANK, WORLD_SIZE={number} and what else torchrun sets "
            "was there. Make a ts.MirroredStrategy(), or call torch.distributed.init_process_group() wherever "
            "WORLD_SIZE is set."
        )
    if not run.num_steps:
        raise ScriptError(
            f"{script} made no optimizer step with {number} replicas, though it did with one. Each run began from the "
            f"same files. Its output ends with:\n{_end_of(run.printed or 'nothing')}"
        )
    if len(run.replicas) != number:
        raise ScriptError(f"{script} trained {len(run.replicas)} replicas where it was given {number}.")


def _compare(runner: _Runner, alone: ScriptRun, run: ScriptRun, *, may_grow: bool) -> list[Comparison]:
    growth = _growth(alone, run, runner.number)
    by_strategy = bool(_REPLICATED & set(run.strategies))  # whose number of replicas the program has asked for
    grown = [] if growth is None or may_grow or by_strategy else [_grown(*growth, runner.number)]
    reference = alone
    if growth is not None:
        runner.repeat(alone)  # examples that are new in each run look like larger batches
        reference = runner.run(**{"assumed_replicas" if by_strategy else "batch_factor": runner.number})
        if reference.error is not None:
            raise ScriptError(f"The script fails with one replica and larger batches:\n{_end_of(reference.error)}")
        if not reference.num_steps or _num_rows(reference) != _num_rows(run):
            return [Comparison(run.title, run.num_steps, [], [_grown(*growth, 1)], run.error)]
    parts = compare(reference, [run]).comparisons
    last = parts[-1]
    if growth is not None:
        last.title += f", beside one replica with {runner.number} times the batch"
    printed = _printed(run, reference) if last.ok else []
    if last.deviations or last.causes or printed:
        varying = {difference.place for difference in _printed(runner.repeat(alone), alone)}
        printed = [difference for difference in printed if difference.place not in varying]
    if printed:
        last.causes.append(_not_merged(printed[0], last.num_steps))
    last.causes[:0] = grown
    return parts


def _growth(reference: ScriptRun, run: ScriptRun, number: int) -> tuple[int, int] | None:
    """Return the sizes of the first batches, if that with several replicas is as many times as large."""
    if not run.num_steps:
        return None
    before, after = _num_rows(reference), _num_rows(run)
    right = reference.at(0)[0].seen
    are_others = any(row not in right for own in run.at(0) for row in own.seen)  # else each sees the whole batch
    return (before, after) if before and after == number * before and are_others else None


def _num_rows(run: ScriptRun) -> int:
    """Return how many examples all replicas see in the first step."""
    return sum(own.num_rows or 0 for own in run.at(0))


def _grown(before: int, after: int, factor: int) -> Cause:
    text = (
        f"the global batch grew from {before} to {after} examples with the number of replicas, so that the runs are "
        "not the same training. Divide the batch size by the number of replicas, or pass --per-replica-batch if this "
        "is meant"
    )
    if factor > 1:
        text += f". What follows is compared with one replica that takes {factor} times as many"
    return Cause("global batch grew", 0, text)


def _printed(run: ScriptRun, reference: ScriptRun) -> list[PrintedDifference]:
    return printed_differences(run.printed, reference.printed, 1e-3 if run.is_single_precision else 1e-7)


def _not_merged(difference: PrintedDifference, step: int) -> Cause:
    text = (
        f"the first process prints {difference.line!r}, with {difference.value:g} where one replica has "
        f"{difference.expected:g}; the weights are right: what is printed is not put together from all replicas"
    )
    return Cause("metric not merged", step, text)


def _check_repeats(again: ScriptRun, reference: ScriptRun) -> None:
    if again.error is not None:
        raise ScriptError(f"The script fails when it is run again with one replica:\n{_end_of(again.error)}")
    found, causes = find_causes(again, reference)
    if found or causes or again.num_steps != reference.num_steps:
        what = f": {found[0]}" if found else f": {causes[0]}" if causes else ""
        raise ScriptError(
            f"Two runs with one replica differ, so that nothing can be said about several{what}\n{_SEEDS}."
        )


def _merge(run: ScriptRun, part: ScriptRun) -> None:
    is_first = not run.replicas
    run.replicas.update(part.replicas)
    run.known |= part.known
    run.error = run.error or part.error
    run.is_single_precision |= part.is_single_precision
    run.is_cut |= part.is_cut
    run.world_size = max(run.world_size, part.world_size)
    if is_first:
        run.printed, run.strategies = part.printed, part.strategies


def _heading(script: str, runner: _Runner, reference: ScriptRun, *, has_strategy: bool) -> str:
    uses = " and ".join(sorted(_REPLICATED & set(reference.strategies)))
    if has_strategy:
        how = f"it makes a {uses}, which gets {runner.number} CPU replicas in one process, and in as many processes"
    else:
        how = f"it uses torch.distributed, so it is run in {runner.number} processes as by torchrun"
    kind = "double precision" if not reference.is_single_precision else "single precision"
    end = f"ended after {reference.num_steps} steps" if reference.is_cut else f"{reference.num_steps} steps to its end"
    return f"{script}: {how}. One replica, in {kind}: {end}."


def _end_of(text: str) -> str:
    return "\n".join(f"    {line}" for line in text.strip().splitlines()[-12:])


def run(options: argparse.Namespace) -> int:
    """Carry out ``torchstrategy verify``: run the program with one replica and with several, and print the report.

    Args:
        options: as the command line declares them.

    Returns:
        0 if all numbers are those of one replica, 1 if not, 2 if that can't be said, 130 after Ctrl-C.
    """
    ends = [number for name in ("SIGTERM", "SIGHUP") if (number := getattr(signal, name, None)) is not None]
    # The program's processes end with this one, and its files are put back. nohup ignores SIGHUP.
    before = {n: signal.signal(n, signal.default_int_handler) for n in ends if signal.getsignal(n) != signal.SIG_IGN}
    try:
        report = verify_script(
            options.program,
            options.arguments,
            replicas=options.replicas,
            steps=options.steps,
            timeout_s=options.timeout,
            per_replica_batch=options.per_replica_batch,
            without=[*["dropout"] * options.no_dropout, *["shuffling"] * options.no_shuffle],
        )
    except (ScriptError, OSError) as error:
        sys.stderr.write(f"torchstrategy verify: {error}\n")
        return 2
    except KeyboardInterrupt:
        sys.stderr.write("torchstrategy verify: interrupted; the program's processes have ended.\n")
        return 130
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    sys.stdout.write(f"{report}\n")
    return 0 if report.ok else 2 if report.is_undecided else 1
