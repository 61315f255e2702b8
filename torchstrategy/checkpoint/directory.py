"""A directory of checkpoints: which there are, which is the latest, and who may write.

What is true of a directory stands in the seals of its files: by which attempt of the job each was written, and as the
how manyeth. The file ``checkpoint``, its index, says it in short, and what files can't say: which of them a manager
counts. An index that is lost, torn or older than the files is made anew of them.

Attempts are numbered, so that one that was stopped and wakes up after its successor has saved can't move the latest
checkpoint back (a fencing token, as in M. Kleppmann, Designing Data-Intensive Applications, 2017, chapter 8).
"""

from __future__ import annotations

import json
import os
import socket
import uuid
from collections.abc import Callable
from typing import Any, NamedTuple

from torchstrategy import errors
from torchstrategy.base.log import logger, warning_once
from torchstrategy.checkpoint.archive import FORMAT, SUFFIX, read_archive, read_seal
from torchstrategy.checkpoint.storage import delete_file, list_files, open_file, write_file

__all__ = ["Fence", "Index", "index_path", "publish", "read_index"]

_INDEX_NAME = "checkpoint"


class Order(NamedTuple):
    """Where a checkpoint stands among those of its directory: later ones are larger.

    Args:
        attempt: number of the job's attempt that wrote it. Releases without such numbers wrote attempt 0.
        sequence: how many checkpoints the directory had got by then.
    """

    attempt: int = 0
    sequence: int = 0


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
        return list(self.written)[-1]


class Fence:
    """What a writer of checkpoints knows of who else writes to the directory.

    Args:
        directory: the directory.
    """

    def __init__(self, directory: str) -> None:
        self.directory = directory
        self.renew()

    def renew(self) -> None:
        """Take up what was written so far: this writer goes on from it."""
        try:
            index = _read_or_rebuild(self.directory)
        except errors.DataLossError:  # a checkpoint may be restored by its path; nothing can be saved here
            index = None
        self._attempt, self._writer = (index.order.attempt, index.writer) if index else (0, "")

    def check(self) -> None:
        """Check that nobody else has written since.

        Raises:
            FailedPreconditionError: somebody has.
        """
        self._require(_read_or_rebuild(self.directory))

    def next(self) -> tuple[Index | None, Order]:
        """Return what there is, and where the next checkpoint of this writer stands.

        Raises:
            FailedPreconditionError: somebody else has written.
        """
        index = _read_or_rebuild(self.directory)
        self._require(index)
        if index is None:
            return None, Order(1, 1)
        is_own = index.writer == _writer()
        return index, Order(index.order.attempt + (not is_own), index.order.sequence + 1)

    def note(self, order: Order) -> None:
        """Note that this writer has written."""
        self._attempt, self._writer = order.attempt, _writer()

    def _require(self, index: Index | None) -> None:
        if index is None or index.writer == _writer() or (index.order.attempt, index.writer) == self._known:
            return
        raise errors.FailedPreconditionError(
            f"Nothing is saved to {self.directory}: {index.writer or 'another program'} has saved {index.latest} there "
            f"in the meantime, as attempt {index.order.attempt} of the job, and this process ({_writer()}) knew of "
            f"attempt {self._attempt} only. If the job was started again elsewhere, end this process. If two jobs "
            "write there, give each a directory of its own."
        )

    @property
    def _known(self) -> tuple[int, str]:
        return self._attempt, self._writer


def publish(
    fence: Fence,
    name: str,
    write: Callable[[str, dict[str, Any], Callable[[], None]], None],
    index: Index,
) -> None:
    """Write a checkpoint and make it the latest of its directory.

    Args:
        fence: the writer's.
        name: the checkpoint's, without folder and suffix.
        write: writes the file, given its path, what its seal says and the check as ``write_archive`` takes it.
        index: what the directory's index says afterwards, with this checkpoint as the latest. Those that are
            superfluous are deleted.

    Raises:
        FailedPreconditionError: somebody else has written to the directory; the latest checkpoint is theirs.
        OSError: the file can't be written; what was there before is unchanged.
    """
    directory = fence.directory
    before, order = fence.next()
    # With those that the last save should have deleted, and was killed before.
    superfluous = {*index.superfluous, *(before.superfluous if before else ())} - index.written.keys()
    written = index.written[name]
    about = {"attempt": order.attempt, "sequence": order.sequence, "written": written, "writer": _writer()}
    write(os.path.join(directory, name + SUFFIX), about, fence.check)
    # The list first: it must never name a file that is gone.
    text = json.dumps(
        {
            "latest": index.latest,
            "written": index.written,
            "last_preserved": index.last_preserved,
            "superfluous": sorted(superfluous),
            "attempt": order.attempt,
            "sequence": order.sequence,
            "writer": _writer(),
        },
        indent=1,
    ).encode()
    write_file(index_path(directory), lambda file: file.write(text), check=lambda: _check_not_overtaken(fence, order))
    fence.note(order)
    for old in superfluous:
        _delete(os.path.join(directory, old + SUFFIX), order)


def index_path(directory: str, filename: str | None = None) -> str:
    """Return the path of the file that names a directory's checkpoints."""
    return os.path.join(directory, filename or _INDEX_NAME)


def read_index(directory: str, filename: str | None = None) -> Index | None:
    """Return what there is in a directory, or ``None`` if nothing is and nothing was.

    Files that the index does not know, because a process was killed between the two or because the index is lost, torn
    or old, are taken up; a log line says so. So it does of files that are gone.

    Raises:
        DataLossError: the index names files outside the directory, or all that it names are gone.
    """
    found = _read_or_rebuild(directory, filename)
    if found is not None and not found.written:
        found = _read_or_rebuild(directory, filename)  # a writer was at it
    if found is None:
        return None
    path = index_path(directory, filename)
    if not found.written:
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


def _read_or_rebuild(directory: str, filename: str | None = None) -> Index | None:
    """Return what the index and the files say together."""
    index, is_damaged = _read(directory, filename)
    names = {name.removesuffix(SUFFIX) for name in list_files(directory) if name.endswith(SUFFIX)}
    if index is None:
        if filename is not None and not is_damaged:
            return None
        files = _files(directory, names, with_old=True)
        if not files and not is_damaged:
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
                order = Order(int(seal["attempt"]), int(seal["sequence"]))
                found[name] = _File(order, float(seal["written"]), str(seal["writer"]))
            elif seal is None and with_old and (number := _number(path)) is not None:
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


def _number(path: str) -> int | None:
    """Return which save wrote a file, in a release before the seal; ``None`` if none did."""
    content = read_archive(path, what="a checkpoint", remedy="", mapped=True)
    is_checkpoint = isinstance(content, dict) and content.get("format") == FORMAT
    return content.get("save_counter") if is_checkpoint else None


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


def _read(directory: str, filename: str | None) -> tuple[Index | None, bool]:
    """Return what the index says, or ``None`` and whether it is damaged.

    Raises:
        DataLossError: it names files outside the directory.
    """
    path = index_path(directory, filename)
    try:
        with open_file(path) as file:
            content = json.loads(file.read())
        written = {str(name): float(t) for name, t in content["written"].items()}
        order = Order(int(content.get("attempt", 0)), int(content.get("sequence", 0)))
        preserved = content["last_preserved"]
        index = Index(
            written,
            None if preserved is None else float(preserved),
            order,
            str(content.get("writer", "")),
            superfluous=tuple(map(str, content.get("superfluous", ()))),
        )
    except (FileNotFoundError, NotADirectoryError):
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


def _check_not_overtaken(fence: Fence, order: Order) -> None:
    """Check that no other attempt has written between this one's file and its index."""
    index = _read_or_rebuild(fence.directory)
    if index is not None and index.order > order:
        fence._require(index)


def _delete(path: str, order: Order) -> None:
    """Delete an old checkpoint, unless the file is another one of its name: of a later attempt, or of ``write``."""
    try:
        seal = read_seal(path)
        if seal is not None and not Order() < Order(int(seal.get("attempt", 0)), int(seal.get("sequence", 0))) < order:
            return
        delete_file(path)
    except FileNotFoundError:
        pass  # the program has deleted it, as tf's tutorial for several workers does
    except (OSError, ValueError) as error:  # the new checkpoint is complete; an old one that stays only takes room
        logger.warning("Could not delete the old checkpoint %s: %s", path, error)


def _writer() -> str:
    """Return the name of this process as a writer."""
    pid = os.getpid()
    if _process.get("pid") != pid:  # also in a forked child
        _process.update(pid=pid, name=f"process {pid} of {socket.gethostname()} ({uuid.uuid4().hex[:8]})")
    return str(_process["name"])


_process: dict[str, Any] = {}
