"""Batches of arrays, shuffled anew for each epoch.

The order is a function of one number, so a position is that number and a count, for any number of replicas and
processes. A batch costs each process one indexing call for each array, of its own part only.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from torchstrategy.base.devices import Placement
from torchstrategy.data.agreement import Workers, check_equal
from torchstrategy.data.batch import Components, LocalBatch, division, take
from torchstrategy.data.checks import checksum
from torchstrategy.errors import DisagreementError, InvalidArgumentError
from torchstrategy.fit.arrays import Arrays

__all__ = ["ArraySource"]

_SAME_ARRAYS = (
    "Pass the same arrays on every rank: load the same files, and seed alike what is random (ts.utils.set_random_seed)."
)


class ArraySource:
    """A source of a distributed dataset: consecutive or shuffled examples of arrays.

    Args:
        arrays: the data.
        batch_size: examples of a global batch; the last one may have fewer.
        shuffle: draw a new order in each iteration, by one number of torch's random stream (the chief's).
        placement: the strategy's replicas.
        workers: its processes, ``None`` if there is one.

    Raises:
        DisagreementError: the processes have different arrays or batch sizes.
    """

    kind = "arrays"
    is_collective = False

    def __init__(
        self, arrays: Arrays, batch_size: int, *, shuffle: bool, placement: Placement, workers: Workers | None
    ) -> None:
        self._arrays = arrays
        self.batch_size = batch_size
        self._shuffle = shuffle
        self._placement = placement
        self._workers = workers
        self.how = "Batches are cut from arrays."
        if workers is not None:
            self.how = "Each process takes its own part of each batch from its arrays."
            record = [*self._sizes, checksum(arrays.tensors)]
            check_equal(workers, "number of examples, batch size and checksum of the arrays", record, _SAME_ARRAYS)

    @property
    def _sizes(self) -> list[int]:
        return [self._arrays.num_examples, self.batch_size]

    def start(self, state: dict[str, Any] | None) -> _Reading:
        """Start an iteration, or go on with one."""
        if state is not None and state["sizes"] != self._sizes:
            raise InvalidArgumentError(
                f"The state to resume from is of arrays with [examples, batch size] {state['sizes']}, these have "
                f"{self._sizes}. Load it into the same data as it was taken from."
            )
        position = _Position(self._sizes)
        if state is not None and not state["is_finished"]:
            position = _Position(self._sizes, state["step"], state["seed"])
        return _Reading(self._arrays, position, self.batch_size, self._placement, self._workers, shuffle=self._shuffle)

    def combine(self, state: dict[str, Any]) -> dict[str, Any]:
        """Return the state as it is: it is the same in every process."""
        return state

    def length(self) -> int:
        """Return the number of global batches."""
        return -(-self._arrays.num_examples // self.batch_size)

    def example(self) -> Components:
        """Return the first examples."""
        return self._arrays.rows(0, min(self.batch_size, self._arrays.num_examples))


class _Position:
    """How many batches were given, and what their order was drawn with."""

    def __init__(self, sizes: list[int], step: int = 0, seed: int | None = None) -> None:
        self._sizes = sizes
        self.step = step
        self.seed = seed
        self.is_finished = False

    def state(self) -> dict[str, Any]:
        return {"step": self.step, "is_finished": self.is_finished, "sizes": self._sizes, "seed": self.seed}


class _Reading:
    """One iteration."""

    def __init__(
        self,
        arrays: Arrays,
        position: _Position,
        batch_size: int,
        placement: Placement,
        workers: Workers | None,
        *,
        shuffle: bool,
    ) -> None:
        self._arrays = arrays
        self.position = position
        self._batch_size = batch_size
        self._placement = placement
        self._workers = workers
        self._shuffle = shuffle
        self._is_open = False
        self._order: Tensor | None = None

    def __next__(self) -> LocalBatch:
        if not self._is_open:
            self._open()
        start = self.position.step * self._batch_size
        size = min(self._batch_size, self._arrays.num_examples - start)
        if size <= 0:
            self.position.is_finished = True
            raise StopIteration
        bounds, shares = division(size, self._placement.num_replicas)
        own = [bounds[i] for i in self._placement.local_replica_ids]
        first, end = own[0][0], own[-1][1]
        rows = self._arrays.rows(start + first, start + end, self._order)
        parts = [rows] if len(own) == 1 else [take(rows, a - first, b - first) for a, b in own]
        self.position.step += 1
        tags = [None if leaf is None else shares for leaf in rows.leaves]
        return LocalBatch(list(zip(*(part.leaves for part in parts), strict=True)), tags, rows.spec)

    def _open(self) -> None:
        """Draw the order, here and not in ``start``: nobody may iterate over what was started."""
        position = self.position
        is_new = self._shuffle and position.seed is None
        # Every rank draws, though the chief's number counts: ranks that were seeded alike stay alike.
        seed = int(torch.empty((), dtype=torch.int64, device="cpu").random_()) if is_new else position.seed
        if self._workers is not None:
            heard = self._workers.exchange("batch to begin with, and the order's seed", [position.step, seed])
            if len({step for step, _ in heard}) > 1:
                steps = [step for step, _ in heard]
                raise DisagreementError(f"The ranks begin with batches {steps}. Load the same state on every rank.")
            seed = heard[0][1]
        position.seed = seed
        if seed is not None:
            generator = torch.Generator().manual_seed(seed)
            self._order = torch.randperm(self._arrays.num_examples, generator=generator, device="cpu")
        self._is_open = True
