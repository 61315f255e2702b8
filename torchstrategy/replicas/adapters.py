"""Methods that mean something else in cross-replica context, by class: a metric's ``compute`` is over all replicas."""

from __future__ import annotations

import contextlib
import functools
import importlib
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

from torch import nn
from torch.utils.hooks import RemovableHandle

from torchstrategy.base.log import warn_once

__all__ = [
    "Adapter",
    "HandleOfAll",
    "OutsideCall",
    "OutsideMethod",
    "is_a",
    "outside_methods",
    "parts_of",
    "prepare_body",
    "register_replicas",
    "register_trace_end",
    "replicas_of",
    "trace_ends",
]

OutsideMethod = Callable[..., Any]


class Adapter(NamedTuple):
    """What a class of objects needs where several replicas have copies of one.

    Args:
        outside: by name, what a method is in cross-replica context; called as ``fn(strategy, bodies, *args, **kwargs)``
            with this process's plain objects, one for each replica.
        prepare: called as ``prepare(body, local_id)`` with each replica's object, once, before its first run.
        parts: returns by name what a replica's object holds its own part of, and what such a part begins with.
    """

    outside: Mapping[str, OutsideMethod] = MappingProxyType({})
    prepare: Callable[[Any, int], None] | None = None
    parts: Callable[[Any], Mapping[str, Any]] | None = None


#: Which modules have the ``ADAPTERS`` of classes, by the classes' full names; subclasses count. Such a module is
#: imported when an object of such a class is met: what happens never depends on what the program has imported.
HOMES = {
    "torchmetrics.collections.MetricCollection": "torchstrategy.metrics.sync",
    "torchmetrics.metric.Metric": "torchstrategy.metrics.sync",
    "torchmetrics.wrappers.minmax.MinMaxMetric": "torchstrategy.metrics.sync",
    "torchmetrics.wrappers.tracker.MetricTracker": "torchstrategy.metrics.sync",
    "torchstrategy.metrics.metric.Metric": "torchstrategy.metrics.sync",
}

#: Options of torch's embeddings by which a replica does with its share what one replica does with the whole batch.
_BY_SHARE = {
    "scale_grad_by_freq": (
        "divides gradients by how often an index is in a replica's own share of the batch, so several replicas train "
        "otherwise than one. Leave it out, or divide the losses of the examples by what the whole data holds."
    ),
    "max_norm": (
        "changes the rows that a replica looks up on this replica only, so that the replicas' parameters differ after "
        "the first look-up. Leave it out, and limit the rows outside `run`: "
        "weight.copy_(torch.renorm(weight, 2, 0, limit)) in torch.no_grad()."
    ),
}

_trace_ends: list[Callable[[str], None]] = []
#: By ``id``: what gives the replicas' copies of an object that serves several replicas itself.
_openers: dict[int, tuple[weakref.ref[Any], Callable[[], contextlib.AbstractContextManager[Sequence[Any]]]]] = {}


class _Active(threading.local):
    value = False


#: Whether an outside method is running on this thread.
_active = _Active()


def outside_methods(cls: type) -> dict[str, OutsideMethod]:
    """Return what methods of a class are in cross-replica context; a subclass's adapter wins."""
    methods: dict[str, OutsideMethod] = {}
    for adapter in reversed(_adapters(cls)):
        methods.update(adapter.outside)
    return methods


def prepare_body(body: Any, local_id: int) -> None:
    """Prepare one replica's object, by its position in the process, for its first run."""
    if local_id == 0 and isinstance(body, (nn.Embedding, nn.EmbeddingBag)):
        for option, what in _BY_SHARE.items():
            if getattr(body, option):
                warn_once(f"{type(body).__name__}({option}={getattr(body, option)!r}) {what}", of=body)
    for adapter in _adapters(type(body)):
        if adapter.prepare is not None:
            adapter.prepare(body, local_id)


def parts_of(cls: type) -> Callable[[Any], Mapping[str, Any]]:
    """Return what names an object's parts of something, such as of a sum, of which each replica has its own."""
    return next((adapter.parts for adapter in _adapters(cls) if adapter.parts is not None), _no_parts)


def _no_parts(_: Any) -> Mapping[str, Any]:
    return MappingProxyType({})


def _adapters(cls: type) -> list[Adapter]:
    """Return the adapters of a class and its bases, its own first."""
    names = [f"{base.__module__}.{base.__qualname__}" for base in cls.__mro__]
    return [importlib.import_module(HOMES[name]).ADAPTERS[name] for name in names if name in HOMES]


def register_trace_end(fn: Callable[[str], None]) -> None:
    """Call ``fn(device_type)`` when a run ends that was traced once for several replicas.

    Values that such a run computed have no meaning outside it; ``fn`` forgets those that the library itself keeps.
    """
    _trace_ends.append(fn)


def trace_ends(device_type: str) -> None:
    """Call the registered functions."""
    for fn in _trace_ends:
        fn(device_type)


def register_replicas(obj: Any, opener: Callable[[], contextlib.AbstractContextManager[Sequence[Any]]]) -> None:
    """Say that one object serves several replicas of this process.

    Args:
        obj: the object.
        opener: returns a context manager that gives a copy for each replica, and takes back what was written to them.
    """
    key = id(obj)  # metrics change their hash with their states
    _openers[key] = weakref.ref(obj, lambda _: _openers.pop(key, None)), opener


def replicas_of(obj: Any) -> contextlib.AbstractContextManager[Sequence[Any]]:
    """Return a context manager that gives a plain object for each local replica; what is written to them counts."""
    found = _openers.get(id(obj))
    return contextlib.nullcontext((obj,)) if found is None or found[0]() is not obj else found[1]()


class OutsideCall:
    """Stands for a method of a process's only object and tells by the context which one is meant.

    Copies of the object, and pickles, have the plain method.

    Args:
        strategy: the strategy that recorded the object.
        obj: the object.
        name: the method's name.
        method: what it is in cross-replica context.
    """

    def __init__(self, strategy: Any, obj: Any, name: str, method: OutsideMethod) -> None:
        self._strategy = strategy
        self._obj = weakref.ref(obj)
        self._name = name
        self._method = method
        self._plain = getattr(obj, name)
        functools.update_wrapper(self, self._plain)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the plain method in replica context or from an outside method, else the outside method."""
        if _active.value or self._strategy._in_replica_context():
            return self._plain(*args, **kwargs)
        _active.value = True
        try:
            obj = self._obj()
            with replicas_of(obj) as bodies:
                result = self._method(self._strategy, bodies, *args, **kwargs)
                return obj if result is bodies[0] else result
        finally:
            _active.value = False

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return getattr(memo[id(self._obj())], self._name)  # the copy has no state yet: this is its class's method

    def __reduce__(self) -> Any:
        return getattr, (self._obj(), self._name)


class HandleOfAll:
    """Removes a hook from every replica's object."""

    def __init__(self, handles: list[RemovableHandle]) -> None:
        self._handles = handles
        self.id = handles[0].id

    def remove(self) -> None:
        """Remove the hook."""
        for handle in self._handles:
            handle.remove()

    def __enter__(self) -> HandleOfAll:
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()


def is_a(value: object, class_name: str) -> bool:
    """``isinstance`` by the class's full name, without importing it."""
    return any(f"{base.__module__}.{base.__qualname__}" == class_name for base in type(value).__mro__)
