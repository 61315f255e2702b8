"""What ``schedule`` returns at once: a value that a worker has yet to compute."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from torchstrategy.base import tree
from torchstrategy.base.labels import label

__all__ = ["Idle", "RemoteValue"]

#: Called while a thread waits, with the seconds that it has waited: says what for, once in a while.
Idle = Callable[[float], None]

WAKE_UP_S = 1.0


class RemoteValue:
    """The result of a scheduled function, made by ``ClusterCoordinator.schedule``. It can't be an argument of another.

    A program that drops the last reference to it says that it doesn't need the result.

    Example:
        >>> with ts.testing.LocalCluster(num_workers=1, num_ps=1) as cluster:
        ...     strategy = ts.ParameterServerStrategy(cluster.resolver())
        ...     coordinator = ts.coordinator.ClusterCoordinator(strategy)
        ...     value = coordinator.schedule(lambda: torch.ones(2))
        ...     print(value.fetch(), value.get())
        ...     strategy.close()
        [1. 1.] tensor([1., 1.])
    """

    #: Tells what pickles arguments that this can't be one.
    _ts_is_remote_value = True

    def __init__(self, name: str, idle: Idle) -> None:
        self._name = name
        self._idle = idle
        self._lock = threading.Lock()
        self._load: Callable[[], Any] | None = None
        self._value: Any = None
        self._error: Exception | None = None
        self._is_settled = False
        self._settled: threading.Event | None = None

    def fetch(self) -> Any:
        """Wait for the function and return its result on the coordinator, tensors as numpy arrays.

        Returns:
            The result; a tensor without dimensions becomes a numpy scalar, a ``bfloat16`` one ``float32``.

        Raises:
            CancelledError: the function was not run; the error's ``__cause__`` is another function's error, or the
                ``UnavailableError`` of a lost parameter server.
            Exception: what the function raised.
        """
        return tree.map_leaves(_to_numpy, self._wait())

    def get(self) -> Any:
        """Wait for the function and return its result on the coordinator, numpy arrays as tensors.

        Returns:
            The result, with tensors on the CPU.

        Raises:
            CancelledError: the function was not run; the error's ``__cause__`` is another function's error, or the
                ``UnavailableError`` of a lost parameter server.
            Exception: what the function raised.
        """
        return tree.map_leaves(_to_tensor, self._wait())

    def __repr__(self) -> str:
        if not self._is_settled:
            state = "not computed yet"
        else:
            state = "computed" if self._error is None else f"{type(self._error).__name__}"
        return f"RemoteValue({self._name}: {state})"

    def _settle(self, load: Callable[[], Any] | None = None, error: Exception | None = None) -> None:
        """Give what makes the value when it is first asked for, or the error."""
        with self._lock:
            self._load, self._error, self._is_settled = load, error, True
            settled = self._settled
        if settled is not None:
            settled.set()

    def _wait(self) -> Any:
        with self._lock:
            if not self._is_settled and self._settled is None:
                self._settled = threading.Event()
        if self._settled is not None:
            start = time.monotonic()
            with label("wait", "for", self._name):
                while not self._settled.wait(WAKE_UP_S):
                    self._idle(time.monotonic() - start)
        with self._lock:
            if self._load is not None:
                self._value, self._load = self._load(), None
        if self._error is not None:
            raise self._error.with_traceback(None)
        return self._value


def _to_numpy(leaf: Any) -> Any:
    if not isinstance(leaf, Tensor):
        return leaf
    tensor = leaf.detach().cpu()
    array = (tensor.float() if tensor.dtype == torch.bfloat16 else tensor).numpy()
    return array[()] if array.ndim == 0 else array


def _to_tensor(leaf: Any) -> Any:
    if isinstance(leaf, (np.ndarray, np.generic)) and leaf.dtype.kind in "biufc":
        return torch.as_tensor(leaf)
    return leaf
