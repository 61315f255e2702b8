"""Comparing named tensors: how far apart, in which ratio, a combination of what."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

__all__ = ["Named", "coefficients", "flat", "furthest", "is_close", "is_rounding", "ratio", "scale_of"]

Named = Mapping[str, Tensor]


def flat(tensors: Named, names: Sequence[str]) -> Tensor:
    """Return tensors as one vector, in the order of ``names``; zeros stand for none."""
    parts = [tensors[name].reshape(-1) for name in names if name in tensors]
    return torch.cat(parts) if parts else torch.zeros(0, dtype=torch.float64)


def scale_of(tensors: Named) -> float:
    """Return the largest magnitude."""
    return max((float(t.abs().max()) for t in tensors.values() if t.numel()), default=0.0)


def is_close(a: Tensor, b: Tensor, tolerance: float) -> bool:
    """Say whether two tensors differ by no more than a tolerance; nan equals nan."""
    return a.shape == b.shape and bool(torch.isclose(a, b, rtol=0.0, atol=tolerance, equal_nan=True).all())


def is_rounding(a: Tensor, b: Tensor, tolerance: float, rounding: Tensor | None) -> bool:
    """Say whether each element differs by no more than a tolerance and what rounding may have done to it."""
    if rounding is None or not a.shape == b.shape == rounding.shape:
        return False
    return bool(((a - b).abs() <= tolerance + rounding).all())


def furthest(a: Tensor, b: Tensor) -> tuple[float, float, float]:
    """Return the largest difference, and the two numbers there."""
    if a.shape != b.shape:
        return float("inf"), float("nan"), float("nan")
    a, b = a.reshape(-1), b.reshape(-1)
    gap = torch.where(a.isnan() & b.isnan(), 0.0, (a - b).abs()).nan_to_num(float("inf"))
    where = int(gap.argmax())
    return float(gap[where]), _real(a[where]), _real(b[where])


def ratio(a: Tensor, b: Tensor, tolerance: float, scale: float | None = None) -> float | None:
    """Return ``c`` where ``a = c b``, or ``None`` if there is none.

    Args:
        a: a vector.
        b: another.
        tolerance: how far numbers may be apart, relative to ``scale``.
        scale: the largest magnitude of what ``a`` was computed from; ``None`` means that of ``a``. Where what is
            allowed is as large as ``a`` itself, any vector would do, so there is no answer.
    """
    if a.shape != b.shape or not a.numel() or a.is_complex() or b.is_complex():
        return None
    square = float(b @ b)
    if not square:
        return None
    found = float(a @ b) / square
    largest = float(a.abs().max())
    allowed = (largest if scale is None else scale) * max(tolerance, 1e-12) * 10
    return found if allowed <= 0.01 * largest and is_close(a, found * b, allowed) else None


def coefficients(target: Tensor, parts: Sequence[Tensor], tolerance: float) -> list[float] | None:
    """Return the numbers by which ``parts`` add up to ``target``, or ``None`` if there are none."""
    if not target.numel() or any(part.shape != target.shape for part in parts):
        return None
    matrix = torch.stack(list(parts), dim=1)
    if not bool(torch.isfinite(matrix).all()) or not bool(torch.isfinite(target).all()):
        return None
    found = torch.linalg.lstsq(matrix, target[:, None], driver="gelsd").solution[:, 0]
    loose = float(target.abs().max()) * max(tolerance, 1e-12) * 100
    return found.tolist() if is_close(matrix @ found, target, loose) else None


def _real(number: Tensor) -> float:
    return float(number.abs() if number.is_complex() else number)
