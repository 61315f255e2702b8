"""Hooks that end a loop or wait: at a step, at a loss that is no number, until other workers have begun."""

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING, Any

from typing_extensions import override

from torchstrategy.base.log import logger
from torchstrategy.checkpoint.preemption import AgreedStop, PreemptionWatcher, TerminationConfig
from torchstrategy.estimator.session_hooks import (
    SessionRunArgs,
    SessionRunContext,
    SessionRunHook,
    SessionRunValues,
    check_steps,
)

if TYPE_CHECKING:
    from torchstrategy.estimator.session import Session

__all__ = ["FinalOpsHook", "GlobalStepWaiterHook", "NanLossDuringTrainingError", "NanTensorHook", "StopAtStepHook"]

_WAIT_S = 0.5
_STEPS_BETWEEN_LINES = 1000


class StopAtStepHook(SessionRunHook):
    """Ends a training at a step.

    Args:
        num_steps: how many steps to make from where the training begins.
        last_step: the global step after which to end. Exactly one of the two is given.

    Raises:
        ValueError: both or none are given, or the number is not whole.

    Example:
        >>> hook = ts.estimator.StopAtStepHook(last_step=1000)
    """

    def __init__(self, num_steps: int | None = None, last_step: int | None = None) -> None:
        if num_steps is None and last_step is None:
            raise ValueError("One of num_steps or last_step must be specified.")
        if num_steps is not None and last_step is not None:
            raise ValueError(
                f"Only one of num_steps or last_step can be specified. Received: {num_steps!r} and {last_step!r}"
            )
        check_steps(num_steps=num_steps, last_step=last_step)
        self._num_steps = num_steps
        self._last_step = last_step

    @override
    def after_create_session(self, session: Session, coord: Session) -> None:
        if self._num_steps is not None:  # also in each further training that gets this hook
            self._last_step = session.global_step + self._num_steps

    @override
    def after_run(self, run_context: SessionRunContext, run_values: SessionRunValues) -> None:
        if self._last_step is not None and run_context.session.global_step >= self._last_step:
            run_context.request_stop()


class NanLossDuringTrainingError(RuntimeError):
    """The loss is no number any more.

    Example:
        >>> raise ts.estimator.NanLossDuringTrainingError
        Traceback (most recent call last):
        torchstrategy.estimator.stopping_hooks.NanLossDuringTrainingError: NaN loss during training.
    """

    def __init__(self, message: str = "NaN loss during training.") -> None:
        super().__init__(message)


class NanTensorHook(SessionRunHook):
    """Watches a loss, and ends the training when it is no number any more.

    Args:
        loss_tensor: what to watch, as a fetch: ``"loss"``, another name, or a function of the session.
        fail_on_nan_loss: raise; ``False`` ends the training quietly.

    Raises:
        NanLossDuringTrainingError: by the training, if the loss is no number and ``fail_on_nan_loss`` holds.

    Example:
        >>> hook = ts.estimator.NanTensorHook("loss", fail_on_nan_loss=False)
    """

    def __init__(self, loss_tensor: Any = "loss", fail_on_nan_loss: bool = True) -> None:  # noqa: FBT001, FBT002 - tf's
        self._loss = loss_tensor
        self._fails = fail_on_nan_loss

    @override
    def before_run(self, run_context: SessionRunContext) -> SessionRunArgs:
        return SessionRunArgs(self._loss)

    @override
    def after_run(self, run_context: SessionRunContext, run_values: SessionRunValues) -> None:
        if not math.isnan(float(run_values.results)):
            return
        message = "Model diverged with loss = NaN."
        if self._fails:
            logger.error(message)
            raise NanLossDuringTrainingError
        logger.warning(message)
        run_context.request_stop()


class FinalOpsHook(SessionRunHook):
    """Keeps what some fetches give at the end of a loop.

    Args:
        final_ops: the fetches, see ``SessionRunArgs``.
        final_ops_feed_dict: must be ``None``.

    Raises:
        ValueError: ``final_ops_feed_dict`` is given.
        TypeError: ``final_ops`` holds something else than names and functions.

    Example:
        >>> hook = ts.estimator.FinalOpsHook({"step": "global_step"})
        >>> hook.final_ops_values is None  # until a training has ended
        True
    """

    def __init__(self, final_ops: Any, final_ops_feed_dict: None = None) -> None:
        self._fetches = SessionRunArgs(final_ops, final_ops_feed_dict).fetches
        self._values: Any = None

    @property
    def final_ops_values(self) -> Any:
        """The values, in the structure of the fetches; ``None`` before the end."""
        return self._values

    @override
    def end(self, session: Session) -> None:
        self._values = session.fetch(self._fetches)


class GlobalStepWaiterHook(SessionRunHook):
    """Lets a worker of an asynchronous training begin only once the others have made some steps together.

    Args:
        wait_until_step: the shared global step to wait for; 0 does not wait.

    Raises:
        ValueError: by the training, if its processes step together: then there is nobody to wait for.

    Example:
        >>> hook = ts.estimator.GlobalStepWaiterHook(wait_until_step=100)
    """

    def __init__(self, wait_until_step: int) -> None:
        self._wait_until_step = wait_until_step
        self._is_done = wait_until_step <= 0

    @override
    def after_create_session(self, session: Session, coord: Session) -> None:
        self._is_done = self._wait_until_step <= 0
        if session.is_synchronous_group and not self._is_done:
            raise ValueError(
                "GlobalStepWaiterHook is for workers that train asynchronously with parameter servers; those of "
                f"{type(session.strategy).__name__} make each step together, so waiting would never end. Remove it."
            )

    @override
    def before_run(self, run_context: SessionRunContext) -> SessionRunArgs | None:
        if self._is_done:
            return None
        self._is_done = True
        logger.info("Waiting for global step %d before starting training.", self._wait_until_step)
        last_logged = 0
        # the variable, which the others change, not what this process's last step left
        while (step := int(run_context.session.checkpoint.global_step)) < self._wait_until_step:
            if run_context.session.should_stop():
                return None
            if step - last_logged > _STEPS_BETWEEN_LINES:
                logger.info(
                    "Waiting for global step %d before starting training. Current step is %d.",
                    self._wait_until_step,
                    step,
                )
                last_logged = step
            time.sleep(_WAIT_S)
        logger.info("Done waiting.")
        return None


class PreemptionHook(SessionRunHook):
    """Saves and ends the program when a process of the job is told that it will be ended; not a part of tf.

    Processes that train together agree on a step, at which all save. Of asynchronous workers each ends by itself, and
    the chief saves. The next start goes on from there.

    Args:
        termination_config: what is a notice, and what follows.

    Raises:
        RuntimeError: by the training, outside the main thread.

    Example:
        >>> hook = ts.estimator.PreemptionHook(ts.experimental.TerminationConfig(deadline=100))
    """

    def __init__(self, termination_config: TerminationConfig | None = None) -> None:
        self._config = termination_config
        self._stop: AgreedStop | None = None

    @override
    def after_create_session(self, session: Session, coord: Session) -> None:
        watcher = PreemptionWatcher(self._config)
        checkpoint = session.checkpoint if self._saves(session) else None
        self._stop = AgreedStop(lambda value, what: session._exchange(what, value), watcher, checkpoint)
        self._end_if_due(session, at_once=True)

    @override
    def after_run(self, run_context: SessionRunContext, run_values: SessionRunValues) -> None:
        self._end_if_due(run_context.session, at_once=False)

    @override
    def end(self, session: Session) -> None:
        self._end_if_due(session, at_once=True)

    def _end_if_due(self, session: Session, *, at_once: bool) -> None:
        if self._stop is None or not self._stop.is_due(at_once=at_once):
            return

        def save() -> None:
            if self._saves(session):
                session.saver.save(session.global_step)

        self._stop.save_and_end(save, f"global step {session.global_step} in {session.model_dir}")

    def _saves(self, session: Session) -> bool:
        return session.saver is not None and (session.is_chief or session.is_synchronous_group)

    @override
    def _release(self) -> None:
        stop, self._stop = self._stop, None
        if stop is not None:
            stop.watcher.close(resend=True)
