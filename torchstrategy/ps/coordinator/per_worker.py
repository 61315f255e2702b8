"""Values that every worker has one of its own of: datasets and their iterators."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import NoReturn
from weakref import finalize

from torchstrategy.base.values import PerWorkerValues
from torchstrategy.ps.coordinator.remote_value import RemoteValue
from torchstrategy.ps.transport.messages import Message

__all__ = ["PerWorkerDataset", "PerWorkerIterator", "Resource", "Resources"]


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
