"""Checks of arguments and results that the methods of a model share."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from torchstrategy import errors
from torchstrategy.base.context import current_frame
from torchstrategy.base.log import logger

__all__ = ["check_context", "check_counts", "warn_of_nan"]


def check_context(strategy: Any, methods: str) -> None:
    """Refuse calls in replica context or in another strategy's scope.

    Args:
        strategy: the model's.
        methods: what is called, for the message.

    Raises:
        RuntimeError: it is such a call.
    """
    frame = current_frame()
    if frame is None:
        return
    if frame.replica_context is not None:
        raise RuntimeError(
            f"A model's {methods} must be called outside of strategy.run: they run steps on all replicas themselves. "
            "Here they were called by a function that run calls."
        )
    if frame.strategy is not strategy:
        raise RuntimeError(
            f"A model's {methods} were called in the scope of a {type(frame.strategy).__name__}, but the model was "
            f"made under another strategy, a {type(strategy).__name__}. Make the model inside "
            "`with strategy.scope():`, or leave the scope."
        )


def check_counts(method: str, **counts: Any) -> None:
    """Check numbers of epochs and batches; ``None`` is one too.

    Raises:
        InvalidArgumentError: one is no positive integer.
    """
    for name, value in counts.items():
        if value is not None and (not isinstance(value, (int, np.integer)) or isinstance(value, bool) or value < 1):
            raise errors.InvalidArgumentError(f"{method}({name}=...) must be a positive integer. Received: {value!r}")


def warn_of_nan(logs: Mapping[str, Any], epoch: int, before: Mapping[str, Any] | None) -> None:
    """Say that a loss is not finite any more, once.

    Args:
        logs: of an epoch.
        epoch: its number.
        before: the logs of the epoch before.
    """
    loss = logs.get("loss")
    if isinstance(loss, float) and not math.isfinite(loss) and math.isfinite((before or {}).get("loss", 0.0)):
        logger.warning(
            f"fit: the loss of epoch {epoch + 1} is {loss}. Try a smaller learning rate, look for nan or inf in x and "
            "y, or clip gradients (Model.clip_gradients). ts.callbacks.TerminateOnNaN() ends the training at once."
        )
