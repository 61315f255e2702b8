"""Penalties of weights, under tf.keras's names; ``ts.regularize`` attaches them to parameters."""

from __future__ import annotations

import math
import numbers
from typing import Any

from torch import Tensor
from torch.nn import functional as F

from torchstrategy.base import later
from torchstrategy.base.names import Configurable

__all__ = [
    "L1",
    "L1L2",
    "L2",
    "OrthogonalRegularizer",
    "Regularizer",
    "l1",
    "l1_l2",
    "l2",
    "orthogonal_regularizer",
]

later.explain_absent(__name__)


class Regularizer(Configurable):
    """Base class of regularizers; any function from a tensor to a scalar does as well.

    Example:
        >>> class Lasso(ts.regularizers.Regularizer):
        ...     def __call__(self, x):
        ...         return 0.1 * x.norm(dim=0).sum()
        >>> Lasso()(torch.ones(4, 3))
        tensor(0.6000)
    """

    def __call__(self, x: Tensor) -> Tensor:
        """Return the penalty.

        Args:
            x: a parameter.

        Returns:
            A scalar.

        Raises:
            NotImplementedError: the subclass does not define it.
        """
        raise NotImplementedError(f"{type(self).__name__} must define __call__(self, x).")


class L1L2(Regularizer):
    """``l1`` times the sum of absolute values plus ``l2`` times the sum of squares. Halves are added in ``float32``.

    Args:
        l1: factor of the absolute values; ``None`` means 0.
        l2: factor of the squares; ``None`` means 0.

    Raises:
        ValueError: a factor is no finite number, or negative.

    Example:
        >>> ts.regularizers.L1L2(l1=0.5, l2=0.25)(torch.tensor([1.0, -2.0]))
        tensor(2.7500)
    """

    def __init__(self, l1: float | None = 0.0, l2: float | None = 0.0) -> None:
        self.l1 = _factor("l1", 0.0 if l1 is None else l1)
        self.l2 = _factor("l2", 0.0 if l2 is None else l2)

    def __call__(self, x: Tensor) -> Tensor:  # noqa: D102 - the base class's
        wide = x.float() if x.dtype.itemsize < 4 else x
        penalty = wide.new_zeros(())
        if self.l1:
            penalty = penalty + self.l1 * wide.abs().sum()
        if self.l2:
            penalty = penalty + self.l2 * wide.square().sum()
        return penalty

    def __repr__(self) -> str:
        return f"{type(self).__name__}(l1={self.l1}, l2={self.l2})"


class L1(L1L2):
    """``l1`` times the sum of absolute values.

    Args:
        l1: the factor; ``None`` means the default.

    Raises:
        ValueError: ``l1`` is no finite number, or negative.

    Example:
        >>> ts.regularizers.L1(0.5)(torch.tensor([1.0, -2.0]))
        tensor(1.5000)
    """

    def __init__(self, l1: float | None = 0.01) -> None:
        super().__init__(l1=0.01 if l1 is None else l1)

    def __repr__(self) -> str:
        return f"L1(l1={self.l1})"


class L2(L1L2):
    """``l2`` times the sum of squares.

    Args:
        l2: the factor; ``None`` means the default.

    Raises:
        ValueError: ``l2`` is no finite number, or negative.

    Example:
        >>> ts.regularizers.L2(0.5)(torch.tensor([1.0, -2.0]))
        tensor(2.5000)
    """

    def __init__(self, l2: float | None = 0.01) -> None:
        super().__init__(l2=0.01 if l2 is None else l2)

    def __repr__(self) -> str:
        return f"L2(l2={self.l2})"


class OrthogonalRegularizer(Regularizer):
    """``factor`` times the mean of the absolute cosines between the rows, or the columns, of a matrix.

    torch's ``Linear`` keeps its weight as ``[out, in]``, the transpose of a Keras kernel: ``mode="columns"`` of it is
    ``mode="rows"`` of Keras' ``Dense``.

    Args:
        factor: the factor.
        mode: ``"rows"`` or ``"columns"``.

    Raises:
        ValueError: ``factor`` is no finite number, or negative; ``mode`` is another word; or, when it is called, the
            parameter is no matrix.

    Example:
        >>> ts.regularizers.OrthogonalRegularizer(0.5)(torch.tensor([[1.0, 0.0], [1.0, 1.0]]))
        tensor(0.3536)
    """

    def __init__(self, factor: float = 0.01, mode: str = "rows") -> None:
        self.factor = _factor("factor", factor)
        if mode not in ("rows", "columns"):
            raise ValueError(f"mode must be 'rows' or 'columns'. Received: {mode!r}")
        self.mode = mode

    def __call__(self, x: Tensor) -> Tensor:  # noqa: D102
        if x.ndim != 2:
            raise ValueError(f"OrthogonalRegularizer needs a matrix. Received a parameter of shape {tuple(x.shape)}.")
        wide = x.float() if x.dtype.itemsize < 4 else x
        rows = F.normalize(wide if self.mode == "rows" else wide.mT)
        cosines = (rows @ rows.mT).triu(1).abs().sum()
        return self.factor * cosines / max(len(rows) * (len(rows) - 1) / 2, 1)

    def __repr__(self) -> str:
        return f"OrthogonalRegularizer(factor={self.factor}, mode={self.mode!r})"


#: tf's other names.
l1, l2, l1_l2, orthogonal_regularizer = L1, L2, L1L2, OrthogonalRegularizer


def _factor(name: str, value: Any) -> float:
    is_number = isinstance(value, numbers.Real) and not isinstance(value, bool)
    if not is_number or not math.isfinite(value) or value < 0:
        raise ValueError(f"{name} must be a finite number that is not negative. Received: {value!r}")
    return float(value)
