"""``ts.utils``: what tf has under ``tf.keras.utils``, and what makes steps faster."""

from __future__ import annotations

import random

import numpy as np
import torch

from torchstrategy.base import later
from torchstrategy.base.context import current_replica_context
from torchstrategy.fit.batch_parts import pack_x_y_sample_weight, unpack_x_y_sample_weight
from torchstrategy.fit.inputs import DatasetCreator
from torchstrategy.fit.sidecar import SidecarEvaluator
from torchstrategy.fit.tuning import tune
from torchstrategy.patches import keep_freed_memory

__all__ = [
    "DatasetCreator",
    "SidecarEvaluator",
    "keep_freed_memory",
    "pack_x_y_sample_weight",
    "set_random_seed",
    "tune",
    "unpack_x_y_sample_weight",
]

later.explain_absent(__name__)


def set_random_seed(seed: int) -> None:
    """Seed Python's ``random``, ``numpy.random`` and torch on all devices, so that a program can be repeated.

    Call it at the start, before modules are made. With several processes every one calls it with the same seed: torch
    draws other numbers on each replica all the same, because a replica's stream in ``run`` derives from the seed and
    its id. ``random`` and ``numpy.random`` give every process the same numbers, also in ``run``.

    Args:
        seed: from 0 to 2**32 - 1.

    Raises:
        ValueError: ``seed`` is no such integer; nothing was seeded.
        RuntimeError: called inside ``run``, where it would give every replica the same numbers.

    Example:
        >>> ts.utils.set_random_seed(7)
        >>> first = torch.rand(2)
        >>> ts.utils.set_random_seed(7)
        >>> torch.equal(torch.rand(2), first)
        True
    """
    if not isinstance(seed, (int, np.integer)) or isinstance(seed, bool) or not 0 <= seed < 2**32:
        raise ValueError(f"seed must be an integer from 0 to 2**32 - 1. Received: {seed!r}")
    if current_replica_context() is not None:
        raise RuntimeError(
            "set_random_seed was called inside `run`, where it would give every replica the same random numbers, such "
            "as dropout masks. Call it at the start of the program."
        )
    random.seed(int(seed))
    np.random.seed(seed)
    torch.manual_seed(int(seed))
