"""Running a model outside training: a copy on inputs like those of the training, and lazy layers that need shapes."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from torchstrategy.checkpoint.tracked import to_plain
from torchstrategy.fit.batch_parts import unpack_x_y_sample_weight
from torchstrategy.fit.modes import Evaluating
from torchstrategy.fit.weight_files import plain_module
from torchstrategy.replicas.mirrored import bodies
from torchstrategy.replicas.record import unrecorded

__all__ = ["copy_module", "example_of", "initialise_lazy_layers", "is_described", "map_described"]


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


def copy_module(model: nn.Module, convert: Callable[[Tensor], Tensor]) -> nn.Module:
    """Return a plain copy, for one replica and in evaluation mode, of the module that a model was made of.

    Args:
        model: the model.
        convert: makes the copy's tensors.
    """
    module = bodies(plain_module(model))[0]
    module = getattr(module, "_orig_mod", module)  # as it was before torch.compile
    memo: dict[int, Any] = {}
    for tensor in (*module.parameters(), *module.buffers()):
        if not is_lazy(tensor):
            value = convert(to_plain(tensor, "a tensor of the model"))
            is_parameter = isinstance(tensor, nn.Parameter)
            memo[id(tensor)] = nn.Parameter(value, tensor.requires_grad) if is_parameter else value
    with unrecorded():
        copied: nn.Module = copy.deepcopy(module, memo)
    return copied.eval()


def example_of(description: Any, batch_size: int) -> Any:
    """Return inputs of a batch size: zeros of the shapes and dtypes that the trainer noted."""

    def make(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return torch.zeros((batch_size, *shape[1:]) if shape else (), dtype=dtype)

    return map_described(make, description)


def map_described(fn: Callable[[tuple[int, ...], torch.dtype], Any], description: Any) -> Any:
    """Return a structure of descriptions with each of them replaced by what a function of it returns."""
    if is_described(description):
        return fn(*description)
    if isinstance(description, dict):
        return type(description)((name, map_described(fn, item)) for name, item in description.items())
    if isinstance(description, (list, tuple)):
        items = [map_described(fn, item) for item in description]
        return type(description)(*items) if hasattr(description, "_fields") else type(description)(items)
    return description


def is_described(value: Any) -> bool:
    """Say whether a value is the shape and dtype of a tensor."""
    return isinstance(value, tuple) and len(value) == 2 and isinstance(value[1], torch.dtype)
