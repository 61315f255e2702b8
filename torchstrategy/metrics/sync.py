"""Makes torchmetrics metrics that a scope recorded right over all replicas in cross-replica context.

The classes are registered by name, so that importing this file does not import torchmetrics. Inside a replica
function a metric is a plain one, with that replica's own state.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torchstrategy.replicas import metric_states
from torchstrategy.replicas.adapters import register_outside_method, register_preparation

__all__: list[str] = []

_METRIC = "torchmetrics.metric.Metric"
_COLLECTION = "torchmetrics.collections.MetricCollection"
_TRACKER = "torchmetrics.wrappers.tracker.MetricTracker"
_KERAS_METRIC = "torchstrategy.metrics.base.KerasMetric"

_OutsideMethod = Callable[..., Any]


def _over_all_replicas(method: str) -> _OutsideMethod:
    """Return what calls a method on one metric that holds what all replicas accumulated."""

    def call(strategy: Any, bodies: Sequence[Any], *args: Any, **kwargs: Any) -> Any:
        return getattr(metric_states.merged_copy(strategy, bodies), method)(*args, **kwargs)

    return call


def _on_each_replica(method: str) -> _OutsideMethod:
    """Return what calls a method on every replica's metric."""

    def call(strategy: Any, bodies: Sequence[Any], *args: Any, **kwargs: Any) -> Any:  # noqa: ARG001
        results = [getattr(body, method)(*args, **kwargs) for body in bodies]
        return results[0]

    return call


def _on_first_replica(method: str) -> _OutsideMethod:
    """Return what calls a method on replica 0's metric only: a value from outside counts once."""

    def call(strategy: Any, bodies: Sequence[Any], *args: Any, **kwargs: Any) -> Any:  # noqa: ARG001
        return getattr(bodies[0], method)(*args, **kwargs)

    return call


def _load_state_dict(strategy: Any, bodies: Sequence[Any], *args: Any, **kwargs: Any) -> Any:
    """Give the loaded (merged) states to replica 0 and let the others begin anew."""
    for body in bodies:
        body.reset()
    if strategy.is_chief:
        result = bodies[0].load_state_dict(*args, **kwargs)
        for metric in metric_states.metrics_of(bodies[0]).values():
            metric._update_count = 1  # state_dict does not hold it, and a metric without updates is not merged
        return result
    result = bodies[0].load_state_dict(*args, **kwargs)
    bodies[0].reset()
    return result


def _update_and_result(strategy: Any, bodies: Sequence[Any], *args: Any, **kwargs: Any) -> Any:
    bodies[0].update(*args, **kwargs)
    return metric_states.merged_copy(strategy, bodies).result()


def _prepare_metric(body: Any, local_id: int) -> None:
    body.distributed_available_fn = _never  # torchmetrics' own synchronisation, over the default process group
    if local_id > 0:
        body.reset()  # what was added before the first run counts once


def _prepare_collection(body: Any, local_id: int) -> None:  # noqa: ARG001
    # torchmetrics lets metrics share one state whose states are equal after the first update. With a replica's small
    # or empty share that happens by chance, also to metrics that differ, such as accuracies of the top 1 and top 5.
    if body._enable_compute_groups is True and not body._groups_checked:
        body._enable_compute_groups = False
        body._groups = {}


def _never() -> bool:
    return False


def _register() -> None:
    register_preparation(_METRIC, _prepare_metric)
    register_preparation(_COLLECTION, _prepare_collection)
    for class_name in (_METRIC, _COLLECTION):
        register_outside_method(class_name, "compute", _over_all_replicas("compute"))
        register_outside_method(class_name, "state_dict", _over_all_replicas("state_dict"))
        register_outside_method(class_name, "load_state_dict", _load_state_dict)
        register_outside_method(class_name, "reset", _on_each_replica("reset"))
        register_outside_method(class_name, "update", _on_first_replica("update"))
        register_outside_method(class_name, "forward", _on_first_replica("forward"))
    for method in ("compute", "compute_all", "best_metric"):
        register_outside_method(_TRACKER, method, _over_all_replicas(method))
    for method in ("increment", "reset", "reset_all"):
        register_outside_method(_TRACKER, method, _on_each_replica(method))
    register_outside_method(_KERAS_METRIC, "forward", _update_and_result)
    register_outside_method(_KERAS_METRIC, "result", _over_all_replicas("result"))
    register_outside_method(_KERAS_METRIC, "reset_state", _on_each_replica("reset_state"))
    register_outside_method(_KERAS_METRIC, "update_state", _on_first_replica("update_state"))


_register()
