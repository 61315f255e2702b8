"""Parameters of which replicas hold different values after a run: known when it is traced, or when it was computed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NoReturn

from torch import Tensor

from torchstrategy.errors import DivergenceError

__all__ = ["Comparisons", "refuse_different"]


def refuse_different(parameters: Sequence[str]) -> NoReturn:
    """Refuse what a run has written.

    Raises:
        DivergenceError: always.
    """
    raise DivergenceError(
        "Replicas have given parameters different values in `run`, and all have replica 0's now: "
        f"{', '.join(parameters)}. Compute what all replicas hold from what `all_reduce` gives, or keep what is each "
        "replica's own in a buffer, or in ts.Variable(..., synchronization=ON_READ)."
    )


class Comparisons:
    """What groups of replicas with shares of different sizes have written alike, or so it should be."""

    def __init__(self) -> None:
        self._pending: list[tuple[str, Tensor]] = []

    def add(self, name: str, differs: Tensor) -> None:
        """Note a parameter and whether the groups' values differ, a 0-d bool that is not computed yet."""
        self._pending.append((name, differs))

    def check(self) -> None:
        """Look at what was noted, which waits for the devices.

        Raises:
            DivergenceError: values differ.
        """
        pending, self._pending = self._pending, []
        different = dict.fromkeys(name for name, differs in pending if bool(differs.cpu()))
        if different:
            raise DivergenceError(
                f"Replicas with shares of different sizes have given {', '.join(different)} different values, and all "
                "have those of replica 0 now. What all replicas hold must not follow a replica's share of the batch: "
                "compute it from what `all_reduce` gives, or keep it in a buffer."
            )
