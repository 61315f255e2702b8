"""Rows of a variable for the categories of each example, combined."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from torchstrategy.estimator.feature_column.features import Ids

__all__ = ["COMBINERS", "category_weights", "check_combiner", "combine_rows"]

COMBINERS = ("mean", "sqrtn", "sum")


def check_combiner(name: str, combiner: str) -> None:
    """Check the name of a way to combine rows.

    Raises:
        ValueError: there is none of this name.
    """
    if combiner not in COMBINERS:
        raise ValueError(f"{name} must be one of {', '.join(map(repr, COMBINERS))}. Received: {combiner!r}")


def combine_rows(table: Tensor, ids: Ids, combiner: str, max_norm: float | None = None) -> Tensor:
    """Combine the rows of each example's categories.

    Args:
        table: ``[num_buckets, columns]``.
        ids: the categories. Negative ones are left out, and so are those without a positive weight unless rows are
            added up.
        combiner: ``"sum"``; ``"mean"``, weighted; ``"sqrtn"``, the sum divided by the root of the sum of squared
            weights.
        max_norm: longer rows are scaled to this l2 norm first; ``None`` means that they are not.

    Returns:
        ``[batch, columns]``, with zeros for examples without categories.
    """
    factors = category_weights(ids, keeps_all=combiner == "sum").to(table.dtype)
    rows = F.embedding(ids.values.clamp(min=0), table)
    if max_norm is not None:
        norms = torch.linalg.vector_norm(rows, dim=-1, keepdim=True)
        rows = rows * (max_norm / norms.clamp(min=max_norm))
    total = (rows * factors.unsqueeze(-1)).sum(dim=1)
    if combiner == "sum":
        return total
    divisor = factors.sum(dim=1, keepdim=True) if combiner == "mean" else factors.square().sum(1, keepdim=True).sqrt()
    return total / torch.where(divisor == 0, torch.ones_like(divisor), divisor)


def category_weights(ids: Ids, *, keeps_all: bool = True) -> Tensor:
    """Return what each category counts, ``[batch, n]``; 0 where there is none, or its weight may not be kept."""
    is_valid = ids.present & (ids.values >= 0)
    if ids.weights is None:
        return is_valid.to(torch.float32)
    if not keeps_all:
        is_valid = is_valid & (ids.weights > 0)
    return torch.where(is_valid, ids.weights, torch.zeros_like(ids.weights))
