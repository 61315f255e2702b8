"""Learning rates chosen by the global batch size, which grows with the number of replicas, and warm-up."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple


class LearningRate(NamedTuple):
    """A learning rate that is reached after a linear warm-up of some optimizer steps."""

    rate: float
    warmup_steps: int = 0

    def factor(self, step: int) -> float:
        """Return what the rate is multiplied by at a step, as ``LambdaLR`` asks for it."""
        return min(1.0, (step + 1) / (self.warmup_steps + 1))


def constant(global_batch_size: int, base: float, warmup_steps: int = 0) -> LearningRate:
    """Take one learning rate for every global batch size."""
    del global_batch_size
    return LearningRate(base, warmup_steps)


def from_table(global_batch_size: int, table: Mapping[int, float], warmup_steps: int = 0) -> LearningRate:
    """Look the learning rate up.

    Raises:
        ValueError: the table has no entry for the global batch size.
    """
    if global_batch_size not in table:
        raise ValueError(
            f"learning_rate.table has no entry for a global batch of {global_batch_size}, only for "
            f"{', '.join(str(size) for size in sorted(table))}. Add one by '+learning_rate.table="
            f"{{{global_batch_size}: RATE}}', change batch_size_per_replica (times the number of replicas it is the "
            "global batch), or choose learning_rate=constant, linear or sqrt."
        )
    return LearningRate(table[global_batch_size], warmup_steps)


def scaled(
    global_batch_size: int, base: float, base_batch_size: int, exponent: float, warmup_steps: int = 0
) -> LearningRate:
    """Scale the rate that is right for ``base_batch_size``: exponent 1 is linear, 0.5 the square root."""
    return LearningRate(base * math.pow(global_batch_size / base_batch_size, exponent), warmup_steps)
