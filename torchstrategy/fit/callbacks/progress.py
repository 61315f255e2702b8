"""Showing how far a training is: bars on terminals and in notebooks, plain lines elsewhere, and rows of a CSV file."""

from __future__ import annotations

import contextlib
import csv
import functools
import importlib.util
import os
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tqdm import tqdm
from typing_extensions import override

from torchstrategy.base.log import guard_lines
from torchstrategy.fit.callbacks.callback import Callback, Logs, is_chief

__all__ = ["CSVLogger", "ProgbarLogger", "check_verbose", "is_notebook", "make_bar", "print_line", "shows_bars"]


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


#: Seconds between two readings of the logs at least, because reading them may wait for the device.
_MIN_INTERVAL_S = 0.2


class ProgbarLogger(Callback):
    """Shows the progress, the loss and the metrics on the chief; ``verbose`` of ``fit`` adds it.

    Like Keras it writes to standard output. ``verbose=1`` shows a bar for each epoch, made by tqdm, if that is a
    terminal or a notebook, and otherwise the same as ``verbose=2``: a line at the end of each epoch. ``evaluate`` and
    ``predict`` show one bar or line; the validation inside ``fit`` shows none.

    Example:
        >>> model = ts.Model(torch.nn.Linear(1, 1))
        >>> model.compile("sgd", "mse")
        >>> history = model.fit(torch.ones(4, 1), torch.ones(4, 1), verbose=2)  # doctest: +ELLIPSIS
        1/1 - ... - loss: ...
    """

    def __init__(self) -> None:
        super().__init__()
        self._verbose: Any = 1
        self._epochs: int | None = None
        self._steps: int | None = None
        self._bar: Any = None
        self._seen = 0
        self._begin_s = self._read_s = 0.0
        self._in_fit = False

    @override
    def set_params(self, params: Mapping[str, Any]) -> None:
        super().set_params(params)
        verbose = params.get("verbose", 1)
        self._verbose = 1 if verbose == "auto" else int(verbose)
        self._epochs, self._steps = params.get("epochs"), params.get("steps")

    @override
    def on_train_begin(self, logs: Logs = None) -> None:
        self._close()
        self._in_fit = True

    @override
    def on_train_end(self, logs: Logs = None) -> None:
        self._close()
        self._in_fit = False

    @override
    def on_epoch_begin(self, epoch: int, logs: Logs = None) -> None:
        title = f"Epoch {epoch + 1}" + ("" if self._epochs is None else f"/{self._epochs}")
        self._begin(title if self._epochs != 1 else None)

    @override
    def on_epoch_end(self, epoch: int, logs: Logs = None) -> None:
        self._end(logs)

    @override
    def on_train_batch_end(self, batch: int, logs: Logs = None) -> None:
        self._step(batch, logs)

    @override
    def on_test_begin(self, logs: Logs = None) -> None:
        if not self._in_fit:
            self._begin(None)

    @override
    def on_test_batch_end(self, batch: int, logs: Logs = None) -> None:
        if not self._in_fit:
            self._step(batch, logs)

    @override
    def on_test_end(self, logs: Logs = None) -> None:
        if not self._in_fit:
            self._end(logs)

    @override
    def on_predict_begin(self, logs: Logs = None) -> None:
        self._begin(None)

    @override
    def on_predict_batch_end(self, batch: int, logs: Logs = None) -> None:
        self._step(batch, None)

    @override
    def on_predict_end(self, logs: Logs = None) -> None:
        self._end(None)

    @override
    def _release(self) -> None:
        self._close()
        self._in_fit = False

    def _begin(self, title: str | None) -> None:
        self._close()
        self._seen = 0
        self._begin_s = self._read_s = time.monotonic()
        if not self._verbose or not is_chief(self.model):
            return
        if self._verbose == 1 and shows_bars():
            self._bar = make_bar(self._steps, title)
        elif title is not None:
            print_line(title)

    def _step(self, batch: int, logs: Logs) -> None:
        self._seen = batch + 1
        if self._bar is None:
            return
        now = time.monotonic()
        if now - self._read_s >= _MIN_INTERVAL_S:
            self._read_s = now
            self._show(logs)

    def _end(self, logs: Logs) -> None:
        if self._steps is None or self._seen > self._steps:
            self._steps = self._seen
        if self._bar is not None:
            self._bar.total = self._steps
            self._show(logs)
            self._close()
        elif self._verbose and is_chief(self.model):
            print_line(_line(self._seen, self._steps, time.monotonic() - self._begin_s, logs))

    def _show(self, logs: Logs) -> None:
        self._bar.set_postfix_str(", ".join(f"{name}={text}" for name, text in _texts(logs)), refresh=False)
        self._bar.n = self._seen
        self._bar.refresh()

    def _close(self) -> None:
        if self._bar is not None:
            self._bar.close()
            self._bar = None


def check_verbose(verbose: Any) -> None:
    """Check the argument of ``fit`` and its kin.

    Raises:
        ValueError: it is none of its values.
    """
    if verbose not in ("auto", 0, 1, 2):
        raise ValueError(
            "verbose must be 0 (nothing), 1 (a bar for each epoch), 2 (a line for each epoch) or 'auto' (as 1). "
            f"Received: {verbose!r}"
        )


def _line(seen: int, steps: int | None, seconds: float, logs: Logs) -> str:
    """Return what Keras prints of an epoch."""
    parts = [
        f"{seen}/{seen if steps is None else steps}",
        f"{seconds:.1f}s",
        f"{_duration(seconds / max(seen, 1))}/step",
    ]
    return " - ".join(parts + [f"{name}: {text}" for name, text in _texts(logs)])


def _texts(logs: Logs) -> list[tuple[str, str]]:
    """Return the logs' names and their numbers as text."""
    return [(name, _number(value)) for name, value in ({} if logs is None else logs).items()]


def _number(value: Any) -> str:
    try:
        number = float(value)
    except (TypeError, ValueError, RuntimeError):
        return " ".join(str(value).split())
    return f"{number:.4f}" if abs(number) > 1e-3 or number == 0 else f"{number:.4e}"


def _duration(seconds: float) -> str:
    if seconds >= 1:
        return f"{seconds:.0f}s"
    return f"{seconds * 1e3:.0f}ms" if seconds >= 1e-3 else f"{seconds * 1e6:.0f}us"


_ABSENT = "NA"


class CSVLogger(Callback):
    """Writes a row for each epoch into a CSV file, on the chief.

    The columns are ``epoch``, from 0, and the names in the logs, sorted; one that appears later is added, with ``NA``
    in the rows before. A training that goes on after an interruption goes on with the rows that it had written.

    Args:
        filename: the file; its folder is made if need be.
        separator: what separates the columns.
        append: go on with the file that is there, instead of replacing it when the first epoch ends.

    Raises:
        TypeError: ``filename`` is no path.

    Example:
        >>> import pathlib, tempfile
        >>> model = ts.Model(torch.nn.Linear(1, 1, bias=False))
        >>> _ = torch.nn.init.zeros_(model.module.weight)
        >>> model.compile("sgd", "mse")
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     log = ts.callbacks.CSVLogger(f"{folder}/log.csv")
        ...     _ = model.fit(torch.ones(4, 1), torch.ones(4, 1), callbacks=[log], verbose=0)
        ...     print(pathlib.Path(folder, "log.csv").read_text())
        epoch,loss
        0,1.0
        <BLANKLINE>
    """

    def __init__(
        self,
        filename: str | os.PathLike[str],
        separator: str = ",",
        append: bool = False,  # noqa: FBT001, FBT002 - Keras' signature
    ) -> None:
        super().__init__()
        if not isinstance(filename, (str, os.PathLike)):
            raise TypeError(f"CSVLogger(filename=...) must be a path. Received: {filename!r}")
        self.filename = os.fspath(filename)
        self.sep = separator
        self.append = append
        self._num_rows = 0
        self._columns: list[str] | None = None  # once the file is ours

    @override
    def on_train_begin(self, logs: Logs = None) -> None:
        self._columns = None
        self._num_rows = len(self._read()[1]) if self.append and is_chief(self.model) else 0

    @override
    def on_epoch_end(self, epoch: int, logs: Logs = None) -> None:
        row = {"epoch": epoch, **{name: _cell(value) for name, value in sorted((logs or {}).items())}}
        if is_chief(self.model):
            self._write(row)
        self._num_rows += 1

    @override
    def state_dict(self) -> dict[str, Any]:
        return {"num_rows": self._num_rows}

    @override
    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._num_rows, self._columns = state["num_rows"], None

    def _write(self, row: Mapping[str, Any]) -> None:
        new = [name for name in row if name not in (self._columns or ())]
        if self._columns is None or new:
            columns, rows = self._read()
            rows = rows[: self._num_rows]
            self._columns = [*(columns if rows else ()), *(name for name in row if not rows or name not in columns)]
            self._rewrite(rows)
        with open(self.filename, "a", newline="", encoding="utf-8") as file:
            self._writer(file).writerow(row)

    def _read(self) -> tuple[list[str], list[dict[str, str]]]:
        """Return the columns and rows of the file; nothing if there is none."""
        if not Path(self.filename).is_file():
            return [], []
        with open(self.filename, newline="", encoding="utf-8") as file:
            reader = csv.DictReader(file, delimiter=self.sep, restval=_ABSENT)
            rows = list(reader)
            return list(reader.fieldnames or ()), rows

    def _rewrite(self, rows: Sequence[Mapping[str, str]]) -> None:
        path = Path(self.filename)
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_name(f"{path.name}.partial")
        with open(partial, "w", newline="", encoding="utf-8") as file:
            writer = self._writer(file)
            writer.writeheader()
            writer.writerows(rows)
        os.replace(partial, path)

    def _writer(self, file: Any) -> csv.DictWriter[str]:
        return csv.DictWriter(
            file, self._columns or [], restval=_ABSENT, extrasaction="ignore", delimiter=self.sep, lineterminator="\n"
        )


def _cell(value: Any) -> Any:
    """Return a value as one cell: several numbers as Keras writes them."""
    is_several = isinstance(value, (list, tuple)) or getattr(value, "ndim", 0) > 0
    return f'"[{", ".join(map(str, value))}]"' if is_several else value
