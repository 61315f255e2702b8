"""What belongs to recorded objects and parameters beside their values: hooks, and attributes of parameters.

What a run registers or sets is its replica's own; everything else belongs to all replicas. The program reaches replica
0's only, by ``register_...`` outside ``run``, by the handles that it has kept, and by the parameters themselves. What
it adds there or removes reaches the other replicas when the next run starts.
"""

from __future__ import annotations

import functools
import io
import itertools
import threading
import types
from collections import OrderedDict, deque
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from torchstrategy.replicas.fingerprints import (
    CONTAINERS,
    SCALARS,
    attributes_of,
    is_of_library,
    is_plain,
    is_recorded,
    snapshot,
)

__all__ = [
    "Belongings",
    "Hooks",
    "HooksWithin",
    "OwnQueue",
    "belongings_of",
    "copy_parameter_hooks",
    "members_held",
    "own_hook",
    "places_in",
    "push_belongings",
    "recorded_in",
]

#: Modules say themselves what they hold; from a thread or a stream one comes to the whole program, in a notebook to all
#: that its cells have made.
_NOT_ENTERED = (*SCALARS, type, types.ModuleType, Tensor, nn.Module, threading.Thread, io.IOBase)


def members_held(
    value: Any, known: Container[int] = (), is_closed: Callable[[Any], bool] = lambda _: False
) -> list[Any]:
    """Return a value and what its attributes and containers hold, however deep.

    Args:
        value: the value.
        known: ids of objects that are left out.
        is_closed: says whether an object is not looked into; modules, tensors and the like never are.
    """
    seen: dict[int, Any] = {}
    waiting = [value]
    while waiting:
        item = waiting.pop()
        if id(item) in seen or id(item) in known:
            continue
        seen[id(item)] = item
        if isinstance(item, _NOT_ENTERED) or is_closed(item):
            continue
        if isinstance(item, Mapping):
            waiting += [*item.keys(), *item.values()]
        elif isinstance(item, CONTAINERS):
            waiting += item
        elif isinstance(item, functools.partial):
            waiting += [item.func, item.args, item.keywords]
        elif isinstance(item, types.MethodType):
            waiting.append(item.__self__)
        elif not isinstance(item, types.FunctionType):
            waiting += attributes_of(item).values()
    return list(seen.values())


def recorded_in(value: Any) -> list[Any]:
    """Return the objects of the classes that a scope records which a value is or holds, however deep."""
    if is_plain(value):
        return []
    return [obj for obj in members_held(value, is_closed=is_recorded) if is_recorded(obj)]


def places_in(value: Any) -> Iterator[tuple[Any, Any, Any]]:
    """Yield the lists and dicts in a value, also in attributes of the user's objects, each key, and what is there.

    The library's and torch's objects are not looked into: what they hold is theirs.
    """

    def is_closed(item: Any) -> bool:
        return is_recorded(item) or is_of_library(item)

    for item in members_held(value, is_closed=is_closed):
        members = item if isinstance(item, (list, dict)) else None
        if members is None and not isinstance(item, _NOT_ENTERED) and not is_closed(item):
            members = getattr(item, "__dict__", None)
        if isinstance(members, (list, dict)):
            for key, member in list(enumerate(members)) if isinstance(members, list) else dict(members).items():
                yield members, key, member


_OF_PARAMETERS = ("_backward_hooks", "_post_accumulate_grad_hooks")
_OWN = "_ts_is_own_hook"


#: What a parameter has beside its values: the keys of its hooks of each kind, and a snapshot of its attributes.
Belongings = tuple[tuple[tuple[Any, ...], ...], Any]


class Hooks:
    """The hooks of one recorded object on every replica.

    Args:
        bodies: the replicas' objects.
    """

    def __init__(self, bodies: Sequence[Any]) -> None:
        self._bodies = bodies
        self._kinds = [
            [body.__dict__[name] for body in bodies]
            for name, value in bodies[0].__dict__.items()
            if "hook" in name and isinstance(value, dict)
        ]
        self._firsts = [dicts[0] for dicts in self._kinds]
        #: The keys of replica 0's hooks of each kind, or nothing if there are none.
        self._noted: tuple[tuple[Any, ...], ...] = ()
        self.note()

    def note(self) -> None:
        """Take replica 0's hooks as known to all replicas."""
        self._noted = self._keys()

    def _keys(self) -> tuple[tuple[Any, ...], ...]:
        return tuple(map(tuple, self._firsts)) if any(self._firsts) else ()  # most modules have none

    def push(self, values_for: Callable[[Any], Sequence[Any]]) -> None:
        """Add to the other replicas' hooks what was added to replica 0's since ``note``, and remove what was removed.

        Args:
            values_for: returns what a hook is on each replica.
        """
        now = self._keys()
        if now == self._noted:
            return
        none = ((),) * len(self._kinds)
        for dicts, before, after in zip(self._kinds, self._noted or none, now or none, strict=True):
            if before != after:
                for i, own in enumerate(dicts[1:], 1):
                    _follow(own, before, dicts[0], functools.partial(_value_on, values_for, i))
        for body in self._bodies[1:]:  # which modules note beside their hooks
            if "_is_full_backward_hook" in body.__dict__:
                body._is_full_backward_hook = self._bodies[0]._is_full_backward_hook
        self._noted = now


class HooksWithin:
    """The hooks of the modules within one: compiled code does not look whether they are still the same."""

    def __init__(self) -> None:
        self._newest = -1
        self._present: list[dict[int, Any]] = []

    def look(self, module: nn.Module) -> tuple[int, ...]:
        """Return the numbers of the hooks, which torch gives out in turn. Fast: called with each call of the module."""
        if self._newest != RemovableHandle.next_id:
            self._newest = RemovableHandle.next_id
            within = itertools.islice(module.modules(), 1, None)
            dicts = (getattr(child, f"_{kind}_hooks") for child in within for kind in _KINDS)
            self._present = [hooks for hooks in dicts if hooks]
        return tuple(itertools.chain.from_iterable(self._present))


_KINDS = ("forward_pre", "forward", "backward_pre", "backward")


def own_hook(hook: Callable[..., Any]) -> Callable[..., Any]:
    """Say that a hook of a parameter is for one replica's copy only."""
    setattr(hook, _OWN, True)
    return hook


class OwnQueue(deque[Any]):
    """Keeps what hooks of parameters are called with: its ``append`` is a hook of one replica's copy only."""


setattr(OwnQueue, _OWN, True)


def copy_parameter_hooks(parameter: Tensor, copied: Tensor) -> None:
    """Give a replica's copy of a parameter the hooks of the program's, in dictionaries of its own."""
    for name in _OF_PARAMETERS:
        hooks = getattr(parameter, name)
        if hooks:
            setattr(copied, name, OrderedDict((key, hook) for key, hook in hooks.items() if not _is_own(hook)))


def belongings_of(parameter: Tensor) -> Belongings:
    """Return what a parameter has beside its values."""
    first, second = parameter._backward_hooks, parameter._post_accumulate_grad_hooks
    attributes = parameter.__dict__
    return (tuple(first) if first else (), tuple(second) if second else ()), snapshot(attributes) if attributes else {}


def push_belongings(
    copies: Sequence[Tensor], before: Belongings, now: Belongings, values_for: Callable[[Any], Sequence[Any]]
) -> None:
    """Let the other replicas' copies of a parameter follow a change of replica 0's hooks and attributes.

    Args:
        copies: one for each replica.
        before: what ``belongings_of`` has returned for replica 0's.
        now: what it returns.
        values_for: returns what a value is on each replica.
    """
    (hooks_before, attributes_before), (hooks, attributes) = before, now
    for name, known, keys in zip(_OF_PARAMETERS, hooks_before, hooks, strict=True):
        if keys != known:
            for copied in copies[1:]:
                if getattr(copied, name) is None:
                    setattr(copied, name, OrderedDict())
                _follow(getattr(copied, name), known, getattr(copies[0], name) or {}, lambda hook: hook)
    if attributes_before != attributes:
        for copied, own in zip(copies[1:], values_for(dict(copies[0].__dict__))[1:], strict=True):
            copied.__dict__.clear()
            copied.__dict__.update(own)


def _is_own(hook: Any) -> bool:
    return hasattr(hook, _OWN) or hasattr(getattr(hook, "__self__", None), _OWN)


def _value_on(values_for: Callable[[Any], Sequence[Any]], local_id: int, hook: Any) -> Any:
    return values_for(hook)[local_id]


def _follow(own: dict[Any, Any], before: Sequence[Any], first: dict[Any, Any], copied: Callable[[Any], Any]) -> None:
    """Make the changes to a replica's hooks that replica 0's have gone through.

    Args:
        own: the replica's hooks, which are what they were.
        before: the keys of replica 0's hooks before.
        first: replica 0's hooks.
        copied: returns what a hook is on the replica.
    """
    # Hooks that both have registered in a run have other keys, but stand in the same order; so have the library's.
    keys = tuple(own) if len(own) == len(before) else before
    counterparts = dict(zip(before, keys, strict=True))
    ours = ([key for key, hook in hooks.items() if _is_own(hook)] for hooks in (first, own))
    counterparts.update(zip(*ours, strict=False))
    for key in before:
        if key not in first:
            own.pop(counterparts[key], None)
    order = []
    for key, hook in first.items():
        mine = counterparts.get(key, key)
        if key not in counterparts:
            own[mine] = copied(hook)
        order.append(mine)
    for key in [*order, *(key for key in own if key not in order)]:
        if key in own:
            own[key] = own.pop(key)
