"""``Estimator.evaluate``, where every batch counts once and the loss is the mean over batches, and ``predict``."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from typing_extensions import override

from torchstrategy.base import tree
from torchstrategy.base.context import reporting_failures
from torchstrategy.base.log import add_note, logger
from torchstrategy.base.values import get_shares
from torchstrategy.checkpoint.reader import latest_checkpoint
from torchstrategy.cluster_resolver.detect import training_nothing
from torchstrategy.estimator.building import Built, Definition, build, plain_strategy, restore, seeded
from torchstrategy.estimator.eval_metrics import write_eval_metrics
from torchstrategy.estimator.session import Session, StepResult, compute_loss, detached, is_first_here, mean, total
from torchstrategy.estimator.session_hooks import SessionRunContext, SessionRunHook, SessionRunValues
from torchstrategy.estimator.session_loop import open_batches, run_steps
from torchstrategy.estimator.specs import ModeKeys
from torchstrategy.estimator.warm_start import as_array
from torchstrategy.losses.loss import replica_means
from torchstrategy.ps.between_graph import BetweenGraphParameterServerStrategy
from torchstrategy.strategies.default import get_replica_context
from torchstrategy.strategies.strategy import Strategy

__all__ = ["EvaluationStepsHook", "evaluate_model", "predict_with_model"]


def predict_with_model(
    definition: Definition,
    input_fn: Callable[..., Any],
    checkpoint_path: str | None,
    hooks: Sequence[SessionRunHook],
    predict_keys: Any,
    *,
    yield_single_examples: bool,
) -> Iterator[Any]:
    """Yield predictions as NumPy arrays."""
    with training_nothing():
        strategy = plain_strategy()
    # A generator's caller has its own random numbers meanwhile.
    with seeded(definition.config.tf_random_seed, strategy):
        batches = open_batches(input_fn, definition, strategy, ModeKeys.PREDICT, is_distributed=False)
        example = batches.example()
        path = checkpoint_path or find_checkpoint(strategy, definition.model_dir, "predict")
        if example is None:
            return
        built = build(definition, strategy, (example[0], None), ModeKeys.PREDICT)
    session = Session(built, definition, batches)
    predicted: list[Any] = []
    all_hooks = [*hooks, *built.spec.prediction_hooks]
    step = _make_step(built, predict_keys, predicted)
    for _ in run_steps(session, batches, all_hooks, lambda: None if path is None else restore(built, path), step):
        batch = predicted.pop()
        if yield_single_examples:
            yield from _examples(batch)
        else:
            yield batch


def _make_step(built: Built, predict_keys: Any, predicted: list[Any]) -> Callable[[Any, Any], StepResult]:
    module: Any = built.spec.module
    predictions: Any = built.spec.predictions

    def replica_step(features: Any) -> tuple[Any, Any]:
        with torch.no_grad():
            outputs = module(features)
            return detached(outputs), _chosen(_checked(predictions(outputs)), predict_keys)

    def step(features: Any, labels: Any) -> StepResult:  # noqa: ARG001 - those of data for training are left out
        with training_nothing():
            outputs, chosen = built.strategy.run(replica_step, args=(features,))
        is_named = isinstance(chosen, Mapping)
        predicted.append({k: _as_array(v) for k, v in chosen.items()} if is_named else _as_array(chosen))
        return StepResult(None, outputs)

    return step


def _checked(predictions: Any) -> Any:
    """Return predictions, or raise a TypeError."""
    if not isinstance(predictions, (Tensor, np.ndarray, Mapping)):
        raise TypeError(
            "EstimatorSpec(predictions=) must return a tensor, or a dictionary of tensors by name. Received a "
            f"{type(predictions).__name__}."
        )
    return predictions


def _chosen(predictions: Any, keys: Any) -> Any:
    """Return the predictions that were asked for.

    Raises:
        ValueError: there is none of them.
    """
    if not keys:
        return predictions
    if not isinstance(predictions, Mapping):
        raise ValueError(
            "predict_keys argument is not valid in case of non-dict predictions. Leave it out, or let "
            "EstimatorSpec(predictions=) return a dictionary."
        )
    keys = [keys] if isinstance(keys, str) else keys  # else "classes" would also name "class"
    chosen = {name: value for name, value in predictions.items() if name in keys}
    if not chosen:
        raise ValueError(f"Expected to run at least one output from {list(predictions)}, provided {keys}.")
    return chosen


def _examples(batch: Any) -> Iterator[Any]:
    """Yield a batch's predictions example by example."""
    if not isinstance(batch, dict):
        yield from batch
        return
    lengths = {name: len(value) if np.ndim(value) else None for name, value in batch.items()}
    if len(set(lengths.values())) > 1 or None in lengths.values():
        raise ValueError(
            f"Batch length of predictions should be same. Received, by name: {lengths}. Pass "
            "yield_single_examples=False for predictions that are not one for each example."
        )
    for i in range(next(iter(lengths.values()), 0) or 0):
        yield {name: value[i] for name, value in batch.items()}


def _as_array(value: Any) -> Any:
    return as_array(value) if isinstance(value, Tensor) else np.asarray(value)


class EvaluationStepsHook(SessionRunHook):
    """Ends an evaluation after a number of steps, and says how far it is.

    Args:
        num_steps: the steps.
    """

    def __init__(self, num_steps: int) -> None:
        self._num_steps = num_steps
        self._done = 0
        self._interval = max(1, math.ceil(num_steps / 10))

    @override
    def after_run(self, run_context: SessionRunContext, run_values: SessionRunValues) -> None:
        self._done += 1
        if self._done % self._interval == 0 or self._done == self._num_steps:
            logger.info("Evaluation [%d/%d]", self._done, self._num_steps)
        if self._done >= self._num_steps:
            run_context.request_stop()


@training_nothing()
def evaluate_model(
    definition: Definition,
    input_fn: Callable[..., Any],
    checkpoint_path: str | None,
    hooks: Sequence[SessionRunHook],
    eval_dir: str,
) -> dict[str, Any]:
    """Evaluate a checkpoint, or the initial values, and return the loss, the metrics and the global step."""
    chosen = definition.config.eval_distribute
    strategy = plain_strategy() if chosen is None else chosen
    if isinstance(strategy, BetweenGraphParameterServerStrategy):
        strategy = strategy.alone()  # a checkpoint has all values
    with reporting_failures(strategy, "Estimator"), seeded(definition.config.tf_random_seed, strategy):
        batches = open_batches(input_fn, definition, strategy, ModeKeys.EVAL, is_distributed=chosen is not None)
        example = batches.example()
        if example is None:
            raise ValueError("input_fn gave no batch to evaluate. Return data with at least one batch.")
        path = checkpoint_path or find_checkpoint(strategy, definition.model_dir, "evaluate")
        built = build(definition, strategy, example, ModeKeys.EVAL)
        metrics = _checked_metrics(built.spec.eval_metric_ops)
        session = Session(built, definition, batches)
        totals = _Totals()
        start = time.monotonic()
        logger.info("Starting evaluation at %s", _now())
        all_hooks = [*hooks, *built.spec.evaluation_hooks]
        step = make_step(built, metrics, totals)
        for _ in run_steps(session, batches, all_hooks, lambda: None if path is None else restore(built, path), step):
            pass
        results = {name: as_number(metric.compute()) for name, (metric, _) in metrics.items()}
        results["loss"] = totals.mean(strategy)
    results["global_step"] = session.global_step
    logger.info("Inference Time : %0.5fs", time.monotonic() - start)
    logger.info("Finished evaluation at %s", _now())
    if session.is_chief:
        write_eval_metrics(eval_dir, session.global_step, results)
        if path is not None:
            logger.info("Saving 'checkpoint_path' summary for global step %d: %s", session.global_step, path)
    return results


def make_step(built: Built, metrics: dict[str, tuple[Any, Any]], totals: _Totals) -> Callable[[Any, Any], StepResult]:
    """Return what evaluates one batch on each of this process's replicas."""
    strategy, spec = built.strategy, built.spec
    module: Any = spec.module
    loss_fn: Any = spec.loss
    outputs_of_first: list[Any] = []

    def replica_step(features: Any, labels: Any) -> Tensor | None:
        context: Any = get_replica_context()
        if _lacks_batch(context.replica_id_in_sync_group, (features, labels)):
            return None
        with torch.no_grad():
            outputs = module(features)
            with replica_means():
                loss = compute_loss(loss_fn, outputs, labels)
            for name, (metric, arguments) in metrics.items():
                _update(name, metric, arguments, (features, labels, outputs))
        if is_first_here(context):
            outputs_of_first[:] = [detached(outputs)]
        return loss

    def step(features: Any, labels: Any) -> StepResult:
        losses = strategy.experimental_local_results(strategy.run(replica_step, args=(features, labels)))
        known = [loss for loss in losses if loss is not None]
        totals.add(known)
        return StepResult(mean(known) if known else None, outputs_of_first.pop() if outputs_of_first else None)

    return step


def _update(name: str, metric: Any, arguments: Any, batch: tuple[Any, Any, Any]) -> None:
    try:
        metric.update(*arguments(*batch))
    except Exception as error:
        add_note(
            error,
            f"The metric {name!r} of eval_metric_ops failed. A metric alone is updated with (labels, outputs), a "
            "pair (metric, arguments) with the tuple that arguments(features, labels, outputs) returns.",
        )
        raise


def find_checkpoint(strategy: Strategy, model_dir: str, what: str) -> str | None:
    """Return the latest checkpoint, the chief's if there are several processes; ``None`` if there is none."""
    path = latest_checkpoint(model_dir)
    if strategy.workers is not None:
        path = strategy.workers.broadcast_object(f"Estimator: the checkpoint to {what}", path)
    if path is None:
        logger.info("Could not find trained model in model_dir: %s, running initialization to %s.", model_dir, what)
    return path


def as_number(value: Any) -> Any:
    """Return a metric's result as a Python number, a NumPy array, or a dictionary of such."""
    if isinstance(value, dict):
        return {name: as_number(part) for name, part in value.items()}
    array = as_array(value) if isinstance(value, Tensor) else value
    return array.item() if isinstance(array, np.generic) else array


class _Totals:
    """The sum of the losses of batches, and their number."""

    def __init__(self) -> None:
        self._losses: list[Tensor] = []
        self._sum = 0.0
        self._count = 0

    def add(self, losses: Sequence[Tensor]) -> None:
        """Add the losses of batches; nothing is read from their devices before the end."""
        self._losses.extend(losses)
        self._count += len(losses)
        if len(self._losses) > 1000:
            self._read()

    def mean(self, strategy: Strategy) -> float:
        """Return the mean over the batches of all processes; 0 if there is none."""
        self._read()
        record = [self._sum, self._count]
        records = [record] if strategy.workers is None else strategy.workers.exchange("Estimator: mean loss", record)
        sums, counts = zip(*records, strict=True)
        return total(sums) / sum(counts) if sum(counts) else 0.0

    def _read(self) -> None:
        self._sum += total([loss.item() for loss in self._losses])
        self._losses.clear()


def _checked_metrics(metrics: dict[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Return a metric, and what makes its arguments, by name."""
    for name in ("loss", "global_step"):
        if name in metrics:
            raise ValueError(
                f'Metric with name "{name}" is not allowed, because Estimator already defines a default metric with '
                "the same name."
            )

    def labels_and_outputs(features: Any, labels: Any, outputs: Any) -> tuple[Any, Any]:  # noqa: ARG001
        return labels, outputs

    return {name: pair if isinstance(pair, tuple) else (pair, labels_and_outputs) for name, pair in metrics.items()}


def _lacks_batch(replica_id: int, batch: Any) -> bool:
    shares = (get_shares(leaf) for leaf in tree.all_leaves(batch))
    return any(tag is not None and len(tag.shares) > 1 and tag.shares[replica_id] == 0 for tag in shares)


def _now() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S")
