"""A campaign of random faults over whole jobs: ``make soak``, or ``python -m tests.soak --faults 30 --seed 7``.

Each run is a job, drawn from a seed: workers with ``fit`` or a loop, or parameter servers. It must end with the right
weights, bit for bit, and no attempt may end for which no fault was planned that ends it. ``--only SEED`` repeats a run.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import logging
import os
import random
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

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


class Campaign:
    """Runs, and what they took.

    Args:
        folder: for the jobs' files.
        show: called with lines for the user.
    """

    def __init__(self, folder: Path, show: Callable[[str], None]) -> None:
        self.num_struck: collections.Counter[str] = collections.Counter()
        self.times: list[Times] = []
        self.failures: list[int] = []
        self._folder = folder
        self._show = show
        self._resources = contextlib.ExitStack()
        self._cluster: Any = None

    def run(self, seed: int) -> None:
        """Run one job; show what was wrong."""
        is_of_servers = random.Random(-seed - 1).random() < SERVERS
        try:
            run = self._servers(seed) if is_of_servers else workers.Run(self._folder, seed, HEARTBEAT_S)
            try:
                run.run()
            finally:
                self.num_struck += run.num_struck
                self.times += run.times
        except Exception as error:  # noqa: BLE001 - whatever it is, it counts, and the next run begins
            self.failures.append(seed)
            self._show(f"FAILED --only {seed}: {type(error).__name__}: {error}".replace("\n", " | ")[:2000])
            if not isinstance(error, Failure):
                self._show(traceback.format_exc())

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
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    first = seed = options.seed if options.only is None else options.only
    begin = shown = time.monotonic()
    with tempfile.TemporaryDirectory() as folder, _quick_and_quiet(), contextlib.ExitStack() as stack:
        campaign = Campaign(Path(folder), lambda line: print(line, flush=True))
        stack.callback(campaign.close)
        while campaign.num_struck.total() < options.faults and time.monotonic() - begin < options.minutes * 60:
            campaign.run(seed)
            seed += 1
            if time.monotonic() - shown > SHOW_S:
                shown = time.monotonic()
                print(f"{shown - begin:.0f} s: {campaign.num_struck.total()} faults, {seed - first} runs", flush=True)
            if options.only is not None:
                break
    print(*table(campaign.times, campaign.num_struck), sep="\n")
    print(
        f"\n{campaign.num_struck.total()} faults in {seed - first} runs, seeds {first} to {seed - 1}, "
        f"{time.monotonic() - begin:.0f} s; failed: {campaign.failures or 'none'}"
    )
    return 1 if campaign.failures else 0


if __name__ == "__main__":
    raise SystemExit(main())
