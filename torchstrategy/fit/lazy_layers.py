"""Gives lazy layers their shapes before the first step, as Keras builds a model from its first batch."""

from __future__ import annotations

import itertools
from typing import Any

from torch import nn
from torch.nn.parameter import is_lazy

from torchstrategy.fit.batch_parts import unpack_x_y_sample_weight
from torchstrategy.fit.modes import Evaluating

__all__ = ["initialise_lazy_layers"]


def initialise_lazy_layers(model: nn.Module, strategy: Any, batch: Any) -> None:
    """Call a model that has parameters without a shape once, so that they get one.

    Replicas get copies of the parameters, which must exist by then.

    Args:
        model: the model.
        strategy: its strategy.
        batch: of a distributed dataset.
    """
    if any(is_lazy(tensor) for tensor in itertools.chain(model.parameters(), model.buffers())):
        x = unpack_x_y_sample_weight(strategy.experimental_local_results(batch)[0])[0]
        with Evaluating(model):
            model(x)
