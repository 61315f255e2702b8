"""Metrics where one object serves all replicas: what each has accumulated, and how that is read outside ``run``.

Tensors are kept by ``ReplicaState``. What it can't keep is here: how often each replica was updated, and states that
are lists, to which every batch adds. A list's earlier items stay out of the traces, which would grow with them.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from torchstrategy.base.devices import Placement
from torchstrategy.errors import UnimplementedError
from torchstrategy.replicas.adapters import OutsideCall, is_a, prepare_body, register_replicas
from torchstrategy.replicas.metric_states import is_metric, metrics_of
from torchstrategy.tpu.state import ReplicaState
from torchstrategy.tpu.trace import Trace
from torchstrategy.xla import runtime
from torchstrategy.xla.runtime import TpuRuntime

__all__ = ["SpmdMetrics"]

#: Attributes that a replica's copy of a metric has for itself.
_OWN = frozenset({"update", "compute", "_update_signature", "_modules", "_parameters", "_buffers", "_device"})
#: What torchmetrics remembers of the last call.
_CACHES = frozenset({"_computed", "_forward_cache", "_cache"})


class _Item:
    """An item of a list state.

    Args:
        runtime: the devices.
        stacks: tensors ``[num_replicas, ...]``, one for each group of replicas.
        place: for each replica of this process, which of them it has; ``None`` if it has no such item.
        values: the replicas' items on the host, if they are there already.
    """

    def __init__(
        self,
        runtime: TpuRuntime,
        stacks: Sequence[Tensor],
        place: Sequence[int | None],
        values: Sequence[Tensor | None] | None = None,
    ) -> None:
        self._runtime = runtime
        self.stacks = tuple(stacks)
        self._place = tuple(place)
        self._values = None if values is None else tuple(values)
        #: What the list shows outside ``run``: replica 0's item, or where it has none, another one's.
        self.shown = self.stacks[0][0] if self.stacks else next(v for v in values or () if v is not None)

    def values(self) -> tuple[Tensor | None, ...]:
        """Return each local replica's item, on the host."""
        if self._values is None:
            rows = [self._runtime.rows(stack) for stack in self.stacks]
            self._values = tuple(None if k is None else rows[k][i][0] for i, k in enumerate(self._place))
        return self._values


class _Begun(NamedTuple):
    """A metric as it was when a run began: its number of updates, and what its lists showed."""

    num_updates: int
    lists: dict[str, list[Tensor]]


#: What a group of replicas has made of the metrics: the number of updates, and the items that it added to lists.
_Notes = dict[int, tuple[int, dict[str, list[Tensor]]]]


class _Kept:
    """What is known of one metric.

    Args:
        metric: the metric, of which torchmetrics makes another hash at each update, and a sum of ``==``.
        offsets: by how much each replica's number of updates differs from the one that the metric shows.
    """

    def __init__(self, metric: Any, offsets: list[int]) -> None:
        self.metric: weakref.ref[Any] = weakref.ref(metric)
        self.offsets = offsets
        #: The items of the states that are lists.
        self.items: dict[str, list[_Item]] = {}


class SpmdMetrics:
    """The recorded metrics of a strategy whose replicas share them.

    Args:
        state: keeps the replicas' tensors.
        runtime: the devices.
        placement: where the replicas are.
    """

    def __init__(self, state: ReplicaState, runtime: TpuRuntime, placement: Placement) -> None:
        self._state = state
        self._runtime = runtime
        self._num_local = placement.num_local
        self._num_replicas = placement.num_replicas
        self._kept: dict[int, _Kept] = {}
        self._begun: dict[int, _Begun] = {}
        self._notes: dict[int, _Notes] = {}

    def adopt(self, obj: Any) -> None:
        """Send a recorded metric to the devices; what was added to it on the host counts on replica 0.

        Raises:
            UnimplementedError: the replicas of other processes have parts of it that this one can't read.
        """
        if not isinstance(obj, nn.Module):
            return
        if self._num_local < self._num_replicas and metrics_of(obj):
            raise UnimplementedError(
                "Metrics can't be read over several hosts that drive their devices together. Start one process for "
                "each chip, or return sums from the replica function and add them up with `strategy.reduce`."
            )
        if is_metric(obj):
            prepare_body(obj, 0)
            register_replicas(obj, _Opener(self, obj))
        for metric in metrics_of(obj).values():
            if self._find(metric) is None:
                self._adopt_metric(metric)

    def _find(self, metric: Any) -> _Kept | None:
        kept = self._kept.get(id(metric))
        return kept if kept is not None and kept.metric() is metric else None

    def _living(self) -> list[tuple[Any, _Kept]]:
        rows = [(key, kept.metric(), kept) for key, kept in self._kept.items()]
        for key, metric, _ in rows:
            if metric is None:
                del self._kept[key]
        return [(metric, kept) for _, metric, kept in rows if metric is not None]

    def _adopt_metric(self, metric: Any) -> None:
        self._kept[id(metric)] = _Kept(metric, [0] + [-metric._update_count] * (self._num_local - 1))
        metric._device = self._runtime.device
        others = self._num_local - 1
        for key, value in metric.__dict__.copy().items():
            default = metric._defaults.get(key)
            if isinstance(default, Tensor) and isinstance(value, Tensor):
                self._write(metric.__dict__, key, [value.cpu(), *[default.cpu()] * others])
            elif isinstance(default, list) or (default is not None and isinstance(value, list)):
                items = value if isinstance(value, list) else [value]
                rows = [[item.cpu()] + [None] * others for item in items]
                self._write_list(metric, self._kept[id(metric)], key, rows)
            elif isinstance(value, Tensor):
                metric.__dict__[key] = value.to(self._runtime.device)

    # -------------------------------------------------------------------------------------------------- during a run

    def begin(self) -> None:
        """Let the replicas find empty lists, to which they add."""
        self._notes = {}
        self._begun = {}
        for metric, kept in self._living():
            lists = {}
            for key in kept.items:
                lists[key] = metric.__dict__[key]
                metric.__dict__[key] = []
            self._begun[id(metric)] = _Begun(metric._update_count, lists)

    @property
    def list_places(self) -> set[tuple[int, str]]:
        """Where the lists are, by the ``id`` of a metric's attributes and the name."""
        return {(id(metric.__dict__), key) for metric, kept in self._living() for key in kept.items}

    def note(self, group: int) -> None:
        """Note what a group of replicas has made of the metrics so far."""
        self._notes[group] = {
            id(metric): (
                metric._update_count,
                {key: list(value) for key in kept.items if isinstance(value := metric.__dict__[key], list)},
            )
            for metric, kept in self._living()
        }

    def end(self, trace: Trace, *, failed: bool) -> None:
        """Keep what the groups have noted; after a failure the metrics' lists and counts are as before."""
        notes, begun = self._notes, self._begun
        self._notes, self._begun = {}, {}
        for metric, kept in self._living():
            start = begun.get(id(metric))
            if start is None:  # made in this run
                continue
            if failed:
                metric.__dict__.update(start.lists)
                metric._update_count = start.num_updates
                continue
            own = [notes[group][id(metric)] for group in range(trace.groups.count)]
            for key, shown in start.lists.items():
                was_reset = any(
                    count < start.num_updates or (count == start.num_updates and lists.get(key)) for count, lists in own
                )
                items = [] if was_reset else self._checked(kept, key, shown)
                items += self._added(trace, [lists.get(key, []) for _, lists in own])
                kept.items[key] = items
                metric.__dict__[key] = [item.shown for item in items]
            _count(metric, kept, start.num_updates, [count for count, _ in own], trace.groups.of_local)

    def _checked(self, kept: _Kept, key: str, shown: list[Tensor]) -> list[_Item]:
        """Return the items of a list; if the program has changed it, what it holds counts on replica 0."""
        items = kept.items[key]
        if len(items) == len(shown) and all(item.shown is own for item, own in zip(items, shown, strict=True)):
            return items
        known = {id(item.shown): item for item in items}
        others = [None] * (self._num_local - 1)
        return [known.get(id(own)) or _Item(self._runtime, (), (), [own.cpu(), *others]) for own in shown]

    def _added(self, trace: Trace, columns: Sequence[list[Tensor]]) -> list[_Item]:
        items = []
        for j in range(max(map(len, columns))):
            values = [column[j] if j < len(column) else None for column in columns]
            present = [value for value in values if value is not None]
            shapes = {(tuple(value.shape), value.dtype) for value in present}
            if len(shapes) == 1 and len(present) == len(values):
                stacks, place = [trace.stack(present)], [0] * self._num_local
            else:
                with trace.region.paused():
                    stacks = [trace.rows(value) for value in present]
                number = {group: k for k, group in enumerate(g for g, v in enumerate(values) if v is not None)}
                place = [number.get(group) for group in trace.groups.of_local]  # type: ignore[misc]
            with trace.region.paused():
                items.append(_Item(self._runtime, stacks, place))
        return items

    # --------------------------------------------------------------------------------------------------- outside run

    @contextlib.contextmanager
    def opened(self, obj: Any) -> Iterator[tuple[Any, ...]]:
        """Give copies of a metric with each local replica's states, on the host; what is written to them counts.

        Args:
            obj: a metric, a collection or a wrapper.
        """
        if runtime.in_function():
            self._runtime.sync()
        family = [module for _, module in obj.named_modules()]
        on_host = {id(module): self._on_host(module) for module in family}
        copies = tuple(self._copy(obj, i, on_host, {}) for i in range(self._num_local))
        yield copies
        with torch.no_grad():
            self._take_back(obj, copies, on_host)

    def _on_host(self, module: Any) -> dict[str, list[Any]]:
        """Return each replica's tensors, and lists of them, by the names of a module's attributes and buffers."""
        found: dict[str, list[Any]] = {}
        for key, value in (*module.__dict__.items(), *module._buffers.items()):
            if isinstance(value, Tensor) and key not in _CACHES:
                rows = self._state.rows(value)
                own = [value.cpu()] * self._num_local if rows is None else [r[0] for r in self._runtime.rows(rows)]
                found[key] = [tensor.clone() for tensor in own]
        kept = self._find(module)
        if kept is not None:
            for key in kept.items:
                columns = [item.values() for item in self._checked(kept, key, module.__dict__[key])]
                found[key] = [[c[i] for c in columns if c[i] is not None] for i in range(self._num_local)]
        return found

    def _copy(self, module: Any, i: int, on_host: dict[int, dict[str, list[Any]]], memo: dict[int, Any]) -> Any:
        if id(module) in memo:
            return memo[id(module)]
        copied = memo[id(module)] = object.__new__(type(module))
        own = on_host[id(module)]
        is_one = is_a(module, "torchmetrics.metric.Metric")
        state = {k: v for k, v in module.__dict__.items() if k not in _CACHES and not isinstance(v, OutsideCall)}
        for key in ("update", "compute", "_update_signature") if is_one else ():
            state.pop(key, None)
        state.update({key: _detached(values[i]) for key, values in own.items() if key in module.__dict__})
        state["_buffers"] = {key: own[key][i] if key in own else value for key, value in module._buffers.items()}
        state["_parameters"] = dict(module._parameters)
        state["_modules"] = {
            name: None if child is None else self._copy(child, i, on_host, memo)
            for name, child in module._modules.items()
        }
        if is_one:
            state.update(dict.fromkeys(_CACHES))
            state["_device"] = torch.device("cpu")
            kept = self._find(module)
            state["_update_count"] = module._update_count + (0 if kept is None else kept.offsets[i])
        copied.__setstate__(state)
        return copied

    def _take_back(self, module: Any, copies: Sequence[Any], on_host: dict[int, dict[str, list[Any]]]) -> None:
        """Give a metric what was written to the replicas' copies of it."""
        given = on_host.pop(id(module), None)
        if given is None:  # done, by another name
            return
        self._take_values(module, copies, given)
        first = copies[0]
        for name in [name for name in module._modules if name not in first._modules]:
            del module._modules[name]
        for name, child in first._modules.items():
            if name not in module._modules:  # a tracker has begun another one
                module._modules[name] = child
                self.adopt(child)
            elif child is not None:
                self._take_back(module._modules[name], [copied._modules[name] for copied in copies], on_host)

    def _take_values(self, module: Any, copies: Sequence[Any], given: dict[str, list[Any]]) -> None:
        first, kept = copies[0], self._find(module)
        for key, before in given.items():
            place = "_buffers" if key in module._buffers else "__dict__"
            now = [getattr(copied, place)[key] for copied in copies]
            if all(_is_same(a, b) for a, b in zip(before, now, strict=True)):
                continue
            if kept is not None and key in kept.items:
                self._write_list(module, kept, key, _rows_of_lists(now))
            else:
                self._write(getattr(module, place), key, now)
        if kept is not None:
            counts = [copied._update_count for copied in copies]
            module._update_count = counts[0]
            kept.offsets = [count - counts[0] for count in counts]
        for key, value in first.__dict__.items():
            if key not in _OWN and key not in given and key not in _CACHES and value is not module.__dict__.get(key):
                module.__dict__[key] = value
        if is_a(module, "torchmetrics.metric.Metric"):
            module.__dict__.update(dict.fromkeys(_CACHES))

    def _write(self, members: dict[str, Any], key: str, values: Sequence[Tensor]) -> None:
        """Give each replica its own value of a tensor."""
        shape = values[0].shape
        values = [value.detach().to(values[0].dtype).expand(shape) for value in values]
        members[key] = tensor = values[0].contiguous().to(self._runtime.device)
        if self._num_local > 1:
            self._state.hold(tensor, self._runtime.upload([value.unsqueeze(0).contiguous() for value in values]))

    def _write_list(self, metric: Any, kept: _Kept, key: str, rows: Sequence[Sequence[Tensor | None]]) -> None:
        kept.items[key] = items = [_Item(self._runtime, (), (), row) for row in rows]
        metric.__dict__[key] = [item.shown for item in items]


def _count(metric: Any, kept: _Kept, before: int, counts: Sequence[int], group_of: Sequence[int]) -> None:
    """Note how often each replica was updated, given what each group has counted."""
    if len(counts) == 1 and counts[0] >= before:
        return
    own = [counts[g] if counts[g] < before else counts[g] + kept.offsets[i] for i, g in enumerate(group_of)]
    kept.offsets = [count - counts[0] for count in own]
    metric._update_count = counts[0]


class _Opener:
    """Opens one metric; it holds the metric weakly."""

    def __init__(self, metrics: SpmdMetrics, obj: Any) -> None:
        self._metrics = metrics
        self._obj = weakref.ref(obj)

    def __call__(self) -> contextlib.AbstractContextManager[tuple[Any, ...]]:
        return self._metrics.opened(self._obj())


def _detached(value: Any) -> Any:
    """Return a list of its own for a list, so that what is added to one copy is not in ours."""
    return list(value) if isinstance(value, list) else value


def _is_same(before: Any, now: Any) -> bool:
    if isinstance(before, list):
        return isinstance(now, list) and [*map(id, before)] == [*map(id, now)]
    return before is now and now._version == 0


def _rows_of_lists(columns: Sequence[Any]) -> list[list[Tensor | None]]:
    lists = [column if isinstance(column, list) else [column] for column in columns]
    length = max(map(len, lists), default=0)
    return [[own[j] if j < len(own) else None for own in lists] for j in range(length)]
