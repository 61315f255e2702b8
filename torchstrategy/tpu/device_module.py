"""What torch looks for as ``torch.xla``: the state of the device's random numbers, for ``torch.utils.checkpoint``.

A checkpointed function is computed again in the backward pass, and must then draw the same numbers: the seed that the
device goes on from is saved before, and put back. torch_xla has no such module.
"""

from __future__ import annotations

import contextlib
import sys
from typing import Any

import torch
from torch import Tensor

from torchstrategy.tpu.refusals import current_region
from torchstrategy.xla.runtime import get_runtime

__all__ = ["current_device", "device", "device_count", "get_rng_state", "install", "is_available", "set_rng_state"]

_initialized = True


def install() -> None:
    """Make this module ``torch.xla``, unless torch_xla has brought one."""
    if not hasattr(torch, "xla"):
        torch._register_device_module("xla", sys.modules[__name__])  # type: ignore[no-untyped-call]


def get_rng_state(_device: Any = None) -> Tensor:
    """Return the seed that the next random numbers on the device come from, as a tensor of the host."""
    region = current_region()
    if region is not None:
        # `checkpoint` has saved the host's state by now, and will draw on from it.
        region.seed_before_draws(keep_host=True)
    seed = get_runtime().get_seed()
    return torch.tensor(seed - 2**64 if seed >= 2**63 else seed, dtype=torch.int64, device="cpu")


def set_rng_state(state: Tensor, _device: Any = None) -> None:
    """Draw again what was drawn after ``get_rng_state`` returned the state."""
    get_runtime().set_seed(int(state) % 2**64)


def device(_device: Any) -> contextlib.AbstractContextManager[None]:
    """Do nothing: there is one device."""
    return contextlib.nullcontext()


def current_device() -> int:
    """Return the number of the only device."""
    return 0


def device_count() -> int:
    """Return how many devices tensors can be on; one stands for all."""
    return 1


def is_available() -> bool:
    """Say that there is a device."""
    return True
