"""Everything on one device: a strategy to test a distributed program with."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from torchstrategy.base.devices import Placement, canonical_device, tensor_device
from torchstrategy.cluster_resolver.detect import warn_of_independent_copies
from torchstrategy.replicas.variables import Variable, VariableOptions, make_copy
from torchstrategy.strategies.replica_values import inputs_of
from torchstrategy.strategies.strategy import Strategy

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
        warn_of_independent_copies(type(self).__name__, os.environ)

    @override
    def experimental_distribute_values_from_function(self, value_fn: Callable[[Any], Any]) -> Any:
        values = super().experimental_distribute_values_from_function(value_fn)
        return inputs_of(self, 0, values)  # as tf, which has no PerReplica here

    @override
    def _make_variable(self, context: Any, value: Tensor, options: VariableOptions) -> Variable | None:
        variable: Variable = make_copy(Variable, value.to(tensor_device(self.placement.devices[0])), options)
        if context is None:
            self.record.add(variable)
        return variable
