"""Records some steps of a training by torch's profiler, in each process."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import Any

from torch import profiler
from tqdm import tqdm

from torchstrategy.base.labels import label, make_profiler
from torchstrategy.profiler import traces
from torchstrategy.strategies.strategy import Strategy

__all__ = ["Profile"]

_RECORDING = (profiler.ProfilerAction.RECORD, profiler.ProfilerAction.RECORD_AND_SAVE)
_END = object()
_LOG_LEVEL = "KINETO_LOG_LEVEL"


@contextlib.contextmanager
def _quiet_kineto() -> Iterator[None]:
    """Keep torch's profiler from printing that it begins and ends: it looks at the environment."""
    if _LOG_LEVEL in os.environ:
        yield
        return
    os.environ[_LOG_LEVEL] = "6"
    try:
        yield
    finally:
        del os.environ[_LOG_LEVEL]


class Profile:
    """Records some steps of a training into a trace, and prints a table of where their time went.

    It stands for ``tf.profiler.experimental.Profile``, but records steps that it counts, not all of its block. torch's
    profiler runs until the last of them has ended, and no longer than the ``with`` block, into which the training
    belongs: if an error or ``return`` leaves it while steps are being recorded, or ``break`` leaves
    their loop, what there is of them is saved. The processes of a strategy must make the same steps: the chief prints
    the figures of all in one table. In ``fit``, call ``step`` from a callback's ``on_train_batch_end``.

    Args:
        folder: of the traces, ``NAME.json`` for each process, which https://ui.perfetto.dev shows.
        strategy: whose processes appear in the table; ``None`` for this one alone.
        skip: how many steps are left out before, at least 1: the profiler warms up in the last one of them.
        record: how many steps are recorded; 0 means that it does nothing.
        name: of this process and its trace; ``None`` means its rank, as in ``rank_0.json``.

    Raises:
        ValueError: ``skip`` or ``record`` is too small, or no integer.
        TypeError: ``strategy`` is none.
        RuntimeError: by the step in which it would begin while another profiler of torch records.

    Example:
        >>> import tempfile
        >>> strategy = ts.MirroredStrategy(["cpu:0", "cpu:1"])
        >>> batches = strategy.experimental_distribute_dataset(torch.ones(8, 4), batch_size=2)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     with ts.profiler.Profile(folder, strategy, skip=1, record=2) as profile:
        ...         for batch in profile.steps(batches):
        ...             _ = strategy.run(torch.sum, args=(batch,))  # doctest: +ELLIPSIS
        Where the time of a step goes, in ms (means of 2 steps):
        ...
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        strategy: Strategy | None = None,
        *,
        skip: int = 5,
        record: int = 10,
        name: str | None = None,
    ) -> None:
        for what, value, least in (("skip", skip, 1), ("record", record, 0)):
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise ValueError(f"Profile({what}=...) must be an integer of at least {least}. Received: {value!r}")
        if strategy is not None and not isinstance(strategy, Strategy):
            raise TypeError(f"Profile(folder, strategy): strategy must be a strategy or None. Received: {strategy!r}")
        self._workers = None if strategy is None else strategy.workers
        rank = 0 if self._workers is None else self._workers.rank
        self._is_chief = rank == 0
        self._is_alone = self._workers is None
        self._last_is_whole = True
        self._name = name or f"rank {rank}"
        self._path = Path(folder) / f"{self._name.replace(' ', '_')}.json"
        self._plan = {"skip_first": skip - 1, "wait": 0, "warmup": 1, "active": record, "repeat": 1}
        self._is_over = record == 0
        self._profiler: profiler.profile | None = None  # while it runs
        self._loop: object | None = None  # the latest one
        self._has_told = False

    def __enter__(self) -> Profile:
        self._begin()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self.break_off(error)

    def break_off(self, error: BaseException | None) -> None:
        """End the profile; save what there is, if steps are being recorded.

        Args:
            error: why the training ends, which an error in saving must not hide; ``None`` if it ends without one.
        """
        if self._profiler is None:
            return
        if not self._is_recording:
            self._stop()
            if self._is_chief and not self._has_told:
                tqdm.write("Nothing was recorded: the training ended within the steps that the profile skips.")
            return
        self._is_alone = True  # the other processes may not have left
        try:
            self.end_epoch()
        except Exception as failure:
            if error is None:
                raise
            tqdm.write(f"What was recorded can't be saved: {failure}")

    def steps(self, batches: Iterable[Any]) -> Iterable[Any]:
        """Return the batches of an epoch; what is done with one of them is a step.

        Args:
            batches: any iterable, such as a distributed dataset.
        """
        return batches if self._is_over else self._follow(batches)

    def step(self) -> None:
        """End a step and begin the next one."""
        self._begin()
        if self._profiler is not None:
            with _quiet_kineto():
                self._profiler.step()

    def end_epoch(self) -> None:
        """Say that no steps follow for now: a recording that has begun ends here, within a step."""
        if self._profiler is None:
            return
        if self._is_recording:
            self._last_is_whole = False
            self._stop()
        elif self._is_chief:
            self._has_told = True
            tqdm.write("Nothing was recorded in this epoch, which had no more steps than the profile skips.")

    def _follow(self, batches: Iterable[Any]) -> Iterator[Any]:
        if self._is_recording:  # in a loop that was left, whose iterator something holds
            self.break_off(None)
        self._begin()
        loop = self._loop = object()
        iterator = iter(batches)
        while True:
            with label("input"):
                batch = next(iterator, _END)
            if batch is _END:
                break
            try:
                yield batch
            except GeneratorExit as left:  # by `break`, or later than the block by an error that holds the loop
                if self._is_recording and self._loop is loop:
                    self.break_off(left)
                raise
            self.step()
        self.end_epoch()

    def _begin(self) -> None:
        """Let torch's profiler run, if it has not yet."""
        if self._is_over or self._profiler is not None:
            return
        self._profiler = make_profiler(schedule=profiler.schedule(**self._plan), on_trace_ready=self._save)
        with _quiet_kineto():
            self._profiler.start()

    def _stop(self) -> None:
        running, self._profiler, self._is_over = self._profiler, None, True
        if running is not None:
            with _quiet_kineto():
                running.stop()

    @property
    def _is_recording(self) -> bool:
        return self._profiler is not None and self._profiler.current_action in _RECORDING

    def _save(self, recorded: profiler.profile) -> None:
        self._profiler, self._is_over = None, True
        self._path.parent.mkdir(parents=True, exist_ok=True)
        recorded.export_chrome_trace(str(self._path))
        trace = traces.read_trace(self._path)
        traces.name_rows(trace, self._name)
        if not self._last_is_whole:
            traces.drop_last_step(trace)
        self._path.write_text(json.dumps(trace))
        figures = [traces.summarise(trace)]
        if not self._is_alone and self._workers is not None:
            rows = self._workers.exchange("the comparison of profiles", asdict(figures[0]))
            figures = [traces.Figures(**row) for row in rows]
        if self._is_chief:
            tqdm.write(traces.make_table(figures))
            tqdm.write(f"Traces, for https://ui.perfetto.dev: {self._path.parent}")
