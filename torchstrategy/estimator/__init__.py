"""The Estimator API: train, evaluate, predict and export a ``model_fn``, on one device or a cluster."""

from __future__ import annotations

from torchstrategy.base import later

# torchmetrics and torch.export take a second to import: only their users wait.
__getattr__, __dir__, __all__ = later.attach(__name__)
