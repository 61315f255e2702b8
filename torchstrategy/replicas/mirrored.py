"""What stands behind an object in the user's hands when a process hosts several replicas: one object for each.

Inside ``run`` every read, write and call goes to the current replica's own object (its *body*), which is a plain object
of the plain class. Outside, data reads give replica 0's, writes and methods act on all replicas. The object in the
user's hands is a facade (``facades.py``), which holds nothing but its ``Mirror``.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import itertools
import random
import types
import weakref
from collections import UserDict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from torchstrategy.base import tree
from torchstrategy.replicas.adapters import OutsideMethod, outside_methods, parts_of, replicas_of
from torchstrategy.replicas.distributed_variables import user_variable
from torchstrategy.replicas.fingerprints import can_change, differ, follow, glance, is_recorded, snapshot
from torchstrategy.replicas.object_hooks import Hooks, places_in
from torchstrategy.replicas.variables import refuse_one_for_all

__all__ = [
    "IS_FACADE",
    "MIRROR",
    "MODULE_INTERNALS",
    "Mirror",
    "bodies",
    "mirror_of",
    "opened",
    "push_attributes",
    "resolve",
]

MIRROR = "_ts_mirror"
IS_FACADE = "_ts_is_facade"
#: What is used up by one replica and can't be copied, or holds what can't be.
_ITERATORS = (types.GeneratorType, map, filter, zip, enumerate, itertools.chain, itertools.islice)
MODULE_INTERNALS = frozenset(nn.Module().__dict__) - {"training"}
#: Stands for what an attribute holds that was set since the last run: whoever set it may go on to change it.
_UNKNOWN = object()
#: What of an optimizer follows by itself, or would take long to look at around each run.
_OPTIMIZER_INTERNALS = frozenset({"param_groups", "state"})


class Mirror:
    """What belongs to one facade.

    Args:
        replicas: the set of replicas; has ``current()``, ``values_for(value)``, ``note_everything()``,
            ``num_layouts`` and ``strategy``.
        cls: the object's plain class.
        copies: one plain object for each replica.
        children: a module's children, as facades.
    """

    def __init__(self, replicas: Any, cls: type, copies: tuple[Any, ...], children: Mapping[str, Any]) -> None:
        self.replicas = replicas
        self.cls = cls
        self.bodies = copies
        self.is_module = issubclass(cls, nn.Module)
        self.outside: dict[str, OutsideMethod] = outside_methods(cls)
        self._parts_of = parts_of(cls)
        self.members: dict[str, _Members] = {}
        if self.is_module:
            state = copies[0].__dict__
            kinds = {"_modules": dict(children), "_parameters": state["_parameters"], "_buffers": state["_buffers"]}
            self.members = {kind: _Members(self, kind, data) for kind, data in kinds.items()}
        #: What the set of replicas knows of a module's tensors, and whether the module got or lost some since.
        self.tensors: Any = None
        #: id of a tensor of replica 0 -> (weak reference to it, its counterparts on the other replicas)
        self.known: dict[int, tuple[weakref.ref[Tensor], tuple[Tensor, ...]]] = {}
        self.is_stale = False
        #: What replica 0's attributes held when they were first read from outside since the last run.
        self._seen: dict[str, Any] = {}
        #: The attributes whose values the program may hold and change without the facade, what these held when the last
        #: run ended, and which of them were ever read from outside.
        self._shared: set[str] = set()
        self._glanced: dict[str, Any] = {}
        self._was_read: set[str] = set()
        #: The names of all attributes when ``__dict__`` was read from outside since the last run.
        self._names: frozenset[str] | None = None
        self.hooks = Hooks(copies)
        #: Facades in the object's attributes, whose copies the replicas' objects hold: what nobody holds is forgotten.
        self.held: dict[str, list[Any]] = {}
        #: Those that were there since the last run: the program may hold replica 0's objects behind them only.
        self._held_before: list[Any] = []
        #: Lists, dicts and keys where facades are in the place of replica 0's own objects.
        self._shown: list[tuple[Any, Any, Any]] = []

    def note_access(self, name: str) -> None:
        """Remember what an attribute of replica 0 holds, to tell later whether it was changed in place from outside."""
        if name not in self._seen and name not in self._parts_of(self.bodies[0]):
            if name in self.held:
                is_as_noted = name in self._glanced and not self._was_written(name)
                self._show_facades(name)
                if is_as_noted:
                    self._glanced[name] = glance(self.bodies[0].__dict__[name])
            value = self.bodies[0].__dict__.get(name)
            self._seen[name] = snapshot(value)
            self._share(name, value)
            self._was_read.add(name)
            for obj in self.held.get(name, ()):  # the program gets replica 0's own objects
                mirror = mirror_of(obj)
                for member in mirror._family() if mirror is not None else ():
                    member.note_all()
                    if member.is_module:
                        member.note_access("_modules")

    def write(self, name: str, value: Any) -> None:
        """Set an attribute of every replica's object from outside; of what each has a part of, it is replica 0's."""
        refuse_one_for_all(f"{type(self.bodies[0]).__name__}.{name}", value)
        values = self.replicas.values_for(value)
        if name in self._parts_of(self.bodies[0]):
            values = [values[0], *(copy.deepcopy(self._parts_of(body)[name]) for body in self.bodies[1:])]
        for body, own in zip(self.bodies, values, strict=True):
            setattr(body, name, own)
        self.hold(name, value)

    def with_metrics(self, reduced: Any) -> Any:
        """Return how a module is copied or pickled, with facades of its metrics: copies hold all replicas' parts."""
        state = reduced[2] if isinstance(reduced, tuple) and len(reduced) > 2 else None
        if not self.is_module or not isinstance(state, dict) or "_modules" not in state:
            return reduced
        children = dict(state["_modules"])
        for name, child in self.members["_modules"].items():
            mirror = mirror_of(child)
            if mirror is not None and any("__reduce_ex__" in member.outside for member in mirror._family()):
                children[name] = child
        return *reduced[:2], {**state, "_modules": children}, *reduced[3:]

    def hold(self, name: str, value: Any) -> None:
        """Keep the facades in an attribute's value for as long as it is the attribute."""
        held = [obj for obj in self.replicas.facades_in(value) if mirror_of(obj) is not self]
        self.release(name)
        if held:
            self.held[name] = held
        self._share(name, value)
        if name in self._shared:
            self.replicas.num_layouts += 1
            self._glanced[name] = _UNKNOWN

    def _share(self, name: str, value: Any) -> None:
        """Note whether the program may hold an attribute's value, and so change it at any time without the facade."""
        is_own = name in MODULE_INTERNALS or name in _OPTIMIZER_INTERNALS or "hook" in name
        if not is_own and name not in self._parts_of(self.bodies[0]) and can_change(value):
            self._shared.add(name)

    def _was_written(self, name: str) -> bool:
        before = self._glanced[name]
        return before is _UNKNOWN or differ(before, glance(self.bodies[0].__dict__.get(name)))

    def note_shared(self, known: dict[int, Any] | None = None) -> None:
        """Remember at the end of a run what attributes hold whose values the program may hold, too."""
        self._glanced = {}
        for name in [name for name in self._shared if name in self.bodies[0].__dict__]:
            if name in self.held and name in self._was_read:
                self._show_facades(name)
            self._glanced[name] = glance(self.bodies[0].__dict__[name], known)

    def _show_facades(self, name: str) -> None:
        """Put facades into the containers in an attribute of replica 0, in the place of its own objects behind them.

        A metric's result, for example, is that of all replicas.
        """
        for members, key, member in places_in(self.bodies[0].__dict__.get(name)):
            facade = self.shown(name, member)
            if facade is not member:
                members[key] = facade
                self._shown.append((members, key, facade))

    def hide_facades(self) -> None:
        """Put replica 0's own objects back when all changes are pushed: compilers must not meet facades."""
        while self._shown:
            members, key, facade = self._shown.pop()
            with contextlib.suppress(LookupError):
                if members[key] is facade:
                    members[key] = resolve(facade)

    def shown(self, name: str, value: Any) -> Any:
        """Return the facade of an object that an attribute holds, of another value the value."""
        for obj in self.held.get(name, ()):
            mirror = mirror_of(obj)
            if mirror is not None and mirror.bodies[0] is value:
                return obj
        return value

    def release(self, name: str) -> None:
        """Let go of an attribute's facades when the next run starts."""
        self._held_before += self.held.pop(name, ())

    def note_all(self) -> None:
        """Do so for all attributes."""
        self._names = self._names or frozenset(self.bodies[0].__dict__)
        for name in self.bodies[0].__dict__:
            if name not in MODULE_INTERNALS:
                self.note_access(name)

    def push_changes(self) -> None:
        """Give the other replicas what was changed in replica 0's attributes and hooks from outside."""
        self.push_hooks()
        push_attributes([self])

    def push_hooks(self) -> None:
        """Give them the hooks, and the children."""
        self.hooks.push(self.replicas.values_for)
        if "_modules" in self._seen:
            seen = self._seen.pop("_modules")
            if differ(seen, snapshot(self.bodies[0]._modules)):
                self._push_children(dict(seen))

    def changed(self, known: dict[int, Any]) -> dict[str, tuple[Any, Any]]:
        """Return the attributes of replica 0 that were changed from outside, with what was known of them and is."""
        state = self.bodies[0].__dict__
        found = {}
        for noted in (self._glanced, self._seen):
            for name, before in noted.items():
                value = state.get(name)
                now = snapshot(value) if noted is self._seen else glance(value, known)
                if before is _UNKNOWN or differ(before, now):
                    found[name] = before, now
        if self._names is not None:
            found.update((name, (_UNKNOWN, None)) for name in state if name not in self._names)
        if isinstance(self.bodies[0], Optimizer):
            found.pop("param_groups", None)  # they follow by themselves, and one around another optimizer has the same
        return found

    def follow(self, name: str, before: Any, now: Any) -> bool:
        """Make the changes in an attribute of replica 0 to those of the others, if it can be done there."""
        values = [body.__dict__.get(name, _UNKNOWN) for body in self.bodies]
        done = follow(values, before, now, self.replicas.values_for)
        if done:
            self.hold(name, values[0])
        return done

    def take(self, name: str, values: Sequence[Any]) -> None:
        """Set or delete an attribute of the other replicas, as replica 0's was from outside."""
        state = self.bodies[0].__dict__
        if name not in state:
            for body in self.bodies[1:]:
                body.__dict__.pop(name, None)
            self.release(name)
            return
        first = state[name]
        for body, value in zip(self.bodies[1:], values[1:], strict=True):
            body.__dict__[name] = value
            if isinstance(first, Tensor):  # the replica's own tensor, if it had one for it
                value.data = first.detach().to(value.device, copy=True)
        self.hold(name, first)

    def accept_changes(self) -> None:
        """Take what ``changed`` returned as known."""
        self._seen, self._names = {}, None
        self._held_before.clear()

    def _push_children(self, seen: dict[str, int]) -> None:
        """Give the other replicas the children that replica 0's module got and lost without the facade."""
        children = dict(self.bodies[0]._modules)
        for name in seen.keys() - children.keys():
            del self.members["_modules"][name]
        for name, child in children.items():
            if seen.get(name) != id(child):
                (self.members["_modules"][name],) = self.replicas.facades_in(child) or [child]

    def call_outside(self, name: str, /, *args: Any, **kwargs: Any) -> Any:
        """Call a method's counterpart for cross-replica context; in a run that it was handed to, the plain method."""
        local_id = self.replicas.current()
        if local_id is not None:
            return getattr(self.bodies[local_id], name)(*args, **kwargs)
        family = list(self._family())
        for mirror in family:
            mirror.push_changes()
        try:
            result = self.outside[name](self.replicas.strategy, self.bodies, *args, **kwargs)
            return self.replicas.facade_of(self) if result is self.bodies[0] else result
        finally:
            for mirror in family:  # what it changed on replica 0 only is meant so
                mirror.accept_changes()
                mirror.note_shared()

    def _family(self) -> Iterator[Mirror]:
        """Yield this mirror and those of a module's children, grandchildren and so on."""
        yield self
        for child in self.members["_modules"].values() if self.is_module else ():
            mirror = mirror_of(child)
            if mirror is not None:
                yield from mirror._family()

    def know(self, tensors: tuple[Tensor, ...]) -> None:
        """Note that one replica's tensors are each other's counterparts."""
        key, known = id(tensors[0]), self.known
        self.known[key] = (weakref.ref(tensors[0], lambda _: known.pop(key, None)), tensors[1:])

    def known_on(self, local_id: int) -> dict[int, Tensor]:
        """Return a replica's counterparts of replica 0's tensors by their ids."""
        living = [(key, reference(), others) for key, (reference, others) in self.known.copy().items()]
        return {key: others[local_id - 1] if local_id else t for key, t, others in living if t is not None}

    def counterparts(self, tensor: Tensor) -> tuple[Tensor, ...] | None:
        """Return the other replicas' counterparts of replica 0's tensor, if this module has or had it."""
        entry = self.known.get(id(tensor))
        return entry[1] if entry is not None and entry[0]() is tensor else None

    def method(self, name: str, *, reads: bool = False) -> Any:
        """Return a method as it is now: of the replica of a run that it is handed to, outside of all or replica 0's.

        Args:
            name: the method's name.
            reads: whether it only reads, so that replica 0's is enough.
        """
        methods = [getattr(body, name) for body in self.bodies]
        if name in self.outside:
            return _Method(self, name, methods, functools.partial(self.call_outside, name))
        return _Method(self, name, methods, methods[0] if reads else functools.partial(self.call_all, methods))

    def call_all(self, methods: Sequence[Any], /, *args: Any, **kwargs: Any) -> Any:
        """Call a method of every replica's object, one for each, and return replica 0's result."""
        if isinstance(self.bodies[0], Optimizer):
            self.replicas.copy_groups(self.bodies)
        given = tree.map_leaves(lambda leaf: list(leaf) if isinstance(leaf, _ITERATORS) else leaf, (args, kwargs))
        calls = self.replicas.values_for(given)
        results: list[Any] = []
        draws = not is_recorded(self.bodies[0])  # torch's optimizers and schedulers do not
        states = (torch.get_rng_state(), random.getstate(), np.random.get_state()) if draws else None
        for method, (a, k) in zip(methods, calls, strict=True):
            if states is not None and results:  # all draw the same, once
                torch.set_rng_state(states[0])
                random.setstate(states[1])
                np.random.set_state(states[2])
            results.append(method(*a, **k))
        return self.replicas.facade_of(self) if results[0] is self.bodies[0] else results[0]


class _Method:
    """A method that was read outside ``run``. It stays what it was, also where a wrapper has taken its place since."""

    __slots__ = ("_methods", "_mirror", "_name", "_outside")

    def __init__(self, mirror: Mirror, name: str, methods: Sequence[Any], outside: Any) -> None:
        self._mirror = mirror
        self._name = name
        self._methods = methods
        self._outside = outside

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        local_id = self._mirror.replicas.current()
        return (self._outside if local_id is None else self._methods[local_id])(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        if name in ("__wrapped__", *_Method.__slots__):  # not bound; of a copy that has none yet
            raise AttributeError(name)
        return getattr(self._methods[0], name)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        copied = memo.get(id(self._mirror.bodies[0]))
        return self if copied is None else getattr(copied, self._name)

    def __reduce__(self) -> Any:
        return getattr, (self._mirror.bodies[0], self._name)


def push_attributes(mirrors: Sequence[Mirror]) -> None:
    """Give the other replicas what was changed in attributes of replica 0 from outside.

    What several objects hold is copied once for each replica, so that they still hold the same.
    """
    known: dict[int, Any] = {}
    found = [(mirror, name, *states) for mirror in mirrors for name, states in mirror.changed(known).items()]
    changed = [(mirror, name) for mirror, name, before, now in found if not mirror.follow(name, before, now)]
    if changed:
        firsts = [mirror.bodies[0].__dict__.get(name) for mirror, name in changed]
        replicas = mirrors[0].replicas
        copies = replicas.values_for(firsts) if len(firsts) > 1 else [[v] for v in replicas.values_for(firsts[0])]
        for (mirror, name), values in zip(changed, zip(*copies, strict=True), strict=True):
            mirror.take(name, values)
    for mirror in mirrors:
        mirror.accept_changes()


class _Members(UserDict[str, Any]):
    """The children, parameters or buffers of a module's facade; a change reaches every replica's object.

    torch's containers and ``torch.nn.utils`` edit these dictionaries directly.
    """

    def __init__(self, mirror: Mirror, kind: str, data: dict[str, Any]) -> None:
        self.data = data
        self._mirror = weakref.ref(mirror)
        self._kind = kind

    def __getitem__(self, name: str) -> Any:
        return user_variable(self.data[name])

    def __setitem__(self, name: str, item: Any) -> None:
        mirror = self._owner()
        values = mirror.replicas.values_for(item)
        self.data[name] = item
        for body, value in zip(mirror.bodies, values, strict=True):
            body.__dict__[self._kind][name] = value
        mirror.is_stale = True

    def __delitem__(self, name: str) -> None:
        mirror = self._owner()
        del self.data[name]
        for body in mirror.bodies:
            body.__dict__[self._kind].pop(name, None)  # replica 0's parameters and buffers are `data`
        mirror.is_stale = True

    def _owner(self) -> Mirror:
        mirror = self._mirror()
        if mirror is None:
            raise RuntimeError("The module that these members belong to no longer exists.")
        return mirror


def mirror_of(obj: Any) -> Mirror | None:
    """Return the mirror of a facade, or ``None`` for a plain object."""
    return object.__getattribute__(obj, MIRROR) if IS_FACADE in type(obj).__dict__ else None


def bodies(obj: Any) -> tuple[Any, ...]:
    """Return this process's plain objects behind an object, one for each replica; ``(obj,)`` if it is plain."""
    mirror = mirror_of(obj)
    return (obj,) if mirror is None else mirror.bodies


def opened(obj: Any) -> contextlib.AbstractContextManager[Sequence[Any]]:
    """Return a context manager that gives one plain object for each replica of this process, to read and write.

    Unlike ``bodies`` it also does where one object serves several replicas.
    """
    mirror = mirror_of(obj)
    return replicas_of(obj) if mirror is None else contextlib.nullcontext(mirror.bodies)


def resolve(obj: Any) -> Any:
    """Return the plain object that a facade stands for here: the current replica's, outside a run replica 0's."""
    mirror = mirror_of(obj)
    if mirror is None:
        return obj
    return mirror.bodies[mirror.replicas.current() or 0]
