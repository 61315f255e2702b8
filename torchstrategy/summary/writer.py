"""The writers of summaries, which one is the default, and whether this process and replica writes.

A file comes into being when something is written to it. Stores can't append to one: there it is written on this host,
and copied as a whole now and then.
"""

from __future__ import annotations

import contextlib
import math
import os
import shutil
import tempfile
import time
import types
import weakref
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any

from torchstrategy.base.context import current_frame, set_within
from torchstrategy.base.log import logger
from torchstrategy.checkpoint.storage import copy_file, is_remote
from torchstrategy.cluster_resolver.detect import find_job

__all__ = [
    "SummaryWriter",
    "create_file_writer",
    "create_noop_writer",
    "default_step",
    "default_writer",
    "experimental",
    "flush",
    "import_tensorboard",
    "record_if",
    "should_record_summaries",
    "writes_here",
]


class _Box:
    """Holds a value that replica functions see, and change, as the caller's."""

    def __init__(self, value: Any) -> None:
        self.value = value


# A context variable that is set in one cell of a notebook may be unset in the next: what is set for good is in the
# default boxes, and `with` puts a box of its own on top.
_writer: ContextVar[_Box] = ContextVar("torchstrategy_summary_writer", default=_Box(None))  # noqa: B039
_step: ContextVar[_Box] = ContextVar("torchstrategy_summary_step", default=_Box(None))  # noqa: B039
_condition: ContextVar[bool | Callable[[], Any]] = ContextVar("torchstrategy_summary_condition", default=True)


class SummaryWriter:
    """Writes summaries into one event file; ``create_file_writer`` makes it.

    Args:
        logdir: the folder, on this host or in a store; ``None`` writes nothing.
        max_queue: number of summaries that may wait to be written.
        flush_millis: milliseconds after which they are; a store gets what ``flush`` and ``close`` don't give it before.
        filename_suffix: end of the file's name.
    """

    def __init__(
        self, logdir: str | os.PathLike[str] | None, max_queue: int, flush_millis: int, filename_suffix: str
    ) -> None:
        self._logdir = None if logdir is None else os.fspath(logdir)
        self._options = {"max_queue": max_queue, "flush_secs": flush_millis / 1000, "filename_suffix": filename_suffix}
        self._files: list[Any] = []
        self._closed = False
        weakref.finalize(self, _close_forgotten, self._files, self._logdir)  # also at the program's end

    def as_default(self, step: Any = None) -> contextlib.AbstractContextManager[SummaryWriter]:
        """Return a context manager inside which summaries go to this writer; they are flushed at its end.

        Args:
            step: the step inside; ``None`` keeps the one that is set.

        Raises:
            RuntimeError: the writer is closed.
        """
        self._check_open()
        return self._as_default(step)

    def set_as_default(self, step: Any = None) -> None:
        """Let summaries go to this writer where no other one is the default.

        Args:
            step: the step from now on; ``None`` keeps the one that is set.

        Raises:
            RuntimeError: the writer is closed.
        """
        self._check_open()
        _writer.get().value = self
        if step is not None:
            _step.get().value = step

    def init(self) -> None:
        """Open the file now, on the process that writes."""
        if not self.is_noop and writes_here():
            self._open()

    def flush(self) -> None:
        """Write what waits."""
        for file in self._files:
            file.flush()
            if isinstance(file, _StoredFile):
                file.copy()

    def close(self) -> None:
        """Write what waits, and end the file. Nothing can be written after it."""
        self._closed = True
        _close(self._files)

    @contextlib.contextmanager
    def _as_default(self, step: Any) -> Iterator[SummaryWriter]:
        with set_within(_writer, _Box(self)), set_within(_step, _step.get() if step is None else _Box(step)):
            yield self
            for file in self._files:
                file.flush()

    def _check_open(self) -> None:
        if self._closed:
            raise RuntimeError(
                f"The summary writer for {self._logdir!r} is closed. Make another with ts.summary.create_file_writer."
            )

    @property
    def is_noop(self) -> bool:
        """Whether it writes nothing."""
        return self._logdir is None

    def add(self, summary: Any, step: int) -> None:
        """Write a summary in TensorBoard's form.

        Args:
            summary: a ``Summary`` message.
            step: its step.

        Raises:
            RuntimeError: the writer is closed.
        """
        self._open().add_summary(summary, step)

    def add_graph(self, graph: tuple[Any, Any]) -> None:
        """Write a graph in TensorBoard's form.

        Args:
            graph: a ``GraphDef`` and a ``RunMetadata`` message.

        Raises:
            RuntimeError: the writer is closed.
        """
        self._open().add_graph(graph)

    def add_start(self, step: int) -> None:
        """Let TensorBoard forget what the folder's earlier files hold from a step on, as a training begins there again.

        Args:
            step: the first one that is written anew.

        Raises:
            RuntimeError: the writer is closed.
        """
        if not self.is_noop:
            from tensorboard.compat.proto.event_pb2 import Event, SessionLog  # noqa: PLC0415 - optional

            self._open().add_event(Event(session_log=SessionLog(status=SessionLog.START)), step)

    def _open(self) -> Any:
        self._check_open()
        if not self._files:
            logdir = str(self._logdir)
            make = _StoredFile if is_remote(logdir) else import_tensorboard().FileWriter
            self._files.append(make(logdir, **self._options))
        return self._files[0]


class _StoredFile:
    """An event file in a store.

    Args:
        logdir: the folder in the store.
        options: TensorBoard's; ``flush_secs`` is also how old the store's copy may be.
    """

    def __init__(self, logdir: str, **options: Any) -> None:
        self._logdir = logdir
        self._interval_s = options["flush_secs"]
        self._copied_s = -math.inf
        self._folder = tempfile.mkdtemp(prefix="torchstrategy-")  # there until `close`, also at the program's end
        self._file = import_tensorboard().FileWriter(self._folder, **options)
        self.add_summary, self.add_graph = self._file.add_summary, self._file.add_graph
        self.add_event = self._file.add_event

    def flush(self) -> None:
        """Write what waits to this host, and to the store if its copy is old."""
        self._file.flush()
        if time.monotonic() - self._copied_s >= self._interval_s:
            self.copy()

    def close(self) -> None:
        """Write what waits, and end the file."""
        try:
            self._file.close()
            self.copy()
        finally:
            shutil.rmtree(self._folder, ignore_errors=True)

    def copy(self) -> None:
        """Give the store what is written."""
        self._copied_s = time.monotonic()
        for name in os.listdir(self._folder):
            copy_file(os.path.join(self._folder, name), os.path.join(self._logdir, name))


def create_file_writer(
    logdir: str | os.PathLike[str],
    max_queue: int | None = None,
    flush_millis: int | None = None,
    filename_suffix: str | None = None,
    name: str | None = None,  # noqa: ARG001 - of tf's graphs
) -> SummaryWriter:
    """Return a writer of event files for TensorBoard. Every process may call it; one of them makes the file.

    Args:
        logdir: the folder for the event file. In a store that fsspec finds, such as ``"s3://bucket/logs"``, the file is
            as new as the last ``flush``, the ``close``, or ``flush_millis``.
        max_queue: number of summaries that may wait to be written; ``None`` means 10.
        flush_millis: milliseconds after which they are; ``None`` means two minutes.
        filename_suffix: end of the file's name; ``None`` means ``".v2"``.
        name: without meaning here.

    Returns:
        The writer. Use it by ``with writer.as_default():`` or ``writer.set_as_default()``.

    Raises:
        ImportError: TensorBoard is not installed.
        TypeError: ``logdir`` is no path.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     writer = ts.summary.create_file_writer(folder)
        ...     with writer.as_default(step=1):
        ...         ts.summary.scalar("loss", torch.tensor(0.5))
        ...     writer.close()
        True
    """
    if not isinstance(logdir, (str, os.PathLike)):
        raise TypeError(f"logdir must be a path. Received: {logdir!r}")
    import_tensorboard()
    return SummaryWriter(
        logdir,
        10 if max_queue is None else max_queue,
        120_000 if flush_millis is None else flush_millis,
        ".v2" if filename_suffix is None else filename_suffix,
    )


def create_noop_writer() -> SummaryWriter:
    """Return a writer that writes nothing.

    Returns:
        The writer, for ``as_default`` and ``set_as_default``.

    Example:
        >>> with ts.summary.create_noop_writer().as_default(step=1):
        ...     ts.summary.scalar("loss", 0.5)
        False
    """
    return SummaryWriter(None, 0, 0, "")


def flush(writer: SummaryWriter | None = None) -> None:
    """Write what waits.

    Args:
        writer: of which writer; ``None`` means the default one, if there is one.

    Example:
        >>> ts.summary.flush()
    """
    writer = default_writer() if writer is None else writer
    if writer is not None:
        writer.flush()


@contextlib.contextmanager
def record_if(condition: bool | Callable[[], Any]) -> Iterator[None]:  # noqa: FBT001 - tf's signature
    """Write summaries inside only if a condition holds.

    Args:
        condition: a bool, or a function without arguments that is asked at each summary.

    Example:
        >>> with ts.summary.record_if(lambda: ts.summary.experimental.get_step() % 100 == 0):
        ...     ts.summary.scalar("loss", 0.5)  # there is no writer
        False
    """
    with set_within(_condition, condition):
        yield


def should_record_summaries() -> bool:
    """Say whether summaries are wanted: there is a default writer, and ``record_if`` allows them.

    Returns:
        The same on all replicas, of which only the chief's replica 0 writes.

    Example:
        >>> ts.summary.should_record_summaries()
        False
    """
    if default_writer() is None:
        return False
    condition = _condition.get()
    return bool(condition() if callable(condition) else condition)


def _set_step(step: Any) -> None:
    """Set the step of summaries that name none: an integer, an integer tensor or variable, or ``None``."""
    _step.get().value = step


def default_writer() -> SummaryWriter | None:
    """Return the writer that summaries go to."""
    writer: SummaryWriter | None = _writer.get().value
    return writer


def default_step() -> Any:
    """Return the step that was set, or ``None``."""
    return _step.get().value


#: tf's ``tf.summary.experimental``.
experimental = types.SimpleNamespace(set_step=_set_step, get_step=default_step)


def writes_here() -> bool:
    """Say whether this is replica 0, or cross-replica context on the chief."""
    frame = current_frame()
    if frame is not None and frame.replica_context is not None and frame.replica_context.replica_id_in_sync_group != 0:
        return False
    workers = None if frame is None else frame.strategy.workers
    if workers is not None:
        return bool(workers.rank == 0)
    job = find_job()
    return job is None or job.rank == 0


def import_tensorboard() -> Any:
    """Return torch's module for TensorBoard.

    Raises:
        ImportError: TensorBoard is not installed.
    """
    try:
        from torch.utils import tensorboard  # noqa: PLC0415 - optional
    except ImportError as error:
        raise ImportError("ts.summary needs TensorBoard: pip install tensorboard") from error
    return tensorboard


def _close(files: list[Any]) -> None:
    while files:
        files.pop().close()


def _close_forgotten(files: list[Any], logdir: str | None) -> None:
    """Close files as the garbage collector or the end of the program does, where no error can be raised."""
    try:
        _close(files)
    except Exception as error:  # noqa: BLE001 - what a store raises
        logger.warning("The last summaries could not be written to %s: %s. Close their writer.", logdir, error)
