"""Where the random numbers of a pipeline come from.

When an iteration begins, every random operation gets a *key*, a few integers that decide everything random in it. Keys
are part of a pipeline's state. Only here is torch's random stream read.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

__all__ = ["Draws", "GlobalDraws", "KeyedDraws", "Memory", "WorkerDraws", "mix"]

_MASK = (1 << 64) - 1


@dataclass
class Memory:
    """What a random operation remembers between iterations.

    Args:
        iteration: how many iterations have begun.
        base: the order it drew once, if it keeps one for ever.
    """

    iteration: int = 0
    base: int | None = None


class Draws(Protocol):
    """Gives random operations their seeds when an iteration begins."""

    def seed(self) -> int:
        """Return a new seed."""

    def fixed_seed(self, memory: Memory) -> int:
        """Return the seed of an operation that has one order for ever."""

    def iteration(self, memory: Memory) -> list[int]:
        """Count an iteration, and return what tells it from others."""

    def silent_seed(self) -> int:
        """Return a seed that may never be used; it takes nothing from torch's stream."""


class GlobalDraws:
    """From torch's default CPU generator."""

    def seed(self) -> int:
        """Return a new seed."""
        return int(torch.empty((), dtype=torch.int64, device="cpu").random_())

    def fixed_seed(self, memory: Memory) -> int:
        """Return the operation's seed, drawn once."""
        if memory.base is None:
            memory.base = self.seed()
        return memory.base

    def iteration(self, memory: Memory) -> list[int]:
        """Count an iteration."""
        memory.iteration += 1
        return [memory.iteration - 1]

    def silent_seed(self) -> int:
        """Return a hash of the generator's state."""
        return int.from_bytes(hashlib.sha256(torch.get_rng_state().numpy().tobytes()).digest()[:8], "little")


class KeyedDraws:
    """As a function of a key: for datasets inside datasets.

    Args:
        key: what decides the seeds of the dataset.
        number: which of several iterations of it this is.
    """

    def __init__(self, key: Sequence[int], number: int) -> None:
        self._key = list(key)
        self._number = number
        self._num_seeds = 0

    def seed(self) -> int:
        """Return a new seed."""
        self._num_seeds += 1
        return mix([*self._key, self._number, self._num_seeds])

    def fixed_seed(self, memory: Memory) -> int:  # noqa: ARG002 - the key decides alone
        """Return a seed that is the same in all iterations."""
        self._num_seeds += 1
        return mix([*self._key, self._num_seeds])

    def iteration(self, memory: Memory) -> list[int]:  # noqa: ARG002 - the number decides alone
        """Return the iteration's number."""
        return [self._number]

    def silent_seed(self) -> int:
        """Return a new seed."""
        return self.seed()


class WorkerDraws(KeyedDraws):
    """In the worker processes of a ``DataLoader``, whose seed, new in each epoch, is the key.

    The memories of operations are copies there, and often end with the epoch.
    """

    def fixed_seed(self, memory: Memory) -> int:
        """Return the seed that was drawn before the workers began.

        Raises:
            ValueError: none was; each epoch's workers would choose another order.
        """
        if memory.base is None:
            raise ValueError(
                "shuffle(reshuffle_each_iteration=False) needs a seed in the worker processes of a DataLoader, because "
                "they can't remember an order from one epoch to the next."
            )
        return memory.base

    def iteration(self, memory: Memory) -> list[int]:
        """Return what tells this epoch from others."""
        return [*self._key, *super().iteration(memory)]


def mix(values: Sequence[int]) -> int:
    """Return one integer of 63 bits that depends on all of some integers."""
    sequence = np.random.SeedSequence([value & _MASK for value in values])
    return int(sequence.generate_state(1, np.uint64)[0] >> np.uint64(1))
