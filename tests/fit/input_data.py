"""Data of every kind that ``fit`` accepts, and what a rank reads of it."""

from itertools import chain
from types import SimpleNamespace

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

import torchstrategy as ts
from tests.data.fake_workers import run_ranks
from torchstrategy.base.values import get_shares
from torchstrategy.fit.batch_parts import unpack_x_y_sample_weight
from torchstrategy.fit.inputs import make_batches


class Frame:
    """Like a data frame of pandas: no numpy array, but numpy can read it."""

    def __init__(self, array):
        self.array = array

    def __array__(self, dtype=None, copy=None):
        return self.array


class Examples(Dataset):
    """A map-style dataset of (number, label)."""

    def __init__(self, num_examples):
        self._num_examples = num_examples

    def __len__(self):
        return self._num_examples

    def __getitem__(self, index):
        return torch.tensor(index), torch.tensor(-index)


class Stream(IterableDataset):
    """The same examples, one after the other."""

    def __init__(self, num_examples):
        self._num_examples = num_examples

    def __iter__(self):
        return map(Examples(self._num_examples).__getitem__, range(self._num_examples))


class Batches:
    """An iterable of batches."""

    def __init__(self, num_examples, batch_size):
        self._numbers = torch.arange(num_examples).split(batch_size)

    def __iter__(self):
        return ((numbers, -numbers) for numbers in self._numbers)


def _pipeline(num_examples):
    numbers = torch.arange(num_examples)
    return ts.data.Dataset.from_tensor_slices((numbers, -numbers))


def _creator(num_examples, batch_size):
    def dataset_fn(context):
        own = _pipeline(num_examples).shard(context.num_input_pipelines, context.input_pipeline_id)
        return own.batch(max(1, batch_size // context.num_replicas_in_sync))

    return ts.utils.DatasetCreator(dataset_fn)


def _arrays(num_examples):
    numbers = np.arange(num_examples)
    return {"x": numbers, "y": -numbers}


# name -> function of (examples, batch size) that returns arguments of make_batches; the numbers are x, -x is y
SOURCES = {
    "numpy": lambda n, b: {**_arrays(n), "batch_size": b},
    "tensors": lambda n, b: {"x": torch.arange(n), "y": -torch.arange(n), "batch_size": b},
    "frames": lambda n, b: {"x": Frame(np.arange(n)), "y": Frame(-np.arange(n)), "batch_size": b},
    "shuffled arrays": lambda n, b: {**_arrays(n), "batch_size": b, "shuffle": True},
    "several inputs": lambda n, b: {"x": [np.arange(n)] * 2, "y": -np.arange(n), "batch_size": b},
    "TensorDataset": lambda n, b: {"x": TensorDataset(torch.arange(n), -torch.arange(n)), "batch_size": b},
    "examples": lambda n, b: {"x": Examples(n), "batch_size": b},
    "shuffled examples": lambda n, b: {"x": Examples(n), "batch_size": b, "shuffle": True},
    "list of examples": lambda n, b: {"x": [(i, -i) for i in range(n)], "batch_size": b},
    "stream": lambda n, b: {"x": Stream(n), "batch_size": b},
    "loader": lambda n, b: {"x": DataLoader(Examples(n), b)},
    "shuffled loader": lambda n, b: {"x": DataLoader(Examples(n), b, shuffle=True)},
    "loader of a stream": lambda n, b: {"x": DataLoader(Stream(n), b)},
    "pipeline": lambda n, b: {"x": _pipeline(n).shuffle(n).batch(b)},
    "pipeline without batches": lambda n, b: {"x": _pipeline(n), "batch_size": b},
    "batches": lambda n, b: {"x": Batches(n, b)},
    "list of batches": lambda n, b: {"x": list(Batches(n, b))},
    "generator": lambda n, b: {"x": iter(Batches(n, b))},
    "creator": lambda n, b: {"x": _creator(n, b)},
}
SHUFFLED = ("shuffled arrays", "shuffled examples", "shuffled loader", "pipeline")


def stand_in(placement, workers=None):
    """Return what ``make_batches`` needs of a strategy, for a rank that is a thread."""
    return SimpleNamespace(placement=placement, workers=workers)


def on_ranks(layout, fn, seed=0):
    """Call ``fn(strategy)`` on each rank of a layout (processes, replicas of each) and return the results."""
    num_processes, num_local = layout

    def call(placement, workers):
        return fn(stand_in(placement, workers if num_processes > 1 else None))

    return run_ranks(num_processes, call, num_local, seed)


def local_values(leaf):
    return list(leaf.values) if isinstance(leaf, ts.PerReplica) else [leaf]


def read_step(element):
    """Return the numbers of each replica of this process, after a look at the labels and the tags."""
    x, y, _ = unpack_x_y_sample_weight(element)
    x = x[0] if isinstance(x, (list, tuple)) else x
    assert get_shares(x) == get_shares(y) is not None
    for numbers, labels in zip(local_values(x), local_values(y), strict=True):
        assert torch.equal(labels, -numbers), "an example came apart"
    return [numbers.tolist() for numbers in local_values(x)]


def read(dataset, num_steps=None):
    """Read steps, or an epoch; the model draws random numbers."""
    iterator, steps = iter(dataset), []
    while num_steps is None or len(steps) < num_steps:
        element = next(iterator, None)
        if element is None:
            break
        steps.append(read_step(element))
        torch.rand(2)
    return steps


def joined(ranks):
    """Put together what the ranks read: for each step the numbers of each replica."""
    assert len(set(map(len, ranks))) == 1, "the ranks have different numbers of steps"
    return [list(chain(*parts)) for parts in zip(*ranks, strict=True)]


def read_epochs(layout, make, num_epochs=1, seed=0):
    """Return, for each epoch and step, the numbers of each replica of all processes.

    Args:
        layout: processes, and replicas of each.
        make: returns the arguments of ``make_batches``, on each rank.
        num_epochs: how many are read.
        seed: of the first rank's random stream.
    """

    def fn(strategy):
        batches = make_batches(strategy, **make())
        return [read(batches.dataset) for _ in range(num_epochs)]

    ranks = on_ranks(layout, fn, seed)
    return [joined([rank[epoch] for rank in ranks]) for epoch in range(num_epochs)]
