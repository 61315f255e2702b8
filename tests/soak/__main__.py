"""A campaign of random faults over whole jobs: ``make soak``, or ``python -m tests.soak --faults 30 --seed 7``.

Each run is a job, drawn from a seed: workers with ``fit`` or a loop, or parameter servers. It must end with the right
weights, bit for bit, and no attempt may end for which no fault was planned that ends it. ``--only SEED`` repeats a run.

A long campaign can be cut: with ``--results FILE`` each run leaves a line there, and the next command goes on after the
last one. ``--minutes 8`` ends a command early, and ``--table FILE...`` shows what is in one or several such files.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import itertools
import json
import logging
import os
import random
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

import torchstrategy as ts
from tests.soak import servers, workers
from tests.soak.attempts import Failure, Times

HEARTBEAT_S = 2.0
#: Shares of runs on parameter servers, which have more faults each.
SERVERS = 0.2
#: Seconds between lines that show how far it is.
SHOW_S = 20.0
BOUNDS_S = (0.1, 0.3, 1.0, 3.0, 10.0, 30.0)


class Result(NamedTuple):
    """What came of a run; a line of a file of results is such a tuple's dict.

    Args:
        seed: of the run.
        seconds: how long it took.
        num_struck: how many faults there were of each kind.
        times: what those took that were timed.
        failure: what was wrong; ``None`` if nothing was.
    """

    seed: int
    seconds: float
    num_struck: dict[str, int]
    times: list[Times]
    failure: str | None


class Results:
    """All runs of a campaign, by seed; a seed that was run again counts once.

    Args:
        paths: files of results that are read; those that are not there yet are empty.
        to: the file to which runs are added; ``None`` for none.

    Raises:
        ValueError: a line of a file is no result.
    """

    def __init__(self, paths: Sequence[Path] = (), to: Path | None = None) -> None:
        self.by_seed: dict[int, Result] = {}
        self._to = to
        for path in (*paths, *([] if to is None else [to])):
            for number, line in enumerate(path.read_text().splitlines() if path.exists() else (), 1):
                try:
                    result = Result(**json.loads(line))
                    result = result._replace(times=[Times(*row) for row in result.times])
                except (TypeError, ValueError) as error:
                    raise ValueError(f"{path}:{number} is no result of a run. Delete that line. ({error})") from error
                self.by_seed[result.seed] = result

    def add(self, result: Result) -> None:
        """Add a run."""
        self.by_seed[result.seed] = result
        if self._to is not None:
            with self._to.open("a") as file:
                file.write(json.dumps(result._asdict()) + "\n")

    @property
    def num_struck(self) -> collections.Counter[str]:
        """How many faults there were of each kind."""
        return sum((collections.Counter(result.num_struck) for result in self.by_seed.values()), collections.Counter())

    @property
    def failures(self) -> list[int]:
        """Seeds of the runs in which something was wrong."""
        return sorted(seed for seed, result in self.by_seed.items() if result.failure is not None)

    def lines(self) -> Iterator[str]:
        """Return the table, and a line about all runs."""
        yield from table([row for result in self.by_seed.values() for row in result.times], self.num_struck)
        seconds = sum(result.seconds for result in self.by_seed.values())
        seeds = f"seeds {min(self.by_seed)} to {max(self.by_seed)}" if self.by_seed else "no seeds"
        yield (
            f"\n{self.num_struck.total()} faults in {len(self.by_seed)} runs, {seeds}, {seconds:.0f} s; "
            f"failed: {self.failures or 'none'}"
        )


class Campaign:
    """Runs jobs.

    Args:
        folder: for the jobs' files.
        show: called with lines for the user.
    """

    def __init__(self, folder: Path, show: Callable[[str], None]) -> None:
        self._folder = folder
        self._show = show
        self._resources = contextlib.ExitStack()
        self._cluster: Any = None

    def run(self, seed: int) -> Result:
        """Run one job; show what was wrong."""
        is_of_servers = random.Random(-seed - 1).random() < SERVERS
        begin, run, failure = time.monotonic(), None, None
        try:
            run = self._servers(seed) if is_of_servers else workers.Run(self._folder, seed, HEARTBEAT_S)
            run.run()
        except Exception as error:  # noqa: BLE001 - whatever it is, it counts, and the next run begins
            failure = f"{type(error).__name__}: {error}".replace("\n", " | ")[:2000]
            self._show(f"FAILED --only {seed}: {failure}")
            if not isinstance(error, Failure):
                self._show(traceback.format_exc())
        num_struck, times = ({}, []) if run is None else (dict(run.num_struck), list(run.times))
        return Result(seed, time.monotonic() - begin, num_struck, times, failure)

    def close(self) -> None:
        """End the cluster."""
        self._resources.close()

    def _servers(self, seed: int) -> servers.Run:
        if self._cluster is None:
            environment = {"TORCHSTRATEGY_HEARTBEAT_S": str(HEARTBEAT_S)}
            cluster = ts.testing.LocalCluster(servers.NUM_WORKERS, servers.NUM_PS, environment=environment)
            self._cluster = self._resources.enter_context(cluster)
        return servers.Run(self._cluster, self._folder / "servers", seed, HEARTBEAT_S)


def table(times: Sequence[Times], num_struck: collections.Counter[str]) -> Iterator[str]:
    """Return the lines of a table of how long noticing and recovering took, for each kind of fault."""
    heads = [f"< {bound:g} s" for bound in BOUNDS_S] + [f"≥ {BOUNDS_S[-1]:g} s"]
    yield f"| fault | number | until | {' | '.join(heads)} | longest |"
    yield f"| --- | --- | --- |{' --- |' * (len(heads) + 1)}"
    for kind, number in sorted(num_struck.items(), key=lambda item: (-item[1], item[0])):
        mine = [row for row in times if row.kind == kind]
        if not mine:
            yield f"| {kind} | {number} | |{' |' * (len(heads) + 1)}"
            continue
        columns = {"noticed": [row.notice for row in mine], "a step again": [row.recover for row in mine]}
        for what, values in columns.items():
            known = [value for value in values if value is not None]
            counts = [0] * len(heads)
            for value in known:
                counts[sum(value >= bound for bound in BOUNDS_S)] += 1
            cells = " | ".join(str(count or "") for count in counts)
            name = f"{kind} | {number}" if what == "noticed" else " | "
            yield f"| {name} | {what} | {cells} | {max(known, default=0.0):.2f} s |"


@contextlib.contextmanager
def _quick_and_quiet() -> Iterator[None]:
    """Let silence count soon, and the library log errors only: it warns of every fault."""
    logger, before = logging.getLogger("torchstrategy"), dict(os.environ)
    level = logger.level
    logger.setLevel(logging.ERROR)
    os.environ["TORCHSTRATEGY_HEARTBEAT_S"] = str(HEARTBEAT_S)
    try:
        yield
    finally:
        logger.setLevel(level)
        os.environ.clear()
        os.environ.update(before)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.soak", description=__doc__.partition("\n")[0])
    parser.add_argument("--faults", type=int, default=2001, help="how many faults there are to be at least")
    parser.add_argument("--seed", type=int, default=0, help="of the first run; the next ones follow")
    parser.add_argument("--only", type=int, help="repeat the run of this seed")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="begin no run after so many")
    parser.add_argument(
        "--results", type=Path, help="file to add each run to; what is in it counts and is not run again"
    )
    parser.add_argument("--table", type=Path, nargs="+", help="run nothing: show what is in these files of results")
    options = parser.parse_args(arguments)
    results = Results(options.table or (), options.results)
    if options.table is None:
        _run(options, results)
    print(*results.lines(), sep="\n")
    return 1 if results.failures else 0


def _run(options: argparse.Namespace, results: Results) -> None:
    torch.set_num_threads(1)
    seeds = itertools.count(options.seed) if options.only is None else [options.only]
    begin = shown = time.monotonic()
    with tempfile.TemporaryDirectory() as folder, _quick_and_quiet(), contextlib.ExitStack() as stack:
        campaign = Campaign(Path(folder), lambda line: print(line, flush=True))
        stack.callback(campaign.close)
        for seed in seeds:
            if options.only is None and results.num_struck.total() >= options.faults:
                return
            if options.only is None and seed in results.by_seed:
                continue
            if time.monotonic() - begin >= options.minutes * 60:
                return
            results.add(campaign.run(seed))
            if time.monotonic() - shown > SHOW_S:
                shown = time.monotonic()
                num_faults = results.num_struck.total()
                print(f"{shown - begin:.0f} s: {num_faults} faults, {len(results.by_seed)} runs", flush=True)


if __name__ == "__main__":
    raise SystemExit(main())
