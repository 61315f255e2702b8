"""Hooks that write for TensorBoard and other viewers: summaries of some steps, and profiles of some."""

from __future__ import annotations

import contextlib
import os
from typing import TYPE_CHECKING, Any

from typing_extensions import override

from torchstrategy.base.labels import make_profiler
from torchstrategy.base.log import logger
from torchstrategy.estimator.logging_hooks import name_fetches, open_writer
from torchstrategy.estimator.session_hooks import SessionRunArgs, SessionRunContext, SessionRunHook, SessionRunValues
from torchstrategy.estimator.timers import SecondOrStepTimer
from torchstrategy.summary import SummaryWriter, scalar

if TYPE_CHECKING:
    from torchstrategy.estimator.session import Session

__all__ = ["ProfilerHook", "SummarySaverHook"]


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
        os.makedirs(self._output_dir or ".", exist_ok=True)
        path = os.path.join(self._output_dir, f"timeline-{step}.json")
        logger.info("Saving timeline for %d into '%s'.", step, path)
        profile.export_chrome_trace(path)

    @override
    def _release(self) -> None:
        if self._profile is not None:
            self._profile.stop()
            self._profile = None
