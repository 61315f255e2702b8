"""Ending a training early, because of what evaluations have found or of anything else.

The chief asks. Processes that step together end together; workers of an asynchronous training look at a variable on the
parameter servers after each of their steps.
"""

from __future__ import annotations

import functools
import math
import operator
import os
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from typing_extensions import override

from torchstrategy.base.log import logger
from torchstrategy.checkpoint.reader import latest_checkpoint
from torchstrategy.estimator.eval_metrics import read_eval_metrics
from torchstrategy.estimator.saver_hook import SecondOrStepTimer
from torchstrategy.estimator.session_hooks import (
    SessionRunContext,
    SessionRunHook,
    SessionRunValues,
    check_estimator,
    is_asynchronous,
)
from torchstrategy.estimator.stopping_hooks import StopAtStepHook
from torchstrategy.replicas.variables import Variable
from torchstrategy.strategies.default import get_strategy

if TYPE_CHECKING:
    from torchstrategy.estimator.estimator import Estimator
    from torchstrategy.estimator.session import Session

__all__ = [
    "make_early_stopping_hook",
    "make_stop_at_checkpoint_step_hook",
    "stop_if_higher_hook",
    "stop_if_lower_hook",
    "stop_if_no_decrease_hook",
    "stop_if_no_increase_hook",
]

_Better = Callable[[float, float], bool]


def make_early_stopping_hook(
    estimator: Estimator,
    should_stop_fn: Callable[[], Any],
    run_every_secs: float | None = 60,
    run_every_steps: int | None = None,
) -> SessionRunHook:
    """Return a hook that ends the training once a function says so.

    The function is called by the chief after the first step and then every so often. Give the hook to
    ``Estimator.train`` or a ``TrainSpec`` on every process.

    Args:
        estimator: whose training it is for.
        should_stop_fn: takes nothing; whether to stop.
        run_every_secs: seconds between two calls.
        run_every_steps: steps between two calls; give ``run_every_secs=None`` with it.

    Returns:
        The hook.

    Raises:
        TypeError: ``estimator`` is no ``Estimator``, or ``should_stop_fn`` is no function.
        ValueError: both or none of ``run_every_secs`` and ``run_every_steps`` are given.

    Example:
        >>> import os, tempfile
        >>> estimator = ts.estimator.LinearRegressor([ts.feature_column.numeric_column("x")])
        >>> stop_file = os.path.join(tempfile.gettempdir(), "please_stop")
        >>> hook = ts.estimator.experimental.make_early_stopping_hook(estimator, lambda: os.path.exists(stop_file))
    """
    check_estimator(estimator)
    if not callable(should_stop_fn):
        raise TypeError(f"`should_stop_fn` must be callable. Received: {should_stop_fn!r}")
    if run_every_secs is not None and run_every_steps is not None:
        raise ValueError(
            "Only one of `run_every_secs` and `run_every_steps` must be set; give run_every_secs=None with "
            f"run_every_steps. Received: {run_every_secs!r} and {run_every_steps!r}"
        )
    return _EarlyStoppingHook(should_stop_fn, run_every_secs, run_every_steps)


def stop_if_higher_hook(
    estimator: Estimator,
    metric_name: str,
    threshold: float,
    eval_dir: str | os.PathLike[str] | None = None,
    min_steps: int = 0,
    run_every_secs: float | None = 60,
    run_every_steps: int | None = None,
) -> SessionRunHook:
    """Return a hook that ends the training once an evaluation's metric is higher than a threshold.

    Args:
        estimator: whose training it is for.
        metric_name: the metric, such as ``"accuracy"``.
        threshold: what it must exceed.
        eval_dir: where evaluations write; ``None`` means ``estimator.eval_dir()``.
        min_steps: evaluations of earlier global steps don't count.
        run_every_secs: seconds between two looks.
        run_every_steps: steps between two looks; give ``run_every_secs=None`` with it.

    Returns:
        The hook.

    Raises:
        TypeError: ``estimator`` is no ``Estimator``.
        ValueError: both or none of ``run_every_secs`` and ``run_every_steps`` are given.
        KeyError: by the training, if an evaluation has no such metric.

    Example:
        >>> estimator = ts.estimator.LinearClassifier([ts.feature_column.numeric_column("x")])
        >>> hook = ts.estimator.experimental.stop_if_higher_hook(estimator, "accuracy", 0.9)
    """
    should_stop = _crosses(estimator, metric_name, threshold, eval_dir, min_steps, operator.gt)
    return make_early_stopping_hook(estimator, should_stop, run_every_secs, run_every_steps)


def stop_if_lower_hook(
    estimator: Estimator,
    metric_name: str,
    threshold: float,
    eval_dir: str | os.PathLike[str] | None = None,
    min_steps: int = 0,
    run_every_secs: float | None = 60,
    run_every_steps: int | None = None,
) -> SessionRunHook:
    """Return a hook that ends the training once an evaluation's metric is lower than a threshold.

    Args:
        estimator: whose training it is for.
        metric_name: the metric, such as ``"loss"``.
        threshold: what it must fall below.
        eval_dir: where evaluations write; ``None`` means ``estimator.eval_dir()``.
        min_steps: evaluations of earlier global steps don't count.
        run_every_secs: seconds between two looks.
        run_every_steps: steps between two looks; give ``run_every_secs=None`` with it.

    Returns:
        The hook.

    Raises:
        TypeError: ``estimator`` is no ``Estimator``.
        ValueError: both or none of ``run_every_secs`` and ``run_every_steps`` are given.
        KeyError: by the training, if an evaluation has no such metric.

    Example:
        >>> estimator = ts.estimator.LinearRegressor([ts.feature_column.numeric_column("x")])
        >>> hook = ts.estimator.experimental.stop_if_lower_hook(estimator, "loss", 0.1, min_steps=100)
    """
    should_stop = _crosses(estimator, metric_name, threshold, eval_dir, min_steps, operator.lt)
    return make_early_stopping_hook(estimator, should_stop, run_every_secs, run_every_steps)


def stop_if_no_increase_hook(
    estimator: Estimator,
    metric_name: str,
    max_steps_without_increase: int,
    eval_dir: str | os.PathLike[str] | None = None,
    min_steps: int = 0,
    run_every_secs: float | None = 60,
    run_every_steps: int | None = None,
) -> SessionRunHook:
    """Return a hook that ends the training once an evaluation's metric has not increased for some steps.

    Args:
        estimator: whose training it is for.
        metric_name: the metric, such as ``"accuracy"``.
        max_steps_without_increase: steps from the best evaluation to a later one after which the training ends.
        eval_dir: where evaluations write; ``None`` means ``estimator.eval_dir()``.
        min_steps: evaluations of earlier global steps don't count.
        run_every_secs: seconds between two looks.
        run_every_steps: steps between two looks; give ``run_every_secs=None`` with it.

    Returns:
        The hook.

    Raises:
        TypeError: ``estimator`` is no ``Estimator``.
        ValueError: both or none of ``run_every_secs`` and ``run_every_steps`` are given.
        KeyError: by the training, if an evaluation has no such metric.

    Example:
        >>> estimator = ts.estimator.LinearClassifier([ts.feature_column.numeric_column("x")])
        >>> hook = ts.estimator.experimental.stop_if_no_increase_hook(estimator, "accuracy", 10_000)
    """
    should_stop = _stagnates(estimator, metric_name, max_steps_without_increase, eval_dir, min_steps, operator.gt)
    return make_early_stopping_hook(estimator, should_stop, run_every_secs, run_every_steps)


def stop_if_no_decrease_hook(
    estimator: Estimator,
    metric_name: str,
    max_steps_without_decrease: int,
    eval_dir: str | os.PathLike[str] | None = None,
    min_steps: int = 0,
    run_every_secs: float | None = 60,
    run_every_steps: int | None = None,
) -> SessionRunHook:
    """Return a hook that ends the training once an evaluation's metric has not decreased for some steps.

    Args:
        estimator: whose training it is for.
        metric_name: the metric, such as ``"loss"``.
        max_steps_without_decrease: steps from the best evaluation to a later one after which the training ends.
        eval_dir: where evaluations write; ``None`` means ``estimator.eval_dir()``.
        min_steps: evaluations of earlier global steps don't count.
        run_every_secs: seconds between two looks.
        run_every_steps: steps between two looks; give ``run_every_secs=None`` with it.

    Returns:
        The hook.

    Raises:
        TypeError: ``estimator`` is no ``Estimator``.
        ValueError: both or none of ``run_every_secs`` and ``run_every_steps`` are given.
        KeyError: by the training, if an evaluation has no such metric.

    Example:
        >>> estimator = ts.estimator.LinearRegressor([ts.feature_column.numeric_column("x")])
        >>> hook = ts.estimator.experimental.stop_if_no_decrease_hook(estimator, "loss", 10_000)
    """
    should_stop = _stagnates(estimator, metric_name, max_steps_without_decrease, eval_dir, min_steps, operator.lt)
    return make_early_stopping_hook(estimator, should_stop, run_every_secs, run_every_steps)


def make_stop_at_checkpoint_step_hook(
    estimator: Estimator, last_step: int, wait_after_file_check_secs: float = 30
) -> SessionRunHook:
    """Return a hook that ends a process's training when a step is reached and, on workers, its checkpoint is written.

    For asynchronous training: a worker that stopped before the chief has saved could not take part any more, if the
    chief were started again at an earlier step.

    Args:
        estimator: whose training it is for.
        last_step: the global step.
        wait_after_file_check_secs: seconds between two looks for the checkpoint.

    Returns:
        The hook; a ``StopAtStepHook`` on the chief.

    Raises:
        TypeError: ``estimator`` is no ``Estimator``.
        ValueError: ``last_step`` is ``None``.

    Example:
        >>> estimator = ts.estimator.LinearRegressor([ts.feature_column.numeric_column("x")])
        >>> hook = ts.estimator.experimental.make_stop_at_checkpoint_step_hook(estimator, last_step=1000)
    """
    check_estimator(estimator)
    if last_step is None:
        raise ValueError("last_step must be specified.")
    if estimator.config.is_chief:
        return StopAtStepHook(last_step=last_step)
    return _StopAtCheckpointStepHook(estimator.model_dir, last_step, wait_after_file_check_secs)


class _EarlyStoppingHook(SessionRunHook):
    def __init__(
        self, should_stop_fn: Callable[[], Any], run_every_secs: float | None, run_every_steps: int | None
    ) -> None:
        self._should_stop_fn = should_stop_fn
        self._timer = SecondOrStepTimer(run_every_secs, run_every_steps)
        self._shared: Variable | None = None

    @override
    def begin(self) -> None:
        self._timer.reset()
        self._shared = None
        if is_asynchronous(get_strategy()):
            self._shared = Variable(0, dtype=torch.int64, trainable=False, name="signal_early_stopping/STOP")

    @override
    def after_create_session(self, session: Session, coord: Session) -> None:
        if self._shared is not None and session.is_chief:
            self._shared.assign(0)  # an earlier training on the same servers may have ended early

    @override
    def after_run(self, run_context: SessionRunContext, run_values: SessionRunValues) -> None:
        session = run_context.session
        if not session.is_chief:
            if self._shared is not None and int(self._shared):
                logger.info("Early stopping requested, suspending run.")
                run_context.request_stop()
            return
        step = session.global_step
        if not self._timer.should_trigger_for_step(step):
            return
        self._timer.update_last_triggered_step(step)
        if self._should_stop_fn():
            logger.info("Requesting early stopping at global step %d", step)
            if self._shared is not None:
                self._shared.assign(1)
            run_context.request_stop()


class _StopAtCheckpointStepHook(SessionRunHook):
    def __init__(self, model_dir: str, last_step: int, wait_s: float) -> None:
        self._model_dir = model_dir
        self._last_step = last_step
        self._wait_s = wait_s

    @override
    def after_run(self, run_context: SessionRunContext, run_values: SessionRunValues) -> None:
        if run_context.session.global_step < self._last_step:
            return
        # Processes that step together must not wait for a file that only all of them can write.
        while is_asynchronous(run_context.session.strategy) and self._saved_step() < self._last_step:
            logger.info("Waiting for the checkpoint of step %d.", self._last_step)
            time.sleep(self._wait_s)
        run_context.request_stop()

    def _saved_step(self) -> int:
        path = latest_checkpoint(self._model_dir)
        number = "" if path is None else path.rsplit("-", 1)[-1]
        return int(number) if number.isdigit() else 0


def _crosses(
    estimator: Estimator, metric_name: str, threshold: float, eval_dir: Any, min_steps: int, is_better: _Better
) -> Callable[[], bool]:
    """Return a function that says whether a metric of an evaluation is beyond a threshold."""

    def should_stop(folder: str | os.PathLike[str]) -> bool:
        word = "higher than" if is_better is operator.gt else "lower than"
        for step, value in _metric_values(folder, metric_name, min_steps):
            if is_better(value, threshold):
                logger.info(
                    'At step %s, metric "%s" has value %s which is %s the configured threshold (%s) for early '
                    "stopping.",
                    step,
                    metric_name,
                    value,
                    word,
                    threshold,
                )
                return True
        return False

    return functools.partial(should_stop, _eval_dir(estimator, eval_dir))


def _stagnates(
    estimator: Estimator, metric_name: str, max_steps: int, eval_dir: Any, min_steps: int, is_better: _Better
) -> Callable[[], bool]:
    """Return a function that says whether a metric has not become better for some steps."""

    def should_stop(folder: str | os.PathLike[str]) -> bool:
        word = "increase" if is_better is operator.gt else "decrease"
        best = best_step = None
        for step, value in _metric_values(folder, metric_name, min_steps):
            was_nan = best is not None and math.isnan(best) and not math.isnan(value)  # any number is better
            if best is None or best_step is None or was_nan or is_better(value, best):
                best, best_step = value, step
            if step - best_step >= max_steps:
                logger.info(
                    'No %s in metric "%s" for %s steps, which is greater than or equal to max steps (%s) configured '
                    "for early stopping.",
                    word,
                    metric_name,
                    step - best_step,
                    max_steps,
                )
                return True
        return False

    return functools.partial(should_stop, _eval_dir(estimator, eval_dir))


def _metric_values(eval_dir: str | os.PathLike[str], metric_name: str, min_steps: int) -> list[tuple[int, float]]:
    """Return a metric's value at each evaluated step from ``min_steps`` on."""
    found = {step: metrics for step, metrics in read_eval_metrics(eval_dir).items() if step >= min_steps}
    for step, metrics in found.items():
        if metric_name not in metrics:
            raise KeyError(
                f"The evaluation at step {step} in {os.fspath(eval_dir)!r} has no metric {metric_name!r}. It has "
                f"{sorted(metrics)}."
            )
    return [(step, metrics[metric_name]) for step, metrics in found.items()]


def _eval_dir(estimator: Estimator, eval_dir: Any) -> str | os.PathLike[str]:
    check_estimator(estimator)
    folder: str | os.PathLike[str] = estimator.eval_dir() if eval_dir is None else eval_dir
    return folder
