"""Where a distributed dataset's elements come from, and the source for global batches of any iterable.

The user gives global batches. A batch of ``m`` is cut into consecutive chunks of ``ceil(m / n)``, and chunk ``i``
goes to replica ``i`` in every hosting, so ``gather`` is in data order and two processes see what two in-process
replicas see. Empty shares are run, never skipped or padded, so that all replicas reach the same merge points and
nothing false reaches a metric.

A batch is taken apart into components (``data/batch.py``), and each component is cut along its examples: tensors
along their first dimension, lists of examples by their entries, registered types by their splitters
(``data/split.py``). Which lists of a collate function's batch have an entry for each example is found by
collating another number of examples (``data/example_lists.py``), because sizes can't tell.

A ``Source`` (``data/sources.py``) makes readings, a reading makes ``LocalBatch``es, and the iterator brings them to
the devices. There are five sources:

- ``IndexedLoader``: for map-style loaders; reads only this process's part: the loader is copied around a batch
  sampler that yields it. Agreement between ranks: first index batch, and a checksum of all at the end.
- ``ArraySource``: for arrays in ``fit``; reads only this process's part, by one indexing call. Agreement between
  ranks: the arrays' checksum; one number an epoch.
- ``WholeBatches``: for other iterables, arrays; reads every batch, and keeps its part. Agreement between ranks:
  shapes and dtypes at each step; nothing for arrays.
- ``OwnStreams``: for ``FILE``, ``OFF``, ``HINT``; reads a stream of its own, cut anew as tf does. Agreement between
  ranks: lengths and who still has data, at each step.
- ``FunctionPipelines``: for datasets of a function; reads what the function made. Agreement between ranks: the same.

**Random numbers.** What decides the order is drawn from the chief's stream, then from a stream derived of it, in
every hosting: within an epoch the model's draws never change the data's order, and the order can be drawn again. (A
stream of the dataset's own over all epochs would make the order independent of dropout altogether, but
``torch.manual_seed`` before an epoch would have no effect, and the orders would not be a plain loader's.) Loading a
batch is seeded by (state at the epoch's start, number of the batch, replica), so augmentation does not depend on the
number of loader workers. Seeding each example would make it independent of the number of processes too, but costs 15
us an example.

**Positions.** A state is a count and the random states of the epoch's start, so it does not know how many replicas
there are. A map-style order is drawn again and skipped without loading; a checksum of the skipped index batches tells
other data. Data with a ``state_dict`` of its own (torchdata's protocol) keeps its own state. Processes with streams
of their own exchange their positions in ``state_dict``, which is therefore collective there; with another number of
processes the streams are shared out anew and read one after the other. (Counting alone would have kept ``state_dict``
local, but a stream would have to be read again from its start.) ``AUTO`` may choose differently for another number of
processes: a loaded state decides how the rest of its epoch is read. Positions don't keep iterators alive, and on
accelerators, where reading runs ahead of the user, each element carries the position that follows it.

A ``ts.data.Dataset`` is an immutable tree of operations. Each iteration builds nodes from it. As long as
elements are slices of arrays only, the nodes carry their positions: shuffling 60,000 images moves integers, and a
batch is one indexing call. Everything random follows from keys that are drawn at the first ``next``, so a state is
keys and counts, never elements. A reader of files is a function from a path to examples; an optional argument
``start`` lets it skip without decoding. Readers stream and never map files into memory, so damage is an error that
names the file.

What processes divide is compared before it is divided (``data/data_order.py``): lengths, checksums of tensors,
structures and dtypes. ``data/prefetch.py`` starts and finishes the copies of an element on one side stream for each
device.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Iterable
from typing import Any, Protocol

import numpy as np
import torch
from torch.utils.data import DataLoader

from torchstrategy.base import tree
from torchstrategy.base.devices import Placement
from torchstrategy.data.batch import Components, LocalBatch, check_splittable, components, signature, split_batch
from torchstrategy.data.data_order import (
    Workers,
    check_equal,
    find_generators,
    is_pipeline,
    known_length,
    warn_of_other_values,
)
from torchstrategy.data.position import END, Position, StreamReader, is_resumable
from torchstrategy.errors import InvalidArgumentError

__all__ = ["Cursor", "Reading", "Source", "WholeBatches", "first_element", "splittable_element"]

_SAME_STATE = "Load the same state on every rank."
_SAME_DATA = "Every rank must build the same dataset in the same order."


class Reading(Protocol):
    """One iteration over a source."""

    @property
    def position(self) -> Position:
        """Where it is."""

    def __next__(self) -> LocalBatch:
        """Return the next element's parts for this process's replicas."""


class Source(Protocol):
    """What a distributed dataset iterates over."""

    @property
    def kind(self) -> str:
        """How elements are read; a state can be loaded by a source of the same kind."""

    @property
    def how(self) -> str:
        """Who reads what, as a sentence."""

    @property
    def is_collective(self) -> bool:
        """Whether ``combine`` must be called by all processes."""

    def start(self, state: dict[str, Any] | None) -> Reading:
        """Start an iteration, or go on with one from what ``combine`` returned."""

    def combine(self, state: dict[str, Any]) -> dict[str, Any]:
        """Make one state of what every process's position says."""

    def length(self) -> int | None:
        """Return the number of elements, if it is known."""

    def example(self) -> Components:
        """Return some batch to describe the elements by, at no cost to random states or other ranks."""


class Cursor:
    """Where an iteration is for its user: after the last element that was handed out.

    Args:
        source: what is read.
        position: where the reading is, ``None`` if there is none yet.
        loaded: the state that it goes on from.
    """

    def __init__(self, source: Source, position: Position | None, loaded: dict[str, Any] | None) -> None:
        self.source = source
        self._position = position
        self.loaded = loaded
        self.is_at_start = True
        self._snapshot: dict[str, Any] | Exception | None = None

    def move(self, snapshot: dict[str, Any] | Exception | None) -> None:
        """Count an element, or the end.

        Args:
            snapshot: the position then, if the reading has gone on since.
        """
        self.is_at_start = False
        self.loaded = None
        self._snapshot = snapshot

    def local_state(self) -> dict[str, Any] | None:
        """Return the position in this process's data."""
        if self.is_at_start or self._position is None:
            return self.loaded
        if isinstance(self._snapshot, Exception):
            raise self._snapshot
        return self._position.state() if self._snapshot is None else self._snapshot


class WholeBatches:
    """Reads every global batch in every process and keeps the process's shares.

    Args:
        data: gives global batches each time it is iterated.
        placement: the strategy's replicas.
        workers: its processes, ``None`` if there is one.
        is_agreed: the ranks are known to hold the same batches, so that steps need no exchange.
    """

    kind = "whole global batches"
    is_collective = False

    def __init__(
        self, data: Iterable[Any], placement: Placement, workers: Workers | None, *, is_agreed: bool = False
    ) -> None:
        self._data = data
        self._placement = placement
        self._workers = workers
        self._is_agreed = is_agreed
        self.how = "Whole batches are read and cut."
        if workers is not None:
            self.how = "Each process reads every batch and keeps its part."

    def start(self, state: dict[str, Any] | None) -> _Reading:
        """Start an iteration, or go on with one."""
        starts_anew = state is not None and bool(state["is_finished"])
        length = self.length()
        if state is not None and not starts_anew and state["length"] != length:
            raise InvalidArgumentError(
                f"The state to resume from is of data with {state['length']} global batches, this data has {length}. "
                "Load it into the same dataset as it was taken from."
            )
        workers = None if self._is_agreed else self._workers
        reader = StreamReader(self._data, workers, state, starts_anew=starts_anew)
        return _Reading(reader, length, self._placement, self._workers, is_agreed=self._is_agreed)

    def combine(self, state: dict[str, Any]) -> dict[str, Any]:
        """Return what is the same in every process."""
        return {**state, "random": None} if self._is_agreed else state

    def length(self) -> int | None:
        """Return the number of global batches, if it is known."""
        return known_length(self._data)

    def example(self) -> Components:
        """Return the first global batch."""
        return splittable_element(self._data, self._placement)


class _Reading:
    """Reads the same batches on every rank, and checks at each step that they agree."""

    def __init__(
        self,
        reader: StreamReader,
        length: int | None,
        placement: Placement,
        workers: Workers | None,
        *,
        is_agreed: bool,
    ) -> None:
        self._reader = reader
        self._placement = placement
        self._is_agreed = is_agreed
        self._workers = workers
        self._is_first = True
        own = reader.position
        self.position = Position(ask=lambda: {"step": own.num_read, **own.state()}, length=length)

    def __next__(self) -> LocalBatch:
        item = self._reader.next()
        batch = None if item is END else components(item)
        if self._workers is not None and self._is_agreed and self._is_first:
            check_equal(self._workers, "number of the batch to go on with", self._reader.num_read, _SAME_STATE)
        if self._workers is not None and not self._is_agreed:
            record = None
            if batch is not None:
                what = ", ".join(map(signature, batch.leaves)) + tree.describe(batch.spec)
                record = f"number {self._reader.num_read - 1}: {what}"
            check_equal(self._workers, "next global batch (None: no more data)", record, _SAME_DATA)
        if batch is None:
            raise StopIteration
        if self._workers is not None and self._is_first and not self._is_agreed:
            warn_of_other_values(self._workers, batch)
        self._is_first = False
        try:
            return split_batch(batch, self._placement)
        except Exception:
            self._reader.give_back()
            raise


def splittable_element(data: Iterable[Any], placement: Placement) -> Components:
    """Return what ``first_element`` does, if it can be divided.

    Raises:
        IndexError: a component has no batch dimension and there is more than one replica.
        ValueError: there is no element, or a component is a dataset itself.
    """
    batch = first_element(data)
    check_splittable(batch, placement.num_replicas)
    return batch


def first_element(data: Iterable[Any]) -> Components:
    """Read one element without starting worker processes, changing random states or moving the data's position.

    Raises:
        ValueError: there is none.
    """
    if is_pipeline(data):
        return components(data.peek())
    if isinstance(data, DataLoader):
        dataset: Any = data.dataset
        if is_pipeline(dataset):  # which counts its iterations, but not peeks
            example = dataset.peek()
            return components(data.collate_fn(example if data.batch_size is None else [example]))
        data = copy.copy(data)
        changes = {"_iterator": None, "num_workers": 0, "timeout": 0, "prefetch_factor": None}
        data.__dict__.update(changes, persistent_workers=False)
        if is_resumable(dataset):
            data.__dict__["dataset"] = copy.copy(dataset)
    elif is_resumable(data):
        data = copy.copy(data)
    generators = find_generators(data)
    states = [generator.get_state() for generator in generators]
    python_state, numpy_state = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng(devices=[]):
            element = next(iter(data), END)
    finally:
        for generator, state in zip(generators, states, strict=True):
            generator.set_state(state)
        random.setstate(python_state)
        np.random.set_state(numpy_state)
    if element is END:
        raise ValueError(
            "The dataset is empty, so the shapes and dtypes of its elements are not known. Give it one batch at least; "
            "drop_last and drop_remainder drop a partial one."
        )
    return components(element)
