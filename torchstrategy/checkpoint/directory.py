"""A directory of checkpoints: which there are, and which is the latest.

What is true of a directory stands in the seals of its files: by which attempt of the job each was written, and as the
how manyeth. The file ``checkpoint``, its index, says it in short, and what files can't say: which of them a manager
counts. An index that is lost, torn or older than the files is made anew of them.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import Any, NamedTuple

from torchstrategy import errors
from torchstrategy.base.log import warning_once
from torchstrategy.checkpoint.archive import FORMAT, SUFFIX, read_seal, read_unchecked
from torchstrategy.checkpoint.storage import list_files, open_file

__all__ = ["Index", "Order", "check_own", "index_path", "read_alone", "read_index", "read_or_rebuild"]

_INDEX_NAME = "checkpoint"


class Order(NamedTuple):
    """Where a checkpoint stands among those of its directory: later ones are larger.

    Args:
        attempt: number of the job's attempt that wrote it. Releases without such numbers wrote attempt 0.
        sequence: how many checkpoints the directory had got by then.
    """

    attempt: int = 0
    sequence: int = 0

    @classmethod
    def said_by(cls, content: Mapping[str, Any]) -> Order:
        """Return the order that a seal or an index says; the first if none."""
        return cls(int(content.get("attempt", 0)), int(content.get("sequence", 0)))


class Index(NamedTuple):
    """What there is in a directory.

    Args:
        written: when each checkpoint was written, by its name (without folder and suffix), the latest last.
        last_preserved: when the latest of those that are kept for good was written.
        order: where the latest checkpoint stands.
        writer: who wrote it.
        unlisted: older ones that ``save`` wrote as well, such as those that a manager keeps for good.
        superfluous: names of checkpoints that the latest save deletes, unless it is killed before.
        missing: names of checkpoints that are gone.
        loss: what is wrong with the index, if it is made of the files alone.
    """

    written: dict[str, float]
    last_preserved: float | None = None
    order: Order = Order()
    writer: str = ""
    unlisted: tuple[str, ...] = ()
    superfluous: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()
    loss: str = ""

    @property
    def latest(self) -> str:
        """Name of the latest checkpoint."""
        return [*self.missing, *self.written][-1]


def index_path(directory: str, filename: str | None = None) -> str:
    """Return the path of the file that names a directory's checkpoints."""
    return os.path.join(directory, filename or _INDEX_NAME)


def read_index(directory: str, filename: str | None = None, *, may_be_gone: bool = False) -> Index | None:
    """Return what there is in a directory, or ``None`` if nothing is and nothing was.

    Files that the index does not know, because a process was killed between the two or because the index is lost, torn
    or old, are taken up; a log line says so. So it does of files that are gone.

    Args:
        directory: the directory.
        filename: name of the index; ``None`` means ``checkpoint``.
        may_be_gone: whether ``None`` also stands for an index all of whose checkpoints are gone.

    Raises:
        DataLossError: the index names files outside the directory, or all that it names are gone.
    """
    found = read_or_rebuild(directory, filename)
    if found is not None and found.missing:
        found = read_or_rebuild(directory, filename)  # a writer was at it
    if found is None:
        return None
    path = index_path(directory, filename)
    if not found.written:
        if may_be_gone:
            return None
        raise errors.DataLossError(
            f"{path} names {', '.join(found.missing[:5])}, but no checkpoint is in {directory}. Put the files back. To "
            f"start without them, delete {path}."
        )
    if found.loss:
        warning_once(
            f"{path} {found.loss}. The checkpoints of the directory are known by their files: "
            f"{', '.join(list(found.written)[-5:])} (the latest is the last)."
        )
    if found.missing:
        warning_once(
            f"{path} names {', '.join(found.missing[:5])}, which is gone. The latest checkpoint that is there is "
            f"{found.latest}."
        )
    return found


def check_own(directory: str, name: str, argument: str, otherwise: str = "") -> None:
    """Check that a directory holds no checkpoints of another name, which would be deleted when they are too many.

    Args:
        directory: the directory.
        name: what the own ones' names begin with.
        argument: what the directory was given as, for the message.
        otherwise: what can be given instead of another directory, as the end of the message.

    Raises:
        ValueError: it does.
    """
    index = read_index(directory)
    others = [other for other in (index.written if index else {}) if not other.startswith(f"{name}-")]
    if others:
        raise ValueError(
            f"{argument}={directory!r}: the directory holds other checkpoints, such as {others[-1]!r}, which would be "
            f"deleted. Give it a directory of its own{otherwise}."
        )


def read_or_rebuild(directory: str, filename: str | None = None, *, with_old: bool = True) -> Index | None:
    """Return what the index and the files say together.

    Args:
        directory: the directory.
        filename: name of the index; ``None`` means ``checkpoint``.
        with_old: whether to look for files of releases before the seal, if there is no index.

    Raises:
        DataLossError: the index names files outside the directory, or is damaged and there are no others.
    """
    index, is_damaged = read_alone(directory, filename)
    names = {name.removesuffix(SUFFIX) for name in list_files(directory) if name.endswith(SUFFIX)}
    if index is None:
        if filename is not None and not is_damaged:
            return None
        files = _files(directory, names, with_old=with_old)
        if not files and not (is_damaged and with_old):
            return None
        if not files:
            raise errors.DataLossError(
                f"{index_path(directory, filename)} is damaged: it should be the JSON file that names the directory's "
                "checkpoints, and none are there. Delete it to start anew."
            )
        return _rebuilt(files, "is damaged" if is_damaged else "is lost")
    files = _files(directory, names, with_old=False)
    # One with another time is of an earlier attempt that woke up, or newer than the index.
    there = {
        name: written
        for name, written in index.written.items()
        if name in names and (name not in files or files[name].written == written)
    }
    missing = tuple(name for name in index.written if name not in there)
    # Without any that the index names, whatever is left.
    newer = {
        name: file
        for name, file in files.items()
        if name not in there and (file.order > index.order or (not there and name not in index.written))
    }
    order, writer = max([(index.order, index.writer), *((file.order, file.writer) for file in newer.values())])
    return index._replace(
        written={**there, **{name: file.written for name, file in newer.items()}},
        order=order,
        writer=writer,
        unlisted=tuple(name for name in files if name not in index.written and name not in newer),
        missing=tuple(name for name in missing if name not in newer),
    )


class _File(NamedTuple):
    """What the seal of a checkpoint says of it."""

    order: Order
    written: float
    writer: str


def _files(directory: str, names: set[str], *, with_old: bool) -> dict[str, _File]:
    """Return those of a directory's files that ``save`` wrote, the latest last.

    Args:
        directory: the directory.
        names: the files, without suffix.
        with_old: whether to look for those of releases before the seal, which have to be read.
    """
    found: dict[str, _File] = {}
    for name in names:
        path = os.path.join(directory, name + SUFFIX)
        try:
            seal = _known_seal(path)
            if seal is not None and "attempt" in seal:
                found[name] = _File(Order.said_by(seal), float(seal["written"]), str(seal["writer"]))
            elif seal is None and with_old and (number := _number(directory, name)) is not None:
                # Not by the file's time, which a copy changes.
                found[name] = _File(Order(0, number), os.stat(path).st_mtime, "")
        except (OSError, ValueError, TypeError, LookupError, errors.DataLossError):
            continue  # just deleted, or no checkpoint
    return dict(sorted(found.items(), key=lambda item: (item[1].order, item[1].written)))


def _known_seal(path: str) -> dict[str, Any] | None:
    """Return a file's seal, which is read once as long as the file is the same."""
    try:
        stat = os.stat(path)
    except OSError:  # not on this host's file systems
        return read_seal(path)
    key = (stat.st_dev, stat.st_ino, stat.st_mtime_ns, stat.st_size)
    if key not in _seals:
        if len(_seals) > _MAX_SEALS:
            _seals.clear()
        _seals[key] = read_seal(path)
    return _seals[key]


_seals: dict[tuple[int, ...], dict[str, Any] | None] = {}
_MAX_SEALS = 10_000


def _number(directory: str, name: str) -> int | None:
    """Return which save wrote a file, in a release before the seal; ``None`` if none did."""
    number = name.rpartition("-")[2]
    if not number.isdecimal():
        return None
    content = read_unchecked(os.path.join(directory, name + SUFFIX))
    is_saved = isinstance(content, dict) and content.get("format") == FORMAT
    return int(number) if is_saved and content.get("save_counter") == int(number) else None


def _rebuilt(files: dict[str, _File], loss: str) -> Index:
    """Return what an index said that is lost.

    A manager lists its latest checkpoints. Where the one that was written next is gone, it was deleted, so those
    before are kept for good.
    """
    names = list(files)
    first = len(names) - 1
    while first > 0 and files[names[first - 1]].order.sequence >= files[names[first]].order.sequence - 1:
        first -= 1
    last = files[names[-1]]
    return Index(
        {name: files[name].written for name in names[first:]},
        files[names[first - 1]].written if first else None,
        last.order,
        last.writer,
        unlisted=tuple(names[:first]),
        loss=loss,
    )


def read_alone(directory: str, filename: str | None = None) -> tuple[Index | None, bool]:
    """Return what the index says, or ``None`` and whether it is damaged.

    Raises:
        DataLossError: it names files outside the directory.
    """
    path = index_path(directory, filename)
    try:
        with open_file(path) as file:
            content = json.loads(file.read())
        written = {str(name): float(t) for name, t in content["written"].items()}
        preserved = content["last_preserved"]
        index = Index(
            written,
            None if preserved is None else float(preserved),
            Order.said_by(content),
            str(content.get("writer", "")),
            superfluous=tuple(map(str, content.get("superfluous", ()))),
        )
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
        return None, False
    except (ValueError, TypeError, LookupError, AttributeError):
        return None, True
    # What it names is read, and deleted when it is old: files of this directory only.
    foreign = [
        name for name in (*written, *index.superfluous) if name in ("", ".", "..") or os.path.basename(name) != name
    ]
    if foreign:
        raise errors.DataLossError(
            f"{path} names {foreign[0]!r}, which is no checkpoint of its directory. Was it written by somebody else? "
            "Take the name out, or delete the file and restore a checkpoint by its path."
        )
    return (index, False) if written else (None, True)
