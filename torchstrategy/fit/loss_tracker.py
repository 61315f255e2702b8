"""The metric behind ``loss`` in the logs: the mean over examples of what the replicas' losses add up to."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from torchstrategy.base.values import known_counts
from torchstrategy.fit.steps import current_step
from torchstrategy.metrics.mean import Mean
from torchstrategy.metrics.metric import sum_dtype
from torchstrategy.strategies.default import get_replica_context

__all__ = ["LossTracker"]


class LossTracker(Mean):
    """A mean over examples, from replicas' shares of batch means.

    Summed over replicas, shares are a batch's mean loss, and the epoch's is the mean over its examples. So a share
    counts with the number that it was divided by, and the examples count once each.

    Args:
        name: the name in logs.
    """

    def __init__(self, name: str = "loss") -> None:
        super().__init__(name, sum_dtype())

    def track(self, loss: Tensor) -> None:
        """Count a replica's share of the loss of the batch that it works on; if it did before, count this instead.

        Args:
            loss: scalar; the sum over replicas is the batch's mean loss.
        """
        num_examples, divisor = known_counts(get_replica_context())
        share, tracked = loss.detach(), current_step().tracked
        if tracked:
            self.add_share(share - tracked[-1], 0, divisor)
        else:
            self.add_share(share, num_examples, divisor)
        if current_step().method:
            tracked.append(share)

    @override
    def update_state(self, values: Any, sample_weight: Any = None) -> None:
        if sample_weight is None and current_step().method:
            self.track(values)  # what Keras' steps call it with
        else:
            super().update_state(values, sample_weight)

    def add_share(self, loss: Tensor, num_examples: int, divisor: int) -> None:
        """Add a replica's share of the loss of a batch.

        Args:
            loss: scalar; the sum over replicas is the batch's mean loss.
            num_examples: this replica's.
            divisor: examples of the whole batch (of all batches of an optimizer step).
        """
        with torch.no_grad():  # in place, and past update_state: this is in every step's way
            self.total.add_(loss.detach(), alpha=divisor)
            self.count.add_(num_examples)
        self._update_count += 1
        self._computed = None
