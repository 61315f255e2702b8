"""Everything on one device: a strategy to test a distributed program with."""

from __future__ import annotations

import os

import torch

from torchstrategy.cluster_resolver.torchrun import is_one_of_several, warn_of_independent_copies
from torchstrategy.devices import Placement, canonical_device
from torchstrategy.strategy import Strategy

__all__ = ["OneDeviceStrategy"]


class OneDeviceStrategy(Strategy):
    """Puts what is made in its scope, and all that ``run`` computes, on one device.

    Distributed datasets deliver their elements to that device.

    Args:
        device: for example ``"/gpu:0"``, ``"cuda:0"`` or ``"cpu:0"``.

    Raises:
        ValueError: there is no such device.

    Example:
        >>> strategy = ts.OneDeviceStrategy("cpu:0")
        >>> strategy.run(lambda x: x + 1, args=(torch.tensor(1),))
        tensor(2)
    """

    def __init__(self, device: str | torch.device) -> None:
        super().__init__(Placement(1, 0, (canonical_device(device),)))
        if is_one_of_several(os.environ):
            warn_of_independent_copies(type(self).__name__)
