"""The hook that writes checkpoints."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from typing_extensions import override

from torchstrategy.base.log import logger
from torchstrategy.checkpoint.manager import CheckpointManager
from torchstrategy.estimator.session_hooks import (
    CheckpointSaverListener,
    SessionRunArgs,
    SessionRunContext,
    SessionRunHook,
    SessionRunValues,
)
from torchstrategy.estimator.timers import SecondOrStepTimer

if TYPE_CHECKING:
    from torchstrategy.estimator.session import Session

__all__ = ["CheckpointSaverHook"]


class CheckpointSaverHook(SessionRunHook):
    """Saves a checkpoint when a training begins, every so many steps or seconds, and at its end.

    An ``Estimator`` makes one as its ``RunConfig`` says, unless the hooks that are given to it hold one. Processes that
    step together save together: at steps that all of them know, or when the chief finds that the seconds have passed.
    Of asynchronous workers the chief alone saves.

    Args:
        checkpoint_dir: folder of the checkpoints.
        save_secs: seconds between two checkpoints.
        save_steps: steps between two checkpoints. Exactly one of the two is given.
        saver: has ``save(step)``, which writes the checkpoint; ``None`` means the training's own if the folder is its
            ``model_dir``, else one that keeps as many checkpoints as the ``RunConfig`` says.
        checkpoint_basename: beginning of the files' names: ``<checkpoint_basename>-<step>.pt``.
        scaffold: must be ``None``.
        listeners: ``CheckpointSaverListener`` objects that are called before and after each checkpoint.

    Raises:
        ValueError: not exactly one of ``save_secs`` and ``save_steps`` is given, or ``scaffold`` is.

    Example:
        >>> import tempfile
        >>> hook = ts.estimator.CheckpointSaverHook(tempfile.gettempdir(), save_steps=1000)
    """

    def __init__(
        self,
        checkpoint_dir: str | os.PathLike[str],
        save_secs: float | None = None,
        save_steps: int | None = None,
        saver: Any = None,
        checkpoint_basename: str = "model.ckpt",
        scaffold: None = None,
        listeners: Sequence[CheckpointSaverListener] | None = None,
    ) -> None:
        if scaffold is not None:
            raise ValueError("CheckpointSaverHook(scaffold=...) must be None: pass saver=... or neither.")
        logger.info("Create CheckpointSaverHook.")
        self._timer = SecondOrStepTimer(save_secs, save_steps)
        self._is_timed = save_secs is not None
        self._dir = os.fspath(checkpoint_dir)
        self._basename = checkpoint_basename
        self._given_saver = saver
        self._saver: Any = None
        self._saves = False
        #: Called before and after each checkpoint, in this order.
        self.listeners: list[CheckpointSaverListener] = list(listeners or [])

    @override
    def begin(self) -> None:
        self._timer.reset()
        for listener in self.listeners:
            listener.begin()

    @override
    def after_create_session(self, session: Session, coord: Session) -> None:
        self._saves = session.is_chief or session.is_synchronous_group
        if not self._saves:
            return
        self._saver = self._make_saver(session) if self._given_saver is None else self._given_saver
        step = session.global_step
        self._save(session, step)
        self._timer.update_last_triggered_step(step)

    @override
    def before_run(self, run_context: SessionRunContext) -> SessionRunArgs | None:
        session = run_context.session
        # Clocks differ: the chief's counts, and the others learn of it by what they exchange in this step.
        if self._is_agreed(session) and session.is_chief and self._is_due(session.global_step + 1):
            session.request_save()
        return None

    @override
    def after_run(self, run_context: SessionRunContext, run_values: SessionRunValues) -> None:
        session = run_context.session
        step = session.global_step
        is_due = session.save_agreed if self._is_agreed(session) else self._is_due(step)
        if self._saves and is_due:
            self._timer.update_last_triggered_step(step)
            if self._save(session, step):
                run_context.request_stop()

    @override
    def end(self, session: Session) -> None:
        if not self._saves:
            return
        step = session.global_step
        if step != self._timer.last_triggered_step():
            self._save(session, step)
        for listener in self.listeners:
            listener.end(session, step)

    def _is_agreed(self, session: Session) -> bool:
        return self._is_timed and session.is_synchronous_group

    def _is_due(self, step: int) -> bool:
        return self._timer.should_trigger_for_step(step)

    def _make_saver(self, session: Session) -> Any:
        is_own = session.model_dir is not None and os.path.realpath(self._dir) == os.path.realpath(session.model_dir)
        if is_own and self._basename == "model.ckpt":
            return session.saver
        return CheckpointManager(
            session.checkpoint,
            self._dir,
            session.config.keep_checkpoint_max or None,
            session.config.keep_checkpoint_every_n_hours,
            checkpoint_name=self._basename,
        )

    def _save(self, session: Session, step: int) -> bool:
        """Save, and say whether a listener wants the training to end."""
        if self.listeners:
            logger.info("Calling checkpoint listeners before saving checkpoint %d...", step)
        for listener in self.listeners:
            listener.before_save(session, step)
        logger.info("Saving checkpoints for %d into %s.", step, os.path.join(self._dir, self._basename))
        self._saver.save(step)
        if self.listeners:
            logger.info("Calling checkpoint listeners after saving checkpoint %d...", step)
        should_stop = False
        for listener in self.listeners:
            if listener.after_save(session, step):
                logger.info("A CheckpointSaverListener requested that training be stopped. listener: %s", listener)
                should_stop = True
        return should_stop
