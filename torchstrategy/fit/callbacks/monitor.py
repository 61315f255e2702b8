"""Which values of a monitored name are better, and reading it from the logs."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torchstrategy.base.log import warn_once

__all__ = ["Goal", "check_mode", "find_goal", "read_monitored"]

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
        raise ValueError(
            f"{callback} with monitor={monitor!r} and mode='auto' can't tell whether larger or smaller values are "
            "better. Pass mode='max' or mode='min'."
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
