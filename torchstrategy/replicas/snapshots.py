"""Tell whether a value was changed in place: data, tensors, arrays, generators, and containers and objects of these."""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

__all__ = ["SCALARS", "differ", "is_plain", "snapshot"]

SCALARS = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)
_CONTAINERS = (tuple, list, set, frozenset, deque)
#: Of a structure with more members only those seen first are compared.
_MAX_MEMBERS = 1000


def snapshot(value: Any) -> Any:
    """Return something that equals a later snapshot of the same value if and only if nothing in it was changed.

    Which modules a structure holds is compared, but not what is in them: they see to that themselves.
    """
    if is_plain(value):  # faster than the general case
        return _copy_plain(value)
    return _snapshot(value, {})


def _snapshot(value: Any, seen: dict[int, Any]) -> Any:
    if type(value) in SCALARS:
        return value
    if isinstance(value, Tensor):
        return (id(value), None if value.is_inference() else value._version) if value.is_leaf else None
    if isinstance(value, torch.Generator):
        return hashlib.blake2b(value.get_state().numpy().tobytes()).digest()
    if isinstance(value, np.ndarray) and not value.dtype.hasobject:
        return value.shape, str(value.dtype), hashlib.blake2b(value.tobytes()).digest()
    if id(value) in seen or len(seen) > _MAX_MEMBERS or isinstance(value, (type, nn.Module)):
        return id(value)
    seen[id(value)] = value
    if isinstance(value, Mapping):
        return [(_key(key), _snapshot(item, seen)) for key, item in value.items()]
    if isinstance(value, _CONTAINERS):
        return [_snapshot(item, seen) for item in value]
    return id(value), [(name, _snapshot(item, seen)) for name, item in getattr(value, "__dict__", {}).items()]


def _key(key: Any) -> Any:
    return key if type(key) in SCALARS else id(key)


def _copy_plain(value: Any) -> Any:
    """Return something that equals another copy if and only if the values are equal; faster than a deep copy."""
    if isinstance(value, dict):
        return {key: _copy_plain(item) for key, item in value.items()}
    if isinstance(value, (set, frozenset)):
        return set(value)
    return [_copy_plain(item) for item in value] if isinstance(value, _CONTAINERS) else value


def differ(before: Any, now: Any) -> bool:
    """Say whether two snapshots of a value differ."""
    return bool(before != now)


def is_plain(value: Any) -> bool:
    """Say whether a value is plain Python data, in containers or not."""
    if type(value) in SCALARS:
        return True
    if isinstance(value, dict):
        return all(is_plain(k) and is_plain(v) for k, v in value.items())
    return isinstance(value, _CONTAINERS) and all(is_plain(item) for item in value)
