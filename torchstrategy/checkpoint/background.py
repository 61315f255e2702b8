"""Saving while training goes on: values of the moment of the call, written by a thread."""

from __future__ import annotations

import atexit
import copy
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from torchstrategy.base import context
from torchstrategy.base.log import logger, name_error
from torchstrategy.checkpoint.archive import named_tensors
from torchstrategy.checkpoint.storage import is_spilled

__all__ = ["Background", "CheckpointOptions", "takes_async"]


class CheckpointOptions(NamedTuple):
    """How a checkpoint is saved.

    Args:
        enable_async: return as soon as the values are copied, and let a thread write them while training goes on. The
            next save, ``restore`` and ``sync`` wait until it is done. If the write fails, that is raised by these, or
            by the strategy's next ``run``, and the checkpoint never counts as the latest. It needs memory for a second
            copy of all that is saved.

    Example:
        >>> import tempfile
        >>> model = torch.nn.Linear(1, 1)
        >>> checkpoint = ts.train.Checkpoint(model=model)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     path = checkpoint.save(f"{folder}/ckpt", ts.train.CheckpointOptions(enable_async=True))
        ...     _ = torch.nn.init.zeros_(model.weight)  # training goes on
        ...     checkpoint.sync()
        ...     ts.train.load_variable(path, "model.weight").abs() > 0
        tensor([[True]])
    """

    enable_async: bool = False


def takes_async(options: CheckpointOptions | None) -> bool:
    """Return whether options ask for an asynchronous save.

    Raises:
        ValueError: they are something else than options.
    """
    if options is None:
        return False
    if not isinstance(options, CheckpointOptions):
        raise ValueError(f"options must be None or ts.train.CheckpointOptions(...). Received: {options!r}")
    return options.enable_async


class Background:
    """Writes one checkpoint at a time, in a thread."""

    def __init__(self) -> None:
        self._buffers: list[Tensor] = []  # of the last snapshot, so that the memory need not be found again
        self._write: _Write | None = None
        self._threads: ThreadPoolExecutor | None = None  # one, which a program that ends waits for
        self._pid = 0
        #: Seconds that the last write of this process took, by whatever thread; ``None`` if there was none.
        self.write_s: float | None = None

    def timed(self, put: Callable[[dict[str, Any]], Any]) -> Callable[[dict[str, Any]], None]:
        """Return a function that does what ``put`` does, and notes how long that took from now on."""
        begin = time.monotonic()

        def put_and_note(content: dict[str, Any]) -> None:
            put(content)
            self.write_s = time.monotonic() - begin

        return put_and_note

    def start(self, path: str, content: dict[str, Any], put: Callable[[dict[str, Any]], Any]) -> None:
        """Copy values, and begin to write them; the write before must be finished.

        Args:
            path: the checkpoint.
            content: tensors and plain values.
            put: writes them.
        """
        self.finish()  # what another process has not let begin everywhere
        snapshot = self._copied(content)
        if self._threads is None or self._pid != os.getpid():  # a forked process has no threads
            self._threads, self._pid = ThreadPoolExecutor(1, thread_name_prefix="checkpoint"), os.getpid()
        self._write = _Write(path, lambda: put(snapshot), self._threads)

    def finish(self) -> tuple[BaseException | None, bool]:
        """Wait until the write is done; return what went wrong, and whether ``run`` has raised it."""
        write, self._write = self._write, None
        if self._pid != os.getpid():  # a forked process: the write is its parent's
            write = None
        failure, is_told = (None, False) if write is None else write.finish()
        if failure is not None:
            self.release()  # else a traceback that somebody keeps would keep the thread
        return failure, is_told

    def release(self) -> None:
        """End the thread, which the next write makes anew; none is under way."""
        if self._threads is not None and self._pid == os.getpid():
            self._threads.shutdown()
        self._threads = None

    def _copied(self, content: dict[str, Any]) -> dict[str, Any]:
        """Return values in memory of their own; what shares memory does so in the copy."""
        copies: dict[int, Any] = {}
        storages: dict[int, torch.UntypedStorage] = {}
        kept, self._buffers = self._buffers, []
        largest: dict[int, torch.UntypedStorage] = {}  # NumPy's parts of one array are storages of one place
        for _, tensor in named_tensors("", content):
            if tensor.layout is torch.strided:
                storage = tensor.untyped_storage()
                other = largest.setdefault(storage.data_ptr(), storage)
                if storage.nbytes() > other.nbytes():
                    largest[storage.data_ptr()] = storage
        for _, tensor in named_tensors("", content):
            if tensor.layout is not torch.strided:
                copies[id(tensor)] = tensor.clone()
                continue
            storage = tensor.untyped_storage()
            if is_spilled(storage):  # made for this save
                copies[id(tensor)] = tensor
                continue
            if tensor.is_conj() or tensor.is_neg():
                copies[id(tensor)] = tensor.clone()
                continue
            place = storage.data_ptr()
            if place not in storages:
                storages[place] = self._copy(largest[place], kept)
            own = torch.empty(0, dtype=tensor.dtype)
            copies[id(tensor)] = own.set_(storages[place], tensor.storage_offset(), tensor.shape, tensor.stride())
        return copy.deepcopy(content, copies)

    def _copy(self, storage: torch.UntypedStorage, kept: list[Tensor]) -> torch.UntypedStorage:
        """Copy a storage into the buffer that stood in its place the last time, if that fits."""
        number = len(self._buffers)
        fits = number < len(kept) and len(kept[number]) == storage.nbytes()
        buffer = kept[number] if fits else torch.empty(storage.nbytes(), dtype=torch.uint8)
        source = torch.empty(0, dtype=torch.uint8).set_(storage)
        np.copyto(buffer.numpy(), source.numpy())  # 0.75 times as long as torch's copy: it passes the caches by
        self._buffers.append(buffer)
        return buffer.untyped_storage()


class _Write:
    """A write by a thread, and what went wrong with it.

    Args:
        path: the checkpoint.
        put: writes it.
        threads: what has the thread.
    """

    def __init__(self, path: str, put: Callable[[], Any], threads: ThreadPoolExecutor) -> None:
        self._path = path
        self._told = threading.Event()
        self._future = threads.submit(put)
        self._future.add_done_callback(self._done)

    def finish(self) -> tuple[BaseException | None, bool]:
        """Wait until it is done; return what went wrong, and whether that was raised already."""
        begin = time.monotonic()
        failure = self._future.exception()
        waited_s = time.monotonic() - begin
        if waited_s > _LONG_S:
            logger.info("Waited %.1f s for the checkpoint %s to be written.", waited_s, self._path)
        was_told = self._told.is_set()
        self._told.set()
        return failure, was_told

    def _done(self, future: Future[Any]) -> None:
        if (failure := future.exception()) is not None:
            context.raise_in_next_run(self._raise)
            # Of the error the text only: its traceback has all that was to be saved.
            atexit.register(_tell_at_end, self._told, self._path, name_error(failure))

    def _raise(self) -> None:
        if not self._told.is_set():
            failure, _ = self.finish()
            raise RuntimeError(_NOT_WRITTEN % (self._path, name_error(failure))) from failure  # type: ignore[arg-type]


def _tell_at_end(told: threading.Event, path: str, failure: str) -> None:
    """Say that a checkpoint was not written, where the program ends and has neither saved, run nor synced since."""
    if not told.is_set():
        logger.error(_NOT_WRITTEN, path, failure)


_LONG_S = 1.0
_NOT_WRITTEN = "The checkpoint %s, which was saved a while ago, could not be written: %s"
