"""Who may write to a directory of checkpoints, and how a checkpoint becomes its latest.

Attempts of a job are numbered, so that one that was stopped and wakes up after its successor has saved can't move the
latest checkpoint back (a fencing token, as in M. Kleppmann, Designing Data-Intensive Applications, 2017, chapter 8).
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import socket
import uuid
from collections.abc import Callable
from typing import Any

from torchstrategy import errors
from torchstrategy.base.log import logger, warning_once
from torchstrategy.checkpoint.archive import SUFFIX, read_seal
from torchstrategy.checkpoint.directory import Index, Order, index_path, read_alone, read_or_rebuild
from torchstrategy.checkpoint.storage import delete_file, is_file, write_file

__all__ = ["Fence", "publish"]

_NUMBERED = re.compile(r"(.+)-\d+")


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
            index = read_or_rebuild(self.directory, with_old=False)
        except (OSError, errors.DataLossError):  # a checkpoint may be restored by its path; nothing can be saved here
            index = None
        self._known = (index.order.attempt, index.writer) if index else (0, "")

    def check(self) -> None:
        """Check that nobody else has written since.

        Raises:
            FailedPreconditionError: somebody has.
        """
        self._require(read_or_rebuild(self.directory, with_old=False))

    def next(self) -> tuple[Index | None, Order]:
        """Return what there is, and where the next checkpoint of this writer stands.

        Raises:
            FailedPreconditionError: somebody else has written.
        """
        index = read_or_rebuild(self.directory, with_old=False)
        self._require(index)
        if index is None:
            return None, Order(1, 1)
        is_own = index.writer == _writer()
        return index, Order(index.order.attempt + (not is_own), index.order.sequence + 1)

    def note(self, order: Order) -> None:
        """Note that this writer has written."""
        self._known = order.attempt, _writer()

    def _require(self, index: Index | None) -> None:
        if index is None or index.writer == _writer() or (index.order.attempt, index.writer) == self._known:
            return
        raise errors.FailedPreconditionError(
            f"Nothing is saved to {self.directory}: {index.writer or 'another program'} has saved {index.latest} there "
            f"in the meantime, as attempt {index.order.attempt} of the job, and this process ({_writer()}) knew of "
            f"attempt {self._known[0]} only. If the job was started again elsewhere, end this process. If two jobs "
            "write there, give each a directory of its own. If both are ranks of one job, the checkpoint holds nothing "
            "that was made in its strategy's scope: save within `with strategy.scope():`, and the chief writes for all."
        )


def publish(
    fence: Fence,
    name: str,
    write: Callable[[str, dict[str, Any], Callable[[], None]], None],
    index: Index,
    *,
    is_numbered: bool = True,
) -> None:
    """Write a checkpoint and make it the latest of its directory.

    Args:
        fence: the writer's.
        name: the checkpoint's, without folder and suffix.
        write: writes the file, given its path, what its seal says and the check as ``write_archive`` takes it.
        index: what the directory's index says afterwards, with this checkpoint as the latest. Those that are
            superfluous are deleted.
        is_numbered: whether the name ends in a number, and checkpoints that begin in another way are another manager's.

    Raises:
        FailedPreconditionError: somebody else has written to the directory; the latest checkpoint is theirs.
        OSError: the file can't be written; what was there before is unchanged.
    """
    directory = fence.directory
    before, order = fence.next()
    if is_numbered and before is not None:
        _note_other_names(directory, name, before)
    # With those that the last save should have deleted, and was killed before.
    superfluous = {*index.superfluous, *(before.superfluous if before else ())} - index.written.keys()
    written = index.written[name]
    about = {"attempt": order.attempt, "sequence": order.sequence, "written": written, "writer": _writer()}
    path = os.path.join(directory, name + SUFFIX)
    is_new = not is_file(path)
    write(path, about, fence.check)
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
    try:
        write_file(
            index_path(directory), lambda file: file.write(text), check=lambda: _check_not_overtaken(fence, order)
        )
    except OSError:
        if is_new:  # it would be found by itself, though its save has failed; what it has replaced is gone in any case
            _take_back(directory, name, order)
        raise
    fence.note(order)
    for old in superfluous:
        _delete(os.path.join(directory, old + SUFFIX), order)


def _note_other_names(directory: str, name: str, before: Index) -> None:
    numbered = [_NUMBERED.fullmatch(other) for other in (name, *before.written)]
    beginnings = sorted({found[1] for found in numbered if found})
    if len(beginnings) > 1:
        warning_once(
            f"Checkpoints {'-... and '.join(beginnings)}-... are saved to one directory, {directory}, whose latest is "
            "the one that was saved last: a program that is started again goes on from that, whichever it wants. Give "
            "each CheckpointManager a directory of its own."
        )


def _check_not_overtaken(fence: Fence, order: Order) -> None:
    """Check that no other attempt has written between this one's file and its index."""
    index = read_or_rebuild(fence.directory, with_old=False)
    if index is not None and index.order > order:
        fence._require(index)


def _take_back(directory: str, name: str, order: Order) -> None:
    """Delete a file that this process has just written, unless the index knows it after all."""
    path = os.path.join(directory, name + SUFFIX)
    with contextlib.suppress(OSError, ValueError):
        seal = read_seal(path)
        index, _ = read_alone(directory)
        is_known = index is not None and name in index.written and index.order >= order
        if seal is not None and Order.said_by(seal) == order and seal.get("writer") == _writer() and not is_known:
            delete_file(path)


def _delete(path: str, order: Order) -> None:
    """Delete an old checkpoint, unless the file is another one of its name: of a later attempt, or of ``write``."""
    try:
        seal = read_seal(path)
        if seal is not None and not Order() < Order.said_by(seal) < order:
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
