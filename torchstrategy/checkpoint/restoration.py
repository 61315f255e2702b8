"""One restore: what it has given to objects, and the values that wait for objects that are attached later."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from torchstrategy.checkpoint.tracked import Plan, Tracked

__all__ = ["Report", "Restoration", "join"]

_numbers = itertools.count()


class Report(NamedTuple):
    """How a checkpoint and the objects fit together now.

    Args:
        matched: names of the values that were restored.
        missing: names of the objects' values that the checkpoint lacks.
        unused: names of the checkpoint's values that no object has.
        added_in_place: names of objects that have values waiting for them, but came into a list or dict unnoticed.
    """

    matched: tuple[str, ...]
    missing: tuple[str, ...]
    unused: tuple[str, ...]
    added_in_place: tuple[str, ...]


class _Given(NamedTuple):
    """Which object got an entry of the checkpoint, and with what success."""

    obj: Callable[[], Any]
    matched: list[str]
    missing: list[str]
    unused: list[str]


class Restoration:
    """One call of ``restore``: entries of the checkpoint, each of which waits for its object or was given to it.

    An entry's values are forgotten as soon as it is given, or replaced by a later restore.

    Args:
        path: the checkpoint.
        saved: kind and state of each object in the checkpoint, by name.
    """

    def __init__(self, path: str, saved: Mapping[str, Any]) -> None:
        self.path = path
        #: Later restores have larger numbers.
        self.number = next(_numbers)
        self._names = tuple(saved)
        #: The entries that no object got. ``None`` stands for the values that a later restore replaced.
        self._waiting: dict[str, Any] = dict(saved)
        self._given: dict[str, _Given] = {}

    def has(self, name: str) -> bool:
        """Say whether values wait for an object of this name."""
        return self._waiting.get(name) is not None

    def waits_under(self, prefix: str) -> bool:
        """Say whether values wait for any object below a name."""
        return any(self.has(join(prefix, name)) for name in self.names_under(prefix))

    def names_under(self, prefix: str) -> Iterator[str]:
        """Yield the checkpoint's names below a name, without it."""
        start = prefix and prefix + "/"
        return (name.removeprefix(start) for name in self._names if name.startswith(start))

    def plan(self, name: str, item: Tracked, strategy: Any) -> Plan:
        """Check waiting values against an object; neither changes.

        Raises:
            ValueError: they do not fit.
        """
        entry = self._waiting[name]
        if entry["kind"] != item.kind:
            raise ValueError(
                f"{item.name} is a {item.kind}, but the checkpoint holds a {entry['kind']} under this name. Give the "
                "objects the names that they were saved under."
            )
        return item.plan(entry["state"], strategy)

    def give(self, name: str, item: Tracked, plan: Plan) -> None:
        """Change an object as planned."""
        plan.apply()
        self._given[name] = _Given(_reference(item.obj), plan.matched, plan.missing, plan.unused)
        del self._waiting[name]

    def replace(self, name: str) -> None:
        """Forget the values that wait under a name: a later restore brings others."""
        if name in self._waiting:
            self._waiting[name] = None

    def report(self, tracked: Mapping[str, Tracked]) -> Report:
        """Say how the checkpoint and the objects, by their names, fit together."""
        fitting = {
            name: given
            for name, given in self._given.items()
            if name not in tracked or given.obj() is tracked[name].obj
        }
        missing = [leaf for name, item in tracked.items() if name not in fitting for leaf in item.leaves()]
        return Report(
            matched=tuple(leaf for given in self._given.values() for leaf in given.matched),
            missing=tuple([leaf for given in fitting.values() for leaf in given.missing] + missing),
            unused=tuple([leaf for given in self._given.values() for leaf in given.unused] + list(self._waiting)),
            added_in_place=tuple(name for name in tracked if self.has(name)),
        )


def join(prefix: str, name: str) -> str:
    """Return a path: ``name`` below ``prefix``, either of which may be empty."""
    return f"{prefix}/{name}" if prefix and name else prefix or name


def _reference(obj: Any) -> Callable[[], Any]:
    try:
        return weakref.ref(obj)
    except TypeError:  # such as an object with __slots__
        return lambda: obj
