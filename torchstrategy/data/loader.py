"""Map-style loaders: every process draws the same global index batches and loads only its own part of them."""

from __future__ import annotations

import copy
import itertools
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
    default_collate,
)

from torchstrategy.base.devices import Placement
from torchstrategy.base.log import warn_once
from torchstrategy.base.values import BatchShares
from torchstrategy.data.batch import (
    Components,
    LocalBatch,
    batch_length,
    check_splittable,
    components,
    division,
    empty_like,
    join_parts,
    split_batch,
)
from torchstrategy.data.data_order import (
    OrderDigest,
    SharedStream,
    Workers,
    check_equal,
    find_generators,
    known_length,
)
from torchstrategy.data.policy import check_first_batch, held_data
from torchstrategy.data.position import END, TAKEN_OVER, Position, random_state, restore_generators
from torchstrategy.data.seeding import IndexBatch, seed_batches, step_seed
from torchstrategy.data.sources import splittable_element
from torchstrategy.errors import InvalidArgumentError

__all__ = ["IndexedLoader", "has_index_batches"]

# Batches whose indices are drawn in a row: half the cost of one at a time, between which a batch is loaded.
_NUM_DRAWN_AHEAD = 16

_SAME_ORDER = (
    "Build the same dataset on every rank, from the same seed if it is random, and draw the same index batches: "
    "shuffle by a torch generator or torch's default one (their states are shared), not by Python's or numpy's. The "
    "strategy gives each rank its part, so no sampler or dataset may divide the data by rank, and random_split must be "
    "seeded alike."
)


def has_index_batches(data: Any) -> bool:
    """Say whether data is a loader that gives one batch for each of its batch sampler's."""
    if not isinstance(data, DataLoader) or isinstance(data.dataset, IterableDataset) or data.batch_sampler is None:
        return False
    # A subclass that iterates in its own way may leave batches out, or change them.
    return type(data).__iter__.__module__.split(".")[0] in ("torch", "torchdata")


class IndexedLoader:
    """Gives the replicas their parts of the batches of a map-style ``DataLoader``.

    The loader is copied, not built anew, so that every option and any subclass is kept; only its batch sampler is
    another one. With several processes each replica's share is loaded and collated by itself.

    Args:
        loader: the user's loader of global batches.
        placement: the strategy's replicas.
        workers: its processes, ``None`` if there is one.
    """

    kind = "index batches"
    is_collective = False

    def __init__(self, loader: DataLoader[Any], placement: Placement, workers: Workers | None) -> None:
        self._original = loader
        self._placement = placement
        self._workers = workers
        self.how = "Whole batches are loaded and cut."
        if workers is not None:
            self.how = "Each process loads only its own part of a batch."
        self._sampler = _IndexBatches(loader, placement, workers)
        self._loader = copy.copy(loader)
        # DataLoader refuses to have its sampler set; the copy has not started any workers, so it is safe here
        self._loader.__dict__.update(batch_sampler=self._sampler, _iterator=None)
        seed_batches(self._loader)
        if loader.num_workers > 0 and not loader.in_order:
            warn_once("in_order=False is ignored: each step must hold the same global batch in every run.")
            self._loader.in_order = True

    def start(self, state: dict[str, Any] | None) -> _Reading:
        """Start an iteration, or go on with one."""
        if state is not None and state["is_finished"]:
            restore_generators(self._original, state)
            state = None
        stream = self._sampler.new_stream(state)
        begun = OrderDigest() if state is None else OrderDigest(state["step"], state["checksum"])
        loader = self._original
        position = Position(
            begun.num_batches, lambda: {"random": random_state(stream, loader)}, checksum=begun.checksum
        )
        draw = _Draw(stream, state)
        has_own_collate = self._original.collate_fn is not default_collate
        return _Reading(
            self._loader,
            self._sampler,
            draw,
            position,
            self._placement,
            self._workers,
            has_own_collate=has_own_collate,
        )

    def combine(self, state: dict[str, Any]) -> dict[str, Any]:
        """Return the state as it is: it is the same in every process."""
        return state

    def length(self) -> int | None:
        """Return the number of global batches, if it is known."""
        return known_length(self._original)

    def example(self) -> Components:
        """Return the first global batch."""
        return splittable_element(self._original, self._placement)


class _Step(NamedTuple):
    shares: BatchShares  # of all replicas
    num_loads: int  # batches that the loader makes for this process
    digest: OrderDigest  # of all index batches up to this one


class _Draw:
    """One iteration's index batches: their steps are queued, because loader workers run ahead of the reader."""

    def __init__(self, stream: SharedStream, state: dict[str, Any] | None) -> None:
        self.stream = stream
        self.resume = state
        self.steps: deque[_Step] = deque()


class _Reading:
    """One iteration."""

    def __init__(
        self,
        loader: DataLoader[Any],
        sampler: _IndexBatches,
        draw: _Draw,
        position: Position,
        placement: Placement,
        workers: Workers | None,
        *,
        has_own_collate: bool,
    ) -> None:
        self._loader = loader
        self._sampler = sampler
        self._placement = placement
        self._workers = workers
        self._items: Iterator[Any] | None = None
        self._has_own_collate = has_own_collate
        self._draw = draw
        self.position = position

    def __next__(self) -> LocalBatch:
        if self._items is None:
            own = torch.get_rng_state()
            self._items = self._open()
            if self._draw.resume is not None:  # the iteration that goes on has drawn this already
                torch.set_rng_state(own)
        elif self._loader.persistent_workers and self._sampler.draw is not self._draw:
            raise RuntimeError(TAKEN_OVER)
        item = next(self._items, END)
        if item is END:
            self._items = iter(())
            self._finish()
            raise StopIteration
        step = self._draw.steps.popleft()
        batch = self._assemble(step, item, self._items)
        number = self.position.step = step.digest.num_batches
        self.position.more["checksum"] = step.digest.checksum
        # An order that was drawn at the start, from one stream, need not be compared before the end.
        workers = None if self._sampler.draws_once else self._workers
        if workers is not None and number > 1 and number & (number - 1) == 0:  # 2, 4, 8, ...
            check_equal(workers, "order of the index batches so far", list(step.digest), _SAME_ORDER)
        return batch

    def _open(self) -> Iterator[Any]:
        self._sampler.draw = self._draw
        loader = self._loader
        is_direct = loader.num_workers == 0 and not loader.pin_memory
        if is_direct or (loader.persistent_workers and loader._iterator is not None):
            # What a new iterator of torch draws as its workers' seed. One that is used again does not: then nothing may
            # tell one epoch's random numbers from the next one's.
            torch.empty((), dtype=torch.int64).random_(generator=loader.generator)
        load = loader.dataset.__getitems__  # type: ignore[attr-defined]
        # Without workers torch's iterator does just this, in twice the time.
        return map(load, iter(self._sampler)) if is_direct else iter(loader)

    def _assemble(self, step: _Step, first: Any, items: Iterator[Any]) -> LocalBatch:
        if self._workers is None:
            return split_batch(components(first), self._placement)
        if not self._sampler.is_compared:
            self._sampler.is_compared = True
            check_first_batch(self._workers, components(first), self._sampler.dataset)
        parts = [components(first), *(components(next(items)) for _ in range(1, step.num_loads))]
        for batch in parts:
            check_splittable(batch, self._placement.num_replicas)
        sizes = [step.shares.shares[i] for i in self._placement.local_replica_ids]
        if 0 in sizes:
            filled, empty = iter(parts), empty_like(parts[0])
            parts = [next(filled) if size else empty for size in sizes]
        shares = self._shares(self._workers, step.shares, sizes, parts)
        return join_parts(parts, shares, are_new=not self._has_own_collate)

    def _shares(
        self, workers: Workers, tag: BatchShares, sizes: list[int], parts: list[Components]
    ) -> list[BatchShares | None]:
        """Return how many examples every replica has of each component."""
        lengths = [[batch_length(leaf) for leaf in part.leaves] for part in parts]
        if self._has_own_collate:  # which may leave examples out, or add some
            heard = workers.exchange("lengths of collated batches", lengths)
            columns = zip(*(row for rows in heard for row in rows), strict=True)
            return [None if None in column else BatchShares(column) for column in columns]
        for row, size in zip(lengths, sizes, strict=True):
            if any(length != size and length is not None for length in row):
                raise ValueError(
                    f"The dataset's __getitems__ gave {row} examples where {size} were asked for. It must give one for "
                    "each index; leave examples out in a collate_fn or by a sampler."
                )
        return [None if length is None else tag for length in lengths[0]]

    def _finish(self) -> None:
        if self._workers is not None and not self.position.is_finished:
            order = [self.position.step, self.position.more["checksum"]]
            check_equal(self._workers, "order of all index batches", order, _SAME_ORDER)
        self.position.is_finished = True


class _IndexBatches:
    """Draws the user's global index batches and gives the loader those of this process's replicas."""

    def __init__(self, loader: DataLoader[Any], placement: Placement, workers: Workers | None) -> None:
        self._batch_sampler: Iterable[Any] = loader.batch_sampler  # type: ignore[assignment]
        self._generators = find_generators(loader)
        self.dataset = loader.dataset
        self._held_data = (None, 0) if workers is None else held_data(loader.dataset)
        self.draws_once = _draws_once(loader)
        self.is_compared = False  # whether the ranks have looked at each other's first batch
        self._placement = placement
        self._workers = workers
        self.draw = _Draw(self.new_stream(None), None)

    def new_stream(self, state: dict[str, Any] | None) -> SharedStream:
        """Return the random stream of a new iteration, or of one that is drawn again."""
        random = None if state is None else state["random"]
        start = None if random is None else random["start"]
        return SharedStream(self._workers, self._generators, start)

    def __len__(self) -> int:
        return len(self._batch_sampler)  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[Sequence[Any]]:
        return self._parts(self.draw)

    def _parts(self, draw: _Draw) -> Iterator[Sequence[Any]]:
        steps = self._steps(draw)
        num_ahead = _NUM_DRAWN_AHEAD if self.draws_once else 1
        while chunk := list(itertools.islice(steps, num_ahead)):
            for step, parts in chunk:
                draw.steps.append(step)
                yield from parts

    def _steps(self, draw: _Draw) -> Iterator[tuple[_Step, list[IndexBatch]]]:
        ids = self._placement.local_replica_ids
        epoch_seed = None
        for indices, digest in self._global_batches(draw):
            bounds, shares = division(len(indices), self._placement.num_replicas)
            number, epoch_seed = digest.num_batches, draw.stream.seed() if epoch_seed is None else epoch_seed
            if self._workers is None:
                parts = [IndexBatch(indices, step_seed(epoch_seed, number, None))]
            else:
                cuts = [(i, indices[slice(*bounds[i])]) for i in ids if shares.shares[i]]
                # an empty share's structure is known from an example only
                cuts = cuts or [(ids[0], indices[:1])]
                parts = [IndexBatch(part, step_seed(epoch_seed, number, i)) for i, part in cuts]
            yield _Step(shares, len(parts), digest), parts

    def _global_batches(self, draw: _Draw) -> Iterator[tuple[list[Any], OrderDigest]]:
        reader = _Reader(self._batch_sampler)
        digest = OrderDigest()
        indices = draw.stream.draw(reader.next)  # here samplers shuffle
        if self._workers is not None:
            first = OrderDigest() if indices is END else OrderDigest().add(indices := list(indices))
            resumed_at = 0 if draw.resume is None else draw.resume["step"]
            num_examples, checksum = self._held_data
            record = (
                f"{known_length(self._batch_sampler)} batches, the first one's indices {first.checksum:x}, after step "
                f"{resumed_at}, {num_examples} examples, of which checksum {checksum:x}"
            )
            check_equal(self._workers, "data that they divide", record, _SAME_ORDER)
        while indices is not END:
            digest = digest.add(indices := list(indices))
            if draw.resume is None or digest.num_batches > draw.resume["step"]:
                yield indices, digest
            elif digest.num_batches == draw.resume["step"]:
                _check_same_order(digest, draw.resume)
            indices = reader.next() if self.draws_once else draw.stream.draw(reader.next)
        if draw.resume is not None and digest.num_batches < draw.resume["step"]:
            _check_same_order(digest, draw.resume)


def _check_same_order(digest: OrderDigest, state: dict[str, Any]) -> None:
    if list(digest) != [state["step"], state["checksum"]]:
        raise InvalidArgumentError(
            f"The state to resume from is {state['step']} global batches into its data, but these are not the first "
            f"ones that this loader draws (it has {digest.num_batches} so far). Load the state into the same loader: "
            "same data, global batch size, shuffling and drop_last. A sampler of your own must draw its order when an "
            "iteration starts, from torch's default generator or a torch.Generator that is its attribute; for one with "
            "set_epoch(), set the epoch of then."
        )


_DRAW_AT_THE_START = (SequentialSampler, RandomSampler, SubsetRandomSampler, WeightedRandomSampler)


def _draws_once(loader: DataLoader[Any]) -> bool:
    """Say whether all random numbers that decide the order are drawn with the first batch, as torch's samplers do."""
    sampler = loader.batch_sampler
    return type(sampler) is BatchSampler and type(sampler.sampler) in _DRAW_AT_THE_START


class _Reader:
    """An iterator that starts at its first ``next``, where a shared random stream is in place."""

    def __init__(self, data: Iterable[Any]) -> None:
        self._data = data
        self._items: Iterator[Any] | None = None

    def next(self) -> Any:
        if self._items is None:
            self._items = iter(self._data)
        return next(self._items, END)
