"""The object in the user's hands when a process hosts several replicas: a facade by class swap.

A facade holds nothing but its ``Mirror``, which says what is behind it; a module's facade has a tree of children of its
own, which are facades too.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from torchstrategy.replicas.distributed_variables import user_variable
from torchstrategy.replicas.fingerprints import SCALARS
from torchstrategy.replicas.mirrored import IS_FACADE, MIRROR, MODULE_INTERNALS, Mirror, resolve

__all__ = ["check_can_swap", "swap_class", "take_strays"]

#: Those in use, by the plain class's id, which a facade's class holds. A plain class that is held would hold, of
#: ``parametrize``, its module.
_facade_classes: weakref.WeakValueDictionary[int, type] = weakref.WeakValueDictionary()
#: Methods of a module that must act on every replica's object; the others work through attribute writes. A class whose
#: `compile` is another thing than torch's sees to its replicas itself.
_MODULE_ON_ALL = {"zero_grad": None, "compile": nn.Module.compile}
#: Methods of other objects that only read; calling them on replica 0 is enough.
_READS = frozenset({"state_dict", "get_last_lr", "get_lr", "get_scale", "is_enabled"})


class _Facade:
    """Mixed in before the plain class, or its methods are put into a subclass of that."""

    def __init_subclass__(cls) -> None:
        """Keep facade classes out of the registries that user classes may keep."""

    def __getattribute__(self, name: str) -> Any:
        if torch.compiler.is_dynamo_compiling():
            _refuse_to_be_compiled()
        mirror: Mirror = object.__getattribute__(self, MIRROR)
        local_id = mirror.replicas.current()
        if local_id is not None:
            return getattr(mirror.bodies[local_id], name)
        if name == "__class__":
            return mirror.cls
        if name in mirror.outside:
            return mirror.method(name)
        return _read_module(self, mirror, name) if mirror.is_module else _read_object(self, mirror, name)

    def __setattr__(self, name: str, value: Any) -> None:
        mirror: Mirror = object.__getattribute__(self, MIRROR)
        local_id = mirror.replicas.current()
        if local_id is not None:
            setattr(mirror.bodies[local_id], name, value)
        elif name == "__class__":
            _change_class(self, mirror, value)
        elif name == "_modules" and mirror.is_module:
            mirror.members["_modules"].clear()
            mirror.members["_modules"].update(value)
        else:
            mirror.write(name, value)
            _refresh_child(mirror, name, value)

    def __delattr__(self, name: str) -> None:
        mirror: Mirror = object.__getattribute__(self, MIRROR)
        local_id = mirror.replicas.current()
        if local_id is not None:
            delattr(mirror.bodies[local_id], name)
            return
        for body in mirror.bodies:
            delattr(body, name)
        mirror.release(name)
        _refresh_child(mirror, name, None)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        mirror: Mirror = object.__getattribute__(self, MIRROR)
        local_id = mirror.replicas.current()
        if local_id is not None:
            return mirror.bodies[local_id](*args, **kwargs)
        if "forward" in mirror.outside:
            return self.forward(*args, **kwargs)
        if not mirror.is_module:
            return mirror.method("__call__")(*args, **kwargs)
        mirror.replicas.note_everything()
        return mirror.bodies[0](*args, **kwargs)

    # No __deepcopy__: wrappers that pass attributes on, such as torch.compile's, would take it for theirs.
    def __reduce_ex__(self, protocol: Any) -> Any:
        mirror: Mirror = object.__getattribute__(self, MIRROR)
        if "__reduce_ex__" in mirror.outside:
            return mirror.call_outside("__reduce_ex__", protocol)
        reduced = resolve(self).__reduce_ex__(protocol)
        return mirror.with_metrics(reduced) if mirror.replicas.current() is None else reduced


_FACADE_METHODS = {
    name: method for name, method in vars(_Facade).items() if callable(method) and name != "__init_subclass__"
}


def _refuse_to_be_compiled() -> None:
    raise RuntimeError(
        "torch.compile met an object that has one copy for each replica. Compile the model itself, inside the scope: "
        "`with strategy.scope(): compiled = torch.compile(model)`, and call it in a function that is not compiled."
    )


#: What torch.compiler.assume_constant_result sets: the function runs when it is traced.
_refuse_to_be_compiled._dynamo_marked_constant = True  # type: ignore[attr-defined]


def check_can_swap(obj: Any) -> None:
    """Raise unless an object can become a facade.

    Raises:
        TypeError: Python can't change the object's class, or what it holds lies outside its ``__dict__``.
    """
    cls = type(obj)
    slots = [name for base in cls.__mro__ for name in _slots_of(base) if name not in ("__dict__", "__weakref__")]
    if slots:
        raise TypeError(f"the class has __slots__ ({', '.join(slots)})")
    object.__new__(cls)  # refuses subclasses of list, dict and the like
    _become(obj, _facade_class(cls))
    _become(obj, cls)


def swap_class(obj: Any, mirror: Mirror) -> None:
    """Make an object that passed ``check_can_swap`` a facade."""
    object.__setattr__(obj, "__dict__", {MIRROR: mirror})
    _become(obj, _facade_class(mirror.cls))


def take_strays(obj: Any) -> None:
    """Give the replicas what ``object.__setattr__`` has written to a facade past its ``__setattr__``."""
    own = object.__getattribute__(obj, "__dict__")
    if len(own) > 1:
        mirror: Mirror = own[MIRROR]
        for name in [name for name in own if name != MIRROR]:
            value = own.pop(name)
            for body, copied in zip(mirror.bodies, mirror.replicas.values_for(value), strict=True):
                body.__dict__[name] = copied
            mirror.hold(name, value)


def _slots_of(cls: type) -> tuple[str, ...]:
    slots = cls.__dict__.get("__slots__", ())
    return (slots,) if isinstance(slots, str) else tuple(slots)


def _become(obj: Any, cls: type) -> None:
    object.__setattr__(obj, "__class__", cls)


def _facade_class(cls: type) -> type:
    facade = _facade_classes.get(id(cls))
    if facade is None:
        names: dict[str, Any] = {
            IS_FACADE: True,
            "__module__": cls.__module__,
            "__qualname__": cls.__qualname__,
            "__doc__": cls.__doc__,
        }
        if not hasattr(cls, "__call__"):  # noqa: B004 - asks the class, not whether an instance is callable
            names["__call__"] = None
        bases: tuple[type, ...] = (_Facade, cls)
        if _root(cls).__base__ is not object:
            # Such as ABC or Generic, which come before the class that gives the object its attributes: in memory these
            # lie where Python finds them in subclasses only.
            names, bases = {**_FACADE_METHODS, **names}, (cls,)
        facade = _facade_classes[id(cls)] = type(cls.__name__, bases, names)
    return facade


def _root(cls: type) -> type:
    """Return the base of a class that first gives its objects attributes."""
    while cls.__base__ is not None and cls.__base__.__dictoffset__:
        cls = cls.__base__
    return cls


def _change_class(obj: Any, mirror: Mirror, cls: type) -> None:
    """Follow a change of the plain class, as ``torch.nn.utils.parametrize`` makes it."""
    for body in mirror.bodies:
        body.__class__ = cls
    mirror.cls = cls
    _become(obj, _facade_class(cls))


def _read_module(module: Any, mirror: Mirror, name: str) -> Any:
    if name in mirror.members:
        return mirror.members[name]
    state = mirror.bodies[0].__dict__
    if name == "__dict__":
        mirror.note_all()
        return state
    if name in state:
        value = state[name]
        if name not in MODULE_INTERNALS and type(value) not in SCALARS:
            mirror.note_access(name)
            value = mirror.shown(name, value)
        return user_variable(value)
    if name in _MODULE_ON_ALL and _MODULE_ON_ALL[name] in (None, getattr(mirror.cls, name)):
        return mirror.method(name)
    if _registers_hook(name):
        return mirror.method(name, reads=True)  # the others follow when a run starts
    if not hasattr(mirror.cls, name):
        for members in mirror.members.values():
            if name in members:
                return members[name]
    return _bound(module, mirror, name)


def _bound(obj: Any, mirror: Mirror, name: str) -> Any:
    """Return what a facade's class has by a name; a class method gets the plain class."""
    value = object.__getattribute__(obj, name)
    return getattr(mirror.cls, name) if getattr(value, "__self__", None) is type(obj) else value


def _registers_hook(name: str) -> bool:
    return "register" in name and name.endswith("hook")


def _read_object(obj: Any, mirror: Mirror, name: str) -> Any:
    first = mirror.bodies[0]
    state = first.__dict__
    if name == "__dict__":
        mirror.note_all()
        return state
    on_class = hasattr(mirror.cls, name)
    is_step = name == "step" and isinstance(first, Optimizer)
    if name in state and is_step:  # of a scheduler, and bound to replica 0's; or a wrapper of the program's
        return mirror.method(name, reads=True)
    if name in state and not (on_class and name == "zero_grad"):
        if type(state[name]) not in SCALARS:
            mirror.note_access(name)
        return user_variable(mirror.shown(name, state[name]))
    if on_class and (name in _READS or _registers_hook(name)):
        if name == "state_dict" and isinstance(first, Optimizer):
            mirror.note_access("state")  # whose tensors it holds
        return mirror.method(name, reads=True)
    value = _bound(obj, mirror, name)
    # Schedulers take `optimizer.step.__func__`; called outside, the step hook refuses it.
    if name.startswith("__") or is_step or not on_class or not callable(value) or isinstance(value, type):
        return value
    return mirror.method(name)


def _refresh_child(mirror: Mirror, name: str, value: Any) -> None:
    """Let a facade's children follow an assignment to its bodies."""
    if not mirror.is_module:
        return
    children = mirror.members["_modules"].data
    if name in mirror.bodies[0]._modules:
        children[name] = value
    else:
        children.pop(name, None)
    if value is None or isinstance(value, (Tensor, nn.Module)):
        mirror.is_stale = True
