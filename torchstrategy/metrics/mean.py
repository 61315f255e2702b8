"""The weighted mean of what it is given."""

from __future__ import annotations

from typing import Any

import torch

from torchstrategy.metrics.base import MeanMetric

__all__ = ["Mean"]


class Mean(MeanMetric):
    """Weighted mean of values.

    Made in a strategy's scope, ``result()`` in cross-replica context is the mean over all examples of all replicas,
    however they were split. Give it per-example losses, not losses that are already divided by the global batch size:
    the mean over replicas of those is too small by the number of replicas.

    Args:
        name: the metric's name, for logs.
        dtype: dtype of the result; ``None`` means torch's default dtype at construction. Sums are kept in ``float64``.
        kwargs: torchmetrics' arguments.

    Example:
        >>> metric = ts.metrics.Mean(name="loss")
        >>> metric.update_state(torch.tensor([1.0, 3.0]))
        >>> metric.update_state(6.0, sample_weight=2.0)
        >>> metric.result()
        tensor(4.)
        >>> metric.reset_state()
        >>> metric.result()
        tensor(0.)
    """

    def __init__(self, name: str = "mean", dtype: torch.dtype | None = None, **kwargs: Any) -> None:
        super().__init__(name, dtype, **kwargs)

    def update(self, values: Any, sample_weight: Any = None) -> None:
        """Add values.

        Args:
            values: a scalar, which counts as one example, or ``[batch, ...]``; ``batch`` may be 0.
            sample_weight: scalar, ``[batch]``, or broadcastable to ``values``; ``None`` means that every example
                weighs 1.

        Raises:
            InvalidArgumentError: ``sample_weight`` does not fit.
        """
        self._add(torch.as_tensor(values), sample_weight)
