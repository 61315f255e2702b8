"""Where elements come from when the user's function makes one dataset for each input pipeline."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import numpy as np
from torch import Tensor

from torchstrategy.base.devices import Placement
from torchstrategy.data.batch import Components, LocalBatch
from torchstrategy.data.data_order import Workers
from torchstrategy.data.input_context import InputContext
from torchstrategy.data.input_pipelines import PipelineReader, PipelinesPosition, combine_states, open_pipelines
from torchstrategy.data.rounds import Rounds
from torchstrategy.data.sources import first_element

__all__ = ["FunctionPipelines"]


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

    def start(self, state: dict[str, Any] | None) -> _Reading:
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
        position = PipelinesPosition(rounds, readers, {"num_replicas": replicas_then})
        if takes_turns:  # consecutive elements go to the process's replicas
            readers = readers * self._placement.num_local
        return _Reading(readers, rounds, position)

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


class _Reading:
    """One iteration, with a reader for each replica of this process."""

    def __init__(self, readers: list[PipelineReader], rounds: Rounds, position: PipelinesPosition) -> None:
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
