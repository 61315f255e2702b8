"""Records some steps of a recipe by torch's profiler: a trace for each process, and a table of where the time went."""

from __future__ import annotations

import functools
import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import Any

import checks
import traces
from torch import profiler
from tqdm import tqdm

import torchstrategy as ts
from torchstrategy.base.labels import label, make_profiler

FOLDER = "profile"  # of the traces, within that of a run
_RECORDING = (profiler.ProfilerAction.RECORD, profiler.ProfilerAction.RECORD_AND_SAVE)
_END = object()


class Profile:
    """Records some steps of a training; without ``profile=true`` it does nothing.

    The training belongs into its ``with`` block: if an error or ``return`` leaves the block while steps are being
    recorded, what there is of them is saved. The processes of a strategy must make the same steps: the chief tells the
    figures of all in one table.

    Args:
        config: the recipe's, with ``profile`` and ``profile_steps``.
        run_path: the folder of the run; the traces go into the folder ``profile`` there.
        strategy: whose processes appear in the table; ``None`` for this one alone.
        name: of this process and its trace; ``None`` means its rank.
        skip_more: steps to leave out besides those of ``profile_steps.skip``.

    Raises:
        ValueError: an option is wrong.
    """

    def __init__(
        self,
        config: checks.Options,
        run_path: Path,
        strategy: ts.Strategy | None = None,
        name: str | None = None,
        skip_more: int = 0,
    ) -> None:
        checks.profile(config)
        self._workers = None if strategy is None else strategy.workers
        rank = 0 if self._workers is None else self._workers.rank
        self._is_chief = rank == 0
        self._is_alone = self._workers is None
        self._last_is_whole = True
        self._name = name or f"rank {rank}"
        self._path = run_path / FOLDER / f"{self._name.replace(' ', '_')}.json"
        self._profiler: profiler.profile | None = None
        if config["profile"]:
            steps = config["profile_steps"]
            self._begin(skip_more + steps["skip"], steps["record"])

    def _begin(self, num_skipped: int, num_recorded: int) -> None:
        os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # it would print that it begins and ends
        self._profiler = make_profiler(
            schedule=profiler.schedule(skip_first=num_skipped - 1, wait=0, warmup=1, active=num_recorded, repeat=1),
            on_trace_ready=self._save,
        )
        self._profiler.start()

    def __enter__(self) -> Profile:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self.break_off(error)

    def break_off(self, error: BaseException | None) -> None:
        """Save what there is, if steps are being recorded.

        Args:
            error: why the training ends, which an error in saving must not hide; ``None`` if it ends without one.
        """
        if not self._is_recording:
            return
        self._is_alone = True  # the other processes may not have left
        try:
            self.end_epoch()
        except Exception as failure:
            if error is None:
                raise
            tqdm.write(f"What was recorded before the error can't be saved: {failure}")

    def steps(self, batches: Iterable[Any]) -> Iterable[Any]:
        """Return the batches of an epoch; what is done with one of them is a step."""
        return batches if self._profiler is None else self._follow(batches)

    def step(self) -> None:
        """End a step and begin the next one."""
        if self._profiler is not None:
            self._profiler.step()

    def end_epoch(self) -> None:
        """Say that no steps follow for now: a recording that has begun ends here, within a step."""
        if self._profiler is None:
            return
        if self._is_recording:
            self._last_is_whole = False
            self._profiler.stop()
        elif self._is_chief:
            tqdm.write("Nothing was recorded in this epoch, which had not more steps than profile_steps.skip.")

    def _follow(self, batches: Iterable[Any]) -> Iterator[Any]:
        iterator = iter(batches)
        while True:
            with label("input"):
                batch = next(iterator, _END)
            if batch is _END:
                break
            yield batch
            self.step()
        self.end_epoch()

    @property
    def _is_recording(self) -> bool:
        return self._profiler is not None and self._profiler.current_action in _RECORDING

    def _save(self, recorded: profiler.profile) -> None:
        self._profiler = None
        self._path.parent.mkdir(parents=True, exist_ok=True)
        recorded.export_chrome_trace(str(self._path))
        trace = traces.read_trace(self._path)
        traces.name_rows(trace, self._name)
        if not self._last_is_whole:
            traces.drop_last_step(trace)
        self._path.write_text(json.dumps(trace))
        figures = [traces.summarise(trace)]
        if not self._is_alone:
            rows = self._workers.exchange("the comparison of profiles", asdict(figures[0]))
            figures = [traces.Figures(**row) for row in rows]
        if self._is_chief:
            _tell(figures, self._path.parent)


class ProfileCallback(ts.callbacks.Callback):
    """Records some batches of a ``fit``.

    Args:
        profile: the recorder.
    """

    def __init__(self, profile: Profile) -> None:
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


class ProfileHook(ts.estimator.SessionRunHook):
    """Records some steps of an Estimator's training.

    Args:
        profile: the recorder.
    """

    def __init__(self, profile: Profile) -> None:
        self._profile = profile

    def after_run(self, run_context: ts.estimator.SessionRunContext, run_values: ts.estimator.SessionRunValues) -> None:
        """End a step."""
        del run_context, run_values
        self._profile.step()

    def end(self, session: ts.estimator.Session) -> None:
        """Record no more."""
        del session
        self._profile.end_epoch()


class WorkerProfile:
    """Records some steps on each worker of a parameter-server cluster. It is made by the coordinator and sent to them.

    Args:
        config: the recipe's.
        run_path: the folder of the run.
    """

    def __init__(self, config: checks.Options, run_path: Path) -> None:
        self._config = config
        self._run_path = run_path.absolute()
        self._profile: Profile | None = None

    def recorded(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function that is to be scheduled; a step is from one of its calls on a worker to the next one.

        Args:
            function: what it does.
        """

        @functools.wraps(function)
        def step(*args: Any) -> Any:
            if self._profile is None:
                index = ts.coordinator.experimental_get_current_worker_index()
                self._profile = Profile(self._config, self._run_path, name=f"worker {index}")
            else:
                self._profile.step()
            try:
                return function(*args)
            except BaseException as error:
                self._profile.break_off(error)
                raise

        return step

    def tell(self) -> None:
        """Print a table of the workers' traces, as far as they are in a folder of this host."""
        if self._config["profile"]:
            tell_of_traces(self._run_path, "worker_*")


def next_batch(batches: Iterator[Any]) -> Any:
    """Return the next batch of an iterator, labelled as input in traces."""
    with label("input"):
        return next(batches)


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
        run_path: as for ``Profile``.
        strategy: as for ``Profile``.
        name: as for ``Profile``.
    """
    with Profile({"profile": True, "profile_steps": profile_steps}, run_path, strategy, name) as profile:
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
    _tell([traces.summarise(traces.read_trace(path)) for path in paths], run_path / FOLDER)


def _tell(figures: Sequence[traces.Figures], folder: Path) -> None:
    tqdm.write(f"{traces.make_table(figures)}\nTraces, for https://ui.perfetto.dev: {folder}")
