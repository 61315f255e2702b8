"""Metrics under tf's names, on top of torchmetrics, and what makes any torchmetrics metric right over replicas."""

from __future__ import annotations

from torchstrategy.base import later

# torchmetrics takes a second to import: only those who use it wait.
__getattr__, __dir__, __all__ = later.attach(__name__)
