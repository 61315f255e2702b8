"""The logs of the epochs as a CSV file."""

from __future__ import annotations

import csv
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from typing_extensions import override

from torchstrategy.fit.callbacks.callback import Callback, Logs, is_chief

__all__ = ["CSVLogger"]

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
