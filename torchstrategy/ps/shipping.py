"""What the coordinator sends of the program: functions and objects, each once, with references to what is shared.

A pickle holds no parameter and no recorded object: it names them, and the worker puts its own in their place. What a
function or an object refers to is sent before it, as *definitions* of their own. An object's definition has a version
for each state that matters to workers (training mode, learning rate), and a function's key follows those versions.
"""

from __future__ import annotations

import threading
import types
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from torch import Tensor, nn

from torchstrategy.ps.pickling import (
    Pickled,
    are_same,
    pickle_with_references,
    state_of,
    state_of_watched,
    weakly,
    what_it_refers_to,
    with_header,
)
from torchstrategy.ps.transport.messages import Message
from torchstrategy.replicas import metric_states
from torchstrategy.replicas.record import owner

__all__ = ["Shipper"]

#: How many versions of one object or function a worker keeps.
_NUM_KEPT = 4


class Shipped(NamedTuple):
    """A function, as workers know it.

    Args:
        key: its definition's key.
        needs: the keys of all definitions that a worker must have, in order; the last is the function's own.
    """

    key: str
    needs: tuple[str, ...]


class _Definition(NamedTuple):
    message: Message
    needs: tuple[str, ...]


class _Entry:
    """One object or function that was shipped, and its versions."""

    def __init__(self, name: str, obj: Any) -> None:
        self.name = name
        self.obj = obj
        #: Fingerprint of a version -> its key, the last one last.
        self.keys: dict[Any, str] = {}
        self.num_versions = 0
        self.watched: Any = None
        #: Of the tensors and modules among what is watched.
        self.states: list[Any] = []
        self.pickled: Pickled | None = None

    def new_key(self, fingerprint: Any) -> tuple[str, list[str]]:
        """Return a key for a new version, and those that it replaces."""
        self.num_versions += 1
        key = self.keys[fingerprint] = f"{self.name}.{self.num_versions}"
        replaced = []
        while len(self.keys) > _NUM_KEPT:
            replaced.append(self.keys.pop(next(iter(self.keys))))
        return key, replaced


class Shipper:
    """Turns functions, arguments and recorded objects into what workers can load.

    Args:
        strategy: the coordinator's strategy; has ``record``, ``hosting`` and ``bindings``.
    """

    def __init__(self, strategy: Any) -> None:
        self._strategy = weakref.ref(strategy)
        self._entries: dict[Any, _Entry] = {}
        self._definitions: dict[str, _Definition] = {}
        #: By the names that workers know.
        self._metrics: dict[str, Callable[[], Any]] = {}
        self._num_named = 0
        #: Identities and names of objects that no longer exist.
        self._gone: deque[tuple[Any, str]] = deque()
        self._lock = threading.RLock()
        #: Held while metrics change, by whoever reads several of their states.
        self.merging = threading.Lock()

    def function(self, fn: Callable[..., Any]) -> Shipped:
        """Return what a worker must have to call a function.

        The function is pickled once, and again when what it refers to by name, or its defaults, are other objects than
        before. What it reads of mutable objects stays as it was when it was pickled; arguments are sent with each call.

        Args:
            fn: any callable.

        Raises:
            TypeError: it refers to something that can't be sent; the message says what.
        """
        if isinstance(fn, nn.Module) and owner(fn) is self._strategy():
            fn = fn.__call__  # the module itself is an object, whose state workers follow
        with self._lock:
            entry = self._function_entry(fn)
            watched = what_it_refers_to(fn)
            states = [state_of_watched(obj) for obj in watched if self._is_followed(obj)]
            if entry.pickled is None or entry.states != states or not are_same(entry.watched, watched):
                entry.pickled = pickle_with_references(fn, f"the function {_name_of(fn)}", self._strategy(), self.name)
                entry.watched, entry.states = [weakly(obj) for obj in watched], states
                entry.keys.clear()
            needs = self._needs(entry.pickled)
            key = entry.keys.get(needs)
            if key is None:
                key = self._define(entry, needs, "function", entry.pickled, needs)
            return Shipped(key, (*needs, key))

    def _is_followed(self, obj: Any) -> bool:
        """Say whether a function is sent again when what it refers to changes; what is recorded has versions."""
        return isinstance(obj, Tensor) or (isinstance(obj, nn.Module) and owner(obj) is not self._strategy())

    def arguments(self, args: Sequence[Any], kwargs: dict[str, Any] | None) -> tuple[bytes, tuple[str, ...]]:
        """Return the arguments of one call as bytes, and the keys of the definitions that they need.

        Raises:
            ValueError: one of them is a ``RemoteValue``.
            TypeError: one of them can't be sent.
        """
        if not args and not kwargs:
            return b"", ()
        return self.value((tuple(args), kwargs or {}), "the arguments")

    def number(self, obj: Any) -> int:
        """Return the number by which workers and servers know a recorded object."""
        with self._lock:
            return int(self.name(obj)[1:])

    def name(self, obj: Any) -> str:
        """Return the name by which references mean a recorded object."""
        return self._entry(id(obj), obj, "o").name

    def value(self, obj: Any, what: str = "the value") -> tuple[bytes, tuple[str, ...]]:
        """Return any object as bytes, and the keys of the definitions that it needs."""
        with self._lock:
            pickled = pickle_with_references(obj, what, self._strategy(), self.name)
            needs = self._needs(pickled)
            return with_header(pickled, needs), needs

    def definition(self, key: str) -> Message:
        """Return the message that defines what a key stands for.

        Raises:
            KeyError: the key was replaced by newer ones.
        """
        with self._lock:
            return self._definitions[key].message

    def unneeded(self, keys: Iterable[str]) -> list[str]:
        """Return those keys that no living function or object stands for any more; never waits."""
        return [key for key in keys if key not in self._definitions]

    def absorb(self, side: Any) -> None:
        """Add to the program's metrics what a function on a worker has accumulated; waits for no other process.

        Args:
            side: what ``Workshop.run`` returned beside the value.
        """
        for name, states in side.items():
            metric = self._metrics.get(name, _nothing)()
            if metric is not None:
                with self.merging:
                    _merge_into(metric, states)

    def _needs(self, pickled: Pickled) -> tuple[str, ...]:
        """Return the keys of the present versions of what a pickle refers to, each after what it needs itself."""
        keys: dict[str, None] = {}
        for reference in pickled.objects:
            obj = reference()
            if obj is None:
                continue
            key = self._object_key(obj)
            keys.update(dict.fromkeys((*self._definitions[key].needs, key)))
        return tuple(keys)

    def _object_key(self, obj: Any) -> str:
        strategy = self._strategy()
        if strategy is not None:
            strategy.hosting.require(obj)
        entry = self._entry(id(obj), obj, "o")
        state = state_of(obj)
        if strategy is not None and entry.watched != state:
            strategy.hosting.take_rest(obj)
            state = state_of(obj)
        if entry.pickled is None or entry.watched != state:
            entry.pickled = pickle_with_references(
                obj, f"the {type(obj).__name__} that was made in the scope", self._strategy(), self.name
            )
            entry.watched = state
        needs = self._needs(entry.pickled)
        key = entry.keys.get((state, needs))
        if key is None:
            kind = "metric" if metric_states.is_metric(obj) else "object"
            if kind == "metric":
                self._metrics[entry.name] = entry.obj
            key = self._define(entry, (state, needs), kind, entry.pickled, needs)
        return key

    def _define(self, entry: _Entry, fingerprint: Any, kind: str, pickled: Pickled, needs: tuple[str, ...]) -> str:
        key, replaced = entry.new_key(fingerprint)
        for old in replaced:
            self._definitions.pop(old, None)
        fields = {
            "key": key,
            "name": entry.name,
            "kind": kind,
            "replaces": replaced,
            "uses": list(needs),
            "specs": pickled.specs,
            "kinds": pickled.kinds,
        }
        self._definitions[key] = _Definition(Message("define", fields, blobs=(pickled.blob,)), needs)
        return key

    def _function_entry(self, fn: Any) -> _Entry:
        if isinstance(fn, types.MethodType):
            return self._entry((id(fn.__self__), id(fn.__func__)), fn.__self__, "f")
        return self._entry(id(fn), fn, "f")

    def _entry(self, identity: Any, obj: Any, prefix: str) -> _Entry:
        entry = self._entries.get(identity)
        if entry is not None and entry.obj() is obj:
            return entry
        self._drop_gone()
        self._num_named += 1
        name = f"{prefix}{self._num_named}"
        gone = self._gone

        def note(_: Any) -> None:  # wherever the garbage collector runs: without a lock
            gone.append((identity, name))

        try:
            reference: Any = weakref.ref(obj, note)
        except TypeError:  # builtin functions and the like live for ever anyway
            reference = weakly(obj)
        entry = self._entries[identity] = _Entry(name, reference)
        return entry

    def _drop_gone(self) -> None:
        """Forget the objects that no longer exist."""
        while self._gone:
            identity, name = self._gone.popleft()
            entry = self._entries.get(identity)
            if entry is not None and entry.name == name:
                del self._entries[identity]
                self._metrics.pop(name, None)
                for key in entry.keys.values():
                    self._definitions.pop(key, None)


def _nothing() -> None:
    return None


def _name_of(fn: Any) -> str:
    return getattr(fn, "__qualname__", None) or repr(fn)


def _merge_into(metric: Any, states: dict[str, Any]) -> None:
    metrics = metric_states.metrics_of(metric)
    for name, state in states.items():
        if name in metrics:
            metric_states.add_state(metrics[name], metric_states.MetricState(*state))
