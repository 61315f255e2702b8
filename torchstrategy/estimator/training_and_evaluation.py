"""Training and evaluation as one call, which is the same in every task of a cluster."""

from __future__ import annotations

import time
from typing import Any

from torchstrategy.base.log import hides_own_frames, logger, show_info
from torchstrategy.estimator.checkpoint_evaluator import (
    CheckpointEvaluator,
    EndOfTraining,
    EvaluatingListener,
    evaluate_continuously,
)
from torchstrategy.estimator.estimator import Estimator
from torchstrategy.estimator.specs import EvalSpec, TrainSpec
from torchstrategy.estimator.task import TaskType

__all__ = ["train_and_evaluate"]

_MAX_DELAY_S = 60
_DELAY_PER_WORKER_S = 5


@hides_own_frames
def train_and_evaluate(
    estimator: Estimator, train_spec: TrainSpec, eval_spec: EvalSpec
) -> tuple[dict[str, Any] | None, list[Any] | None] | None:
    """Train an estimator and evaluate its checkpoints, in one process or as a task of the cluster in ``TF_CONFIG``.

    In one process, checkpoints are evaluated as they are saved, but not more often than each ``throttle_secs``, and the
    last one always. So does the chief of processes that know no cluster, such as torchrun's, while the others wait.

    In a cluster every task makes the same call and does its part: the chief and the workers train, parameter servers
    hold the variables, and an ``evaluator`` task, which need not be in the cluster's list, evaluates checkpoints until
    the one of ``max_steps``, or until the chief has ended. Without an evaluator nothing is evaluated.

    If one of the tasks that train in step was lost, the others end with an error. Start all of them again, with the
    same call: they go on from the last checkpoint. The evaluator and asynchronous workers can be started again alone.

    Args:
        estimator: the estimator; its ``RunConfig`` has the cluster, the task and the strategy.
        train_spec: how to train; ``max_steps`` counts from the first training in ``model_dir``.
        eval_spec: how to evaluate, and what to export.

    Returns:
        In one process, what the last evaluation returned and a list of what the exporters did; ``(None, None)`` if
        nothing was left to train, and where another process evaluates. ``None`` in a cluster.

    Raises:
        TypeError: an argument has another type.
        ValueError: the task can't take part: it is a second evaluator, a ``master``, or one of several that train while
            no strategy joins them; or ``eval_distribute`` joins processes of which only the chief evaluates.

    Example:
        >>> import tempfile
        >>> folder = tempfile.TemporaryDirectory()
        >>> def model_fn(features, labels, mode):
        ...     module = torch.nn.Linear(1, 1)
        ...     optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        ...     loss = torch.nn.functional.mse_loss
        ...     return ts.estimator.EstimatorSpec(mode, module=module, loss=loss, train_op=optimizer)
        >>> def input_fn():
        ...     return ts.data.Dataset.from_tensors((torch.ones(2, 1), torch.ones(2, 1))).repeat()
        >>> estimator = ts.estimator.Estimator(model_fn, folder.name)
        >>> train_spec = ts.estimator.TrainSpec(input_fn, max_steps=5)
        >>> metrics, exports = ts.estimator.train_and_evaluate(
        ...     estimator, train_spec, ts.estimator.EvalSpec(input_fn, steps=1)
        ... )
        >>> metrics["global_step"]
        5
        >>> folder.cleanup()
    """
    if not isinstance(eval_spec, EvalSpec):
        raise TypeError(f"`eval_spec` must have type `ts.estimator.EvalSpec`. Received: {eval_spec!r}")
    if not isinstance(estimator, Estimator):
        raise TypeError(f"`estimator` must have type `ts.estimator.Estimator`. Received: {estimator!r}")
    if not isinstance(train_spec, TrainSpec):
        raise TypeError(f"`train_spec` must have type `ts.estimator.TrainSpec`. Received: {train_spec!r}")
    show_info()
    config = estimator.config
    evaluator = CheckpointEvaluator(estimator, eval_spec, train_spec.max_steps)
    if config.task_type == TaskType.EVALUATOR:
        if config.task_id > 0:
            raise ValueError(
                "There can be only one `evaluator` task, with the index 0: all evaluate the same checkpoints. This "
                f"task's index: {config.task_id}"
            )
        evaluate_continuously(evaluator, eval_spec, EndOfTraining(estimator.model_dir))
        return None
    if not config.cluster_spec:
        return _train_locally(estimator, train_spec, eval_spec, evaluator)
    if config.task_type == TaskType.PS:
        _serve(config)
        return None
    _check_tasks_meet(config)
    _train_in_cluster(estimator, train_spec)
    return None


def _train_locally(
    estimator: Estimator, train_spec: TrainSpec, eval_spec: EvalSpec, evaluator: CheckpointEvaluator
) -> tuple[dict[str, Any] | None, list[Any] | None]:
    config = estimator.config
    if config.eval_distribute is not None and config.eval_distribute.workers is not None:
        raise ValueError(
            "RunConfig(eval_distribute=) joins several processes. Without a cluster in TF_CONFIG the chief evaluates "
            "alone while the others wait. Leave it out, give it a strategy for one process, or call "
            "Estimator.train and Estimator.evaluate in turn in all processes. Received: a "
            f"{type(config.eval_distribute).__name__}"
        )
    where = (
        "Running training on several processes, of which the chief evaluates while the others wait."
        if _is_synchronous(config)
        else "Running training and evaluation locally (non-distributed)."
    )
    logger.info(
        "%s The evaluate will happen after every checkpoint. Checkpoint frequency is determined based on RunConfig "
        "arguments: save_checkpoints_steps %s or save_checkpoints_secs %s.",
        where,
        config.save_checkpoints_steps,
        config.save_checkpoints_secs,
    )
    listener = EvaluatingListener(evaluator, eval_spec.throttle_secs)
    estimator.train(
        train_spec.input_fn,
        hooks=train_spec.hooks,
        max_steps=train_spec.max_steps,
        saving_listeners=(*train_spec.saving_listeners, listener),
    )
    metrics, exports = listener.last
    return metrics, exports  # a plain tuple, as tf returns


def _train_in_cluster(estimator: Estimator, train_spec: TrainSpec) -> None:
    config = estimator.config
    end = EndOfTraining(estimator.model_dir)
    if config.is_chief:
        if TaskType.EVALUATOR not in config.cluster_spec.jobs:
            logger.info(
                "The cluster names no evaluator: checkpoints are evaluated only if a task of the type 'evaluator' is "
                "started beside it."
            )
        end.clear()
    _delay_start(config)
    estimator.train(
        train_spec.input_fn,
        hooks=train_spec.hooks,
        max_steps=train_spec.max_steps,
        saving_listeners=train_spec.saving_listeners,
    )
    if config.is_chief:
        end.declare(estimator.latest_checkpoint())


def _delay_start(config: Any) -> None:
    """Let the workers of an asynchronous training begin one after another, as in tf."""
    if config.task_type != TaskType.WORKER or config.is_chief or _is_synchronous(config):
        return
    limit = config.experimental_max_worker_delay_secs
    delay_s = min(_MAX_DELAY_S if limit is None else limit, (config.task_id + 1) * _DELAY_PER_WORKER_S)
    if delay_s > 0:
        logger.info("Waiting %d secs before starting training.", delay_s)
        time.sleep(delay_s)


def _check_tasks_meet(config: Any) -> None:
    """Refuse a cluster whose tasks would each train a model of their own in one directory, and a master."""
    if config.task_type == TaskType.MASTER:
        raise ValueError(
            "A cluster with a `master`, which trains and evaluates in turn, is not supported. Call the job `chief`, "
            "and start a task of the type `evaluator` beside it."
        )
    if config.num_worker_replicas == 1 or config.num_ps_replicas > 0 or _is_synchronous(config):
        return
    strategy = config.train_distribute
    raise ValueError(
        f"The cluster has {config.num_worker_replicas} tasks that train, and RunConfig(train_distribute=) is "
        f"{'None' if strategy is None else f'a {type(strategy).__name__}, which is for one process'}: each would train "
        "a model of its own, and all would save it in the same model_dir. Pass train_distribute="
        "ts.MultiWorkerMirroredStrategy(), or add a `ps` job to the cluster. Received: "
        f"{config.cluster_spec}"
    )


def _is_synchronous(config: Any) -> bool:
    strategy = config.train_distribute
    return strategy is not None and strategy.workers is not None


def _serve(config: Any) -> None:
    """Hold variables until the chief has ended."""
    from torchstrategy.ps.server import serve_until_chief_ends  # noqa: PLC0415 - pyzmq, which is an extra

    serve_until_chief_ends(config.cluster_spec, config.task_id)
