"""Saving and restoring named objects, with any strategy or none.

In cross-replica context a mirrored object's ``state_dict`` is replica 0's and its ``load_state_dict`` acts on all
replicas, so nothing here copies between replicas. The chief writes, and the other processes wait for its word.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any

from torchstrategy.base.context import current_replica_context
from torchstrategy.base.log import logger
from torchstrategy.checkpoint.archive import SUFFIX, checkpoint_file, read_checkpoint, write_checkpoint
from torchstrategy.checkpoint.background import Background, CheckpointOptions, takes_async
from torchstrategy.checkpoint.directory import Index
from torchstrategy.checkpoint.fencing import Fence, publish
from torchstrategy.checkpoint.objects import capture_together, strategy_of, track_all
from torchstrategy.checkpoint.process_reports import (
    agree_on_restore,
    agree_on_write,
    begin_together,
    write_together,
)
from torchstrategy.checkpoint.restoration import (
    CheckpointLoadStatus,
    InitializationOnlyStatus,
    Restoration,
    join,
)
from torchstrategy.checkpoint.storage import absolute, delete_leftovers, spilled_to
from torchstrategy.checkpoint.tracked import Group, Plan, Tracked, walk
from torchstrategy.replicas.record import owner

__all__ = ["Checkpoint"]

_Path = str | os.PathLike[str]


class Checkpoint(Group):
    """A group of named objects that are saved to and restored from one file.

    Objects may be modules, optimizers, learning-rate schedulers, gradient scalers, torchmetrics metrics, variables,
    generators, tensors, anything with ``state_dict`` and ``load_state_dict``, other checkpoints, and dicts, lists and
    tuples of these. They are attributes of the checkpoint: ``checkpoint.model``. A number goes into a tensor.

    Every process calls ``save`` and ``restore``, in cross-replica context. The chief writes; a process that is given
    another path than the chief writes there too, as tf's programs for several workers expect. A metric is saved as what
    all its replicas accumulated, and so is a variable that is aggregated when it is read.

    An object may be attached after ``restore``: it then gets what the checkpoint holds for its name, which waits in
    memory until then.

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
        >>> later = ts.train.Checkpoint(model=torch.nn.Linear(1, 1))
        >>> status = later.restore(ts.train.latest_checkpoint(folder.name))
        >>> status
        CheckpointLoadStatus(matched=2, missing=0, unused=1)
        >>> later.epoch = torch.tensor(0)
        >>> later.epoch
        tensor(3)
        >>> status.assert_consumed()
        CheckpointLoadStatus(matched=3, missing=0, unused=0)
        >>> folder.cleanup()
    """

    _save_counter: int
    _restorations: list[tuple[Restoration, str]]  # with values that may wait for this checkpoint's objects; its path
    _fences: dict[str, Fence]  # of the directories that were read or written
    _background: Background
    _pending: tuple[str, Callable[[], None]] | None  # on all processes, the asynchronous save, and how to undo it

    def __init__(self, root: Any = None, **objects: Any) -> None:
        object.__setattr__(self, "_objects", {})
        object.__setattr__(self, "_save_counter", 0)
        object.__setattr__(self, "_restorations", [])
        object.__setattr__(self, "_fences", {})
        object.__setattr__(self, "_background", Background())
        object.__setattr__(self, "_pending", None)
        if root is not None:
            self._attach("root", root)
        for name, value in objects.items():
            self._attach(name, value)

    def __getattr__(self, name: str) -> Any:
        try:
            return self.__dict__["_objects"][name]
        except KeyError:
            raise AttributeError(f"The checkpoint has no object {name!r}.") from None

    def __setattr__(self, name: str, value: Any) -> None:
        if name in self.__dict__:
            object.__setattr__(self, name, value)
        else:
            self._attach(name, value)

    def __repr__(self) -> str:
        objects = ", ".join(f"{name}={type(value).__name__}" for name, value in self._objects.items())
        return f"{type(self).__name__}({objects})"

    @property
    def save_counter(self) -> int:
        """Number of the last ``save``; part of the checkpoint, so that numbering goes on after a restore."""
        return self._save_counter

    def save(self, file_prefix: _Path, options: CheckpointOptions | None = None) -> str:
        """Write ``<file_prefix>-<number>.pt`` and make it the directory's latest checkpoint.

        Args:
            file_prefix: directory and beginning of the name; the directory is made if need be.
            options: ``ts.train.CheckpointOptions(enable_async=True)`` lets training go on while a thread writes.

        Returns:
            The path to give to ``restore``: ``<file_prefix>-<number>``.

        Raises:
            RuntimeError: called in replica context, another process could not write, or the asynchronous save before
                could not.
            OSError: the file can't be written. Earlier checkpoints are unchanged.
            TypeError: a ``state_dict`` holds something else than tensors and plain values.
            ValueError: an object has no single value to save, such as a lazy module without shapes or a variable
                that is never aggregated.
        """
        is_async = takes_async(options)
        self._finish()  # whose number is free again if it has failed
        path = f"{os.fspath(file_prefix)}-{self._save_counter + 1}"
        name = os.path.basename(path)
        self._save_as(path, Index({name: time.time()}), is_async=is_async)
        return path

    def write(self, file_prefix: _Path, options: CheckpointOptions | None = None) -> str:
        """Write ``<file_prefix>.pt``, without a number and without making it the latest checkpoint.

        Args:
            file_prefix: the path without suffix; the directory is made if need be.
            options: as for ``save``.

        Returns:
            The path to give to ``read``.

        Raises:
            RuntimeError: called in replica context, or another process could not write.
            OSError: the file can't be written. Earlier checkpoints are unchanged.
            TypeError: a ``state_dict`` holds something else than tensors and plain values.
            ValueError: an object has no single value to save.
        """
        is_async = takes_async(options)
        path = os.fspath(file_prefix)
        file = absolute(path + SUFFIX)
        self._write(path, lambda content: write_checkpoint(file, content), is_async=is_async)
        return path

    def read(self, save_path: _Path | None, options: CheckpointOptions | None = None) -> CheckpointLoadStatus:
        """Restore what ``write`` wrote: as ``restore``, but without a change of ``save_counter``.

        Args:
            save_path: what ``write`` returned; ``None`` restores nothing.
            options: have no meaning here.

        Returns:
            A status, as ``restore`` returns it.

        Raises:
            NotFoundError: there is no such file.
            DataLossError: it is damaged, a directory, or no checkpoint of this library.
            ValueError: a shape, a number of parameters or a kind of object differs.
            InvalidArgumentError: a dtype differs.
            RuntimeError: called in replica context, or another process could not restore.
        """
        takes_async(options)
        return self._read("read", save_path)[0]

    def restore(self, save_path: _Path | None, options: CheckpointOptions | None = None) -> CheckpointLoadStatus:
        """Give the objects the values that a checkpoint holds for their names.

        Everything is checked first, on all processes: an error leaves every object as it was, unless it is one of your
        objects' own ``load_state_dict``. Values that the checkpoint lacks stay as they are; ask the status whether
        that happened: if you don't, a line in the log warns of it when the status is dropped. Values of names that have
        no object yet wait until one is attached; a later restore replaces them by its own. Attaching does not
        communicate, and checks in the same way: if the values don't fit, the object is not attached.

        Args:
            save_path: what ``save`` or ``latest_checkpoint`` returned; ``None`` restores nothing.
            options: have no meaning here.

        Returns:
            A status with ``assert_consumed()``, ``assert_existing_objects_matched()``,
            ``assert_nontrivial_match()`` and ``expect_partial()``. It always tells the state of now, also after
            further objects were attached.

        Raises:
            NotFoundError: there is no such file.
            DataLossError: it is damaged, a directory, or no checkpoint of this library.
            ValueError: a shape, a number of parameters or a kind of object differs.
            InvalidArgumentError: a dtype differs.
            RuntimeError: called in replica context, or another process could not restore.
        """
        takes_async(options)
        return self._restore(save_path)

    def _restore(self, save_path: _Path | None, *, must_match: bool = False) -> CheckpointLoadStatus:
        """Do what ``restore`` does; with ``must_match`` raise ``ValueError`` if nothing matches an object."""
        status, save_counter = self._read("restore", save_path, must_match=must_match)
        if save_counter is not None:
            self._save_counter = save_counter
        return status

    def _read(
        self, method: str, save_path: _Path | None, *, must_match: bool = False
    ) -> tuple[CheckpointLoadStatus, int | None]:
        """Restore the objects; return the status and the checkpoint's counter."""
        _require_cross_replica(f"Checkpoint.{method} was called")
        if save_path is None:
            return InitializationOnlyStatus(), None
        path = os.fspath(save_path)
        tracked = self._track()
        strategy = strategy_of(tracked)
        self._finish()
        content: dict[str, Any] = {}
        plans: dict[str, Plan] = {}
        error: Exception | None = None
        try:
            content = read_checkpoint(checkpoint_file(path), mapped=not strategy.hosting.holds_values)
            restoration = Restoration(path, content["objects"])
            plans = {
                name: restoration.plan(name, item, strategy) for name, item in tracked.items() if restoration.has(name)
            }
            if must_match:
                restoration.require_match(tracked, plans)
        except Exception as raised:  # noqa: BLE001 - whatever it is, the waiting processes must hear of it
            error = raised
        self._fence(os.path.dirname(path)).renew()
        agree_on_restore(strategy, path, error, [name for name in plans if owner(tracked[name].obj) is not None])
        for name, plan in plans.items():
            restoration.give(name, tracked[name], plan)
        for prefix, item in walk("", self):
            if isinstance(item, Checkpoint):
                item._await(restoration, prefix)
        if strategy.is_chief:
            delete_leftovers(os.path.dirname(path))
        status = CheckpointLoadStatus(restoration, self._track)
        if (missing := status.missing) and not status.matched:
            logger.warning("Nothing in the checkpoint %s matches an object: %r", path, status)
        elif missing and strategy.is_chief:
            status._warn_unless_asked(missing)
        return status, content["save_counter"]

    def _strategy(self) -> Any:
        """Return the strategy that made the objects, else the current one."""
        return strategy_of(self._track())

    def sync(self) -> None:
        """Wait until the last asynchronous save is complete. With several processes, all must call it.

        Raises:
            RuntimeError: it could not be written, on whatever process.
        """
        self._finish()
        self._background.release()

    def _finish(self) -> None:
        """Wait for an asynchronous save, and raise on all processes if it failed."""
        if self._pending is None:
            return
        (path, undo), self._pending = self._pending, None
        failure, is_told = self._background.finish()
        is_written = False
        try:
            is_written = agree_on_write(self._strategy(), path, failure, is_told=is_told)
        finally:
            if not is_written:
                undo()

    def _save_as(
        self, path: str, index: Index, *, is_async: bool = False, undo: Callable[[], None] = lambda: None
    ) -> None:
        """Count a save, write it and make it the latest, as ``publish`` does; ``undo`` is called if it fails later."""
        directory, name = os.path.split(path)
        fence = self._fence(directory)

        def uncount() -> None:
            self._save_counter -= 1
            undo()

        def put(content: dict[str, Any]) -> None:
            publish(fence, name, lambda file, about, check: write_checkpoint(file, content, about, check), index)

        self._save_counter += 1
        try:
            self._write(path, put, is_async=is_async, undo=uncount)
        except BaseException:
            self._save_counter -= 1
            raise

    def _fence(self, directory: str) -> Fence:
        """Return what this checkpoint knows of who writes to a directory, since it read it first."""
        place = absolute(directory)  # which a thread that writes can rely on
        if place not in self._fences:
            self._fences[place] = Fence(place)
        return self._fences[place]

    def _attach(self, name: str, value: Any) -> None:
        """Add an object, or a structure of objects, and give it the values that wait for it."""
        if hasattr(type(self), name) or name.startswith("_"):
            raise ValueError(f"{name!r} can't be the name of an object in a checkpoint. Choose another name.")
        items = dict(walk(name, value, parents=(self,)))
        tracked = track_all(items, self._track())
        sources = [(item, *source) for path, item in tracked.items() if (source := self._waiting_for(path)) is not None]
        if sources:
            _require_cross_replica(f"The object {name!r}, for which restored values wait, was attached")
            strategy = strategy_of({**self._track(), **tracked})
            plans = [restoration.plan(saved_name, item, strategy) for item, restoration, saved_name in sources]
            for (item, restoration, saved_name), plan in zip(sources, plans, strict=True):
                restoration.give(saved_name, item, plan)
        self._objects[name] = value
        self._restorations = _still_waiting(self._restorations)
        for path, item in items.items():
            if isinstance(item, Checkpoint):
                for restoration, prefix in self._restorations:
                    item._await(restoration, join(prefix, path))

    def _waiting_for(self, name: str) -> tuple[Restoration, str] | None:
        """Return the latest restore that has values for an object's name, and their name in its checkpoint."""
        found = [(r, join(prefix, name)) for r, prefix in self._restorations if r.has(join(prefix, name))]
        return max(found, key=lambda source: source[0].number, default=None)

    def _await(self, restoration: Restoration, prefix: str) -> None:
        """Keep what a restore holds below a name for objects that are attached later; drop what it replaces."""
        for earlier, path in self._restorations:
            if earlier.number < restoration.number:
                for name in restoration.names_under(prefix):
                    earlier.replace(join(path, name))
        sources = [*self._restorations, (restoration, prefix)]
        self._restorations = _still_waiting(sources)

    def _track(self) -> dict[str, Tracked]:
        return track_all(dict(walk("", self)))

    def _write(
        self,
        path: str,
        put: Callable[[dict[str, Any]], Any],
        *,
        is_async: bool = False,
        undo: Callable[[], None] = lambda: None,
    ) -> None:
        """Capture all objects and let the chief ``put`` them into a file, or a thread of the chief."""
        _require_cross_replica("Checkpoint.save or write was called")
        tracked = self._track()
        strategy = strategy_of(tracked)
        self._finish()
        put = self._background.timed(put)
        strategy._before_capture()
        capture_states = capture_together(tracked, strategy, path)  # after it they report what went wrong

        def capture() -> dict[str, Any]:
            with spilled_to(os.path.dirname(path)):
                states = capture_states()
            objects = {name: item.entry(states[name]) for name, item in tracked.items()}
            # A program that numbers its checkpoints itself has no counter to store.
            return {"save_counter": self._save_counter or None, "objects": objects}

        if is_async:
            try:
                begin_together(strategy, path, lambda: self._background.start(path, capture(), put))
            except BaseException:
                self._background.finish()
                raise
            self._pending = (path, undo)
        else:
            write_together(strategy, path, lambda: put(capture()))


def _still_waiting(sources: list[tuple[Restoration, str]]) -> list[tuple[Restoration, str]]:
    """Return those with values that wait, each once."""
    return list({(id(r), prefix): (r, prefix) for r, prefix in sources if r.waits_under(prefix)}.values())


def _require_cross_replica(what: str) -> None:
    if current_replica_context() is not None:
        raise RuntimeError(
            f"{what} in replica context, where every replica would do it at once. Do it outside the function that you "
            "give to strategy.run, such as after the training loop's step."
        )
