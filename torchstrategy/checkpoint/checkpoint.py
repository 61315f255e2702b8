"""Saving and restoring named objects, with any strategy or none.

In cross-replica context a mirrored object's ``state_dict`` is replica 0's and its ``load_state_dict`` acts on all
replicas, so nothing here copies between replicas. The chief writes; the other processes wait for its word.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

from torchstrategy.checkpoint.atomic import (
    SUFFIX,
    checkpoint_file,
    read_checkpoint,
    read_index,
    write_checkpoint,
    write_index,
)
from torchstrategy.checkpoint.objects import Plan, Tracked, track_object
from torchstrategy.checkpoint.status import CheckpointLoadStatus, InitializationOnlyStatus
from torchstrategy.context import current_replica_context
from torchstrategy.replicas.record import owner
from torchstrategy.strategies.default import get_strategy

__all__ = ["Checkpoint", "latest_checkpoint"]

_Path = str | os.PathLike[str]


class Checkpoint:
    """A group of named objects that are saved to and restored from one file.

    Objects may be modules, optimizers, learning-rate schedulers, gradient scalers, torchmetrics metrics, generators,
    tensors, anything with ``state_dict`` and ``load_state_dict``, other checkpoints, and dicts, lists and tuples of
    these. They are attributes of the checkpoint: ``checkpoint.model``. A number goes into a tensor.

    Every process calls ``save`` and ``restore``, in cross-replica context; the chief alone writes. A metric is saved
    as what all its replicas accumulated.

    Args:
        root: one object that needs no name.
        objects: objects by name.

    Raises:
        ValueError: a checkpoint can't hold one of them.

    Example:
        >>> import tempfile
        >>> folder = tempfile.TemporaryDirectory()
        >>> model, epoch = torch.nn.Linear(1, 1), torch.tensor(3)
        >>> checkpoint = ts.train.Checkpoint(model=model, epoch=epoch)
        >>> path = checkpoint.save(f"{folder.name}/run")
        >>> path.removeprefix(folder.name)
        '/run-1'
        >>> _ = epoch.fill_(0)
        >>> status = checkpoint.restore(ts.train.latest_checkpoint(folder.name))
        >>> status.assert_consumed()
        CheckpointLoadStatus(matched=3, missing=0, unused=0)
        >>> epoch
        tensor(3)
        >>> folder.cleanup()
    """

    _objects: dict[str, Any]
    _save_counter: int

    def __init__(self, root: Any = None, **objects: Any) -> None:
        object.__setattr__(self, "_objects", {})
        object.__setattr__(self, "_save_counter", 0)
        if root is not None:
            self._add("root", root)
        for name, value in objects.items():
            self._add(name, value)

    def __getattr__(self, name: str) -> Any:
        try:
            return self.__dict__["_objects"][name]
        except KeyError:
            raise AttributeError(f"The checkpoint has no object {name!r}.") from None

    def __setattr__(self, name: str, value: Any) -> None:
        if name in self.__dict__ or hasattr(type(self), name):
            object.__setattr__(self, name, value)
        else:
            self._add(name, value)

    @property
    def save_counter(self) -> int:
        """Number of the last ``save``; part of the checkpoint, so that numbering goes on after a restore."""
        return self._save_counter

    def save(self, file_prefix: _Path) -> str:
        """Write ``<file_prefix>-<number>.pt`` and make it the directory's latest checkpoint.

        Args:
            file_prefix: directory and beginning of the name; the directory is made if need be.

        Returns:
            The path to give to ``restore``: ``<file_prefix>-<number>``.

        Raises:
            RuntimeError: called in replica context, or another process could not write.
            OSError: the file can't be written. Earlier checkpoints are unchanged.
            TypeError: a ``state_dict`` holds something else than tensors and plain values.
        """
        path = f"{os.fspath(file_prefix)}-{self._save_counter + 1}"
        directory, name = os.path.split(path)
        return self._save_as(path, lambda: write_index(directory, {name: time.time()}))

    def write(self, file_prefix: _Path) -> str:
        """Write ``<file_prefix>.pt``, without a number and without making it the latest checkpoint.

        Args:
            file_prefix: the path without suffix; the directory is made if need be.

        Returns:
            The path to give to ``restore``.

        Raises:
            RuntimeError: called in replica context, or another process could not write.
            OSError: the file can't be written. Earlier checkpoints are unchanged.
            TypeError: a ``state_dict`` holds something else than tensors and plain values.
        """
        path = os.fspath(file_prefix)
        self._write(path, lambda: None)
        return path

    def restore(self, save_path: _Path | None) -> CheckpointLoadStatus:
        """Give the objects the values that a checkpoint holds for their names.

        Everything is checked first, on all processes: an error leaves every object as it was. Values that the
        checkpoint lacks stay as they are; ask the returned status whether that happened.

        Args:
            save_path: what ``save`` or ``latest_checkpoint`` returned; ``None`` restores nothing.

        Returns:
            A status with ``assert_consumed()``, ``assert_existing_objects_matched()``,
            ``assert_nontrivial_match()`` and ``expect_partial()``.

        Raises:
            NotFoundError: there is no such file.
            DataLossError: it is damaged, a directory, or no checkpoint of this library.
            ValueError: a shape, a number of parameters or a kind of object differs.
            InvalidArgumentError: a dtype differs.
            RuntimeError: called in replica context, or another process could not restore.
        """
        _require_cross_replica("restore")
        if save_path is None:
            return InitializationOnlyStatus()
        path = os.fspath(save_path)
        tracked = self._track()
        strategy = self._strategy()
        content: dict[str, Any] = {}
        plans: list[Plan] = []
        error: Exception | None = None
        try:
            content = read_checkpoint(checkpoint_file(path))
            plans = _plan(tracked, content["objects"], strategy)
        except Exception as raised:  # noqa: BLE001 - whatever it is, the waiting processes must hear of it
            error = raised
        _agree_on_restore(strategy, path, error)
        for plan in plans:
            plan.apply()
        if content["save_counter"] is not None:
            object.__setattr__(self, "_save_counter", content["save_counter"])
        return CheckpointLoadStatus(
            path, *([name for plan in plans for name in getattr(plan, f)] for f in ("matched", "missing", "unused"))
        )

    def _strategy(self) -> Any:
        """Return the strategy that made the objects, else the current one."""
        owners = (owner(item.obj) for item in self._track().values())
        return next((strategy for strategy in owners if strategy is not None), None) or get_strategy()

    def _save_as(self, path: str, finish: Callable[[], None]) -> str:
        """Count a save and write it; ``finish`` is called by the chief when the file is complete."""
        self._save_counter += 1
        try:
            self._write(path, finish)
        except BaseException:
            self._save_counter -= 1
            raise
        return path

    def _add(self, name: str, value: Any) -> None:
        if hasattr(type(self), name) or name.startswith("_"):
            raise ValueError(f"{name!r} can't be the name of an object in a checkpoint. Choose another name.")
        _flatten(name, value)  # refuses what can't be saved
        self._objects[name] = value

    def _track(self) -> dict[str, Tracked]:
        return _flatten("", self)

    def _write(self, path: str, finish: Callable[[], None]) -> None:
        _require_cross_replica("save")
        tracked = self._track()
        strategy = self._strategy()
        # What needs all processes comes first: after it only the chief works, and any error of its own is reported.
        states = {name: item.capture(strategy) for name, item in tracked.items() if item.is_collective}
        failure: Exception | None = None
        if strategy.is_chief:
            try:
                for name, item in tracked.items():
                    if not item.is_collective:
                        states[name] = item.capture(strategy)
                objects = {name: {"kind": item.kind, "state": states[name]} for name, item in tracked.items()}
                write_checkpoint(path + SUFFIX, {"save_counter": self._save_counter, "objects": objects})
                finish()
            except Exception as error:  # noqa: BLE001 - whatever it is, the waiting processes must hear of it
                failure = error
        _agree_on_write(strategy, path, failure)


def latest_checkpoint(checkpoint_dir: _Path, latest_filename: str | None = None) -> str | None:
    """Return the path of a directory's latest checkpoint, or ``None`` if there is none.

    Args:
        checkpoint_dir: the directory that ``Checkpoint.save`` or a manager wrote to. It may have been moved.
        latest_filename: name of the file that names the checkpoints; ``None`` means ``checkpoint``.

    Raises:
        DataLossError: that file is damaged.

    Example:
        >>> ts.train.latest_checkpoint("no/such/directory") is None
        True
    """
    directory = os.fspath(checkpoint_dir)
    index = read_index(directory, latest_filename)
    path = os.path.join(directory, index.latest) if index else None
    return path if path and os.path.isfile(path + SUFFIX) else None


def _flatten(name: str, value: Any) -> dict[str, Tracked]:
    """Return the objects in a structure by their paths."""
    if isinstance(value, Checkpoint):
        children: Mapping[Any, Any] = value._objects
    elif type(value) is dict:
        children = value
    elif type(value) in (list, tuple):
        children = {str(i): item for i, item in enumerate(value)}
    else:
        return {name: track_object(name, value)}
    found: dict[str, Tracked] = {}
    for key, item in children.items():
        if not isinstance(key, str) or "/" in key or not key:
            raise ValueError(f"The keys of {name!r} in a checkpoint must be names without '/'. Received: {key!r}")
        found.update(_flatten(f"{name}/{key}" if name else key, item))
    return found


def _plan(tracked: dict[str, Tracked], saved: dict[str, Any], strategy: Any) -> list[Plan]:
    plans = []
    for name, item in tracked.items():
        if name not in saved:
            plans.append(Plan(missing=item.leaves()))
            continue
        if saved[name]["kind"] != item.kind:
            raise ValueError(
                f"{name} is a {item.kind}, but the checkpoint holds a {saved[name]['kind']} under this name. Give the "
                "objects the names that they were saved under."
            )
        plans.append(item.plan(saved[name]["state"], strategy))
    plans.append(Plan(unused=[name for name in saved if name not in tracked]))
    return plans


def _require_cross_replica(what: str) -> None:
    if current_replica_context() is not None:
        raise RuntimeError(
            f"Checkpoint.{what} was called in replica context, where every replica would do it at once. Call it "
            "outside the function that you give to strategy.run, such as after the training loop's step."
        )


def _agree_on_write(strategy: Any, path: str, failure: Exception | None) -> None:
    """Wait for the chief; raise on every process if it failed."""
    if strategy.workers is not None:
        name = os.path.basename(path)
        report = strategy.workers.exchange(f"writing of checkpoint {name}", _describe(failure))[0]
        if report is not None:
            raise RuntimeError(f"Rank 0 could not write the checkpoint {path}: {report}") from failure
    elif failure is not None:
        raise failure


def _agree_on_restore(strategy: Any, path: str, error: Exception | None) -> None:
    """Raise on every process if one of them can't restore, before any has changed anything."""
    if strategy.workers is None:
        reports: list[Any] = []
    else:
        reports = strategy.workers.exchange("restoring of a checkpoint", [os.path.basename(path), _describe(error)])
    if error is not None:
        raise error
    for rank, (name, report) in enumerate(reports):
        if report is not None:
            raise RuntimeError(f"Rank {rank} could not restore the checkpoint {name}, so no rank did: {report}")
    if len({name for name, _ in reports}) > 1:
        _raise_different_paths([name for name, _ in reports])


def _raise_different_paths(names: list[str]) -> NoReturn:
    rows = "\n".join(f"  rank {rank}: {name}" for rank, name in enumerate(names))
    raise RuntimeError(
        f"The ranks would restore different checkpoints:\n{rows}\nThe directory must be on a file system that all "
        "hosts share."
    )


def _describe(error: Exception | None) -> str | None:
    return None if error is None else f"{type(error).__name__}: {error}"
