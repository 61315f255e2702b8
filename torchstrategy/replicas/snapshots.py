"""Tell whether a value was changed in place: plain data, tensors, random generators and simple objects can be told."""

from __future__ import annotations

from collections import deque
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["SCALARS", "differ", "is_plain", "snapshot"]

SCALARS = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)
_CONTAINERS = (tuple, list, set, frozenset, deque)


def snapshot(value: Any) -> Any:
    """Return what tells whether a value was changed in place; ``None`` for what can't be told."""
    if isinstance(value, Tensor):
        return (id(value), None if value.is_inference() else value._version) if value.is_leaf else None
    if is_plain(value):
        return _copy_plain(value)
    if isinstance(value, torch.Generator):
        return value.get_state()
    state = getattr(value, "__dict__", None)
    if type(state) is dict and not isinstance(value, (type, nn.Module)) and is_plain(state):
        return id(value), _copy_plain(state)
    if isinstance(value, dict):  # an optimizer's state: tensors by parameter
        return [(id(key), [(name, snapshot(item)) for name, item in entry.items()])
                for key, entry in value.items() if isinstance(entry, dict)]  # fmt: skip
    return None


def _copy_plain(value: Any) -> Any:
    """Return something that equals another copy if and only if the values are equal; faster than a deep copy."""
    if isinstance(value, dict):
        return {key: _copy_plain(item) for key, item in value.items()}
    if isinstance(value, (set, frozenset)):
        return set(value)
    return [_copy_plain(item) for item in value] if isinstance(value, _CONTAINERS) else value


def differ(before: Any, now: Any) -> bool:
    """Say whether two snapshots of a value differ."""
    if isinstance(before, Tensor) and isinstance(now, Tensor):
        return not torch.equal(before, now)
    return bool(before != now)


def is_plain(value: Any) -> bool:
    """Say whether a value is plain Python data, in containers or not."""
    if type(value) in SCALARS:
        return True
    if isinstance(value, dict):
        return all(is_plain(k) and is_plain(v) for k, v in value.items())
    return isinstance(value, _CONTAINERS) and all(is_plain(item) for item in value)
