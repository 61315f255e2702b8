"""Hooks that write checkpoints, with the position in the data if one asks for it, and when it is time to.

tf keeps it in files beside the checkpoints. Here it is part of them, so that a training that was killed at any moment
finds a model and a position that belong together.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from typing_extensions import override

from torchstrategy.base.log import logger
from torchstrategy.checkpoint.manager import CheckpointManager
from torchstrategy.checkpoint.storage import real_path
from torchstrategy.estimator.session import Session
from torchstrategy.estimator.session_hooks import (
    CheckpointSaverListener,
    SessionRunArgs,
    SessionRunContext,
    SessionRunHook,
    SessionRunValues,
    check_estimator,
    is_asynchronous,
)
from torchstrategy.estimator.specs import ModeKeys

if TYPE_CHECKING:
    from torchstrategy.estimator.session import Session

__all__ = ["CheckpointInputPipelineHook", "CheckpointSaverHook", "SecondOrStepTimer"]


class CheckpointInputPipelineHook(SessionRunHook):
    """Lets a training that goes on from a checkpoint go on with the data after it, instead of from the data's start.

    Without this hook ``input_fn`` starts anew with each call of ``train``, as in tf. With it a training that was killed
    and started again sees the batches that an unbroken one would have seen; a training that had come to the end of its
    data begins anew. Give it to every process, and to every call of ``train`` that shall go on.

    The number of workers may change in between. A dataset with ``state_dict`` and ``load_state_dict`` resumes where it
    was; of any other the batches are read again up to the position, so their order must be the same: let the data
    shuffle by torch's default generator, by a ``torch.Generator`` that is its attribute, or by ``ts.data.Dataset``.

    Args:
        estimator: whose training it is for.
        external_state_policy: must be ``None``; what the position can't hold is warned of.

    Raises:
        TypeError: ``estimator`` is no ``Estimator``.
        ValueError: ``external_state_policy`` is given; or, by the training, its workers are asynchronous.

    Example:
        >>> estimator = ts.estimator.LinearRegressor([ts.feature_column.numeric_column("x")])
        >>> hook = ts.estimator.CheckpointInputPipelineHook(estimator)
    """

    def __init__(self, estimator: Any, external_state_policy: None = None) -> None:
        check_estimator(estimator)
        if external_state_policy is not None:
            raise ValueError(f"external_state_policy must be None. Received: {external_state_policy!r}")

    @override
    def after_create_session(self, session: Session, coord: Session) -> None:
        if session.mode != ModeKeys.TRAIN:
            return
        if is_asynchronous(session.strategy):
            raise ValueError(
                "CheckpointInputPipelineHook can't be used with asynchronous workers: they are at different batches "
                "when the chief saves a checkpoint. Remove the hook, or train by ts.MultiWorkerMirroredStrategy."
            )
        session.checkpoint.input_pipeline = session.dataset  # gets the values that were restored for this name
        if session.global_step > 0 and not session.dataset.is_restored:
            logger.warning(
                "The checkpoint of step %d holds no position in the data: it was saved without "
                "CheckpointInputPipelineHook. The data starts anew.",
                session.global_step,
            )


class SecondOrStepTimer:
    """Says when something is due: every so many seconds or every so many steps.

    Args:
        every_secs: seconds between two times.
        every_steps: steps between two times. Exactly one of the two is given.

    Raises:
        ValueError: both or none are given, or what is given is negative or no number.

    Example:
        >>> timer = ts.estimator.SecondOrStepTimer(every_steps=2)
        >>> timer.should_trigger_for_step(5)  # the first time
        True
        >>> timer.update_last_triggered_step(5)
        (None, None)
        >>> timer.should_trigger_for_step(6), timer.should_trigger_for_step(7)
        (False, True)
    """

    def __init__(self, every_secs: float | None = None, every_steps: int | None = None) -> None:
        if every_secs is None and every_steps is None:
            raise ValueError("Either every_secs or every_steps should be provided.")
        if every_secs is not None and every_steps is not None:
            raise ValueError(
                f"Can not provide both every_secs and every_steps. Received: {every_secs!r} and {every_steps!r}"
            )
        for name, every in (("every_secs", every_secs), ("every_steps", every_steps)):
            if every is not None and not (isinstance(every, (int, float, np.number)) and every >= 0):  # nor NaN
                raise ValueError(f"{name} must be a number that is not negative. Received: {every!r}")
        self._every_s = every_secs
        self._every_steps = every_steps
        self.reset()

    def reset(self) -> None:
        """Forget the last time, so that the next step is due."""
        self._last_step: int | None = None
        self._last_s = 0.0

    def should_trigger_for_step(self, step: int) -> bool:
        """Say whether it is due.

        Args:
            step: the step that is asked for.

        Returns:
            ``True`` at the first step, never twice for one step.
        """
        if self._last_step is None:
            return True
        if step == self._last_step:
            return False
        if self._every_s is not None:
            return time.monotonic() >= self._last_s + self._every_s
        return step >= self._last_step + (self._every_steps or 0)

    def update_last_triggered_step(self, step: int) -> tuple[float, int] | tuple[None, None]:
        """Note that it was done now.

        Args:
            step: the step at which it was.

        Returns:
            Seconds and steps since the last time; two ``None`` at the first.
        """
        now = time.monotonic()
        last_step, last_s = self._last_step, self._last_s
        self._last_step, self._last_s = step, now
        return (None, None) if last_step is None else (now - last_s, step - last_step)

    def last_triggered_step(self) -> int | None:
        """Return the step of the last time, or ``None``."""
        return self._last_step


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
        is_own = session.model_dir is not None and real_path(self._dir) == real_path(session.model_dir)
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
