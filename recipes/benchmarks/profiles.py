"""Records some steps of a benchmark beside those that it times: a trace for each process, and a table of their time."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import checks
from tqdm import tqdm

import torchstrategy as ts

FOLDER = "profile"  # of the traces, within that of a run


def make(
    options: checks.Options, run_path: Path, strategy: ts.Strategy | None = None, name: str | None = None
) -> ts.profiler.Profile:
    """Return the recorder of a benchmark; without ``profile=true`` it does nothing.

    Args:
        options: the benchmark's, with ``profile`` and ``profile_steps``.
        run_path: the folder of the run; the traces go into the folder ``profile`` there.
        strategy: whose processes appear in the table; ``None`` for this one alone.
        name: of this process and its trace; ``None`` means its rank.

    Raises:
        ValueError: an option is wrong.
    """
    checks.profile(options)
    steps = options["profile_steps"]
    record = steps["record"] if options["profile"] else 0
    return ts.profiler.Profile(run_path / FOLDER, strategy, skip=steps["skip"], record=record, name=name)


class ProfileCallback(ts.callbacks.Callback):
    """Records some batches of a ``fit``.

    Args:
        profile: the recorder.
    """

    def __init__(self, profile: ts.profiler.Profile) -> None:
        super().__init__()
        self.profile = profile

    def on_train_batch_end(self, batch: int, logs: Mapping[str, Any] | None = None) -> None:
        """End a step."""
        del batch, logs
        self.profile.step()

    def on_test_begin(self, logs: Mapping[str, Any] | None = None) -> None:
        """Leave out the validation."""
        del logs
        self.profile.end_epoch()

    def on_train_end(self, logs: Mapping[str, Any] | None = None) -> None:
        """Record no more."""
        del logs
        self.profile.end_epoch()


class WorkerProfile:
    """Records some steps on each worker of a parameter-server cluster. It is made by the coordinator and sent to them.

    Args:
        config: the recipe's.
        run_path: the folder of the run.
    """

    def __init__(self, config: checks.Options, run_path: Path) -> None:
        self._config = config
        self._run_path = run_path.absolute()
        self._profile: ts.profiler.Profile | None = None

    def recorded(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function that is to be scheduled; a step is from one of its calls on a worker to the next one.

        Args:
            function: what it does.
        """

        @functools.wraps(function)
        def step(*args: Any) -> Any:
            if self._profile is None:
                index = ts.coordinator.experimental_get_current_worker_index()
                self._profile = make(self._config, self._run_path, name=f"worker {index}")
            else:
                self._profile.step()
            try:
                return function(*args)
            except BaseException as error:
                self._profile.break_off(error)
                raise

        return step


def record_calls(
    step: Callable[[], object],
    profile_steps: checks.Options,
    run_path: Path,
    strategy: ts.Strategy | None = None,
    name: str | None = None,
) -> None:
    """Record some calls of a function as steps, as benchmarks do it beside what they time.

    Args:
        step: the function.
        profile_steps: how many calls are left out, and how many are recorded, as in conf/.
        run_path: as for ``make``.
        strategy: as for ``make``.
        name: as for ``make``.
    """
    with make({"profile": True, "profile_steps": profile_steps}, run_path, strategy, name) as profile:
        for _ in range(profile_steps["skip"] + profile_steps["record"]):
            step()
            profile.step()


def case_path(run_path: Path, *case: str) -> Path:
    """Return a folder within that of a run, for the traces of one of several cases."""
    return run_path / re.sub(r"\W+", "_", " ".join(case))


def tell_of_traces(run_path: Path, pattern: str = "*") -> None:
    """Print a table of the traces in a folder of this host.

    Args:
        run_path: the folder of the run.
        pattern: of the names of the processes.
    """
    paths = sorted((run_path / FOLDER).glob(f"{pattern}.json"), key=lambda path: (len(path.name), path.name))
    if not paths:
        tqdm.write(f"No steps of {pattern} were recorded: there were not more than profile_steps.skip.")
        return
    tqdm.write(f"{ts.profiler.table(paths)}\nTraces, for https://ui.perfetto.dev: {run_path / FOLDER}")
