"""The event files of trainings: one for each folder, whichever hooks write into it.

TensorBoard reads the files of a folder one after another and never goes back, so hooks must share one.
"""

from __future__ import annotations

import os
import weakref

from torchstrategy.base.log import info_once
from torchstrategy.summary import SummaryWriter, create_file_writer, create_noop_writer

__all__ = ["open_writer"]

#: Writers by folder. Their files are closed when the last hook has given them up.
_writers: weakref.WeakValueDictionary[str, SummaryWriter] = weakref.WeakValueDictionary()


def open_writer(folder: str | os.PathLike[str]) -> SummaryWriter:
    """Return the writer for a folder; one that writes nothing if TensorBoard is not installed."""
    path = os.path.realpath(folder)
    writer = _writers.get(path)
    if writer is None:
        try:
            writer = create_file_writer(folder)
        except ImportError:
            info_once("No summaries are written, because TensorBoard is not installed.")
            return create_noop_writer()
        _writers[path] = writer
    return writer
