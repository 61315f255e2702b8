"""Processes that each read a stream of their own.

It is that of a function that gets an ``InputContext``, or one that is cut anew into minibatches (OFF, FILE, HINT).

The rule is tf's, measured on 2.21: a process takes its elements apart and cuts them into minibatches for its replicas,
of the floor or ceiling of global batch size / replicas, in an order that is rotated from process to process.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor

from torchstrategy.base.devices import Placement
from torchstrategy.data.batch import (
    Components,
    LocalBatch,
    batch_length,
    check_batch_sizes,
    check_splittable,
    concatenate,
    take,
)
from torchstrategy.data.data_order import Workers, declared_batch_size
from torchstrategy.data.input_pipelines import (
    Make,
    PipelineReader,
    Rounds,
    combine_states,
    open_pipelines,
    position_of,
)
from torchstrategy.data.position import Position
from torchstrategy.data.sources import first_element, splittable_element
from torchstrategy.data.split import minibatch_sizes
from torchstrategy.errors import DisagreementError

__all__ = ["FunctionPipelines", "InputContext", "OwnStreams"]


@dataclass(frozen=True)
class InputContext:
    """Passed to the dataset function of ``distribute_datasets_from_function``.

    Args:
        num_input_pipelines: how many input pipelines feed the strategy: one for each process, or for each replica.
        input_pipeline_id: which of them the function makes, from 0.
        num_replicas_in_sync: replicas over all processes.

    Example:
        >>> context = ts.InputContext(num_input_pipelines=2, input_pipeline_id=1, num_replicas_in_sync=4)
        >>> context.get_per_replica_batch_size(64)
        16
        >>> context
        InputContext(input pipeline id 1, total: 2)
    """

    num_input_pipelines: int = 1
    input_pipeline_id: int = 0
    num_replicas_in_sync: int = 1

    def get_per_replica_batch_size(self, global_batch_size: int) -> int:
        """Return one replica's part of the global batch size.

        Args:
            global_batch_size: examples in a step over all replicas.

        Returns:
            ``global_batch_size // num_replicas_in_sync``.

        Raises:
            ValueError: the size is not divisible.

        Example:
            >>> ts.InputContext(num_replicas_in_sync=2).get_per_replica_batch_size(10)
            5
        """
        if global_batch_size % self.num_replicas_in_sync != 0:
            raise ValueError(
                f"The `global_batch_size` {global_batch_size!r} is not divisible by `num_replicas_in_sync` "
                f"{self.num_replicas_in_sync!r}. Choose a multiple of the number of replicas."
            )
        return global_batch_size // self.num_replicas_in_sync

    def __repr__(self) -> str:
        return f"InputContext(input pipeline id {self.input_pipeline_id}, total: {self.num_input_pipelines})"


class FunctionPipelines:
    """Deals the batches of the function's datasets to the replicas, without splitting them.

    The function is called at once. Iteration goes on until every rank is out of data; a replica without data gets
    empty batches. A last round of elements without a batch dimension is dropped unless every replica has one.

    Args:
        fn: takes an ``InputContext`` and returns a ``DataLoader`` or another iterable of one replica's batches.
        placement: the strategy's replicas.
        workers: its processes, ``None`` if there is one.
        per_replica: call ``fn`` for each replica instead of once in each process.

    Raises:
        TypeError: ``fn`` returned something that can't be iterated again and again.
    """

    def __init__(
        self, fn: Callable[[InputContext], Any], placement: Placement, workers: Workers | None, *, per_replica: bool
    ) -> None:
        self.kind = "datasets of a function" + (" for each replica" if per_replica else "")
        self.how = "The dataset function divides the data."
        self.is_collective = workers is not None
        self._fn = fn
        self._placement = placement
        self._workers = workers
        if per_replica:
            self._num, self._indices = placement.num_replicas, list(placement.local_replica_ids)
        elif workers is None:
            self._num, self._indices = 1, [0]
        else:
            self._num, self._indices = workers.size, [workers.rank]
        self._own = {i: self._make(self._num, i, placement.num_replicas) for i in self._indices}

    def start(self, state: dict[str, Any] | None) -> _FunctionReading:
        """Start an iteration, or go on with one."""
        replicas_now = self._placement.num_replicas
        goes_on = state is not None and not state["is_finished"]
        if state is not None and not goes_on and state["num_replicas"] != replicas_now:
            state = None  # the function's datasets may be other ones now, and have no next iteration
        replicas_then = state["num_replicas"] if state is not None and goes_on else replicas_now

        def data_of(num: int, index: int) -> Any:
            own = self._own.get(index) if num == self._num and replicas_then == replicas_now else None
            return self._make(num, index, replicas_then) if own is None else own

        takes_turns = len(self._indices) == 1 and self._placement.num_local > 1
        readers = open_pipelines(self._num, self._indices, data_of, state, keeps_elements=takes_turns)
        rounds = Rounds(self._workers, state["step"] if state is not None and goes_on else 0, self.example)
        # what the function was told: its batch sizes may depend on it
        position = position_of(rounds, readers, num_replicas=replicas_then)
        if takes_turns:  # consecutive elements go to the process's replicas
            readers = readers * self._placement.num_local
        return _FunctionReading(readers, rounds, position)

    def combine(self, state: dict[str, Any]) -> dict[str, Any]:
        """Make one state of all processes' positions; every process calls it."""
        return combine_states(self._workers, state)

    def length(self) -> int | None:
        """Return ``None``: the datasets of other ranks are not known here."""
        return None

    def example(self) -> Components:
        """Return the first batch of the first dataset."""
        return first_element(self._own[self._indices[0]])

    def _make(self, num_pipelines: int, index: int, num_replicas: int) -> Iterable[Any]:
        return _check_dataset(self._fn(InputContext(num_pipelines, index, num_replicas)))


class _FunctionReading:
    """One iteration, with a reader for each replica of this process."""

    def __init__(self, readers: list[PipelineReader], rounds: Rounds, position: Position) -> None:
        self._readers = readers
        self._rounds = rounds
        self.position = position

    def __next__(self) -> LocalBatch:
        if self.position.is_finished:
            raise StopIteration
        parts = [reader.next() for reader in self._readers]
        step = self._rounds.step(parts, has_data=any(part is not None for part in parts))
        if step is None:
            self.position.is_finished = True
            raise StopIteration
        return step


def _check_dataset(dataset: Any) -> Iterable[Any]:
    if isinstance(dataset, Iterator):
        raise TypeError(
            f"The dataset function returned a {type(dataset).__name__}, which can be iterated only once. Return a "
            "DataLoader, a list of batches, or another object whose __iter__ starts anew."
        )
    if isinstance(dataset, (Mapping, Tensor, np.ndarray)):
        raise TypeError(
            f"The dataset function returned a {type(dataset).__name__}, which holds one batch or examples. Return a "
            "DataLoader, a list of batches, or another iterable of batches for one replica."
        )
    if not isinstance(dataset, Iterable) or isinstance(dataset, (str, bytes)):
        raise TypeError(
            f"The dataset function must return a DataLoader or another iterable of batches. Received: {dataset!r}"
        )
    return dataset


class OwnStreams:
    """Gives this process's replicas minibatches of its own stream, until no process has data.

    Args:
        make: returns the stream of process ``i`` of ``n``, an iterable of global batches.
        placement: the strategy's replicas.
        workers: its processes, ``None`` if there is one.
        policy: the name of the sharding policy.
    """

    def __init__(self, make: Make, placement: Placement, workers: Workers | None, policy: str) -> None:
        self.kind = f"streams of each process ({policy})"
        self.how = "Each process cuts its own stream into minibatches for its replicas."
        self.is_collective = workers is not None
        self._size = 1 if workers is None else workers.size
        self._rank = 0 if workers is None else workers.rank
        self._make = make
        self._own = make(self._size, self._rank)
        self._placement = placement
        self._workers = workers

    def start(self, state: dict[str, Any] | None) -> _Reading:
        """Start an iteration, or go on with one."""
        (reader,) = open_pipelines(self._size, [self._rank], self._data_of, state, keeps_elements=True)
        goes_on = state is not None and not state["is_finished"]
        rounds = Rounds(self._workers, state["step"] if state is not None and goes_on else 0, self.example)
        layout = [self._placement.num_replicas, self._placement.num_local]
        more = {"batch_size": declared_batch_size(self._own), "layout": layout, "next_size": 0}
        if state is not None and goes_on:
            more["batch_size"] = state["batch_size"]
            more["next_size"] = state["next_size"] if state["layout"] == layout else 0
        position = position_of(rounds, [reader], **more)
        return _Reading(reader, rounds, position, self._placement, self._workers)

    def combine(self, state: dict[str, Any]) -> dict[str, Any]:
        """Make one state of all processes' positions; every process calls it."""
        return combine_states(self._workers, state)

    def length(self) -> int | None:
        """Return ``None``: other processes' streams are not known here."""
        return None

    def example(self) -> Components:
        """Return the first element of this process's stream."""
        return splittable_element(self._own, self._placement)

    def _data_of(self, num_processes: int, index: int) -> Any:
        is_own = (num_processes, index) == (self._size, self._rank)
        return self._own if is_own else self._make(num_processes, index)


class _Reading:
    """One iteration; the minibatches that are not cut yet are at most one element's."""

    def __init__(
        self,
        reader: PipelineReader,
        rounds: Rounds,
        position: Position,
        placement: Placement,
        workers: Workers | None,
    ) -> None:
        self._reader = reader
        self._rounds = rounds
        self.position = position
        self._placement = placement
        self._workers = workers
        self._sizes: list[int] | None = None

    @property
    def _rest(self) -> Components | None:
        """What of the stream was read and not cut yet."""
        return self._reader.position.rest

    @_rest.setter
    def _rest(self, rest: Components | None) -> None:
        self._reader.position.rest = rest

    def __next__(self) -> LocalBatch:
        if self.position.is_finished:
            raise StopIteration
        if self._placement.num_replicas == 1:
            element = self._next_whole()
            step = self._rounds.step([element], has_data=element is not None)
        else:
            sizes = self._local_sizes()
            self._fill(1)
            has_data = self._rest is not None
            step = self._rounds.step([self._cut(size) for size in sizes], has_data=has_data)
        if step is None:
            self.position.is_finished = True
            raise StopIteration
        return step

    def _next_whole(self) -> Components | None:
        """Return the next element for the only replica, as it is."""
        rest, self._rest = self._rest, None
        return self._reader.next() if rest is None else rest

    def _local_sizes(self) -> list[int]:
        more = self.position.more
        if self._sizes is None:
            more["batch_size"] = self._agree_on_batch_size()
            first = self._placement.first_replica
            self._sizes = minibatch_sizes(more["batch_size"], self._placement.num_replicas, first)
        sizes, start, num_local = self._sizes, more["next_size"], self._placement.num_local
        more["next_size"] = (start + num_local) % len(sizes)
        return [sizes[(start + i) % len(sizes)] for i in range(num_local)]

    def _agree_on_batch_size(self) -> int:
        """Return the global batch size: as declared, else that of the first elements."""
        self._fill(1)
        declared = self.position.more["batch_size"]
        own = [declared, 0 if self._rest is None else _length(self._rest)]
        heard = [own] if self._workers is None else self._workers.exchange("global batch size", own)
        sizes = [size for size, _ in heard]
        if len({size for size in sizes if size is not None}) > 1:
            raise DisagreementError(
                f"The ranks' datasets have different batch sizes (by rank): {sizes}. The batch size is that of all "
                "replicas together, so it must be the same on every rank."
            )
        return int(max(size or length for size, length in heard))

    def _cut(self, size: int) -> Components | None:
        """Take a minibatch off the stream; ``None`` if nothing is left."""
        self._fill(max(size, 1))
        rest = self._rest
        if rest is None:
            return None
        length = _length(rest)
        self._rest = take(rest, size, length) if size < length else None
        return take(rest, 0, min(size, length))

    def _fill(self, size: int) -> None:
        """Read on until there are so many examples, or no more."""
        while self._rest is None or _length(self._rest) < size:
            element = self._reader.next()
            if element is None:
                return
            check_splittable(element, 2)
            check_batch_sizes(element)
            if _length(element):
                self._rest = element if self._rest is None else concatenate([self._rest, element])


def _length(batch: Components) -> int:
    return next((length for length in map(batch_length, batch.leaves) if length is not None), 0)
