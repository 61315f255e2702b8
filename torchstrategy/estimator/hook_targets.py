"""What hooks ask about the estimator and the strategy that they are for."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torchstrategy.estimator.run_config import RunConfig

if TYPE_CHECKING:
    from torchstrategy.strategies.strategy import Strategy

__all__ = ["check_estimator", "is_asynchronous"]


def is_asynchronous(strategy: Strategy) -> bool:
    """Say whether each process of a strategy trains at its own pace with shared variables."""
    return strategy.extended.experimental_between_graph and strategy.workers is None


def check_estimator(estimator: Any) -> None:
    """Check that what hooks are made for is an ``Estimator``, by what it has: its class uses hooks itself.

    Raises:
        TypeError: it is not.
    """
    is_estimator = isinstance(getattr(estimator, "config", None), RunConfig) and callable(
        getattr(estimator, "eval_dir", None)
    )
    if not is_estimator:
        raise TypeError(f"`estimator` must have type `ts.estimator.Estimator`. Received: {estimator!r}")
