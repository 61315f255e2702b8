"""What torchmetrics metrics have accumulated, over all replicas.

Works by torchmetrics' own bookkeeping (``_defaults``, ``_reductions``, ``_update_count``) and does not import it. Only
copies are written to: the replicas' metrics go on accumulating. Replicas that were never updated are left out, so
that a mean or a stack over replicas does not contain default values.

What a metric keeps in plain attributes, and not in states, can't be merged: where replicas' differ, that is warned of.
"""

from __future__ import annotations

import copy
import types
import weakref
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from torchstrategy.base import tree
from torchstrategy.base.devices import tensor_device
from torchstrategy.base.log import users_frame, warn_once_at
from torchstrategy.base.names import dtype_name
from torchstrategy.collectives.summing import in_a_row
from torchstrategy.replicas.adapters import is_a
from torchstrategy.replicas.record import unrecorded

__all__ = [
    "MetricState",
    "add_state",
    "is_metric",
    "load_state",
    "merged_copy",
    "merged_states",
    "metrics_of",
    "modules_but_metrics",
    "own_states",
]

_METRICS = ("torchmetrics.metric.Metric", "torchmetrics.collections.MetricCollection")
#: Whether a class of modules is one of metrics: asked for every module at every step that is scheduled.
_metric_classes: weakref.WeakKeyDictionary[type[nn.Module], bool] = weakref.WeakKeyDictionary()
_OPERATION = "merging of metric states"
#: Attributes of every module, and what torchmetrics changes in those of its own.
_NOT_THE_PROGRAMS = {*vars(nn.Module()), "_update_count", "_computed", "_forward_cache", "_cache"}


class MetricState(NamedTuple):
    """What one metric holds.

    Args:
        num_updates: updates since the last reset.
        values: a tensor or a list of tensors for each state's name.
        plain: a text for each number, and collection of numbers, that it holds besides.
    """

    num_updates: int
    values: dict[str, Any]
    plain: Mapping[str, str] = {}


def is_metric(obj: object) -> bool:
    """Say whether an object is a torchmetrics metric or a collection of them."""
    return any(is_a(obj, name) for name in _METRICS)


def metrics_of(body: Any) -> dict[str, Any]:
    """Return the metrics that a metric, a collection or a wrapper consists of, by their module names."""
    return {name: m for name, m in body.named_modules() if is_a(m, "torchmetrics.metric.Metric")}


def modules_but_metrics(root: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield the paths and modules of a module that are in none of its metrics."""
    found = list(root.named_modules())
    metrics = [module for _, module in found if _is_metric_class(type(module))]
    if not metrics:
        return iter(found)
    of_metrics = {id(module) for metric in metrics for module in metric.modules()}
    return ((path, module) for path, module in found if id(module) not in of_metrics)


def _is_metric_class(cls: type[nn.Module]) -> bool:
    found = _metric_classes.get(cls)
    if found is None:
        found = _metric_classes[cls] = any(_full_name(base) in _METRICS for base in cls.__mro__)
    return found


def _full_name(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"


def merged_copy(strategy: Any, bodies: Sequence[Any]) -> Any:
    """Return a copy of a metric that holds what all replicas accumulated, and computes without communicating.

    Every process must call this at the same point, unless ``strategy`` is ``None``: then only the bodies are merged.
    """
    states = merged_states(strategy, bodies)
    merged = _copy_sharing_tensors(next((body for body in bodies if _num_updates(body)), bodies[0]))
    for name, metric in metrics_of(merged).items():
        load_state(metric, states[name])
        metric.sync_on_compute = metric._to_sync = False
    return merged


def merged_states(strategy: Any, bodies: Sequence[Any], *, resumable: bool = False) -> dict[str, MetricState]:
    """Return the states over all replicas, by the metrics' module names.

    Every process must call this at the same point.

    Args:
        strategy: the metric's strategy; ``None`` merges the bodies only.
        bodies: this process's plain metrics, one for each replica.
        resumable: the states must be such that one replica can go on with them.

    Raises:
        ValueError: with ``resumable``, some can't: a metric combines its replicas' states only when it computes.
    """
    local = [own_states(body) for body in bodies]
    is_alone = strategy is None or strategy.workers is None
    replicas = local if is_alone else _gather(strategy, local, _operation(bodies[0]))
    metrics = metrics_of(bodies[0])
    return {
        name: _merge(metric, [states[name] for states in replicas], resumable=resumable)
        for name, metric in metrics.items()
    }


def load_state(metric: Any, state: MetricState) -> None:
    """Overwrite what one metric holds."""
    metric._computed = metric._forward_cache = metric._cache = None
    metric._is_synced = False
    metric._update_count = state.num_updates
    for key, value in state.values.items():
        on_device = [t.to(metric.device) for t in value] if isinstance(value, list) else value.to(metric.device)
        setattr(metric, key, on_device)


def own_states(body: Any) -> dict[str, MetricState]:
    """Return what one replica's metric, collection or wrapper holds, by the metrics' module names."""
    return {name: _read_state(metric) for name, metric in metrics_of(body).items()}


def add_state(metric: Any, state: MetricState) -> None:
    """Merge into one metric what another has accumulated."""
    own = _read_state(metric)
    _warn_of_plain_attributes(metric, [own, state])
    load_state(metric, _merge(metric, [own, state], resumable=True))


def _read_state(metric: Any) -> MetricState:
    values = {key: getattr(metric, key) for key in metric._defaults}
    values = {key: list(value) if isinstance(value, list) else value for key, value in values.items()}
    return MetricState(metric._update_count, values, _plain_attributes(metric))


def _plain_attributes(metric: Any) -> dict[str, str]:
    """Return what tells apart numbers that are no states of a metric, without waiting for an accelerator."""
    texts = {
        name: _text_of(value)
        for name, value in {**vars(metric), **metric._buffers}.items()
        if name not in metric._defaults and name not in _NOT_THE_PROGRAMS
    }
    return {name: text for name, text in texts.items() if text is not None}


def _text_of(value: Any) -> str | None:
    if isinstance(value, (Tensor, np.ndarray, np.generic)):
        is_number = (value.is_cpu and value.numel() == 1) if isinstance(value, Tensor) else value.size == 1
        return repr(value.item()) if is_number else None
    if isinstance(value, (int, float)):
        return None if isinstance(value, bool) else repr(value)
    if not isinstance(value, Collection) or isinstance(value, (str, bytes)):
        return None
    items: Iterable[Any] = value.values() if isinstance(value, Mapping) else value
    known = [item for item in items if isinstance(item, (int, float))]
    return f"{len(value)} items ({zlib.crc32(repr(known).encode()):08x})"


def _warn_of_plain_attributes(metric: Any, states: Sequence[MetricState]) -> None:
    """Warn of numbers that replicas hold besides their states, and that differ: a merged metric has one replica's."""
    first = states[0].plain
    names = [name for name in first if any(state.plain.get(name, first[name]) != first[name] for state in states)]
    if not names:
        return
    is_ours = is_a(metric, "torchstrategy.metrics.metric.Metric")
    state = f'self.{names[0]} = self.add_weight("{names[0]}")'
    if not is_ours:
        state = f'self.add_state("{names[0]}", torch.tensor(0.0), dist_reduce_fx="sum")'
    warn_once_at(
        users_frame(),
        f"The metric {type(metric).__name__} keeps {', '.join(map(repr, names))} in plain attributes, which differ "
        "between replicas. Only states are added up over replicas, so its result is that of one replica's examples. "
        f"Make states of them in __init__: {state}.",
        of=metric,
    )


def _num_updates(body: Any) -> int:
    return max((metric._update_count for metric in metrics_of(body).values()), default=0)


def _merge(metric: Any, states: Sequence[MetricState], *, resumable: bool) -> MetricState:
    updated = [state for state in states if state.num_updates] or states[:1]
    if len(updated) == 1:
        return updated[0]
    _warn_of_plain_attributes(metric, updated)
    reductions = metric._reductions
    if resumable and any(r is None and isinstance(metric._defaults[key], Tensor) for key, r in reductions.items()):
        raise ValueError(
            f"The states of {len(updated)} replicas of a {type(metric).__name__} can't be stored as one replica's: the "
            "metric combines them only when it computes. Call compute() and reset() before saving, or leave it out."
        )
    values = {key: _reduce(fn, [state.values[key] for state in updated]) for key, fn in reductions.items()}
    return MetricState(sum(state.num_updates for state in updated), values)


def _reduce(reduction: Callable[[Any], Any] | None, values: Sequence[Any]) -> Any:
    is_cat = getattr(reduction, "__name__", None) == "dim_zero_cat"
    if any(isinstance(value, list) for value in values):
        joined = _same_device([item for value in values for item in (value if isinstance(value, list) else [value])])
        # An unmerged metric holds a list here, and so may a merged one; an empty one can't be concatenated.
        return joined if reduction is None or is_cat or not joined else reduction(joined)
    tensors = _same_device(values)
    if is_cat:
        return torch.cat([t.reshape(1) if t.ndim == 0 else t for t in tensors])
    stacked = torch.stack(tensors)
    return stacked if reduction is None else reduction(stacked)


def _same_device(items: Sequence[Any]) -> list[Any]:
    device = next((item.device for item in items if isinstance(item, Tensor)), None)
    return [item.to(device) if isinstance(item, Tensor) else item for item in items]


def _copy_sharing_tensors(body: Any) -> Any:
    """Deep-copy a metric without its tensors: a metric may hold a whole network, and results may carry a graph."""
    shared: dict[int, Any] = {}
    for metric in metrics_of(body).values():
        held = (metric._computed, metric._forward_cache, *_read_state(metric).values.values())
        tensors = [*metric.parameters(), *metric.buffers(), *tree.all_leaves(list(held))]
        shared.update({id(tensor): tensor for tensor in tensors if isinstance(tensor, Tensor)})
    with unrecorded():
        copied = copy.deepcopy(body, shared)
    for module in copied.modules():
        for name, value in vars(module).copy().items():
            # What a copy has for an `OutsideCall`, and a copy of the copy would have of another object.
            if isinstance(value, types.MethodType) and value.__func__ is getattr(type(module), name, None):
                delattr(module, name)
    return copied


def _operation(body: Any) -> str:
    """Return what ranks call the merging: with the metric's name, so that different metrics are not taken for one."""
    return f"{_OPERATION} of {type(body).__name__} {getattr(body, 'name', '')!s}".rstrip()


def _gather(strategy: Any, local: Sequence[dict[str, MetricState]], operation: str) -> list[dict[str, MetricState]]:
    """Return the states of every replica of every process, in the order of replica ids.

    The layouts travel as one message and all tensors as one buffer of bytes, however many states there are.
    """
    tensors = [t for states in local for state in states.values() for t in _tensors_of(state)]
    layout = [{name: _describe(state) for name, state in states.items()} for states in local]
    layouts = strategy.workers.exchange(operation, layout)
    device = tensor_device(strategy.placement.devices[0])
    data = [in_a_row(t.detach().to(device)).view(torch.uint8) for t in tensors]
    packed = torch.cat([torch.empty(0, dtype=torch.uint8, device=device), *data])
    buffers = strategy.workers.all_gather_tensors(packed, operation)
    replicas = []
    for process_layout, buffer in zip(layouts, buffers, strict=True):
        reader = _Reader(buffer)
        replicas += [{name: _rebuild(row, reader) for name, row in states.items()} for states in process_layout]
    return replicas


def _tensors_of(state: MetricState) -> list[Tensor]:
    tensors = [item for value in state.values.values() for item in (value if isinstance(value, list) else [value])]
    stranger = next((item for item in tensors if not isinstance(item, Tensor)), None)
    if stranger is not None:
        raise TypeError(
            "A metric's states must be tensors to be merged over processes. Received a state that holds a "
            f"{type(stranger).__name__}. Compute the metric inside strategy.run for this replica's own result."
        )
    return tensors


def _describe(state: MetricState) -> list[Any]:
    """Return what ``_rebuild`` needs, in a form that JSON can hold."""
    return [state.num_updates, {key: _describe_value(value) for key, value in state.values.items()}, state.plain]


def _describe_value(value: Any) -> Any:
    if isinstance(value, list):
        return [_describe_value(item) for item in value]
    return {"dtype": dtype_name(value.dtype), "shape": list(value.shape)}


def _rebuild(row: Sequence[Any], reader: _Reader) -> MetricState:
    values = {
        key: [reader.take(**item) for item in value] if isinstance(value, list) else reader.take(**value)
        for key, value in row[1].items()
    }
    return MetricState(row[0], values, row[2])


class _Reader:
    """Takes tensors out of a buffer of bytes, in the order in which they were put there."""

    def __init__(self, buffer: Tensor) -> None:
        self._buffer = buffer
        self._position = 0

    def take(self, dtype: str, shape: Sequence[int]) -> Tensor:
        torch_dtype: torch.dtype = getattr(torch, dtype)
        end = self._position + torch.Size(shape).numel() * torch_dtype.itemsize
        data = self._buffer[
            self._position : end
        ].clone()  # a view of another dtype must start at a multiple of its size
        self._position = end
        return data.view(torch_dtype).reshape(shape)
