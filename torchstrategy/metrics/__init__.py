"""Metrics under tf's names, on top of torchmetrics, and what makes any torchmetrics metric right over replicas."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from torchstrategy.metrics import sync as _sync  # noqa: F401 - registers what torchmetrics' classes do over replicas

if TYPE_CHECKING:
    from torchstrategy.metrics.classification import SparseCategoricalAccuracy
    from torchstrategy.metrics.mean import Mean

__all__ = ["Mean", "SparseCategoricalAccuracy"]

_MODULES = {"Mean": "mean", "SparseCategoricalAccuracy": "classification"}


def __getattr__(name: str) -> Any:  # torchmetrics takes a second to import: only those who use it wait
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
