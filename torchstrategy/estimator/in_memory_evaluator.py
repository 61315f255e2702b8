"""Evaluation in the middle of a training, with the weights of the moment."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from typing_extensions import override

from torchstrategy.estimator.session_hooks import SessionRunContext, SessionRunHook, SessionRunValues, check_estimator
from torchstrategy.estimator.timers import SecondOrStepTimer

if TYPE_CHECKING:
    from torchstrategy.estimator.estimator import Estimator
    from torchstrategy.estimator.session import Session

__all__ = ["InMemoryEvaluatorHook"]


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
