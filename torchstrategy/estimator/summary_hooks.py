"""Hooks that write for TensorBoard and other viewers: summaries of some steps, and profiles of some.

TensorBoard reads the files of a folder one after another and never goes back, so hooks must share one.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
import weakref
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from typing_extensions import override

from torchstrategy.base.labels import make_profiler
from torchstrategy.base.log import info_once, logger
from torchstrategy.checkpoint.storage import copy_file, real_path
from torchstrategy.estimator.saver_hook import SecondOrStepTimer
from torchstrategy.estimator.session import Session
from torchstrategy.estimator.session_hooks import (
    SessionRunArgs,
    SessionRunContext,
    SessionRunHook,
    SessionRunValues,
    show_value,
)
from torchstrategy.estimator.specs import ModeKeys
from torchstrategy.summary import SummaryWriter, create_file_writer, create_noop_writer, scalar

if TYPE_CHECKING:
    from torchstrategy.estimator.session import Session

__all__ = ["LoggingTensorHook", "ProfilerHook", "StepCounterHook", "SummarySaverHook"]

#: Writers by folder. Their files are closed when the last hook has given them up.
_writers: weakref.WeakValueDictionary[str, SummaryWriter] = weakref.WeakValueDictionary()


def open_writer(folder: str | os.PathLike[str]) -> SummaryWriter:
    """Return the writer for a folder; one that writes nothing if TensorBoard is not installed."""
    path = real_path(os.fspath(folder))
    writer = _writers.get(path)
    if writer is None:
        try:
            writer = create_file_writer(folder)
        except ImportError:
            info_once("No summaries are written, because TensorBoard is not installed.")
            return create_noop_writer()
        _writers[path] = writer
    return writer


class LoggingTensorHook(SessionRunHook):
    """Logs values every so many steps or seconds, or at the end.

    Values are read, which may wait for the device, only where they are logged. Lines of the level ``INFO`` come from
    the chief alone.

    Args:
        tensors: what to log: a dict of fetches by the names to show them under, in whose order they are shown, or a
            list of fetches. See ``SessionRunArgs`` for what can be fetched.
        every_n_iter: steps between two lines. The first step is logged.
        every_n_secs: seconds between two lines.
        at_end: also log at the end. Otherwise exactly one of ``every_n_iter`` and ``every_n_secs`` is needed.
        formatter: gets a dict of the values and returns the line.

    Raises:
        ValueError: none or both of ``every_n_iter`` and ``every_n_secs`` are given, or ``every_n_iter`` is not
            positive.
        TypeError: a fetch is neither a name nor a function.

    Example:
        >>> hook = ts.estimator.LoggingTensorHook({"loss": "loss", "step": "global_step"}, every_n_iter=100)
    """

    def __init__(
        self,
        tensors: Any,
        every_n_iter: int | None = None,
        every_n_secs: float | None = None,
        at_end: bool = False,  # noqa: FBT001, FBT002 - tf's signature
        formatter: Callable[[dict[str, Any]], str] | None = None,
    ) -> None:
        only_at_end = at_end and every_n_iter is None and every_n_secs is None
        if not only_at_end and (every_n_iter is None) == (every_n_secs is None):
            raise ValueError(
                "either at_end and/or exactly one of every_n_iter and every_n_secs must be provided. Received: "
                f"at_end={at_end}, every_n_iter={every_n_iter}, every_n_secs={every_n_secs}"
            )
        if every_n_iter is not None and every_n_iter <= 0:
            raise ValueError(f"invalid every_n_iter={every_n_iter}. It must be positive.")
        self._fetches = name_fetches(tensors)
        self._order = sorted(self._fetches) if isinstance(tensors, Mapping) else list(self._fetches)
        self._timer = None if only_at_end else SecondOrStepTimer(every_n_secs, every_n_iter)
        self._at_end = at_end
        self._formatter = formatter
        self._num_steps = 0
        self._is_due = False

    @override
    def begin(self) -> None:
        self._num_steps = 0
        if self._timer is not None:
            self._timer.reset()

    @override
    def before_run(self, run_context: SessionRunContext) -> SessionRunArgs | None:
        self._is_due = self._timer is not None and self._timer.should_trigger_for_step(self._num_steps)
        return SessionRunArgs(self._fetches) if self._is_due else None

    @override
    def after_run(self, run_context: SessionRunContext, run_values: SessionRunValues) -> None:
        if self._is_due:
            self._log(run_values.results)
        self._num_steps += 1

    @override
    def end(self, session: Session) -> None:
        if self._at_end:
            self._log(session.fetch(self._fetches))

    def _log(self, values: dict[str, Any]) -> None:
        elapsed_s = None if self._timer is None else self._timer.update_last_triggered_step(self._num_steps)[0]
        if self._formatter is not None:
            logger.info(self._formatter(values))
            return
        line = ", ".join(f"{name} = {show_value(values[name])}" for name in self._order)
        logger.info("%s", line if elapsed_s is None else f"{line} ({elapsed_s:.3f} sec)")


class StepCounterHook(SessionRunHook):
    """Logs how many steps are done in a second, and writes it as the summary ``global_step/sec``.

    The chief does; steps are those of the global step, to which all workers of an asynchronous training add.

    Args:
        every_n_steps: steps between two counts.
        every_n_secs: seconds between two counts; give ``every_n_steps=None`` with it.
        output_dir: folder of the summaries; ``None`` writes none unless there is a ``summary_writer``.
        summary_writer: writes the summaries, instead of one for ``output_dir``.

    Raises:
        ValueError: both or none of ``every_n_steps`` and ``every_n_secs`` are given.

    Example:
        >>> hook = ts.estimator.StepCounterHook(every_n_steps=1000)
    """

    def __init__(
        self,
        every_n_steps: int | None = 100,
        every_n_secs: float | None = None,
        output_dir: str | os.PathLike[str] | None = None,
        summary_writer: SummaryWriter | None = None,
    ) -> None:
        if (every_n_steps is None) == (every_n_secs is None):
            raise ValueError(
                "exactly one of every_n_steps and every_n_secs should be provided. Received: "
                f"every_n_steps={every_n_steps}, every_n_secs={every_n_secs}"
            )
        self._timer = SecondOrStepTimer(every_n_secs, every_n_steps)
        self._output_dir = output_dir
        self._given_writer = summary_writer
        self._writer: SummaryWriter | None = None

    @override
    def after_create_session(self, session: Session, coord: Session) -> None:
        self._timer.reset()
        self._writer = self._given_writer
        if self._writer is None and self._output_dir is not None and session.is_chief:
            self._writer = open_writer(self._output_dir)

    @override
    def after_run(self, run_context: SessionRunContext, run_values: SessionRunValues) -> None:
        session = run_context.session
        if not session.is_chief or not self._timer.should_trigger_for_step(step := session.global_step):
            return
        elapsed_s, elapsed_steps = self._timer.update_last_triggered_step(step)
        if elapsed_s is None or elapsed_steps is None:
            return
        rate = elapsed_steps / max(elapsed_s, 1e-9)
        if self._writer is not None:
            with self._writer.as_default(step):
                scalar("global_step/sec", rate)
        logger.info("global_step/sec: %g", rate)

    @override
    def _release(self) -> None:
        self._writer = None


def name_fetches(tensors: Any) -> dict[str, Any]:
    """Return fetches by the names that they are shown under.

    Args:
        tensors: a dict of fetches, a list of fetches, or one; variables and functions that are not in a dict are shown
            under their own names.

    Raises:
        TypeError: a fetch is neither a name nor a function.
    """
    if not isinstance(tensors, Mapping):
        leaves = tensors if isinstance(tensors, (list, tuple)) else [tensors]
        tensors = {_name(leaf): leaf for leaf in leaves}
    return dict(SessionRunArgs(dict(tensors)).fetches)


def _name(leaf: Any) -> str:
    own = getattr(leaf, "name", None) or getattr(leaf, "__name__", None)
    return leaf if isinstance(leaf, str) else str(own or leaf)


class SummarySaverHook(SessionRunHook):
    """Writes summaries of every so many steps, on the chief.

    At these steps it writes scalars that it fetches, and is the default writer while the step runs: what the module or
    the loss writes by ``ts.summary`` goes to the same file, with the number that the global step has after the step.

    Args:
        save_steps: steps between two times; the first step is written.
        save_secs: seconds between two times. Exactly one of the two is given.
        output_dir: folder of the event file.
        summary_writer: writes instead of one for ``output_dir``; one of the two is needed.
        scaffold: must be ``None``; there are no graphs whose summaries it could hold.
        summary_op: scalars to write: a dict of fetches by their tags, a list of names, or one. ``None`` means
            ``"loss"``.

    Raises:
        ValueError: not exactly one of ``save_steps`` and ``save_secs`` is given, there is neither an ``output_dir`` nor
            a ``summary_writer``, or ``scaffold`` is given.
        TypeError: ``summary_op`` holds something else than names and functions.

    Example:
        >>> import tempfile
        >>> hook = ts.estimator.SummarySaverHook(save_steps=100, output_dir=tempfile.gettempdir())
    """

    def __init__(
        self,
        save_steps: int | None = None,
        save_secs: float | None = None,
        output_dir: str | os.PathLike[str] | None = None,
        summary_writer: SummaryWriter | None = None,
        scaffold: None = None,
        summary_op: Any = None,
    ) -> None:
        if scaffold is not None:
            raise ValueError(
                "SummarySaverHook(scaffold=...) is tf's way to a graph's summaries. Name what to write: "
                "summary_op={'loss': 'loss'}, and write the rest by ts.summary in the module or the loss."
            )
        if output_dir is None and summary_writer is None:
            raise ValueError("SummarySaverHook needs an output_dir or a summary_writer.")
        self._timer = SecondOrStepTimer(save_secs, save_steps)
        self._output_dir = output_dir
        self._given_writer = summary_writer
        self._fetches = name_fetches("loss" if summary_op is None else summary_op)
        self._writer: SummaryWriter | None = None
        self._is_due = False
        self._step = 0

    @override
    def after_create_session(self, session: Session, coord: Session) -> None:
        self._timer.reset()
        if not session.is_chief:
            self._writer = None
        elif self._given_writer is not None:
            self._writer = self._given_writer
        elif self._output_dir is not None:
            self._writer = open_writer(self._output_dir)

    @override
    def before_run(self, run_context: SessionRunContext) -> SessionRunArgs | None:
        step = run_context.session.global_step + 1
        self._is_due = self._writer is not None and self._timer.should_trigger_for_step(step)
        if self._writer is None or not self._is_due:
            return None
        self._step = step
        if self._timer.last_triggered_step() is None and run_context.session.mode == ModeKeys.TRAIN:
            self._writer.add_start(step)  # a training that was killed may have written further than it had saved
        return SessionRunArgs(self._fetches)

    @override
    def _around_step(self) -> contextlib.AbstractContextManager[Any]:
        if self._writer is None or not self._is_due:
            return contextlib.nullcontext()
        return self._writer.as_default(self._step)

    @override
    def after_run(self, run_context: SessionRunContext, run_values: SessionRunValues) -> None:
        if not self._is_due or self._writer is None:
            return
        step = run_context.session.global_step
        self._timer.update_last_triggered_step(step)
        with self._writer.as_default(step):
            for tag, value in run_values.results.items():
                scalar(tag, value)

    @override
    def _release(self) -> None:
        self._writer = None


class ProfilerHook(SessionRunHook):
    """Writes profiles of single steps, on the chief, each into a file ``timeline-<step>.json``.

    Chrome's ``chrome://tracing`` and https://ui.perfetto.dev show them.

    Args:
        save_steps: steps between two profiles; the first step, which is unlike all others, is not profiled.
        save_secs: seconds between two profiles. Exactly one of the two is given.
        output_dir: folder of the files; it is made if need be.
        show_dataflow: without meaning here.
        show_memory: also profile what memory is used.

    Raises:
        ValueError: not exactly one of ``save_steps`` and ``save_secs`` is given.

    Example:
        >>> hook = ts.estimator.ProfilerHook(save_steps=1000)
    """

    def __init__(
        self,
        save_steps: int | None = None,
        save_secs: float | None = None,
        output_dir: str | os.PathLike[str] = "",
        show_dataflow: bool = True,  # noqa: ARG002, FBT001, FBT002 - tf's signature
        show_memory: bool = False,  # noqa: FBT001, FBT002
    ) -> None:
        self._timer = SecondOrStepTimer(save_secs, save_steps)
        self._output_dir = os.fspath(output_dir)
        self._shows_memory = show_memory
        self._profile: Any = None

    @override
    def after_create_session(self, session: Session, coord: Session) -> None:
        self._timer.reset()

    @override
    def before_run(self, run_context: SessionRunContext) -> SessionRunArgs | None:
        session = run_context.session
        is_first = self._timer.last_triggered_step() is None
        if not session.is_chief or is_first or not self._timer.should_trigger_for_step(session.global_step + 1):
            return None
        self._profile = make_profiler(profile_memory=self._shows_memory)
        self._profile.start()
        return None

    @override
    def after_run(self, run_context: SessionRunContext, run_values: SessionRunValues) -> None:
        step = run_context.session.global_step
        if self._profile is None:
            if self._timer.last_triggered_step() is None:
                self._timer.update_last_triggered_step(step)
            return
        profile, self._profile = self._profile, None
        profile.stop()
        self._timer.update_last_triggered_step(step)
        path = os.path.join(self._output_dir, f"timeline-{step}.json")
        logger.info("Saving timeline for %d into '%s'.", step, path)
        with tempfile.TemporaryDirectory(prefix="torchstrategy-") as folder:
            made = os.path.join(folder, "timeline.json")
            profile.export_chrome_trace(made)
            copy_file(made, path)

    @override
    def _release(self) -> None:
        if self._profile is not None:
            self._profile.stop()
            self._profile = None
