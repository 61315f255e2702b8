"""Values that are on workers: results that nobody has fetched, and what each worker has one of its own of."""

from __future__ import annotations

import itertools
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NoReturn
from weakref import finalize

import numpy as np
import torch
from torch import Tensor

from torchstrategy.base import tree
from torchstrategy.base.labels import label
from torchstrategy.base.values import PerWorkerValues
from torchstrategy.ps.transport.messages import Message

__all__ = ["Idle", "PerWorkerDataset", "PerWorkerIterator", "RemoteValue", "Resource", "Resources"]

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


class PerWorkerDataset(PerWorkerValues):
    """A dataset on every worker, all of it on each of them.

    ``iter`` of it makes an iterator on every worker, which is an argument for ``schedule``. The dataset itself is one,
    too, for functions that go through all of it.
    """

    def __init__(self, resource: Resource, make_iterator: Callable[[PerWorkerDataset], PerWorkerIterator]) -> None:
        super().__init__(resource.values)
        self._ts_resource_id = resource.id
        self._make_iterator = make_iterator

    def __iter__(self) -> PerWorkerIterator:
        return self._make_iterator(self)


class PerWorkerIterator(PerWorkerValues):
    """An iterator on every worker. A worker that was lost and came back begins anew."""

    def __init__(self, resource: Resource, dataset: PerWorkerDataset) -> None:
        super().__init__(resource.values)
        self._ts_resource_id = resource.id
        self._dataset = dataset  # which must live as long

    def __iter__(self) -> PerWorkerIterator:
        return self

    def __next__(self) -> NoReturn:
        raise NotImplementedError(
            "The elements of a per-worker dataset are on the workers. Give the iterator to a function as an argument, "
            "`coordinator.schedule(fn, args=(iterator,))`, and call next() in the function."
        )

    def get_next(self) -> NoReturn:
        """Raise, as ``next`` does: elements are on the workers."""
        self.__next__()


class Resource:
    """What makes a per-worker value on a worker.

    Args:
        number: its id.
        kind: ``"dataset"`` or ``"iterator"``.
        name: for messages.
        definitions: messages with the definitions that a worker must have first.
        blob: the pickled dataset, or function that makes one.
        of: the id of the dataset that an iterator goes through.
        values: for each worker, what stands for its value.
    """

    def __init__(
        self,
        number: int,
        kind: str,
        name: str,
        values: Sequence[RemoteValue],
        *,
        definitions: Sequence[Message] = (),
        blob: bytes | None = None,
        of: int | None = None,
    ) -> None:
        self.id = number
        self.kind = kind
        self.name = name
        self.definitions = definitions
        self.of = of
        self.values = tuple(values)
        #: Why it could not be made, and on which workers.
        self.failed_on: dict[str, set[int]] = {}
        self._blob = blob

    def message(self) -> Message:
        """Return the message that makes it on a worker."""
        fields = {"id": self.id, "kind": self.kind, "of": self.of}
        return Message("resource", fields, blobs=() if self._blob is None else (self._blob,))


class Resources:
    """All per-worker values that the program still refers to; the loop's thread alone goes through them."""

    def __init__(self) -> None:
        self._numbers = itertools.count()
        self._resources: dict[int, Resource] = {}
        # A finaliser may run in the middle of anything, so it only leaves a note.
        self._dropped: deque[int] = deque()

    def __iter__(self) -> Iterator[Resource]:
        return iter(self._resources.values())

    def next_id(self) -> int:
        """Return a new id."""
        return next(self._numbers)

    def add(self, resource: Resource) -> None:
        """Note a resource."""
        self._resources[resource.id] = resource

    def drop_with(self, values: PerWorkerValues) -> None:
        """Drop the resource when nobody refers to its values any more."""
        finalize(values, self._dropped.append, values._ts_resource_id).atexit = False

    def take_dropped(self) -> list[int]:
        """Forget the resources that were dropped since the last call, and return their ids."""
        dropped = []
        while self._dropped:
            number = self._dropped.popleft()
            if self._resources.pop(number, None) is not None:
                dropped.append(number)
        return dropped
