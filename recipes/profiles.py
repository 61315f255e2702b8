"""Records some steps of a recipe by torch's profiler: a trace for each process, and a table of where the time went."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import traces
from omegaconf import DictConfig
from torch import profiler
from tqdm import tqdm

import torchstrategy as ts
from torchstrategy.labels import make_profiler

_RECORDING = (profiler.ProfilerAction.RECORD, profiler.ProfilerAction.RECORD_AND_SAVE)
_END = object()


class Profile:
    """Records some steps of a training; without ``profile=true`` it does nothing.

    The processes of a strategy must make the same steps: the chief tells the figures of all in one table.

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
        config: DictConfig,
        run_path: Path,
        strategy: ts.Strategy | None = None,
        name: str | None = None,
        skip_more: int = 0,
    ) -> None:
        self._workers = None if strategy is None else strategy.workers
        rank = 0 if self._workers is None else self._workers.rank
        self._is_chief = rank == 0
        self._is_alone = self._workers is None
        self._last_is_whole = True
        self._name = name or f"rank {rank}"
        self._path = run_path / "profile" / f"{self._name.replace(' ', '_')}.json"
        self._profiler: profiler.profile | None = None
        if not isinstance(config.profile, bool):
            raise ValueError(f"profile must be true or false. Received: {config.profile!r}")
        if config.profile:
            self._begin(config.profile_steps.skip, config.profile_steps.record, skip_more)

    def _begin(self, num_skipped: int, num_recorded: int, skip_more: int) -> None:
        for name, value in (("skip", num_skipped), ("record", num_recorded)):
            if not isinstance(value, int) or value < 1:
                raise ValueError(f"profile_steps.{name} must be an integer of at least 1. Received: {value!r}")
        os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # it would print that it begins and ends
        self._profiler = make_profiler(
            schedule=profiler.schedule(
                skip_first=skip_more + num_skipped - 1, wait=0, warmup=1, active=num_recorded, repeat=1
            ),
            on_trace_ready=self._save,
        )
        self._profiler.start()

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
        if self._profiler.current_action in _RECORDING:
            self._last_is_whole = False
            self._profiler.stop()
        elif self._is_chief:
            tqdm.write("Nothing was recorded in this epoch, which had not more steps than profile_steps.skip.")

    def _follow(self, batches: Iterable[Any]) -> Iterator[Any]:
        iterator = iter(batches)
        try:
            while True:
                with profiler.record_function("ts::input"):
                    batch = next(iterator, _END)
                if batch is _END:
                    break
                yield batch
                self.step()
        except BaseException:  # also where the program leaves its loop; the other processes may not
            self._is_alone = True
            if self._profiler is not None and self._profiler.current_action in _RECORDING:
                self.end_epoch()
            raise
        self.end_epoch()

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
            tqdm.write(f"{traces.make_table(figures)}\nTraces, for https://ui.perfetto.dev: {self._path.parent}")


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

    def __init__(self, config: DictConfig, run_path: Path) -> None:
        self._config = config
        self._run_path = run_path.absolute()
        self._profile: Profile | None = None

    def begin_step(self) -> None:
        """Begin a step on a worker."""
        if self._profile is None:
            index = ts.coordinator.experimental_get_current_worker_index()
            self._profile = Profile(self._config, self._run_path, name=f"worker {index}")
        self._profile.step()

    def next_batch(self, batches: Iterator[Any]) -> Any:
        """Begin a step on a worker with the next batch."""
        self.begin_step()
        with profiler.record_function("ts::input"):
            return next(batches)


def tell_of_workers(run_path: Path) -> None:
    """Print a table of the workers' traces, as far as they are in a folder of this host."""
    paths = sorted((run_path / "profile").glob("worker_*.json"))
    if paths:
        tqdm.write(traces.make_table([traces.summarise(traces.read_trace(path)) for path in paths]))
