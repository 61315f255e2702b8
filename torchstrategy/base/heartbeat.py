"""How long a process may be silent before others take it for lost."""

from __future__ import annotations

import os

__all__ = ["heartbeat_seconds"]


def heartbeat_seconds() -> float:
    """Return after how many seconds without a sign of life a process counts as gone.

    Returns:
        ``TORCHSTRATEGY_HEARTBEAT_S``, by default 10.

    Raises:
        ValueError: the variable is no positive number.
    """
    text = os.environ.get("TORCHSTRATEGY_HEARTBEAT_S", "10")
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < float("inf"):
        raise ValueError(f"TORCHSTRATEGY_HEARTBEAT_S must be a positive number of seconds. Received: {text!r}")
    return seconds
