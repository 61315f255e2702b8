"""Random numbers that begin at the ``tf_random_seed`` of a ``RunConfig``."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

__all__ = ["seeded"]


@contextlib.contextmanager
def seeded(seed: int | None) -> Iterator[None]:
    """Let torch's random numbers begin at a seed inside, and go on as before after it; ``None`` changes nothing."""
    if seed is None:
        yield
        return
    devices = range(torch.cuda.device_count()) if torch.cuda.is_available() else ()
    with torch.random.fork_rng(devices):
        torch.manual_seed(seed)
        yield
