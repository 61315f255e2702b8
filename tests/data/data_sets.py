"""Data sets of every kind for the properties of input: what they are, and what a rank reads of them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

import torchstrategy as ts
from torchstrategy.base.values import get_shares
from torchstrategy.data.distribute import distribute_dataset

LOADERS = ("loader", "stream loader")
WITH_BATCH_SIZE = ("arrays", "numpy", "examples", "stream")
BATCHES = ("dicts", "tuples", "dataclasses", "pipeline", "seeded pipeline")
KINDS = (*LOADERS, *WITH_BATCH_SIZE, *BATCHES)


@dataclass(frozen=True)
class Data:
    """One data set. Its examples are the numbers below ``num_examples``, each with features made from it."""

    kind: str
    num_examples: int
    batch_size: int
    drop_remainder: bool = False
    shuffle: bool = False
    num_workers: int = 0
    seed: int = 0

    def make(self) -> tuple[Any, dict[str, Any]]:
        """Return a new data set and the arguments with which it is distributed."""
        arguments = {"batch_size": self.batch_size} if self.kind in WITH_BATCH_SIZE else {}
        return _MAKERS[self.kind](self), arguments

    def plain_epochs(self, num_epochs: int = 2) -> list[list[list[int]]]:
        """Return the numbers of each global batch as a program without a strategy reads them."""
        torch.manual_seed(self.seed)
        dataset, arguments = self.make()
        if arguments:
            numbers = list(range(self.num_examples))
            return [[numbers[i : i + self.batch_size] for i in range(0, len(numbers), self.batch_size)]] * num_epochs
        return [[numbers_of(batch).tolist() for batch in dataset] for _ in range(num_epochs)]


class Pair(NamedTuple):
    number: Any
    features: Any


@dataclass
class Example:
    number: Any
    nested: Any


def features_of(numbers: Tensor) -> Tensor:
    return torch.stack([numbers * 0.5, numbers * -1.0], 1)


def numbers_of(batch: Any) -> Any:
    """Return the component that holds the examples' numbers."""
    if isinstance(batch, Example):
        return batch.number
    return batch["number"] if isinstance(batch, dict) else batch[0]


def features_in(batch: Any) -> Any:
    """Return the component that holds the examples' features."""
    if isinstance(batch, Example):
        return batch.nested["features"][0]
    return batch["features"] if isinstance(batch, dict) else batch[1]


class Examples(torch.utils.data.Dataset):
    """A map-style data set."""

    def __init__(self, num_examples: int) -> None:
        self._num_examples = num_examples

    def __len__(self) -> int:
        return self._num_examples

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"number": index, "features": torch.tensor([index * 0.5, index * -1.0])}


class Stream(IterableDataset):
    """Its loader's workers take every second example, of an order that they share."""

    def __init__(self, num_examples: int, *, shuffle: bool) -> None:
        self._examples = Examples(num_examples)
        self._shuffle = shuffle

    def __iter__(self) -> Iterator[dict[str, Any]]:
        info = get_worker_info()
        order = list(range(len(self._examples)))
        if self._shuffle:
            seed = int(torch.randint(2**40, ())) if info is None else info.seed - info.id
            order = torch.randperm(len(order), generator=torch.Generator().manual_seed(seed)).tolist()
        own = order if info is None else order[info.id :: info.num_workers]
        return map(self._examples.__getitem__, own)


class Batches:
    """A re-iterable of global batches, shuffled anew each time by torch's default generator."""

    def __init__(self, data: Data, build: Callable[[Tensor], Any]) -> None:
        self._data = data
        self._build = build

    def __iter__(self) -> Iterator[Any]:
        data = self._data
        order = torch.randperm(data.num_examples) if data.shuffle else torch.arange(data.num_examples)
        for numbers in order.split(data.batch_size) if data.num_examples else ():
            if len(numbers) == data.batch_size or not data.drop_remainder:
                yield self._build(numbers)


def _loader(data: Data) -> Any:
    """A shuffling loader of no examples can't be made in torch."""
    shuffle = data.shuffle and data.num_examples > 0
    return DataLoader(
        Examples(data.num_examples),
        data.batch_size,
        shuffle=shuffle,
        drop_last=data.drop_remainder,
        num_workers=data.num_workers,
    )


def _stream_loader(data: Data) -> Any:
    stream = Stream(data.num_examples, shuffle=data.shuffle)
    return DataLoader(stream, data.batch_size, drop_last=data.drop_remainder, num_workers=data.num_workers)


def _tensors(data: Data) -> dict[str, Tensor]:
    numbers = torch.arange(data.num_examples)
    return {"number": numbers, "features": features_of(numbers)}


def _pipeline(data: Data, seed: int | None) -> Any:
    dataset = ts.data.Dataset.from_tensor_slices(_tensors(data))
    if data.shuffle:
        dataset = dataset.shuffle(max(1, data.num_examples // 2), seed=seed)
    return dataset.batch(data.batch_size, drop_remainder=data.drop_remainder)


_MAKERS: dict[str, Callable[[Data], Any]] = {
    "loader": _loader,
    "stream loader": _stream_loader,
    "arrays": _tensors,
    "numpy": lambda data: tuple(np.asarray(values) for values in _tensors(data).values()),
    "examples": lambda data: Examples(data.num_examples),
    "stream": lambda data: Stream(data.num_examples, shuffle=False),
    "dicts": lambda data: Batches(data, lambda n: {"number": n, "features": features_of(n)}),
    "tuples": lambda data: Batches(data, lambda n: Pair(n, features_of(n).numpy())),
    "dataclasses": lambda data: Batches(data, lambda n: Example(n, {"features": [features_of(n)]})),
    "pipeline": lambda data: _pipeline(data, None),
    "seeded pipeline": lambda data: _pipeline(data, data.seed),
}


class Step(NamedTuple):
    """What one rank sees of one step: its replicas' numbers, and how many examples every replica has."""

    local: list[list[int]]
    shares: tuple[int, ...]


def read_step(element: Any) -> Step:
    numbers, features = numbers_of(element), features_in(element)
    columns = [list(leaf.values) if isinstance(leaf, ts.PerReplica) else [leaf] for leaf in (numbers, features)]
    for one, two in zip(*columns, strict=True):
        assert one.dtype is torch.int64
        assert torch.equal(two, features_of(one)), "an example came apart"
    assert get_shares(numbers) == get_shares(features)
    return Step([leaf.tolist() for leaf in columns[0]], get_shares(numbers).shares)


def read_epoch(dataset: Any, rank: int = 0) -> list[Step]:
    """Read one epoch while other ranks' models draw different random numbers."""
    steps = []
    for element in dataset:
        steps.append(read_step(element))
        torch.rand(rank)
    return steps


def distributor(placement: Any, workers: Any) -> Callable[..., Any]:
    """Return what stands for ``strategy.experimental_distribute_dataset`` on a rank that is a thread."""
    return lambda dataset, **arguments: distribute_dataset(dataset, placement, workers, **arguments)


def joined(ranks: list[list[Step]]) -> list[list[list[int]]]:
    """Put together what the ranks read in an epoch: for each step the numbers of each replica.

    The tags must be the same on every rank and say what the replicas got.
    """
    steps = []
    for parts in zip(*ranks, strict=True):
        replicas = [numbers for part in parts for numbers in part.local]
        assert {part.shares for part in parts} == {tuple(map(len, replicas))}
        steps.append(replicas)
    return steps


def chunks(batch: list[int], num_replicas: int) -> list[list[int]]:
    """Cut a batch by tf's rule."""
    size = math.ceil(len(batch) / num_replicas)
    return [batch[i * size : (i + 1) * size] for i in range(num_replicas)]
