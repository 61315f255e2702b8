"""Distributed datasets and their iterators."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Any

import torch

from torchstrategy.data.batch import LocalBatch, deliver, describe
from torchstrategy.data.sources import Source
from torchstrategy.devices import Placement
from torchstrategy.errors import InvalidArgumentError, OutOfRangeError
from torchstrategy.options import InputOptions
from torchstrategy.values import PerReplica

__all__ = ["DistributedDataset", "DistributedIterator", "OptionalElement"]


class DistributedDataset:
    """Gives each replica its share of every global batch; made by a strategy.

    Each iteration starts anew, in an order that all processes share. An element has the structure of the user's
    batches. Its leaves are ``PerReplica`` values if this process has several replicas, plain tensors if it has one.

    Args:
        source: where the elements come from.
        placement: the replicas of this process.
        options: whether elements are moved to the replicas' devices, and how far ahead.

    Example:
        >>> strategy = ts.MirroredStrategy(["cpu:0", "cpu:1"])
        >>> dataset = strategy.experimental_distribute_dataset(torch.arange(5), batch_size=3)
        >>> for batch in dataset:
        ...     print(batch)
        PerReplica:{
          0: tensor([0, 1]),
          1: tensor([2])
        }
        PerReplica:{
          0: tensor([3]),
          1: tensor([4])
        }
    """

    def __init__(self, source: Source, placement: Placement, options: InputOptions) -> None:
        self._source = source
        self._placement = placement
        self._options = options
        self._element_spec: Any = None

    def __iter__(self) -> DistributedIterator:
        return DistributedIterator(self._source.batches(), self._placement, self._options)

    def __len__(self) -> int:
        length = self._source.length()
        if length is None:
            raise TypeError(f"The length of this {type(self).__name__} is not known.")
        return length

    @property
    def element_spec(self) -> Any:
        """The structure of the elements, with a ``TensorSpec`` for each tensor; the first use reads one element.

        Raises:
            ValueError: the dataset is empty.
        """
        if self._element_spec is None:
            example = self._source.example()
            specs = [describe(leaf) for leaf in example.leaves]
            num_local = len(self._placement.devices)
            leaves = specs if num_local == 1 else [spec and PerReplica((spec,) * num_local) for spec in specs]
            self._element_spec = example.spec.unflatten(leaves)
        return self._element_spec


class OptionalElement:
    """What ``DistributedIterator.get_next_as_optional`` returns: an element, or none at the end.

    Args:
        elements: the element, or nothing.
    """

    def __init__(self, *elements: Any) -> None:
        self._elements = elements

    def has_value(self) -> bool:
        """Say whether there is an element."""
        return bool(self._elements)

    def get_value(self) -> Any:
        """Return the element.

        Raises:
            InvalidArgumentError: there is none.
        """
        if not self._elements:
            raise InvalidArgumentError("This optional has no value: the dataset is at its end. Ask has_value() first.")
        return self._elements[0]


class DistributedIterator:
    """Iterates over a distributed dataset once.

    After an error in the dataset the iterator is finished. Dropping it stops its loader's worker processes.

    Args:
        batches: the elements, not yet on the replicas' devices.
        placement: the replicas of this process.
        options: whether elements are moved to the replicas' devices, and how far ahead.
    """

    def __init__(self, batches: Iterator[LocalBatch], placement: Placement, options: InputOptions) -> None:
        self._batches = batches
        self._placement = placement
        self._to_device = options.experimental_fetch_to_device is not False
        on_accelerators = self._to_device and all(device.type != "cpu" for device in placement.devices)
        self._num_ahead = options.experimental_per_replica_buffer_size if on_accelerators else 0
        self._elements: deque[Any] = deque()
        self._end: Exception | None = None

    def __iter__(self) -> DistributedIterator:
        return self

    def __next__(self) -> Any:
        while self._end is None and len(self._elements) <= self._num_ahead:
            self._read()
        if self._elements:
            return self._elements.popleft()
        error = self._end
        if error is None or isinstance(error, StopIteration):
            raise StopIteration
        self._end = RuntimeError(f"This iterator ended with an error before: {error!r}. Take a new one: iter(dataset).")
        raise error

    def get_next(self) -> Any:
        """Return the next element.

        Raises:
            OutOfRangeError: the dataset's end was reached.
        """
        try:
            return next(self)
        except StopIteration:
            raise OutOfRangeError("End of the dataset: all its elements have been read.") from None

    def get_next_as_optional(self) -> OptionalElement:
        """Return the next element, or an empty optional at the dataset's end."""
        try:
            return OptionalElement(next(self))
        except StopIteration:
            return OptionalElement()

    def _read(self) -> None:
        try:
            batch = self._next_on_cpu()
            self._elements.append(deliver(batch, self._placement, to_device=self._to_device))
        except StopIteration:
            self._end = StopIteration()
        except Exception as error:  # noqa: BLE001 - raised in its turn, after the elements that were read before it
            self._end = error

    def _next_on_cpu(self) -> LocalBatch:
        if torch.get_default_device().type == "cpu":
            return next(self._batches)
        # A scope on an accelerator makes it the default device, but loaders draw and collate on the CPU.
        with torch.device("cpu"):
            return next(self._batches)
