"""What always saying the more frequent of two classes would score."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from torchstrategy.metrics.mean import WeightedMean
from torchstrategy.metrics.metric_inputs import as_tensor

__all__ = ["AccuracyBaseline"]


class AccuracyBaseline(WeightedMean):
    """The accuracy of always predicting the more frequent one of the labels 0 and 1.

    Args:
        name: the metric's name.
    """

    def __init__(self, name: str) -> None:
        super().__init__(name)

    def update_state(self, labels: Any, sample_weight: Any = None) -> None:
        """Add the labels of a batch.

        Args:
            labels: numbers in [0, 1], ``[batch, ...]``.
            sample_weight: as for ``ts.metrics.Mean``.
        """
        self._add(as_tensor(labels), sample_weight)

    def result(self) -> Tensor:
        """Return the larger one of the classes' shares; 0 if there were no labels."""
        mean = self._mean()
        return torch.where(self.count == 0, 0.0, torch.maximum(mean, 1 - mean))
