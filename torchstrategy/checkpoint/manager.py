"""Keeping the last few checkpoints of a directory, and going on from the newest that is whole."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from typing import Any

from torchstrategy import errors
from torchstrategy.base.log import logger
from torchstrategy.base.names import lines_of_ranks
from torchstrategy.checkpoint.archive import DamagedError
from torchstrategy.checkpoint.background import CheckpointOptions, takes_async
from torchstrategy.checkpoint.checkpoint import Checkpoint
from torchstrategy.checkpoint.directory import Index, read_index
from torchstrategy.checkpoint.storage import delete_leftovers

__all__ = ["CheckpointManager", "restore_newest"]

_SECONDS_PER_HOUR = 3600.0


class CheckpointManager:
    """Saves numbered checkpoints to one directory and deletes old ones.

    Every process makes one and calls its methods; the chief writes and deletes, and so does a process with a directory
    of its own. A new manager knows the checkpoints that the directory's earlier manager kept. Call
    ``restore_or_initialize`` before saving to go on with their numbering.

    Args:
        checkpoint: what to save.
        directory: where to; made at the first save.
        max_to_keep: how many checkpoints to keep; ``None`` keeps all.
        keep_checkpoint_every_n_hours: when a checkpoint would be deleted, keep it for good if the last one kept so is
            at least this many hours older; ``None`` deletes all.
        checkpoint_name: beginning of the file names: ``<checkpoint_name>-<number>.pt``.
        step_counter: what ``int()`` reads the current step from: a tensor, a variable, or an object with ``__int__``.
        checkpoint_interval: fewest steps between two saves; ``None`` saves at every call.
        init_fn: called by ``restore_or_initialize`` if there is no checkpoint.

    Raises:
        ValueError: ``max_to_keep`` is not positive, or there is an interval without a ``step_counter``.
        TypeError: ``checkpoint`` is no ``Checkpoint``, or the ``step_counter`` is a Python number, which no training
            loop can change.

    Example:
        >>> import tempfile
        >>> folder = tempfile.TemporaryDirectory()
        >>> checkpoint = ts.train.Checkpoint(model=torch.nn.Linear(1, 1))
        >>> manager = ts.train.CheckpointManager(checkpoint, folder.name, max_to_keep=2)
        >>> _ = [manager.save() for _ in range(3)]
        >>> [path.removeprefix(folder.name) for path in manager.checkpoints]
        ['/ckpt-2', '/ckpt-3']
        >>> folder.cleanup()
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        directory: str | os.PathLike[str],
        max_to_keep: int | None,
        keep_checkpoint_every_n_hours: float | None = None,
        checkpoint_name: str = "ckpt",
        step_counter: Any = None,
        checkpoint_interval: int | None = None,
        init_fn: Callable[[], Any] | None = None,
    ) -> None:
        if not isinstance(checkpoint, Checkpoint):
            raise TypeError(
                f"checkpoint must be a ts.train.Checkpoint, such as ts.train.Checkpoint(model=model). Received a "
                f"{type(checkpoint).__name__}."
            )
        if max_to_keep is not None and max_to_keep <= 0:
            raise ValueError(f"Expected a positive integer or None for max_to_keep. Received: {max_to_keep}")
        if checkpoint_interval is not None and step_counter is None:
            raise ValueError(
                "checkpoint_interval needs a step_counter, which says how many steps were made since the last save. "
                "Pass for example step_counter=torch.tensor(0) and add 1 to it in every step."
            )
        if isinstance(step_counter, (int, float)):
            raise TypeError(
                f"step_counter is the number {step_counter!r}, which stays what it is. Pass for example "
                "step_counter=torch.tensor(0) and add 1 to it in every step."
            )
        self._checkpoint = checkpoint
        self._directory = os.fspath(directory)
        self._max_to_keep = max_to_keep
        self._keep_every_h = keep_checkpoint_every_n_hours
        self._name = checkpoint_name
        self._step_counter = step_counter
        self._interval = checkpoint_interval
        self._init_fn = init_fn
        self._last_step: int | None = None
        self._last_preserved = 0.0
        #: Name of each checkpoint that may be deleted, and when it was written; oldest first.
        self._times: dict[str, float] = {}
        self._unlisted: list[str] = []  # which can be restored, too
        self._look(may_be_gone=True)

    @property
    def directory(self) -> str:
        """Where the checkpoints are."""
        return self._directory

    @property
    def checkpoint(self) -> Checkpoint:
        """What is saved."""
        return self._checkpoint

    @property
    def checkpoint_interval(self) -> int | None:
        """Fewest steps between two saves."""
        return self._interval

    @property
    def checkpoints(self) -> list[str]:
        """Paths of the checkpoints that are kept, oldest first."""
        return [self._path(name) for name in self._times]

    @property
    def latest_checkpoint(self) -> str | None:
        """Path of the checkpoint that was saved last, or ``None``."""
        return self.checkpoints[-1] if self._times else None

    def save(
        self,
        checkpoint_number: int | None = None,
        check_interval: bool = True,  # noqa: FBT001, FBT002 - tf's
        options: CheckpointOptions | None = None,
    ) -> str | None:
        """Save a checkpoint and delete those that are too many.

        Args:
            checkpoint_number: its number, anything that ``int()`` reads; ``None`` goes on counting.
            check_interval: ``False`` saves even if fewer than ``checkpoint_interval`` steps were made.
            options: ``ts.train.CheckpointOptions(enable_async=True)`` lets training go on while a thread writes.

        Returns:
            The path to give to ``Checkpoint.restore``; ``None`` if it is too early to save.

        Raises:
            RuntimeError: called in replica context, or another process could not write.
            OSError: the file can't be written. Earlier checkpoints are unchanged.
        """
        is_async = takes_async(options)
        step = None if self._interval is None else int(self._step_counter)
        if check_interval and self._is_too_early(step):
            return None
        self._checkpoint._finish()  # which may take one away from those that count
        number = self._checkpoint.save_counter + 1 if checkpoint_number is None else int(checkpoint_number)
        name = f"{self._name}-{number}"
        times = {n: t for n, t in self._times.items() if n != name} | {name: time.time()}
        deleted, preserved = self._choose_deleted(times)
        kept = {n: t for n, t in times.items() if n not in deleted and n not in preserved}
        last_preserved = max([self._last_preserved, *(times[n] for n in preserved)])

        before = self._times, self._last_preserved, self._last_step

        def undo() -> None:
            self._times, self._last_preserved, self._last_step = before

        index = Index(kept, last_preserved, superfluous=tuple(deleted))
        self._checkpoint._save_as(self._path(name), index, is_async=is_async, undo=undo)
        self._times, self._last_preserved, self._last_step = kept, last_preserved, step
        return self._path(name)

    def sync(self) -> None:
        """Wait until the last asynchronous save is complete. With several processes, all must call it.

        Raises:
            RuntimeError: it could not be written; it is no checkpoint of this manager any more.
        """
        self._checkpoint.sync()

    def restore_or_initialize(self) -> str | None:
        """Restore the latest checkpoint; if there is none, call ``init_fn``.

        If the latest is damaged, the newest one before it that is whole is restored, and a log line says so. What
        processes left in the directory that were killed while they saved is deleted.

        Returns:
            The path of the checkpoint, or ``None`` if there is none.

        Raises:
            DataLossError: there are checkpoints, but none is whole; or they were not written by this library.
            ValueError: the checkpoint does not fit the objects, or has none of their names.
            RuntimeError: the processes see different checkpoints.
        """
        self.sync()
        self._look()
        if self._checkpoint._strategy().is_chief:
            delete_leftovers(self._directory)  # also if there is nothing to restore
        restored = self._restore_newest(lambda path: self._checkpoint._restore(path, must_match=True))
        if restored is None:
            if self._init_fn is not None:
                self._init_fn()
            return None
        if self._interval is not None:
            self._last_step = int(self._step_counter)
        return restored

    def _restore_newest(self, restore: Callable[[str], Any]) -> str | None:
        """Do what ``restore_newest`` does, if all processes see the same checkpoints."""
        self._check_all_see(self.latest_checkpoint)
        return restore_newest([*self._unlisted, *self.checkpoints], restore)

    def _look(self, *, may_be_gone: bool = False) -> None:
        """Take up which checkpoints are in the directory, of whatever attempt of the job."""
        self._checkpoint._fence(self._directory).renew()
        index = read_index(self._directory, may_be_gone=may_be_gone) or Index({})
        self._last_preserved = time.time() if index.last_preserved is None else index.last_preserved
        self._times = dict(index.written)
        self._unlisted = [self._path(name) for name in index.unlisted]

    def _path(self, name: str) -> str:
        return os.path.join(self._directory, name)

    def _is_too_early(self, step: int | None) -> bool:
        if self._interval is None or step is None or self._last_step is None:
            return False
        return step < self._last_step + self._interval

    def _choose_deleted(self, times: dict[str, float]) -> tuple[list[str], list[str]]:
        """Return the names of those that are too many: to be deleted, and to be kept for good."""
        deleted: list[str] = []
        preserved: list[str] = []
        last = self._last_preserved
        num_superfluous = 0 if self._max_to_keep is None else max(0, len(times) - self._max_to_keep)
        for name in list(times)[:num_superfluous]:
            if self._keep_every_h is not None and times[name] - last >= self._keep_every_h * _SECONDS_PER_HOUR:
                preserved.append(name)
                last = times[name]
            else:
                deleted.append(name)
        return deleted, preserved

    def _check_all_see(self, latest: str | None) -> None:
        workers = self._checkpoint._strategy().workers
        if workers is None:
            return
        seen = workers.exchange("restore_or_initialize", latest and os.path.basename(latest))
        if any(name != seen[0] for name in seen):
            raise RuntimeError(
                f"The ranks see different latest checkpoints in {self._directory}:\n{lines_of_ranks(seen)}\nThe "
                "directory must be on a file system that all hosts share."
            )


def restore_newest(paths: Sequence[str], restore: Callable[[str], Any]) -> str | None:
    """Restore the newest checkpoint that is whole.

    Args:
        paths: the checkpoints, the newest last.
        restore: called with a path; if there are several processes, all restore or all raise.

    Returns:
        Its path; ``None`` if there are none.

    Raises:
        DataLossError: none is whole.
    """
    for i, path in enumerate(reversed(paths), start=1):
        try:
            restore(path)
        except (DamagedError, errors.NotFoundError) as error:
            if i == len(paths):
                raise
            logger.warning("%s Going on from the checkpoint before it: %s", error, paths[-1 - i])
        else:
            return path
    return None
