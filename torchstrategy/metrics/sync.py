"""Makes torchmetrics metrics that a scope recorded right over all replicas in cross-replica context.

``replicas.adapters`` knows the classes by their names and imports this file when it meets one. Inside a replica
function a metric is a plain one, with that replica's own state.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torchstrategy.base.context import current_frame
from torchstrategy.base.log import users_frame, warn_once_at
from torchstrategy.replicas import metric_states
from torchstrategy.replicas.adapters import Adapter

__all__ = ["ADAPTERS"]

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


def _apply(strategy: Any, bodies: Sequence[Any], fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:  # noqa: ARG001
    """Do what ``to`` and its kind ask for with each replica's part; of several, each stays on its device."""
    for body in bodies:
        device = body.device
        body._apply(fn, *args, **kwargs)
        if len(bodies) > 1 and body.device != device:
            body.to(device)
    return bodies[0]


def _reduce(strategy: Any, bodies: Sequence[Any], protocol: Any) -> Any:
    """Copy and pickle what this process's replicas accumulated; it never communicates."""
    merged = metric_states.merged_copy(None, bodies)
    is_part = strategy.workers is not None and current_frame() is None
    if is_part and any(metric._update_count for metric in metric_states.metrics_of(merged).values()):
        name = getattr(merged, "name", type(merged).__name__)
        warn_once_at(
            users_frame(),
            f"The copy or pickle of metric {name!r} that is made outside `strategy.scope()` holds what this process "
            f"has seen, of {strategy.workers.size}, and nothing adds up what its copies hold. Copy it inside `with "
            "strategy.scope():`, or keep its result in place of a copy.",
            of=strategy,
        )
    return merged.__reduce_ex__(protocol)


def _state_dict(strategy: Any, bodies: Sequence[Any], *args: Any, **kwargs: Any) -> Any:  # noqa: ARG001
    """Return what this process's replicas accumulated; it never communicates, so that a chief may save alone."""
    is_stored = any(any(metric._persistent.values()) for metric in metric_states.metrics_of(bodies[0]).values())
    source = metric_states.merged_copy(None, bodies) if is_stored else bodies[0]
    return source.state_dict(*args, **kwargs)


def _load_from_state_dict(strategy: Any, bodies: Sequence[Any], state_dict: Any, prefix: str, *args: Any) -> None:
    """Give the stored states, which are those of all replicas, to the first one and let the others begin anew."""
    is_stored = any(prefix + key in state_dict for key in bodies[0]._defaults)
    bodies[0]._load_from_state_dict(state_dict, prefix, *args)
    if is_stored:
        bodies[0]._update_count = 1  # a state_dict does not hold it, and a metric without updates is not merged
        for body in bodies[1:] if strategy.is_chief else bodies:
            body.reset()


def _update_and_result(strategy: Any, bodies: Sequence[Any], *args: Any, **kwargs: Any) -> Any:
    bodies[0].update_state(*args, **kwargs)
    return metric_states.merged_copy(strategy, bodies).result()


def _compute_min_max(strategy: Any, bodies: Sequence[Any]) -> Any:
    """Compute over all replicas, and let every replica remember the extremes of what was computed so far."""
    merged = metric_states.merged_copy(strategy, bodies)
    value = merged.compute()
    for body in bodies:
        body.min_val, body.max_val = merged.min_val, merged.max_val
    return value


def _prepare_metric(body: Any, local_id: int) -> None:
    body.distributed_available_fn = _never  # torchmetrics' own synchronisation, over the default process group
    if local_id > 0:
        body.reset()  # what was added before the first run counts once


def _prepare_collection(body: Any, local_id: int) -> None:  # noqa: ARG001
    # torchmetrics lets metrics share one state whose states are equal after the first update. With a replica's small
    # or empty share that happens by chance, also to metrics that differ, such as accuracies of the top 1 and top 5.
    body._compute_groups_create_state_ref(copy=True)
    body._enable_compute_groups = body._groups_checked = False
    body._groups = {}


def _never() -> bool:
    return False


_GATHERED = {
    "compute": _over_all_replicas("compute"),
    "reset": _on_each_replica("reset"),
    "update": _on_first_replica("update"),
    "forward": _on_first_replica("forward"),
    "__reduce_ex__": _reduce,
}

ADAPTERS = {
    "torchmetrics.metric.Metric": Adapter(
        {**_GATHERED, "state_dict": _state_dict, "_load_from_state_dict": _load_from_state_dict, "_apply": _apply},
        _prepare_metric,
        lambda body: body._defaults,
    ),
    "torchmetrics.collections.MetricCollection": Adapter(_GATHERED, _prepare_collection),
    "torchmetrics.wrappers.tracker.MetricTracker": Adapter(
        {name: _over_all_replicas(name) for name in ("compute", "compute_all", "best_metric")}
        | {name: _on_each_replica(name) for name in ("increment", "reset", "reset_all")}
        | {name: _on_first_replica(name) for name in ("update", "forward")}
    ),
    "torchmetrics.wrappers.minmax.MinMaxMetric": Adapter({"compute": _compute_min_max}),
    "torchstrategy.metrics.metric.Metric": Adapter(
        {
            "forward": _update_and_result,
            "result": _over_all_replicas("result"),
            "reset_state": _on_each_replica("reset_state"),
            "reset_states": _on_each_replica("reset_states"),
            "update_state": _on_first_replica("update_state"),
        }
    ),
}
