"""Random numbers of data loading: they depend on the seed of the batch, not on who loads it.

Augmentation draws from torch's default CPU generator, from ``numpy.random`` and from ``random``. All three are seeded
for each batch anew, so that a batch looks the same from any number of loader workers, and another one on each replica.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch
from numpy.random import mtrand
from torch.utils.data import DataLoader, Dataset, get_worker_info

__all__ = ["IndexBatch", "SeededDataset", "seed_batches", "step_seed"]

# np.random draws from this while a batch is loaded: numpy needs 70 microseconds to get and set a state, 0.5 to swap.
_NUMPY_BITS = np.random.MT19937(0)
_PYTHON_RANDOM: Any = random.getstate.__self__  # type: ignore[attr-defined]
_Generator: Any = (
    random.Random.__base__
)  # without the conversions of other seeds and versions, which cost as much again
_MASK = 2**64 - 1


class IndexBatch(list[Any]):
    """The indices of one batch, with the seed of the random numbers that loading it draws.

    Args:
        indices: what the dataset is asked for.
        seed: from 0 to 2**64 - 1, see ``step_seed``.
    """

    def __init__(self, indices: Iterable[Any], seed: int) -> None:
        super().__init__(indices)
        self.seed = seed


class SeededDataset(Dataset[Any]):
    """Loads and collates batches of a map-style dataset, each with the random numbers of its seed.

    In a loader's worker process nothing else draws. In the program's own process the program's streams are put back
    afterwards, so that loading does not move them; only the second of a pair of normal numbers, which numpy keeps for
    its next call, is lost. Generators that a dataset holds itself are its own affair.

    Args:
        inner: the user's dataset; its other attributes are there as well.
        collate_fn: makes a batch of a list of examples.
    """

    def __init__(self, inner: Dataset[Any], collate_fn: Callable[[Any], Any]) -> None:
        self.inner = inner
        self._collate_fn = collate_fn

    def __getitems__(self, indices: IndexBatch) -> Any:
        """Return the collated batch."""
        if get_worker_info() is not None:
            random.seed(indices.seed)
            _seed_arrays(indices.seed)
            return self._collate_fn(self._load(indices))
        torch_state = torch.default_generator.get_state()
        numpy_bits = mtrand.get_bit_generator()
        mtrand.set_bit_generator(_NUMPY_BITS)
        _PYTHON_STREAM.put_aside(indices.seed)
        try:
            _seed_arrays(indices.seed)
            return self._collate_fn(self._load(indices))
        finally:
            mtrand.set_bit_generator(numpy_bits)
            _PYTHON_STREAM.put_back()
            torch.default_generator.set_state(torch_state)

    def __getitem__(self, index: Any) -> Any:
        return self.inner[index]

    def __len__(self) -> int:
        return len(self.inner)  # type: ignore[arg-type]

    def __getattr__(self, name: str) -> Any:
        if name == "inner":  # not there yet while this object is being unpickled
            raise AttributeError(name)
        return getattr(self.inner, name)

    def _load(self, indices: IndexBatch) -> Any:
        inner = self.inner
        load_batch = getattr(inner, "__getitems__", None)  # as torch's own loader looks for it
        return load_batch(list(indices)) if load_batch else [inner[index] for index in indices]


def seed_batches(loader: DataLoader[Any]) -> None:
    """Make a loader seed its random numbers by the ``IndexBatch`` that its batch sampler gives.

    Args:
        loader: over a map-style dataset, batched. It is changed, so give a copy of the user's loader.
    """
    # DataLoader refuses to have its dataset set
    loader.__dict__["dataset"] = SeededDataset(loader.dataset, loader.collate_fn)
    loader.collate_fn = _as_it_is
    if loader.num_workers > 0:
        loader.worker_init_fn = _WorkerStart(loader.worker_init_fn)


def step_seed(epoch_seed: int, step: int, replica_id: int | None = None) -> int:
    """Return the seed of one replica's part of one global batch.

    Args:
        epoch_seed: drawn once for each iteration over the data; its lower 64 bits count.
        step: number of the global batch, from 0.
        replica_id: the replica; ``None`` for the whole batch.

    Returns:
        From 0 to 2**64 - 1; different for each replica and step.
    """
    seed = _mix(epoch_seed)
    seed = _mix(seed + step)
    return _mix(seed + (0 if replica_id is None else replica_id + 1))


class _WorkerStart:
    """Calls the user's ``worker_init_fn``, for which ``get_worker_info().dataset`` is the user's dataset."""

    def __init__(self, worker_init_fn: Callable[[int], None] | None) -> None:
        self._worker_init_fn = worker_init_fn

    def __call__(self, worker_id: int) -> None:
        info = get_worker_info()
        if info is not None and isinstance(info.dataset, SeededDataset):
            object.__setattr__(info, "dataset", info.dataset.inner)  # it is frozen
        if self._worker_init_fn is not None:
            self._worker_init_fn(worker_id)


class _PythonStream:
    """The program's stream of ``random``, put aside while a batch is loaded.

    ``random.getstate`` builds 625 integers, which takes longer than all the rest. So the state is read only if the
    program has drawn since it was put back. The next number tells: it differs then, but for one time in 2**32.
    """

    def __init__(self) -> None:
        self._words: tuple[int, ...] = ()
        self._next: tuple[int | None, float | None] = (None, None)

    def put_aside(self, seed: int) -> None:
        """Replace it by the stream of a seed."""
        upcoming = (_PYTHON_RANDOM.getrandbits(32), _PYTHON_RANDOM.gauss_next)
        if upcoming != self._next:
            _, (*words, position), _ = _PYTHON_RANDOM.getstate()
            self._words = (*words, position - 1)  # before the number that was just drawn
            self._next = upcoming
        _Generator.seed(_PYTHON_RANDOM, seed)
        _PYTHON_RANDOM.gauss_next = None

    def put_back(self) -> None:
        _Generator.setstate(_PYTHON_RANDOM, self._words)
        _PYTHON_RANDOM.gauss_next = self._next[1]


_PYTHON_STREAM = _PythonStream()


def _as_it_is(batch: Any) -> Any:
    return batch


def _seed_arrays(seed: int) -> None:
    # torch and numpy have the same generator, of which torch uses 32 bits of seed: each gets its own half
    torch.default_generator.manual_seed(seed & 0xFFFFFFFF)
    np.random.seed(seed >> 32)


def _mix(x: int) -> int:
    """Spread 64 bits: a step of SplitMix64, https://doi.org/10.1145/2714064.2660195."""
    x = (x + 0x9E3779B97F4A7C15) & _MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK
    return x ^ (x >> 31)
