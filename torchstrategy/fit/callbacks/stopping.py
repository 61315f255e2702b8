"""Callbacks that end a training early, and what callbacks monitor."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from typing_extensions import override

from torchstrategy.base.log import warn_once
from torchstrategy.base.values import RemoteTensor
from torchstrategy.fit.callbacks.callback import Callback, Logs, is_chief
from torchstrategy.fit.callbacks.progress import print_line

__all__ = ["EarlyStopping", "Goal", "TerminateOnNaN", "check_mode", "find_goal", "read_monitored"]

_LARGER_IS_BETTER = ("acc", "auc", "precision", "recall", "f1", "fbeta", "iou", "io_u", "r2", "true_pos", "true_neg")
_SMALLER_IS_BETTER = ("loss", "error", "mse", "mae", "mape", "msle", "entropy", "hinge", "divergence", "false_", "perp")


@dataclass(frozen=True)
class Goal:
    """What counts as an improvement.

    Args:
        larger: whether larger values are better.
        min_delta: by how much, at least.
    """

    larger: bool
    min_delta: float = 0.0

    @property
    def worst(self) -> float:
        """The value that everything else improves on."""
        return -math.inf if self.larger else math.inf

    def is_better(self, new: float, best: float) -> bool:
        """Say whether a new value improves on the best one so far; one that is not a number never does."""
        return new - self.min_delta > best if self.larger else new + self.min_delta < best


def check_mode(mode: str, callback: str) -> str:
    """Return the mode.

    Raises:
        ValueError: it is none.
    """
    if mode not in ("auto", "min", "max"):
        raise ValueError(f"{callback}(mode=...) must be 'auto', 'min' or 'max'. Received: {mode!r}")
    return mode


def find_goal(monitor: str, mode: str, model: Any, callback: str, min_delta: float = 0.0) -> Goal:
    """Return what is better for a monitored name.

    Args:
        monitor: the name in the logs.
        mode: ``"min"``, ``"max"``, or ``"auto"``, which asks the model's metric of that name and then the name.
        model: the model.
        callback: what the error message calls the callback.
        min_delta: by how much, at least.

    Raises:
        ValueError: ``"auto"`` can't tell.
    """
    larger = mode == "max" if mode in ("min", "max") else _larger_is_better(monitor, model)
    if larger is None:
        names = ", ".join(getattr(model, "metrics_names", None) or ["loss"])
        raise ValueError(
            f"{callback} with monitor={monitor!r} and mode='auto' can't tell whether larger or smaller values are "
            "better. Pass mode='max' or mode='min' if a step or a callback adds this value. The logs have: "
            f"{names}; with validation data each with val_ before it, too."
        )
    return Goal(larger, abs(min_delta))


def read_monitored(logs: Mapping[str, Any] | None, monitor: str, callback: str) -> float | None:
    """Return the monitored value as a float, or ``None`` with a warning if the logs lack it."""
    value = (logs or {}).get(monitor)
    if value is not None:
        return float(value)
    hint = ""
    if monitor.startswith("val_"):
        hint = " Pass validation data to `fit`, or monitor one of these. (With validation_freq, ignore this.)"
    warn_once(
        f"{callback} monitors {monitor!r}, which is not in the logs and is skipped. The logs have: "
        f"{', '.join(sorted(logs or {})) or 'nothing'}.{hint}",
        stacklevel=2,
    )
    return None


def _larger_is_better(monitor: str, model: Any) -> bool | None:
    name = monitor.removeprefix("val_")
    if name == "loss" or name.endswith("_loss"):
        return False
    for metric in _metrics_named(name, model):
        larger = getattr(metric, "higher_is_better", None)
        if larger is not None:
            return bool(larger)
    if any(part in name.lower() for part in _SMALLER_IS_BETTER):
        return False
    return True if any(part in name.lower() for part in _LARGER_IS_BETTER) else None


def _metrics_named(name: str, model: Any) -> list[Any]:
    metrics = list(getattr(model, "metrics", None) or [])
    names = list(getattr(model, "metrics_names", None) or [])
    if len(names) != len(metrics):
        names = [getattr(metric, "name", None) for metric in metrics]
    return [metric for metric, own in zip(metrics, names, strict=True) if own == name]


class EarlyStopping(Callback):
    """Ends the training when a value has stopped improving.

    Args:
        monitor: the name of the value in the logs.
        min_delta: by how much a value must be better to count as an improvement.
        patience: epochs without improvement after which the training ends.
        verbose: 1 prints a line when it does.
        mode: ``"min"`` or ``"max"``, what is better; ``"auto"`` tells by the metric and its name.
        baseline: a value that must be improved on as well; ``None`` means none.
        restore_best_weights: go back to the weights of the best epoch at the end, also if no epoch was better than
            ``baseline``. Every process keeps a copy of the model's ``state_dict()`` in the host's memory.
        start_from_epoch: epochs at the start that are not looked at.

    Attributes:
        best: the best value so far.
        best_epoch: its epoch, from 0.
        stopped_epoch: the epoch that ended the training; 0 if none did.

    Raises:
        ValueError: ``mode`` is none, or ``"auto"`` can't tell (when the training begins).

    Example:
        >>> model = ts.Model(torch.nn.Linear(1, 1))
        >>> model.compile(torch.optim.SGD(model.parameters(), lr=0.0), "mse")
        >>> stop = ts.callbacks.EarlyStopping(monitor="loss", patience=3)
        >>> history = model.fit(torch.ones(4, 1), torch.ones(4, 1), epochs=10, callbacks=[stop], verbose=0)
        >>> len(history.history["loss"])  # the first epoch is the best one
        4
    """

    def __init__(
        self,
        monitor: str = "val_loss",
        min_delta: float = 0,
        patience: int = 0,
        verbose: int = 0,
        mode: str = "auto",
        baseline: float | None = None,
        restore_best_weights: bool = False,  # noqa: FBT001, FBT002 - Keras' signature
        start_from_epoch: int = 0,
    ) -> None:
        super().__init__()
        self.monitor = monitor
        self.min_delta = abs(min_delta)
        self.patience = patience
        self.verbose = verbose
        self.mode = check_mode(mode, "EarlyStopping")
        self.baseline = baseline
        self.restore_best_weights = restore_best_weights
        self.start_from_epoch = start_from_epoch
        self._goal = Goal(larger=False)
        self._reset()

    def _reset(self) -> None:
        self.wait = 0
        self.stopped_epoch = 0
        self.best = self._goal.worst
        self.best_epoch = 0
        self.best_weights: dict[str, Any] | None = None

    @override
    def on_train_begin(self, logs: Logs = None) -> None:
        self._goal = find_goal(self.monitor, self.mode, self.model, "EarlyStopping", self.min_delta)
        self._reset()

    @override
    def on_epoch_end(self, epoch: int, logs: Logs = None) -> None:
        current = read_monitored(logs, self.monitor, "EarlyStopping")
        if current is None or epoch < self.start_from_epoch:
            return
        is_best = self._goal.is_better(current, self.best)
        if self.restore_best_weights and (is_best or self.best_weights is None):
            self.best_weights = _host_copy(self.model)
            self.best_epoch = epoch
        self.wait += 1
        if is_best:
            self.best, self.best_epoch = current, epoch
            if self.baseline is None or self._goal.is_better(current, self.baseline):
                self.wait = 0
        elif self.wait >= self.patience and epoch > 0:
            self.stopped_epoch = epoch
            self.model.stop_training = True

    @override
    def on_train_end(self, logs: Logs = None) -> None:
        says = self.verbose > 0 and is_chief(self.model)
        if self.stopped_epoch > 0 and says:
            print_line(f"Epoch {self.stopped_epoch + 1}: {self.monitor} has stopped improving, the training ends.")
        if self.restore_best_weights and self.best_weights is not None:
            if says:
                print_line(f"The weights are those of the end of the best epoch, {self.best_epoch + 1}.")
            self.model.load_state_dict(self.best_weights)

    @override
    def state_dict(self) -> dict[str, Any]:
        return {
            "wait": self.wait,
            "stopped_epoch": self.stopped_epoch,
            "best": self.best,
            "best_epoch": self.best_epoch,
            "best_weights": self.best_weights,
        }

    @override
    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.wait, self.stopped_epoch = state["wait"], state["stopped_epoch"]
        self.best, self.best_epoch = state["best"], state["best_epoch"]
        self.best_weights = state["best_weights"]
        if self.stopped_epoch > 0:
            self.model.stop_training = True


class TerminateOnNaN(Callback):
    """Ends the training at the first batch whose loss is not finite.

    The loss is the running mean of the epoch, so a single loss that is not finite is seen for the rest of the epoch.
    With several processes the training ends at the end of that epoch.

    Args:
        raise_error: raise ``RuntimeError`` there, on all processes, instead of ending the training, so that no later
            line of the program takes its weights.
        log_interval: batches between two looks at it. A look waits for the device, and makes the processes of a job
            exchange their metrics; with more than 1, training goes on for some batches after the fact.

    Raises:
        TypeError: ``raise_error`` is no bool.
        ValueError: ``log_interval`` is not positive.

    Example:
        >>> model = ts.Model(torch.nn.Linear(1, 1))
        >>> model.compile("sgd", "mse")
        >>> x = torch.full((4, 1), float("nan"))
        >>> stop = ts.callbacks.TerminateOnNaN()
        >>> history = model.fit(x, x, batch_size=1, epochs=5, callbacks=[stop], verbose=0)
        Batch 0: the loss is nan, the training ends.
        >>> len(history.history["loss"])
        1
    """

    def __init__(self, raise_error: bool = False, *, log_interval: int = 1) -> None:  # noqa: FBT001, FBT002 - Keras'
        super().__init__()
        if not isinstance(raise_error, bool):
            raise TypeError(
                f"TerminateOnNaN(raise_error=...) must be a bool. Received: {raise_error!r}. Batches between two looks "
                "are log_interval=."
            )
        if log_interval < 1:
            raise ValueError(f"TerminateOnNaN(log_interval=...) must be at least 1. Received: {log_interval!r}")
        self.raise_error = raise_error
        self.log_interval = log_interval
        self._read_at = 0

    @override
    def on_epoch_begin(self, epoch: int, logs: Logs = None) -> None:
        self._read_at = 0

    @override
    def on_train_batch_end(self, batch: int, logs: Logs = None) -> None:
        if batch + 1 >= self._read_at:
            self._read_at = batch + 1 + (self.log_interval or 1)
            self._check(f"Batch {batch}", logs)

    @override
    def on_epoch_end(self, epoch: int, logs: Logs = None) -> None:
        self._check(f"Epoch {epoch + 1}", logs)

    def _check(self, when: str, logs: Logs) -> None:
        loss = None if self.model.stop_training else (logs or {}).get("loss")
        if loss is not None and not math.isfinite(float(loss)):
            if self.raise_error:
                raise RuntimeError(f"TerminateOnNaN: {when}: the loss is {float(loss)}.")
            self.model.stop_training = True
            if is_chief(self.model):
                print_line(f"{when}: the loss is {float(loss)}, the training ends.")


def _host_copy(model: Any) -> dict[str, Any]:
    """Return a copy of a model's state in the host's memory."""
    return {name: _copied(value) for name, value in model.state_dict().items()}


def _copied(value: Any) -> Any:
    if isinstance(value, RemoteTensor):
        return value.snapshot()
    return value.detach().to("cpu", copy=True) if isinstance(value, Tensor) else copy.deepcopy(value)
