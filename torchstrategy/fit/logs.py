"""The numbers that callbacks and users see: read from the metrics when somebody looks at them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, MutableMapping
from typing import Any

import numpy as np
from torch import Tensor

__all__ = ["BatchLogs", "to_number"]


class BatchLogs(MutableMapping[str, Any]):
    """What callbacks get after a batch: the loss and the metrics of the epoch so far, computed when they are read.

    Args:
        read: returns the numbers; called once, when they are first needed.
    """

    def __init__(self, read: Callable[[], dict[str, Any]]) -> None:
        self._read = read
        self._values: dict[str, Any] | None = None

    def expire(self) -> None:
        """Say that the batch is over: what was not read until now would be the numbers of a later one."""
        if self._values is None:
            self._read = _refuse

    @property
    def _data(self) -> dict[str, Any]:
        if self._values is None:
            self._values = dict(self._read())
        return self._values

    def copy(self) -> dict[str, Any]:
        """Return the numbers as a plain dict."""
        return dict(self._data)

    def __getitem__(self, name: str) -> Any:
        return self._data[name]

    def __setitem__(self, name: str, value: Any) -> None:
        self._data[name] = value

    def __delitem__(self, name: str) -> None:
        del self._data[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._data)

    def __len__(self) -> int:
        return len(self._data)

    def __repr__(self) -> str:
        return repr(self._data)


def _refuse() -> dict[str, Any]:
    raise RuntimeError(
        "The logs of a batch are computed when they are read, and these were kept unread until after the hook that got "
        "them. Read them in the hook, such as logs['loss'], or keep logs.copy()."
    )


def to_number(value: Any) -> Any:
    """Return a scalar as a Python number and another tensor as an array."""
    if isinstance(value, Tensor):
        value = value.detach().float() if value.dtype.itemsize < 4 and value.is_floating_point() else value.detach()
        return value.item() if value.numel() == 1 else value.cpu().numpy()
    return value.item() if isinstance(value, np.ndarray | np.generic) and value.size == 1 else value
