"""What the metrics under tf's names have in common: a weighted mean, kept as a sum and a count.

Sums are kept in ``float64`` whatever the values' dtype, so that the order and number of updates don't show.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torchmetrics import Metric

from torchstrategy import errors

__all__ = ["KerasMetric", "MeanMetric"]


class KerasMetric(Metric):
    """A torchmetrics metric that also has tf's names: ``update_state``, ``result``, ``reset_state``.

    Args:
        name: the metric's name, for logs.
        dtype: dtype of the result; ``None`` means torch's default dtype at construction.
        kwargs: torchmetrics' arguments.
    """

    full_state_update = False

    def __init__(self, name: str, dtype: torch.dtype | None = None, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.name = name
        self.result_dtype = dtype or torch.get_default_dtype()

    def update_state(self, *args: Any, **kwargs: Any) -> None:
        """Add the values of one batch: torchmetrics' ``update``."""
        self.update(*args, **kwargs)

    def result(self) -> Tensor:
        """Return the metric since the last reset: torchmetrics' ``compute``, without its warning before updates.

        In replica context this is the replica's own result, in cross-replica context the one over all replicas.
        """
        if not self.update_called:
            return torch.zeros((), dtype=self.result_dtype, device=self.device)
        value: Tensor = self.compute()
        return value

    def reset_state(self) -> None:
        """Start anew: torchmetrics' ``reset``."""
        self.reset()

    def reset_states(self) -> None:
        """Start anew: ``reset_state`` under its name in older releases of tf."""
        self.reset_state()

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """Add the values of one batch and return the result over all batches so far, as tf does.

        (torchmetrics returns the value of the one batch.)
        """
        self.update(*args, **kwargs)
        return self.result()


class MeanMetric(KerasMetric):
    """A mean over examples; subclasses call ``_add``.

    Args:
        name: the metric's name, for logs.
        dtype: dtype of the result; ``None`` means torch's default dtype at construction.
        kwargs: torchmetrics' arguments.
    """

    total: Tensor
    count: Tensor

    def __init__(self, name: str, dtype: torch.dtype | None = None, **kwargs: Any) -> None:
        super().__init__(name, dtype, **kwargs)
        sum_dtype = torch.float32 if torch.get_default_device().type == "mps" else torch.float64  # which mps lacks
        self.add_state("total", torch.zeros((), dtype=sum_dtype), dist_reduce_fx="sum")
        self.add_state("count", torch.zeros((), dtype=sum_dtype), dist_reduce_fx="sum")

    def _add(self, values: Tensor, sample_weight: Any) -> None:
        """Add values of ``[batch, ...]``; an example's value is the mean over its other dimensions."""
        values = values.detach().to(self.total)
        weight = torch.ones_like(values) if sample_weight is None else self._matching_weight(sample_weight, values)
        if values.ndim > 1:
            values, weight = (values * weight).flatten(1).mean(1), weight.flatten(1).mean(1)
        else:
            values = values * weight
        self.total = self.total + values.sum()
        self.count = self.count + weight.sum()

    def _matching_weight(self, sample_weight: Any, values: Tensor) -> Tensor:
        """Return the weights in the shape of the values; ``[batch]`` and ``[batch, 1]`` weights count for examples."""
        weight = torch.as_tensor(sample_weight).detach().to(values)
        original = tuple(weight.shape)
        if weight.ndim == values.ndim + 1 and weight.shape[-1] == 1:
            weight = weight.squeeze(-1)
        elif 0 < weight.ndim < values.ndim:
            weight = weight.reshape(*weight.shape, *(1,) * (values.ndim - weight.ndim))
        try:
            return weight.broadcast_to(values.shape)
        except RuntimeError as error:
            raise errors.InvalidArgumentError(
                f"sample_weight must be a scalar, have one entry for each example, or be broadcastable to the values' "
                f"shape {tuple(values.shape)}. Received shape {original}"
            ) from error

    def compute(self) -> Tensor:
        """Return the mean over all examples since the last reset; 0 if there were none."""
        mean = torch.where(self.count == 0, 0.0, self.total / torch.where(self.count == 0, 1.0, self.count))
        return mean.to(self.result_dtype)
