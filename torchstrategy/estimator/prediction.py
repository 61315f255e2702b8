"""``Estimator.predict``: what the model says of each example, one after another."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from torchstrategy.cluster_resolver.torchrun import training_nothing
from torchstrategy.estimator.batches import open_batches
from torchstrategy.estimator.building import Built, Definition, build, plain_strategy, restore
from torchstrategy.estimator.evaluation import find_checkpoint
from torchstrategy.estimator.hooks import SessionRunHook
from torchstrategy.estimator.loop import run_steps
from torchstrategy.estimator.seeding import seeded
from torchstrategy.estimator.session import Session
from torchstrategy.estimator.specs import ModeKeys
from torchstrategy.estimator.steps import StepResult, detached
from torchstrategy.estimator.variables import as_array

__all__ = ["predict_with_model"]


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
    with seeded(definition.config.tf_random_seed):  # a generator's caller has its own random numbers meanwhile
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
