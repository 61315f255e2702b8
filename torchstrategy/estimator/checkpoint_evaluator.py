"""Evaluating checkpoints: after each one, in an evaluator task, or by a hook between two steps."""

from __future__ import annotations

import json
import os
import tempfile
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from typing_extensions import override

from torchstrategy.base.log import logger
from torchstrategy.checkpoint.archive import SUFFIX
from torchstrategy.checkpoint.storage import delete_file, is_file, open_file, write_file
from torchstrategy.errors import DataLossError
from torchstrategy.estimator.estimator import Estimator
from torchstrategy.estimator.saver_hook import SecondOrStepTimer
from torchstrategy.estimator.session_hooks import (
    CheckpointSaverListener,
    SessionRunContext,
    SessionRunHook,
    SessionRunValues,
    check_estimator,
)
from torchstrategy.estimator.specs import EvalSpec

if TYPE_CHECKING:
    from torchstrategy.estimator.estimator import Estimator
    from torchstrategy.estimator.session import Session

__all__ = [
    "CheckpointEvaluator",
    "EndOfTraining",
    "EvaluatingListener",
    "Evaluation",
    "InMemoryEvaluatorHook",
    "evaluate_continuously",
]


class InMemoryEvaluatorHook(SessionRunHook):
    """Evaluates during a training: when it begins, every so many steps, and at its end.

    It needs no checkpoint of the training: the weights of the moment are handed over in a temporary file. Results go
    where ``Estimator.evaluate`` writes them. For trainings in one process; ``train_and_evaluate`` evaluates for others.

    Args:
        estimator: the one that is trained.
        input_fn: data to evaluate with, as for ``Estimator.evaluate``.
        steps: steps of an evaluation; ``None`` takes all data.
        hooks: hooks of the evaluations.
        name: of the data set, if there are several: results go to ``model_dir/eval_<name>``.
        every_n_iter: steps between two evaluations.

    Raises:
        TypeError: ``estimator`` is no ``Estimator``.
        ValueError: ``every_n_iter`` is not positive, or the estimator's cluster has several processes.

    Example:
        >>> estimator = ts.estimator.LinearRegressor([ts.feature_column.numeric_column("x")])
        >>> evaluation_data = lambda: ({"x": torch.tensor([[1.0]])}, torch.tensor([[2.0]]))
        >>> hook = ts.estimator.experimental.InMemoryEvaluatorHook(estimator, evaluation_data, steps=1)
    """

    def __init__(
        self,
        estimator: Estimator,
        input_fn: Callable[..., Any],
        steps: int | None = None,
        hooks: Sequence[SessionRunHook] | None = None,
        name: str | None = None,
        every_n_iter: int = 100,
    ) -> None:
        check_estimator(estimator)
        if every_n_iter is None or every_n_iter <= 0:
            raise ValueError(f"invalid every_n_iter={every_n_iter}. It must be positive.")
        if estimator.config.num_ps_replicas > 0 or estimator.config.num_worker_replicas > 1:
            raise ValueError(
                "InMemoryEvaluatorHook is for trainings in one process. In a cluster, let an evaluator task evaluate: "
                "ts.estimator.train_and_evaluate."
            )
        self._estimator = estimator
        self._input_fn = input_fn
        self._steps = steps
        self._hooks = hooks
        self._name = name
        self._timer = SecondOrStepTimer(every_steps=every_n_iter)
        self._num_steps = 0

    @override
    def begin(self) -> None:
        self._timer.reset()
        self._num_steps = 0

    @override
    def after_create_session(self, session: Session, coord: Session) -> None:
        self._evaluate(session)

    @override
    def after_run(self, run_context: SessionRunContext, run_values: SessionRunValues) -> None:
        self._num_steps += 1
        if self._timer.should_trigger_for_step(self._num_steps):
            self._evaluate(run_context.session)

    @override
    def end(self, session: Session) -> None:
        self._evaluate(session)

    def _evaluate(self, session: Session) -> None:
        with tempfile.TemporaryDirectory() as folder:
            path = session.checkpoint.write(os.path.join(folder, f"model.ckpt-{session.global_step}"))
            self._estimator.evaluate(self._input_fn, self._steps, self._hooks, path, self._name)
        self._timer.update_last_triggered_step(self._num_steps)


_WARNING_INTERVAL_S = 600.0
_POLL_S = 0.5
_FINISHED = "training_finished.json"
_GRACE_S = 300.0


class Evaluation(NamedTuple):
    """What came of an evaluation.

    Args:
        metrics: what ``evaluate`` returned; ``None`` if there was no checkpoint that was not evaluated before.
        exports: what the exporters returned.
    """

    metrics: dict[str, Any] | None = None
    exports: list[Any] | None = None


class CheckpointEvaluator:
    """Evaluates an estimator's latest checkpoint, and calls the exporters.

    Args:
        estimator: the estimator.
        eval_spec: how it is evaluated.
        max_steps: the global step at which training ends; ``None`` if only the data ends it.
    """

    def __init__(self, estimator: Estimator, eval_spec: EvalSpec, max_steps: int | None) -> None:
        self._estimator = estimator
        self._spec = eval_spec
        self.max_steps = max_steps
        self._evaluated: str | None = None
        self._warned_at: float | None = None

    def evaluate(self) -> Evaluation:
        """Evaluate the latest checkpoint, unless that was done already, and export."""
        path = self._estimator.latest_checkpoint()
        if path is None:
            self._warn("Estimator is not trained yet. Will start an evaluation when a checkpoint is ready.")
            return Evaluation()
        if path == self._evaluated:
            self._warn("No new checkpoint ready for evaluation. Skip the current evaluation pass.")
            return Evaluation()
        spec = self._spec
        try:
            metrics = self._estimator.evaluate(
                spec.input_fn, steps=spec.steps, hooks=spec.hooks, checkpoint_path=path, name=spec.name
            )
        except (FileNotFoundError, DataLossError) as error:
            if is_file(path + SUFFIX):
                raise
            logger.info("The checkpoint %s was deleted before it was evaluated: %s", path, error)
            return Evaluation()
        exports = self._export(metrics, path)
        self._warned_at = None
        self._evaluated = path
        return Evaluation(metrics, exports)

    def is_last(self, evaluation: Evaluation) -> bool:
        """Say whether an evaluation was that of the training's last step."""
        if not self.max_steps or evaluation.metrics is None:
            return False
        return bool(evaluation.metrics["global_step"] >= self.max_steps)

    def _export(self, metrics: dict[str, Any], path: str) -> list[Any]:
        directory = os.path.join(self._estimator.model_dir, "export")
        exports: list[Any] = []
        for exporter in self._spec.exporters:
            try:
                exported = exporter.export(
                    estimator=self._estimator,
                    export_path=os.path.join(directory, exporter.name),
                    checkpoint_path=path,
                    eval_result=metrics,
                    is_the_final_export=self.is_last(Evaluation(metrics)),
                )
            except (FileNotFoundError, DataLossError) as error:
                if is_file(path + SUFFIX):
                    raise
                logger.warning("The checkpoint %s was deleted before %r exported it: %s", path, exporter.name, error)
                exported = None
            exports.append(exported)
        return exports

    def _warn(self, message: str) -> None:
        """Say why nothing is evaluated, from time to time."""
        now = time.monotonic()
        if self._warned_at is None or now - self._warned_at > _WARNING_INTERVAL_S:
            logger.warning(message)
            self._warned_at = now


class EvaluatingListener(CheckpointSaverListener):
    """Evaluates checkpoints in the process that writes them: not the one that training begins with, but the last one.

    Args:
        evaluator: evaluates the latest checkpoint.
        throttle_secs: the shortest time between two evaluations, in seconds.
    """

    def __init__(self, evaluator: CheckpointEvaluator, throttle_secs: float) -> None:
        self._evaluator = evaluator
        self._throttle_s = throttle_secs
        #: What came of the last evaluation.
        self.last = Evaluation()

    @override
    def begin(self) -> None:
        self._timer = SecondOrStepTimer(every_secs=self._throttle_s)
        self._is_first = True

    @override
    def after_save(self, session: Any, global_step_value: int) -> None:
        if self._is_first:  # nothing is trained yet
            self._is_first = False
        elif self._timer.should_trigger_for_step(global_step_value):
            self._evaluate(global_step_value)
        else:
            logger.info("Skip the current checkpoint eval due to throttle secs (%s secs).", self._throttle_s)

    @override
    def end(self, session: Any, global_step_value: int) -> None:
        if global_step_value != self._timer.last_triggered_step():
            self._evaluate(global_step_value)

    def _evaluate(self, step: int) -> None:
        self._timer.update_last_triggered_step(step)
        evaluation = self._evaluator.evaluate()
        if evaluation.metrics is not None:  # else training began where it ends: the checkpoint is evaluated already
            self.last = evaluation


class EndOfTraining:
    """What tells an evaluator task that no further checkpoint will come: a file in ``model_dir``.

    Training can end before ``max_steps``, where the data ends or a hook stops it.

    Args:
        model_dir: the estimator's directory.
    """

    def __init__(self, model_dir: str) -> None:
        self._path = os.path.join(model_dir, _FINISHED)
        self._before = self._read()
        self._made_at = time.monotonic()

    def clear(self) -> None:
        """Say that training goes on. For the chief."""
        if is_file(self._path):
            delete_file(self._path)

    def declare(self, checkpoint: str | None) -> None:
        """Say that training has ended. For the chief.

        Args:
            checkpoint: the last one.
        """
        content = {"checkpoint": checkpoint and os.path.basename(checkpoint), "time": time.time()}
        write_file(self._path, lambda file: file.write(json.dumps(content).encode()))

    def is_declared(self) -> bool:
        """Say whether training has ended.

        A file that was there from the beginning may be of an earlier training. It counts after five minutes, in which
        the chief of another one would have cleared it.
        """
        content = self._read()
        return content is not None and (content != self._before or time.monotonic() - self._made_at > _GRACE_S)

    def _read(self) -> bytes | None:
        try:
            with open_file(self._path) as file:
                return file.read()
        except FileNotFoundError:
            return None


def evaluate_continuously(evaluator: CheckpointEvaluator, eval_spec: EvalSpec, end: EndOfTraining) -> None:
    """Evaluate checkpoints as they come, until that of the last step, or the last one of a training that has ended.

    Args:
        evaluator: evaluates the latest checkpoint.
        eval_spec: says how long to wait before the first evaluation, and between the starts of two.
        end: tells whether training has ended.
    """
    if eval_spec.start_delay_secs:
        logger.info("Waiting %f secs before starting eval.", eval_spec.start_delay_secs)
        _sleep(eval_spec.start_delay_secs, end.is_declared)
    while True:
        started = time.monotonic()
        has_ended = end.is_declared()  # before looking for what was saved before that was said
        evaluation = evaluator.evaluate()
        if evaluator.is_last(evaluation):
            step = evaluation.metrics and evaluation.metrics["global_step"]
            logger.info("Exiting evaluation, global_step=%s >= train max_steps=%s", step, evaluator.max_steps)
            return
        if has_ended and evaluation.metrics is None:
            logger.info("Exiting evaluation: training has ended, and its last checkpoint is evaluated.")
            return
        if has_ended:
            continue
        remaining = eval_spec.throttle_secs - (time.monotonic() - started)
        if remaining > 0:
            logger.info("Waiting %f secs before starting next eval run.", remaining)
        _sleep(max(remaining, _POLL_S if evaluation.metrics is None else 0.0), end.is_declared)


def _sleep(seconds: float, is_over: Callable[[], bool]) -> None:
    """Sleep, or until something is over."""
    deadline = time.monotonic() + seconds
    while (remaining := deadline - time.monotonic()) > 0 and not is_over():
        time.sleep(min(_POLL_S, remaining))
