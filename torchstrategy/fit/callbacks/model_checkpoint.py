"""The callback that saves the model while it is trained."""

from __future__ import annotations

import contextlib
import os
import string
from collections.abc import Iterator, Mapping
from typing import Any

from typing_extensions import override

from torchstrategy.base.log import logger, warn_once
from torchstrategy.checkpoint.fencing import Fence
from torchstrategy.checkpoint.preemption import check_positive
from torchstrategy.checkpoint.process_reports import WriteFailedError
from torchstrategy.fit.callbacks.callback import Callback, Logs, is_chief
from torchstrategy.fit.callbacks.progress import print_line
from torchstrategy.fit.callbacks.stopping import Goal, check_mode, find_goal
from torchstrategy.fit.weight_files import is_listed, write_weights

__all__ = ["FINISHED", "ModelCheckpoint"]

#: The file that says, in a directory of checkpoints, that no more will come. A ``SidecarEvaluator`` looks for it.
FINISHED = "training_finished"


class ModelCheckpoint(Callback):
    """Saves the model after epochs, or every so many batches.

    What is written is the ``state_dict``, as by ``model.save_weights``, and ``model.load_weights`` reads it. A path
    without a suffix is the beginning of a file's name, ``<filepath>.pt``, which becomes
    ``ts.train.latest_checkpoint`` of its directory, where a ``SidecarEvaluator`` finds it. (For one that ends in
    ``.pt``, ``.pth``, ``.bin`` or ``.safetensors`` no evaluator looks.) Give each callback and each program that writes
    checkpoints a directory of its own.

    Args:
        filepath: where to; names in braces are replaced by ``epoch``, ``batch`` (both from 1) and what the logs hold:
            ``"models/{epoch:02d}-{val_loss:.4f}.pt"``. Without any, each file replaces the one before.
        monitor: the name in the logs that says what is best.
        verbose: 1 prints a line at each save.
        save_best_only: save only what is better than all before.
        save_weights_only: save the weights only, else all of the model, as ``Model.save``. Such a file can run code
            when it is loaded; tf's default is ``False`` nevertheless.
        mode: ``"min"`` or ``"max"``, what is better; ``"auto"`` tells by the metric and its name.
        save_freq: ``"epoch"``, or a number of batches.
        initial_value_threshold: what the first model must be better than; ``None`` means nothing.
        on_write_error: what follows if there is no room on the disk, or no right to write: ``"raise"`` ends ``fit``,
            ``"warn"`` logs a warning and trains on; what was saved before is as it was.

    Raises:
        ValueError: an argument is out of range; a name in ``filepath`` is not in the logs, or ``"auto"`` can't tell (in
            the training).

    Example:
        >>> import tempfile
        >>> folder = tempfile.TemporaryDirectory()
        >>> model = ts.Model(torch.nn.Linear(1, 1))
        >>> model.compile("sgd", "mse")
        >>> save = ts.callbacks.ModelCheckpoint(f"{folder.name}/weights-{{epoch}}")
        >>> history = model.fit(torch.ones(4, 1), torch.ones(4, 1), epochs=2, callbacks=[save], verbose=0)
        >>> ts.train.latest_checkpoint(folder.name).removeprefix(folder.name)
        '/weights-2'
        >>> model.load_weights(f"{folder.name}/weights-1")
        >>> folder.cleanup()
    """

    def __init__(  # noqa: PLR0913 - tf's signature, and one more
        self,
        filepath: str | os.PathLike[str],
        monitor: str = "val_loss",
        verbose: int = 0,
        save_best_only: bool = False,  # noqa: FBT001, FBT002 - tf's signature
        save_weights_only: bool = True,  # noqa: FBT001, FBT002 - tf's signature, but for the default
        mode: str = "auto",
        save_freq: str | int = "epoch",
        initial_value_threshold: float | None = None,
        *,
        on_write_error: str = "raise",
    ) -> None:
        super().__init__()
        self.filepath = os.fspath(filepath)
        self.monitor = monitor
        self.verbose = verbose
        self.save_best_only = save_best_only
        self.save_weights_only = save_weights_only
        self.mode = check_mode(mode, "ModelCheckpoint")
        self.save_freq = check_save_freq(save_freq, "ModelCheckpoint")
        self.best = initial_value_threshold
        self.on_write_error = check_on_write_error(on_write_error, "ModelCheckpoint")
        self._goal: Goal | None = None
        self._fence: Fence | None = None
        self._fields = _fields(self.filepath)
        self._epoch = 0
        self._last_batch = -1
        self._num_batches = 0
        if isinstance(self.save_freq, int) and (save_best_only or self._fields - {"epoch", "batch"}):
            self.log_interval = self.save_freq

    @override
    def on_train_begin(self, logs: Logs = None) -> None:
        if self.save_best_only:
            self._goal = find_goal(self.monitor, self.mode, self.model, "ModelCheckpoint")
            if self.best is None:
                self.best = self._goal.worst
        self._last_batch, self._num_batches = -1, 0
        self._fence = Fence(os.path.dirname(self.filepath)) if self._is_for_evaluator() else None
        self._say_finished(is_finished=False)

    @override
    def on_epoch_begin(self, epoch: int, logs: Logs = None) -> None:
        self._epoch = epoch

    @override
    def on_train_batch_end(self, batch: int, logs: Logs = None) -> None:
        if not isinstance(self.save_freq, int):
            return
        self._num_batches = self._count(batch)
        self._last_batch = batch
        if self._num_batches >= self.save_freq:
            self._num_batches = 0
            self._save(self._epoch, batch, logs)

    @override
    def on_epoch_end(self, epoch: int, logs: Logs = None) -> None:
        if self.save_freq == "epoch":
            self._save(epoch, None, logs)

    @override
    def on_train_end(self, logs: Logs = None) -> None:
        self._say_finished(is_finished=True)

    @override
    def state_dict(self) -> dict[str, Any]:
        return {"best": self.best, "last_batch": self._last_batch, "num_batches": self._num_batches}

    @override
    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.best = state["best"]
        self._last_batch, self._num_batches = state["last_batch"], state["num_batches"]

    def saves_after(self, batch: int) -> bool:
        """Say whether ``on_train_batch_end`` may save, so that a loop with steps under way can wait for them before.

        Args:
            batch: the batch that it will be called with.
        """
        return isinstance(self.save_freq, int) and self._count(batch) >= self.save_freq

    def _count(self, batch: int) -> int:
        """Return the batches since the last save, at the end of a batch."""
        return self._num_batches + (batch - self._last_batch if batch > self._last_batch else batch + 1)

    def _save(self, epoch: int, batch: int | None, logs: Logs) -> None:
        before = self.best
        if not self._is_wanted(epoch, logs):
            return
        path = self._format(epoch, batch, {} if logs is None else logs)
        self._say(epoch, f"saving the model to {path}")
        best, self.best = self.best, before  # until it is on the disk
        with passing_over_write_errors(self.on_write_error, "ModelCheckpoint"):
            if self.save_weights_only:
                write_weights(self.model, path, fence=self._fence)
            else:
                self.model.save(path)
            self.best = best

    def _is_wanted(self, epoch: int, logs: Logs) -> bool:
        """Say whether the model is to be saved; with ``save_best_only`` this notes the best value."""
        if self._goal is None:
            return True
        current = (logs or {}).get(self.monitor)
        if current is None:
            warn_once(
                f"ModelCheckpoint(save_best_only=True) monitors {self.monitor!r}, which is not in the logs, so the "
                f"model is saved each time. The logs have: {_names(logs or {})}.",
                stacklevel=2,
            )
            return True
        current, best = float(current), float(self._goal.worst if self.best is None else self.best)
        if not self._goal.is_better(current, best):
            self._say(epoch, f"{self.monitor} did not improve from {best:.5f}")
            return False
        self._say(epoch, f"{self.monitor} improved from {best:.5f} to {current:.5f}")
        self.best = current
        return True

    def _format(self, epoch: int, batch: int | None, logs: Mapping[str, Any]) -> str:
        values: dict[str, Any] = {name: logs[name] for name in self._fields if name in logs}
        values["epoch"] = epoch + 1
        if batch is not None:
            values.setdefault("batch", batch + 1)
        missing = self._fields - values.keys()
        if missing:
            raise ValueError(
                f"ModelCheckpoint(filepath={self.filepath!r}) has names that are not in the logs: "
                f"{', '.join(sorted(missing))}. There are: {_names({**logs, **values})}."
            )
        return self.filepath.format(**values)

    def _say(self, epoch: int, text: str) -> None:
        if self.verbose > 0 and is_chief(self.model):
            print_line(f"Epoch {epoch + 1}: {text}")

    def _is_for_evaluator(self) -> bool:
        """Say whether what is saved becomes the latest checkpoint of a directory."""
        return self.save_weights_only and is_listed(self.filepath) and not _fields(os.path.dirname(self.filepath))

    def _say_finished(self, *, is_finished: bool) -> None:
        """Tell an evaluator whether more checkpoints will come."""
        if not self._is_for_evaluator() or not is_chief(self.model):
            return
        directory = os.path.dirname(self.filepath) or "."
        path = os.path.join(directory, FINISHED)
        if not is_finished:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)
        elif os.path.isdir(directory):
            with (
                passing_over_write_errors(self.on_write_error, "ModelCheckpoint"),
                open(path, "w", encoding="utf-8"),
            ):
                pass


def check_on_write_error(value: Any, callback: str) -> str:
    """Return ``on_write_error``.

    Raises:
        ValueError: it is neither ``"raise"`` nor ``"warn"``.
    """
    if value not in ("raise", "warn"):
        raise ValueError(f"{callback}(on_write_error=...) must be 'raise' or 'warn'. Received: {value!r}")
    return str(value)


@contextlib.contextmanager
def passing_over_write_errors(on_write_error: str, callback: str) -> Iterator[None]:
    """Let training go on if something can't be written, where that is wanted.

    Args:
        on_write_error: the callback's argument.
        callback: its name, for the log.
    """
    try:
        yield
    except (OSError, WriteFailedError) as error:
        if on_write_error == "raise":
            raise
        logger.warning("%s: nothing was saved, and training goes on: %s", callback, error)


def check_save_freq(save_freq: Any, callback: str) -> str | int:
    """Return ``save_freq``.

    Raises:
        ValueError: it is neither ``"epoch"`` nor a positive number.
    """
    if save_freq != "epoch":
        check_positive(save_freq, f"{callback}(save_freq=...)", "'epoch' or a positive number of batches")
    return save_freq  # type: ignore[no-any-return]


def _fields(text: str) -> set[str]:
    """Return the names in braces.

    Raises:
        ValueError: the braces don't fit together, or there is no name in them.
    """
    found = {name for _, name, _, _ in string.Formatter().parse(text) if name is not None}
    if any(not name or name.isdigit() for name in found):
        raise ValueError(
            f"The names in braces in a filepath must be those of logs, such as {{epoch:02d}}. Received: {text!r}. "
            "Double the braces for braces themselves."
        )
    return found


def _names(logs: Mapping[str, Any]) -> str:
    return ", ".join(sorted(logs)) or "nothing"
