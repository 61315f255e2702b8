"""Plain data: what a checkpoint file may hold, and what ``torch.load(weights_only=True)`` therefore reads."""

from __future__ import annotations

from collections import Counter, OrderedDict
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.parameter import is_lazy

from torchstrategy.base.values import RemoteTensor

__all__ = ["no_shape_message", "to_plain"]

_ATOMS = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size)


def to_plain(value: Any, name: str) -> Any:
    """Return the value with its tensors on the CPU, detached; nothing is copied that need not be.

    Args:
        value: a structure of dicts, lists, tuples and sets.
        name: what error messages call it.

    Raises:
        TypeError: it holds something else than tensors, numbers, strings and the like.
        ValueError: a tensor has no shape yet.
    """
    if is_lazy(value):
        raise ValueError(no_shape_message(name))
    if isinstance(value, Tensor):
        return _plain_tensor(value)
    if isinstance(value, np.generic):
        return value.item()
    if type(value) in _ATOMS:
        return value
    if type(value) is Counter:
        return Counter(value)
    if isinstance(value, dict):
        items = [(to_plain(k, f"a key of {name}"), to_plain(v, f"{name}[{k!r}]")) for k, v in value.items()]
        return OrderedDict(items) if isinstance(value, OrderedDict) else dict(items)
    if type(value) in (list, tuple, set):
        return type(value)(to_plain(item, f"{name}[{i}]") for i, item in enumerate(value))
    raise TypeError(
        f"{name} is a {type(value).__name__}, which a checkpoint can't hold: it holds tensors, numbers, strings, None, "
        "and dicts, lists, tuples and sets of these. Return such values from state_dict()."
    )


def no_shape_message(name: str) -> str:
    """Return what to say of a value of a lazy module that was never called."""
    return (
        f"{name} has no shape yet, because its lazy module was never called. Call the module once, or restore it, "
        "before saving."
    )


def _plain_tensor(tensor: Tensor) -> Tensor:
    if isinstance(tensor, RemoteTensor):
        return tensor.snapshot()
    result = tensor.detach().cpu()
    # A view of a larger buffer would be written with all of that buffer.
    is_view = result.layout is torch.strided and result.untyped_storage().nbytes() > result.nbytes
    return result.clone() if is_view else result
