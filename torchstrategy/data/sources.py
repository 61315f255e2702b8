"""Where a distributed dataset's elements come from when the user gives global batches."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch.utils.data import DataLoader

from torchstrategy.data.agreement import (
    OrderDigest,
    SharedStream,
    Workers,
    check_equal,
    find_generators,
    known_length,
)
from torchstrategy.data.batch import (
    Components,
    LocalBatch,
    batch_length,
    check_splittable,
    components,
    empty_like,
    join_parts,
    split_batch,
)
from torchstrategy.data.split import share_bounds, share_sizes
from torchstrategy.devices import Placement
from torchstrategy.log import warn_once
from torchstrategy.values import BatchShares

__all__ = ["ShardedLoader", "Source", "WholeBatches", "first_element"]

_END = object()
_SAME_DATA = "Every rank must build the same dataset in the same order."
_SAME_ORDER = (
    "Every rank must draw the same index batches: shuffle by a torch generator or torch's default one (their states "
    "are shared), not by Python's or numpy's, and build the same dataset on every rank."
)


class Source(Protocol):
    """What a distributed dataset iterates over."""

    def batches(self) -> Iterator[LocalBatch]:
        """Start an iteration."""

    def length(self) -> int | None:
        """Return the number of elements, if it is known."""

    def example(self) -> Components:
        """Return some batch to describe the elements by, at no cost to random states or other ranks."""


class WholeBatches:
    """Reads every global batch in every process and keeps the process's shares.

    Args:
        data: gives global batches each time it is iterated.
        placement: the strategy's replicas.
        workers: its processes, ``None`` if there is one.
        is_agreed: the ranks are known to hold the same batches, so that steps need no exchange.
    """

    def __init__(
        self, data: Iterable[Any], placement: Placement, workers: Workers | None, *, is_agreed: bool = False
    ) -> None:
        self._data = data
        self._placement = placement
        self._workers = None if is_agreed else workers

    def batches(self) -> Iterator[LocalBatch]:
        """Start an iteration."""
        workers = self._workers
        for batch in map(components, self._data) if workers is None else _read_together(self._data, workers):
            yield split_batch(batch, self._placement)

    def length(self) -> int | None:
        """Return the number of global batches, if it is known."""
        return known_length(self._data)

    def example(self) -> Components:
        """Return the first global batch."""
        batch = first_element(self._data)
        check_splittable(batch, self._placement.num_replicas)
        return batch


class ShardedLoader:
    """Loads only this process's part of each global batch of a map-style ``DataLoader``.

    The loader is copied, not built anew, so that every option and any subclass is kept; only its batch sampler is
    another one. Each replica's share is collated by itself.

    Args:
        loader: the user's loader of global batches.
        placement: the strategy's replicas.
        workers: its processes.
    """

    def __init__(self, loader: DataLoader[Any], placement: Placement, workers: Workers) -> None:
        self._original = loader
        self._placement = placement
        self._workers = workers
        self._sampler = _ShareSampler(loader, placement, workers)
        self._loader = copy.copy(loader)
        # DataLoader refuses to have its sampler set; the copy has not started any workers, so it is safe here
        self._loader.__dict__.update(batch_sampler=self._sampler, _iterator=None)
        if loader.num_workers > 0 and not loader.in_order:
            warn_once("in_order=False is ignored: with several processes each step must hold the same global batch.")
            self._loader.in_order = True

    def batches(self) -> Iterator[LocalBatch]:
        """Start an iteration."""
        items = iter(self._loader)
        item = next(items, _END)
        draw = self._sampler.latest_draw
        while item is not _END:
            step = draw.steps.popleft()
            yield self._assemble(step, [components(item), *(components(next(items)) for _ in range(1, step.num_loads))])
            item = next(items, _END)
        check_equal(self._workers, "order of all index batches", draw.digest.record(), _SAME_ORDER)

    def length(self) -> int | None:
        """Return the number of global batches, if it is known."""
        return known_length(self._original)

    def example(self) -> Components:
        """Return the first global batch."""
        batch = first_element(self._original)
        check_splittable(batch, self._placement.num_replicas)
        return batch

    def _assemble(self, step: _Step, loaded: list[Components]) -> LocalBatch:
        for batch in loaded:
            check_splittable(batch, self._placement.num_replicas)
        filled = iter(loaded)
        empty = empty_like(loaded[0])
        parts = [next(filled) if step.sizes[i] else empty for i in self._placement.local_replica_ids]
        tag = BatchShares(step.sizes)
        return join_parts(parts, [None if leaf is None else tag for leaf in empty.leaves])


class _Step(NamedTuple):
    sizes: tuple[int, ...]  # of all replicas' shares
    num_loads: int  # batches that the loader makes for this process


class _Draw:
    """One iteration's index batches: their steps, queued because loader workers run ahead of the reader."""

    def __init__(self) -> None:
        self.steps: deque[_Step] = deque()
        self.digest = OrderDigest()


class _ShareSampler:
    """Draws the user's global index batches and gives the loader those of this process's replicas."""

    def __init__(self, loader: DataLoader[Any], placement: Placement, workers: Workers) -> None:
        self._batch_sampler: Iterable[Any] = loader.batch_sampler  # type: ignore[assignment]
        self._generators = find_generators(loader)
        self._placement = placement
        self._workers = workers
        self.latest_draw = _Draw()

    def __len__(self) -> int:
        return len(self._batch_sampler)  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[Sequence[Any]]:
        self.latest_draw = _Draw()
        return self._shares(self.latest_draw)

    def _shares(self, draw: _Draw) -> Iterator[Sequence[Any]]:
        local = slice(self._placement.first_replica, self._placement.first_replica + len(self._placement.devices))
        for indices in self._global_batches(draw.digest):
            sizes = share_sizes(len(indices), self._placement.num_replicas)
            parts = [indices[start:stop] for start, stop in share_bounds(sizes)[local] if start < stop]
            parts = parts or [indices[:1]]  # an empty share's structure is known from an example only
            draw.steps.append(_Step(sizes, len(parts)))
            yield from parts

    def _global_batches(self, digest: OrderDigest) -> Iterator[list[Any]]:
        stream = SharedStream(self._workers, self._generators)
        reader = _Reader(self._batch_sampler)
        indices = stream.draw(reader.next)  # here samplers shuffle
        first = OrderDigest()
        if indices is not _END:
            first.add(indices := list(indices))
        record = [known_length(self._batch_sampler), *first.record()]
        check_equal(self._workers, "number of batches and first index batch", record, _SAME_ORDER)
        while indices is not _END:
            digest.add(indices := list(indices))
            yield indices
            indices = stream.draw(reader.next)


class _Reader:
    """An iterator that starts at its first ``next``, where a shared random stream is in place."""

    def __init__(self, data: Iterable[Any]) -> None:
        self._data = data
        self._items: Iterator[Any] | None = None

    def next(self) -> Any:
        if self._items is None:
            self._items = iter(self._data)
        return next(self._items, _END)


def _read_together(data: Iterable[Any], workers: Workers) -> Iterator[Components]:
    """Read the same batches on every rank, and check at each step that their sizes agree."""
    stream = SharedStream(workers, find_generators(data))
    reader = _Reader(data)
    while True:
        item = stream.draw(reader.next)
        batch = None if item is _END else components(item)
        lengths = None if batch is None else [batch_length(leaf) for leaf in batch.leaves]
        check_equal(workers, "sizes of the next global batch (None: no more data)", lengths, _SAME_DATA)
        if batch is None:
            return
        yield batch


def first_element(data: Iterable[Any]) -> Components:
    """Read one element without starting worker processes or changing torch's random states.

    Raises:
        ValueError: there is none.
    """
    if isinstance(data, DataLoader):
        data = copy.copy(data)
        data.__dict__.update(_iterator=None, num_workers=0, timeout=0, persistent_workers=False)
    generators = find_generators(data)
    states = [generator.get_state() for generator in generators]
    with torch.random.fork_rng(devices=[]):
        element = next(iter(data), _END)
    for generator, state in zip(generators, states, strict=True):
        generator.set_state(state)
    if element is _END:
        raise ValueError("The dataset is empty, so the shapes and dtypes of its elements are not known.")
    return components(element)
