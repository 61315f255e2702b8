"""Methods that mean something else in cross-replica context, by class: a metric's ``compute`` is over all replicas."""

from __future__ import annotations

import contextlib
import functools
import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch.utils.hooks import RemovableHandle

__all__ = [
    "HandleOfAll",
    "OutsideCall",
    "OutsideMethod",
    "first_run_modes",
    "is_a",
    "outside_methods",
    "prepare_body",
    "register_first_run_mode",
    "register_outside_method",
    "register_preparation",
    "register_replicas",
    "register_trace_end",
    "replicas_of",
    "trace_ends",
]

OutsideMethod = Callable[..., Any]

_methods: dict[str, dict[str, OutsideMethod]] = {}
_first_run_modes: list[Callable[[], contextlib.AbstractContextManager[Any]]] = []
_preparations: dict[str, Callable[[Any, int], None]] = {}
_trace_ends: list[Callable[[str], None]] = []
#: By ``id``: what gives the replicas' copies of an object that serves several replicas itself.
_openers: dict[int, tuple[weakref.ref[Any], Callable[[], contextlib.AbstractContextManager[Sequence[Any]]]]] = {}


class _Active(threading.local):
    value = False


#: Whether an outside method is running on this thread.
_active = _Active()


def register_outside_method(class_name: str, method: str, fn: OutsideMethod) -> None:
    """Call ``fn(strategy, bodies, *args, **kwargs)`` for ``method`` on a recorded object in cross-replica context.

    Args:
        class_name: ``module.Class``; subclasses count. A name, so that nothing need be imported.
        method: the method's name.
        fn: gets the strategy and this process's objects, one for each replica, whose methods are the plain ones.
    """
    _methods.setdefault(class_name, {})[method] = fn


def outside_methods(cls: type) -> dict[str, OutsideMethod]:
    """Return the registered methods of a class and its bases; a subclass's registration wins."""
    methods: dict[str, OutsideMethod] = {}
    for base in reversed(cls.__mro__):
        methods.update(_methods.get(f"{base.__module__}.{base.__qualname__}", {}))
    return methods


def register_preparation(class_name: str, fn: Callable[[Any, int], None]) -> None:
    """Call ``fn(body, local_id)`` once for each replica's object before its first run.

    Args:
        class_name: ``module.Class``; subclasses count.
        fn: gets a plain object and its replica's position in this process.
    """
    _preparations[class_name] = fn


def prepare_body(body: Any, local_id: int) -> None:
    """Make the registered preparations of one replica's object."""
    for base in type(body).__mro__:
        fn = _preparations.get(f"{base.__module__}.{base.__qualname__}")
        if fn is not None:
            fn(body, local_id)


def register_first_run_mode(make: Callable[[], contextlib.AbstractContextManager[Any]]) -> None:
    """Enter what ``make`` returns around each replica's function in the first run over several replicas."""
    _first_run_modes.append(make)


@contextlib.contextmanager
def first_run_modes() -> Iterator[None]:
    """Enter the registered modes; not where torch.compile is used, which would compile for them and then anew."""
    dynamo: Any = sys.modules.get("torch._dynamo.eval_frame")
    compiles = dynamo is not None and any(backend is not None for backend in dynamo.cached_backends.values())
    with contextlib.ExitStack() as stack:
        for make in () if compiles else _first_run_modes:
            stack.enter_context(make())
        yield


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
            with replicas_of(self._obj()) as bodies:
                return self._method(self._strategy, bodies, *args, **kwargs)
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
