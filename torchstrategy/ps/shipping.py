"""What the coordinator sends of the program: functions and objects, each once, with references to what is shared.

A pickle holds no parameter and no recorded object: it names them, and the worker puts its own in their place. What a
function or an object refers to is sent before it, as *definitions* of their own. An object's definition has a version
for each state that matters to workers (training mode, learning rate), and a function's key follows those versions.
"""

from __future__ import annotations

import enum
import functools
import inspect
import itertools
import threading
import types
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from torchstrategy.ps.bindings import version_of
from torchstrategy.ps.optimizer_updates import as_numbers
from torchstrategy.ps.pickling import Pickled, pickle_with_references, with_header
from torchstrategy.ps.served import Served
from torchstrategy.ps.served_optimizers import hyper_parameters, step_hooks
from torchstrategy.ps.transport.messages import Message
from torchstrategy.ps.user_modules import is_sent_by_value
from torchstrategy.replicas import metric_states
from torchstrategy.replicas.record import owner

__all__ = ["Shipper", "state_of", "weakly"]

_FUNCTIONS = (types.FunctionType, types.MethodType, functools.partial)
#: What of a module's attributes workers follow: these, tensors, what is numbered, and containers of them. Of any other
#: object workers have what it was when they got the module.
_PLAIN = frozenset({bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size})
_NUMBERED = (*_FUNCTIONS, types.BuiltinFunctionType, nn.Module, enum.Enum)
_CONTAINERS = (dict, list, tuple, set, frozenset)
_MOST_FOLLOWED = 100  # entries of a container, which are gone through in every `schedule`
_MAX_DEPTH = 3
_TABLES = frozenset({dict, OrderedDict, set})  # of hooks and members


def state_of(obj: Any) -> Any:
    """Return what of an object's state workers must follow; hashable."""
    if metric_states.is_metric(obj):
        return ()
    if isinstance(obj, nn.Module):
        return tuple(_state_of_module(module) for _, module in metric_states.modules_but_metrics(obj))
    if isinstance(obj, Optimizer):
        trained = tuple(_trains(p) for group in obj.param_groups for p in group["params"])
        hooks = tuple((name, tuple(map(_number_of, own.values()))) for name, own in step_hooks(obj).items())
        hyper = [{name: as_numbers(value) for name, value in group.items()} for group in hyper_parameters(obj)]
        return repr(hyper), trained, hooks  # a tensor's own repr leaves digits out
    return ()


def _state_of_module(module: nn.Module) -> Any:
    """Return the state of one module; this is done with each one in every `schedule`."""
    state: list[Any] = []
    for name, value in vars(module).items():
        kind = type(value)
        if kind in _PLAIN:
            state += name, value
        elif kind in _TABLES and not value:
            continue
        elif name == "_modules":
            state += *value, *map(_number_of, value.values())
        elif name in ("_parameters", "_buffers"):
            state += value
            state += [
                (_number_of(own), own.binding.requires_grad) if isinstance(own, Served) else _mark(own)
                for own in value.values()
            ]
        else:
            state += name, _mark(value)
    return tuple(state)


def _mark(value: Any, depth: int = 0) -> Any:
    """Return what is another one when a value is another one for workers; hashable."""
    if type(value) in _PLAIN:
        return value
    if isinstance(value, Tensor):
        if isinstance(value, Served):
            return _number_of(value), value.binding.requires_grad
        return _number_of(value), version_of(value), value.requires_grad
    if isinstance(value, _NUMBERED):
        return _number_of(value)
    if isinstance(value, (np.ndarray, np.generic)):
        return value.tobytes() if value.size <= _MOST_FOLLOWED else _number_of(value)
    if not isinstance(value, _CONTAINERS) or depth == _MAX_DEPTH:
        return None
    if len(value) > _MOST_FOLLOWED:
        return len(value)
    items = value.items() if isinstance(value, dict) else enumerate(value)
    return tuple((key if type(key) in _PLAIN else None, _mark(item, depth + 1)) for key, item in items)


#: By identity, which another object may have later: a reference, and a number that no other object ever has.
_numbered: dict[int, tuple[Any, int]] = {}
_numbers = itertools.count()


def _number_of(obj: Any) -> int:
    known = _numbered.get(id(obj))
    if known is not None and known[0]() is obj:
        return known[1]
    key, number = id(obj), next(_numbers)

    def forget(gone: Any) -> None:
        if _numbered.get(key, (None, -1))[0] is gone:
            del _numbered[key]

    try:
        _numbered[key] = weakref.ref(obj, forget), number
    except TypeError:  # builtin functions and the like live for ever anyway
        _numbered[key] = weakly(obj), number
    return number


def _state_of_watched(obj: Any) -> Any:
    """Return what changes when a tensor or module to which a function refers is another one for workers."""
    return _mark(obj) if isinstance(obj, Tensor) else state_of(obj)


def _trains(parameter: Tensor) -> bool:
    return parameter.binding.requires_grad if isinstance(parameter, Served) else parameter.requires_grad


def what_it_refers_to(fn: Any) -> list[Any]:
    """Return the objects that a function refers to by name, to notice when a name stands for another one.

    The program's own functions among them are sent with it, so what these refer to belongs to it.
    """
    found: list[Any] = [fn] if isinstance(fn, nn.Module) else []
    functions, seen = [fn], set()
    while functions:
        plain = functions.pop()
        plain = inspect.unwrap(plain.func if isinstance(plain, functools.partial) else plain)
        if isinstance(plain, types.MethodType):
            found.append(plain.__self__)
            plain = plain.__func__
        code = getattr(plain, "__code__", None)
        if code is None or id(plain) in seen:
            continue
        seen.add(id(plain))
        cells = [_content(cell) for cell in plain.__closure__ or ()]
        names = [plain.__globals__.get(name) for name in _names_in(code)]
        own = [*cells, *names, plain.__defaults__, *(plain.__kwdefaults__ or {}).values()]
        found += own
        functions += [each for each in own if isinstance(each, _FUNCTIONS) and is_sent_by_value(each)]
    return found


@functools.lru_cache(maxsize=1024)
def _names_in(code: types.CodeType) -> tuple[str, ...]:
    """Return the names in a function's code, and in that of functions and comprehensions inside it."""
    inner = [_names_in(const) for const in code.co_consts if isinstance(const, types.CodeType)]
    return tuple(dict.fromkeys((*code.co_names, *(name for names in inner for name in names))))


def _content(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not assigned yet
        return None


def weakly(obj: Any) -> Callable[[], Any]:
    """Return what gives an object, without keeping it alive where that can be."""
    try:
        return weakref.ref(obj)
    except TypeError:
        return lambda: obj


def are_same(before: list[Callable[[], Any]] | None, now: list[Any]) -> bool:
    """Say whether what was watched is what there is now."""
    if before is None or len(before) != len(now):
        return False
    # A weak reference gives None for an object that is gone, which is not the None that a name stands for now.
    return all(a() is b and (b is not None or not isinstance(a, weakref.ref)) for a, b in zip(before, now, strict=True))


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
            states = [_state_of_watched(obj) for obj in watched if self._is_followed(obj)]
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
