"""What is read is not kept: arrays larger than memory, and memory that does not grow over an epoch."""

import gc
import itertools
import os
import tracemalloc

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset

import torchstrategy as ts
from tests.data.fake_workers import one_process, run_ranks
from torchstrategy.data.distribute import distribute_dataset, distribute_from_function
from torchstrategy.data.numpy import ArrayBatches, make_numpy_dataset

WIDTH = 1 << 18


@pytest.fixture
def huge(tmp_path):
    """A file without content, twice as long as this machine's memory, of which only both ends say something."""
    num_bytes = max(40 << 30, 2 * os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    num_examples = num_bytes // (4 * WIDTH)
    path = tmp_path / "examples"
    path.touch()
    os.truncate(path, num_examples * 4 * WIDTH)
    array = np.memmap(path, np.float32, "r+", shape=(num_examples, WIDTH))
    array[0, 0], array[1, 0], array[-2, 0], array[-1, 0] = 1, 2, 3, 4
    array.flush()
    if path.stat().st_blocks * 512 > 1 << 30:
        pytest.skip("this file system has no sparse files")
    yield np.memmap(path, np.float32, "r", shape=array.shape)
    path.unlink()


@pytest.mark.slow
@pytest.mark.parametrize("num_replicas", [1, 2])
def test_arrays_larger_than_memory(huge, num_replicas):
    dataset = distribute_dataset(huge, one_process(num_replicas), None, batch_size=4)
    first = last = None
    for last in dataset:
        first = last if first is None else first
    firsts, lasts = [[element] if num_replicas == 1 else element.values for element in (first, last)]
    assert torch.cat([part[:, 0] for part in firsts]).tolist() == [1, 2, 0, 0]
    assert torch.cat([part[:, 0] for part in lasts])[-2:].tolist() == [3, 4]
    assert dataset.element_spec is not None


@pytest.mark.filterwarnings("ignore:The given NumPy array is not writable")  # of torch's own collate function
def test_both_ends_of_an_array_larger_than_memory_through_a_loader_of_each_process(huge):
    ends = [0, 1, len(huge) - 2, len(huge) - 1]
    loader = DataLoader(make_numpy_dataset({"x": huge}), 4, sampler=ends)

    def read(placement, workers):
        [element] = distribute_dataset(loader, placement, workers)
        return element["x"][:, 0].tolist()

    assert run_ranks(2, read) == [[1, 2], [3, 4]]


NUM_READ = 1500
WARM_UP = 200
NUM_EXAMPLES = 2 * (NUM_READ + WARM_UP)
# Python's free lists move by some 10 kB; the smallest object takes 28 bytes and a pointer to it.
ALLOWED = 24 * NUM_READ


class Stream(IterableDataset):
    def __iter__(self):
        return (torch.full((8,), float(i)) for i in range(NUM_EXAMPLES))


class Batches:
    def __iter__(self):
        return (torch.full((2, 8), float(i)) for i in range(NUM_READ + WARM_UP))


class Examples(torch.utils.data.Dataset):
    def __len__(self):
        return NUM_EXAMPLES

    def __getitem__(self, index):
        return {"x": torch.full((8,), float(index)), "name": f"number {index}"}


DATA = {
    "loader": lambda: DataLoader(Examples(), 2, shuffle=True),
    "stream": lambda: DataLoader(Stream(), 2),
    "batches": Batches,
    "arrays": lambda: ArrayBatches(make_numpy_dataset(np.arange(NUM_EXAMPLES)), 2),
    "pipeline": lambda: ts.data.Dataset.from_tensor_slices(torch.arange(NUM_EXAMPLES)).shuffle(100).batch(2),
    "generator": lambda: ts.data.Dataset.from_generator(Stream().__iter__).batch(2).prefetch(2),
}


def kept(dataset):
    """Return how much more memory Python's objects take later in an epoch, and how many tensors there are more."""
    iterator = iter(dataset)
    tracemalloc.start()
    try:
        before = _read(iterator, WARM_UP)
        after = _read(iterator, NUM_READ)
    finally:
        tracemalloc.stop()
    return [after[i] - before[i] for i in range(2)]


def _read(iterator, number):
    assert sum(1 for _ in itertools.islice(iterator, number)) == number
    gc.collect()
    return tracemalloc.get_traced_memory()[0], sum(type(thing) is torch.Tensor for thing in gc.get_objects())


def check_nothing_is_kept(num_bytes, num_tensors):
    assert num_bytes < ALLOWED
    assert num_tensors < 4


@pytest.mark.slow
@pytest.mark.parametrize("kind", DATA)
@pytest.mark.parametrize("num_replicas", [1, 2])
def test_nothing_is_kept_of_the_elements_that_were_read(kind, num_replicas):
    check_nothing_is_kept(*kept(distribute_dataset(DATA[kind](), one_process(num_replicas), None)))


@pytest.mark.slow
def test_nothing_is_kept_of_the_elements_of_a_dataset_function():
    check_nothing_is_kept(*kept(distribute_from_function(lambda context: DATA["loader"](), one_process(1), None)))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["loader", "stream", "pipeline"])
def test_each_process_keeps_nothing_of_the_elements_that_were_read(kind, process_pool):
    for growth in process_pool(2).run(keep_on_rank, kind):
        check_nothing_is_kept(*growth)


def keep_on_rank(kind):
    strategy = ts.MirroredStrategy(["cpu:0"])
    return kept(strategy.experimental_distribute_dataset(DATA[kind]()))
