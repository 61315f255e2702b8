"""Strings in features: torch has no tensors of them, so they stay in lists and NumPy arrays on the host."""

from __future__ import annotations

from typing import Any

import numpy as np
from torch import Tensor

__all__ = ["Strings", "as_strings"]

Strings = np.ndarray[Any, np.dtype[np.object_]]


def as_strings(value: Any) -> Strings:
    """Return strings as an array of dtype ``object`` whose elements are ``str``; bytes are decoded as UTF-8.

    Args:
        value: a list of ``str``, ``bytes`` or ``None`` (which becomes ``""``), or an array of them of any shape.

    Raises:
        ValueError: an element is something else.

    Example:
        >>> from torchstrategy.estimator.feature_column.strings import as_strings
        >>> as_strings([b"red", "green"])
        array(['red', 'green'], dtype=object)
    """
    if isinstance(value, Tensor):
        raise ValueError(f"Expected strings, in a list or a NumPy array. Received a tensor of dtype {value.dtype}.")
    array = np.asarray(value, dtype=None if isinstance(value, np.ndarray) else object)
    result = np.empty(array.shape, dtype=object)
    result.ravel()[:] = [item if type(item) is str else _as_text(item) for item in array.ravel().tolist()]
    return result


def _as_text(item: Any) -> str:
    if item is None:
        return ""
    if isinstance(item, bytes):
        return item.decode("utf-8", "surrogateescape")  # bytes that are no UTF-8 keep their fingerprint
    if isinstance(item, str):
        return str(item)
    raise ValueError(f"Expected strings (str or bytes). Received {item!r} of type {type(item).__name__}.")
