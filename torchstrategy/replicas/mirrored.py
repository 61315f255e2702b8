"""The object in the user's hands when a process hosts several replicas: a facade by class swap.

Inside ``run`` every read, write and call goes to the current replica's own object (its *body*), which is a plain object
of the plain class. Outside, data reads give replica 0's, writes and methods act on all replicas. A module keeps its
own tree of children, which are facades too, and shares its dictionaries of parameters and buffers with replica 0.
"""

from __future__ import annotations

import copy
import functools
import weakref
from typing import Any

import torch
from torch import nn

from torchstrategy.context import current_replica_context
from torchstrategy.replicas.adapters import OutsideMethod, outside_methods

__all__ = ["Mirror", "bodies", "mirror_of", "resolve", "swap_class"]

_mirrors: dict[int, Mirror] = {}
_facade_classes: weakref.WeakKeyDictionary[type, type] = weakref.WeakKeyDictionary()

#: What the facade of a module keeps for itself.
_OWN = frozenset({"_modules", "__dict__"})
#: Methods of a module that must act on every replica's object; the others work through attribute writes.
_MODULE_ON_ALL = frozenset({"zero_grad", "compile"})
_STRUCTURAL = frozenset({"add_module", "register_module", "register_parameter", "register_buffer"})
#: Methods of other objects that only read; calling them on replica 0 is enough.
_READS = frozenset({"state_dict", "get_last_lr", "get_lr", "get_scale", "is_enabled", "step"})
_PLAIN_DATA = (bool, int, float, complex, str, bytes, type(None), tuple, list, dict, set, frozenset)


class Mirror:
    """What belongs to one facade.

    Args:
        replicas: the set of replicas; has ``current()``, ``value_for(local_id, value)`` and ``strategy``.
        cls: the object's plain class.
        copies: one plain object for each replica.
    """

    def __init__(self, replicas: Any, cls: type, copies: tuple[Any, ...]) -> None:
        self.replicas = replicas
        self.cls = cls
        self.bodies = copies
        self.is_module = issubclass(cls, nn.Module)
        self.outside: dict[str, OutsideMethod] = outside_methods(cls)
        #: Replica 0's plain data when it was first looked at from outside since the last run.
        self.seen: dict[str, Any] | None = None

    def note_access(self) -> None:
        """Remember replica 0's plain data, to tell later what was changed in place from outside."""
        if self.seen is None:
            self.seen = _plain_data(self.bodies[0])

    def push_changes(self) -> None:
        """Give the other replicas what was changed in replica 0's plain data from outside."""
        if self.seen is None:
            return
        now, before, self.seen = _plain_data(self.bodies[0]), self.seen, None
        for name, value in now.items():
            if name not in before or before[name] != value:
                for body in self.bodies[1:]:
                    body.__dict__[name] = copy.deepcopy(value)

    def call_all(self, name: str, /, *args: Any, **kwargs: Any) -> Any:
        """Call a method of every replica's object and return replica 0's result."""
        results = []
        for i, body in enumerate(self.bodies):
            own_args, own_kwargs = self.replicas.value_for(i, (args, kwargs))
            results.append(getattr(body, name)(*own_args, **own_kwargs))
        if all(isinstance(result, torch.utils.hooks.RemovableHandle) for result in results):
            return _HandleOfAll(results)
        return results[0]


class _HandleOfAll:
    """Removes a hook from every replica's object."""

    def __init__(self, handles: list[torch.utils.hooks.RemovableHandle]) -> None:
        self._handles = handles

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()

    def __enter__(self) -> _HandleOfAll:
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()


class _Facade:
    """Mixed in before the plain class."""

    def __getattribute__(self, name: str) -> Any:
        mirror = _mirrors[id(self)]
        local_id = mirror.replicas.current()
        if local_id is not None:
            return getattr(mirror.bodies[local_id], name)
        if name == "__class__":
            return mirror.cls
        if name in mirror.outside:
            return functools.partial(mirror.outside[name], mirror.replicas.strategy, mirror.bodies)
        return _read_module(self, mirror, name) if mirror.is_module else _read_object(self, mirror, name)

    def __setattr__(self, name: str, value: Any) -> None:
        mirror = _mirrors[id(self)]
        local_id = mirror.replicas.current()
        if local_id is not None:
            setattr(mirror.bodies[local_id], name, value)
            return
        values = [mirror.replicas.value_for(i, value) for i in range(len(mirror.bodies))]
        if mirror.is_module and (isinstance(value, nn.Module) or name in self._modules):
            super().__setattr__(name, value)
        for body, own in zip(mirror.bodies, values, strict=True):
            setattr(body, name, own)

    def __delattr__(self, name: str) -> None:
        mirror = _mirrors[id(self)]
        local_id = mirror.replicas.current()
        if local_id is not None:
            delattr(mirror.bodies[local_id], name)
            return
        if mirror.is_module and name in self._modules:
            del self._modules[name]
        for body in mirror.bodies:
            # Replica 0 shares the facade's dictionaries.
            if hasattr(body, name):
                delattr(body, name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        mirror = _mirrors[id(self)]
        local_id = mirror.replicas.current()
        if local_id is None and "forward" in mirror.outside:
            return self.forward(*args, **kwargs)
        return mirror.bodies[local_id or 0](*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return copy.deepcopy(resolve(self), memo)

    def __copy__(self) -> Any:
        return copy.copy(resolve(self))

    def __reduce_ex__(self, protocol: Any) -> Any:
        return resolve(self).__reduce_ex__(protocol)


def mirror_of(obj: Any) -> Mirror | None:
    """Return the mirror of a facade, or ``None`` for a plain object."""
    return _mirrors.get(id(obj)) if isinstance(type(obj), type) and issubclass(type(obj), _Facade) else None


def bodies(obj: Any) -> tuple[Any, ...]:
    """Return this process's plain objects behind an object, one for each replica; ``(obj,)`` if it is plain."""
    mirror = mirror_of(obj)
    return (obj,) if mirror is None else mirror.bodies


def resolve(obj: Any) -> Any:
    """Return the plain object that a facade stands for here: the current replica's, outside a run replica 0's."""
    mirror = mirror_of(obj)
    if mirror is None:
        return obj
    return mirror.bodies[mirror.replicas.current() or 0]


def swap_class(obj: Any, mirror: Mirror) -> None:
    """Make an object a facade.

    Raises:
        TypeError: Python can't change the object's class.
    """
    facade = _facade_class(mirror.cls)
    key = id(obj)
    weakref.finalize(obj, _mirrors.pop, key, None)
    _mirrors[key] = mirror
    try:
        object.__setattr__(obj, "__class__", facade)
    except TypeError:
        del _mirrors[key]
        raise


def _facade_class(cls: type) -> type:
    facade = _facade_classes.get(cls)
    if facade is None:
        names = {"__module__": cls.__module__, "__qualname__": cls.__qualname__, "__doc__": cls.__doc__}
        if not hasattr(cls, "__call__"):  # noqa: B004 - asks the class, not whether an instance is callable
            names["__call__"] = None
        facade = type(cls.__name__, (_Facade, cls), names)
        _facade_classes[cls] = facade
    return facade


def _read_module(module: Any, mirror: Mirror, name: str) -> Any:
    if name in _OWN:
        return object.__getattribute__(module, name)
    if name in _MODULE_ON_ALL or (name.startswith("register_") and name.endswith("hook")):
        return functools.partial(mirror.call_all, name)
    if name in _STRUCTURAL:
        return functools.partial(_change_structure, module, mirror, name)
    state = mirror.bodies[0].__dict__
    if name in state:
        mirror.note_access()
        return state[name]
    return object.__getattribute__(module, name)


def _read_object(obj: Any, mirror: Mirror, name: str) -> Any:
    value = object.__getattribute__(obj, name)
    if name in ("state", "defaults", "__dict__"):
        mirror.note_access()
    if name.startswith("__") or name in _READS or not hasattr(type(obj), name) or not callable(value):
        return value
    return functools.partial(mirror.call_all, name)


def _change_structure(module: Any, mirror: Mirror, name: str, /, *args: Any, **kwargs: Any) -> None:
    """Register a child, parameter or buffer on the facade and on every replica's object."""
    values = [mirror.replicas.value_for(i, (args, kwargs)) for i in range(len(mirror.bodies))]
    if name in ("add_module", "register_module"):
        getattr(nn.Module, name)(module, *args, **kwargs)
    for body, (own_args, own_kwargs) in zip(mirror.bodies, values, strict=True):
        getattr(body, name)(*own_args, **own_kwargs)


def _plain_data(body: Any) -> dict[str, Any]:
    """Return a copy of the attributes that hold nothing but plain Python data."""
    return {
        name: copy.deepcopy(value)
        for name, value in body.__dict__.items()
        if not (name.startswith("_") and name in _MODULE_INTERNALS) and _is_plain(value)
    }


_MODULE_INTERNALS = frozenset(nn.Module().__dict__) - {"training"}


def _is_plain(value: Any) -> bool:
    if type(value) not in _PLAIN_DATA:
        return False
    if isinstance(value, dict):
        return all(_is_plain(k) and _is_plain(v) for k, v in value.items())
    if isinstance(value, (tuple, list, set, frozenset)):
        return all(_is_plain(item) for item in value)
    return True
