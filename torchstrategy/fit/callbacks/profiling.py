"""Profiles of some batches of a training."""

from __future__ import annotations

import operator
from typing import Any

from torch import profiler

from torchstrategy.base.labels import make_profiler

__all__ = ["BatchProfiler", "parse_profile_batch"]


class BatchProfiler:
    """Profiles the batches from one to another, once.

    Args:
        folder: where the trace goes.
        batches: the first and the last batch, counted from 1; ``None`` for no profile.
    """

    def __init__(self, folder: str, batches: tuple[int, int] | None) -> None:
        self._folder = folder
        self._batches = batches
        self._running: Any = None
        self._done = False

    def before(self, batch: int) -> None:
        """Begin if it is time to, before a batch."""
        if self._batches is None or self._done or batch < self._batches[0]:
            return
        if self._running is None:
            handler = profiler.tensorboard_trace_handler(self._folder)
            self._running = make_profiler(on_trace_ready=handler, record_shapes=True)
            self._running.start()

    def after(self, batch: int) -> None:
        """End if it is time to, after a batch."""
        if self._batches is not None and batch >= self._batches[1]:
            self.stop()

    def stop(self) -> None:
        """Write the trace, if one is being made."""
        if self._running is not None:
            self._running.stop()
            self._running, self._done = None, True


def parse_profile_batch(value: Any) -> tuple[int, int] | None:
    """Return the first and last batch of Keras' argument ``profile_batch``; ``None`` for no profile.

    Raises:
        ValueError: it is no batch and no range of them.
    """
    parts = value.split(",") if isinstance(value, str) else value if isinstance(value, (tuple, list)) else [value]
    try:
        batches = [operator.index(int(part) if isinstance(part, str) else part) for part in parts]
    except (TypeError, ValueError):
        batches = []
    if batches == [0]:
        return None
    if len(batches) in (1, 2) and 1 <= batches[0] <= batches[-1]:
        return batches[0], batches[-1]
    raise ValueError(
        "TensorBoard(profile_batch=...) must be a batch, counted from 1, or the first and last one of several, such as "
        f"(10, 20); 0 means no profile. Received: {value!r}"
    )
