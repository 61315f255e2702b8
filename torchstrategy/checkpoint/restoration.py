"""One restore: what it has given to objects, the values that wait for others; and what ``restore`` returns of it."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from torchstrategy.base.context import reporting_failures
from torchstrategy.base.log import add_note, logger
from torchstrategy.checkpoint.tracked import Plan, Tracked

__all__ = ["CheckpointLoadStatus", "InitializationOnlyStatus", "Restoration", "join"]

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
        self._strategy: Any = None  # of the objects
        self._given: dict[str, _Given] = {}

    @property
    def unused(self) -> list[str]:
        """Names of the checkpoint's values that no object has, as of now."""
        return [leaf for given in self._given.values() for leaf in given.unused] + list(self._waiting)

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
        self._strategy = strategy
        entry = self._waiting[name]
        if entry["kind"] != item.kind:
            raise ValueError(
                f"{item.name} is a {item.kind}, but the checkpoint holds a {entry['kind']} under this name. Give the "
                "objects the names that they were saved under."
            )
        if (saved := entry.get("class", item.class_name)) != item.class_name:
            raise ValueError(
                f"The checkpoint's {item.name} is a {saved}, the object is a {item.class_name}. Restore it into one of "
                "the same class, or leave it out."
            )
        return item.plan(entry["state"], strategy)

    def require_match(self, tracked: Mapping[str, Tracked], plans: Mapping[str, Plan]) -> None:
        """Check that a checkpoint has anything for the objects that are there.

        Raises:
            ValueError: it has not.
        """
        wanted = [leaf for item in tracked.values() for leaf in item.leaves()]
        # A scaler that was disabled is there, and has no values.
        if wanted and all(plan.unused and not plan.matched for plan in plans.values()):
            raise ValueError(
                f"Nothing in the checkpoint {self.path} matches an object, so nothing was restored. It holds "
                f"{_in_short(self._names)}; the objects are {_in_short(wanted)}. Give the objects the names that they "
                "were saved under. To restore values for objects that come later, restore into a "
                "ts.train.Checkpoint() without objects and attach them."
            )

    def give(self, name: str, item: Tracked, plan: Plan) -> None:
        """Change an object as planned."""
        try:
            with reporting_failures(self._strategy, f"restoring {item.name} of {self.path}"):
                plan.apply()
        except Exception as error:
            add_note(
                error, f"Raised by {item.name} when it got its values of {self.path}. Other objects may have theirs."
            )
            raise
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
            unused=tuple(self.unused),
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


class CheckpointLoadStatus:
    """Which values a restore matched, as of now.

    Args:
        restoration: the restore.
        track: returns the objects of the checkpoint by their names.
    """

    def __init__(self, restoration: Restoration, track: Callable[[], Mapping[str, Tracked]]) -> None:
        self.path = restoration.path
        self._restoration = restoration
        self._track = track
        self._untold: weakref.finalize[Any, Any] | None = None

    def _warn_unless_asked(self, missing: Sequence[str]) -> None:
        """Warn of values that the checkpoint lacks when this status is dropped, or at exit, if nobody asks before."""
        self._untold = weakref.finalize(self, _warn_of, self._restoration, missing)

    def _note_asked(self) -> None:
        if self._untold is not None:
            self._untold.detach()

    @property
    def matched(self) -> tuple[str, ...]:
        """Names of the values that were restored."""
        return self._report().matched

    @property
    def missing(self) -> tuple[str, ...]:
        """Names of the objects' values that the checkpoint lacks."""
        return self._report().missing

    @property
    def unused(self) -> tuple[str, ...]:
        """Names of the checkpoint's values that no object has; those that wait for an object are among them."""
        return self._report().unused

    def __repr__(self) -> str:
        report = self._report()
        counts = f"matched={len(report.matched)}, missing={len(report.missing)}, unused={len(report.unused)}"
        return f"{type(self).__name__}({counts})"

    def assert_consumed(self) -> CheckpointLoadStatus:
        """Check that the objects and the checkpoint hold the same values.

        Raises:
            ValueError: they do not.
        """
        self.assert_existing_objects_matched()
        unused = self.unused
        if unused:
            raise ValueError(
                f"The checkpoint {self.path} holds values that no object has: {_in_short(unused)}. Attach objects "
                "under these names, or call expect_partial() instead."
            )
        return self

    def assert_existing_objects_matched(self) -> CheckpointLoadStatus:
        """Check that the objects got all their values from the checkpoint. It may hold more.

        Raises:
            ValueError: they did not.
        """
        self._note_asked()
        report = self._report()
        if report.added_in_place:
            raise ValueError(
                f"The checkpoint {self.path} holds values for {_in_short(report.added_in_place)}, which came into a "
                "list or dict after the restore, where that is not noticed. Assign the list or dict to the checkpoint "
                "again."
            )
        if report.missing:
            raise ValueError(
                f"The checkpoint {self.path} lacks values of the objects, which stay as they were: "
                f"{_in_short(report.missing)}.{_of_unused(report.unused)}"
            )
        return self

    def assert_nontrivial_match(self) -> CheckpointLoadStatus:
        """Check that anything was restored.

        Raises:
            ValueError: nothing was.
        """
        self._note_asked()
        report = self._report()
        if not report.matched:
            raise ValueError(
                f"Nothing in the checkpoint {self.path} matches an object. It holds {_in_short(report.unused)}; "
                f"the objects are {_in_short(report.missing)}."
            )
        return self

    def expect_partial(self) -> CheckpointLoadStatus:
        """Say that a partial match is meant, so that nothing warns of it; checks nothing."""
        self._note_asked()
        return self

    def _report(self) -> Report:
        return self._restoration.report(self._track())


class InitializationOnlyStatus(CheckpointLoadStatus):
    """The status of ``restore(None)``: nothing was restored, and only ``expect_partial`` is content with that."""

    def __init__(self) -> None:
        super().__init__(Restoration("None", {}), dict)

    def assert_consumed(self) -> CheckpointLoadStatus:
        """Raise."""
        raise ValueError(_NO_PATH)

    def assert_existing_objects_matched(self) -> CheckpointLoadStatus:
        """Raise."""
        raise ValueError(_NO_PATH)

    def assert_nontrivial_match(self) -> CheckpointLoadStatus:
        """Raise."""
        raise ValueError(_NO_PATH)


_NO_PATH = "No checkpoint was given (save_path=None); nothing was restored."


def _of_unused(names: Sequence[str]) -> str:
    return f" It holds values of {_in_short(names)}, which no object has." if names else ""


def _warn_of(restoration: Restoration, missing: Sequence[str]) -> None:
    logger.warning(
        "The checkpoint %s lacks values of %s, which stayed as they were.%s Give the objects the names that they were "
        "saved under; if it is meant, call expect_partial() of what restore returns.",
        restoration.path,
        _in_short(missing),
        _of_unused(restoration.unused),
    )


def _in_short(names: Sequence[str]) -> str:
    shown = ", ".join(names[:10]) or "nothing"
    return f"{shown} and {len(names) - 10} more" if len(names) > 10 else shown
