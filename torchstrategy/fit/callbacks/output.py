"""Printing for a training: to standard output, as Keras does, past progress bars, and never at the training's risk."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import os
import sys
import threading
from typing import Any

from tqdm import tqdm

from torchstrategy.base.log import guard_lines

__all__ = ["is_notebook", "make_bar", "print_line", "shows_bars"]


class _Output:
    """The ``sys.stdout`` of the moment. If it fails, because it was closed for instance, what is written is lost."""

    def write(self, text: str) -> int:
        """Write text if that is possible."""
        stream = sys.stdout
        try:
            stream.write(text)
        except UnicodeEncodeError:
            encoding = stream.encoding or "ascii"
            stream.write(text.encode(encoding, "replace").decode(encoding))
        except (AttributeError, OSError, ValueError):  # none, broken, closed
            pass
        return len(text)

    def flush(self) -> None:
        """Flush it if that is possible."""
        with contextlib.suppress(AttributeError, OSError, ValueError):
            sys.stdout.flush()

    def isatty(self) -> bool:
        """Say whether it is a terminal."""
        try:
            return bool(sys.stdout.isatty())
        except (AttributeError, OSError, ValueError):
            return False

    def fileno(self) -> int:
        """Return its file descriptor, by which tqdm finds the terminal's width."""
        try:
            return int(sys.stdout.fileno())
        except (AttributeError, ValueError) as error:
            raise OSError("there is no standard output") from error

    @property
    def encoding(self) -> str:
        """Its encoding, by which tqdm chooses its characters."""
        return getattr(sys.stdout, "encoding", None) or "ascii"


class _TextBar(tqdm):  # type: ignore[misc]
    """tqdm without its thread, which would outlive the training, and without its lock between processes."""

    monitor_interval = 0


_TextBar.set_lock(threading.RLock())
_output = _Output()  # one, by which tqdm knows the bars that a line must not overwrite
guard_lines(functools.partial(_TextBar.external_write_mode, _output))


def print_line(text: str) -> None:
    """Print a line, above a bar if one is shown."""
    _TextBar.write(text, file=_output)
    _output.flush()


def is_notebook() -> bool:
    """Say whether the program runs in a notebook's kernel."""
    ipython = sys.modules.get("IPython")
    shell = None if ipython is None else ipython.get_ipython()
    return shell is not None and hasattr(shell, "kernel")


def shows_bars() -> bool:
    """Say whether standard output can show a bar that moves."""
    return is_notebook() or _output.isatty()


def make_bar(total: int | None, desc: str | None) -> Any:
    """Return a bar of tqdm: in notebooks its widget, if the package for it is installed."""
    if is_notebook() and importlib.util.find_spec("ipywidgets") is not None:
        with contextlib.suppress(ImportError):  # tqdm's, for a version that it can't use
            from tqdm.notebook import tqdm as notebook_bar  # noqa: PLC0415 - only in notebooks

            return notebook_bar(total=total, desc=desc, unit="step")
    return _TextBar(total=total, desc=desc, unit="step", file=_output, dynamic_ncols=_has_width())


def _has_width() -> bool:
    """Say whether the terminal knows its width; tqdm shows nothing on one whose width is 0."""
    try:
        return os.get_terminal_size(_output.fileno()).columns > 0
    except (OSError, ValueError):
        return False
