"""The validation of ``fit``: its data, and after which epochs it is due."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torchstrategy.fit.inputs import Batches

__all__ = ["Validation", "check_frequency"]


class Validation:
    """The validation of ``fit``."""

    def __init__(self, data: Batches, steps: int | None, frequency: int | Sequence[int]) -> None:
        self.data = data
        self.steps = steps
        self._frequency = frequency

    def is_due(self, epoch: int) -> bool:
        """Say whether there is one after an epoch, counted from 1."""
        frequency = self._frequency
        return epoch % frequency == 0 if isinstance(frequency, int) else epoch in frequency


def check_frequency(frequency: Any) -> None:
    """Check ``validation_freq``.

    Raises:
        ValueError: it is neither a positive integer nor a list of epochs.
    """
    is_count = isinstance(frequency, int) and not isinstance(frequency, bool) and frequency >= 1
    if not is_count and not isinstance(frequency, (list, tuple, set, range)):
        raise ValueError(
            "fit(validation_freq=...) must be a positive integer or a list of epochs, counted from 1. Received: "
            f"{frequency!r}"
        )
