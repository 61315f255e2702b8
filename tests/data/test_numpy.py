import copy
from collections import namedtuple

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from tests.data.fake_workers import one_process
from torchstrategy.data.distribute import distribute_dataset
from torchstrategy.data.numpy import make_numpy_dataset

Pair = namedtuple("Pair", "x y")


def test_items_are_views_in_the_structure_of_the_arrays():
    x, y = np.arange(6.0).reshape(3, 2), torch.arange(3)
    dataset = make_numpy_dataset({"x": x, "pair": Pair(y, (x,))})
    assert len(dataset) == 3
    item = dataset[1]
    assert np.shares_memory(item["x"], x)
    assert item["pair"].y[0].tolist() == [2.0, 3.0]
    assert item["pair"].x == 1
    with pytest.raises(IndexError):
        dataset[3]


def test_it_feeds_a_data_loader_and_a_strategy_alike():
    dataset = make_numpy_dataset((np.arange(10.0).reshape(5, 2), np.arange(5)))
    by_loader = distribute_dataset(DataLoader(dataset, batch_size=3), one_process(2), None)
    by_size = distribute_dataset(dataset, one_process(2), None, batch_size=3)
    assert len(by_loader) == len(by_size) == 2
    for (x1, y1), (x2, y2) in zip(by_loader, by_size, strict=True):
        for one, two in ((x1, x2), (y1, y2)):
            assert all(torch.equal(a, b) for a, b in zip(one.values, two.values, strict=True))


def test_batches_of_arrays_are_views():
    x = np.zeros((4, 2))
    (batch,) = distribute_dataset(x, one_process(2), None, batch_size=4)
    x[3] = 7
    assert batch.values[1].tolist() == [[0, 0], [7, 7]]


def test_read_only_arrays_are_not_copied_and_do_not_warn(tmp_path):
    np.save(tmp_path / "x.npy", np.arange(4))
    x = np.load(tmp_path / "x.npy", mmap_mode="r")
    assert [batch.tolist() for batch in distribute_dataset(x, one_process(1), None, batch_size=3)] == [[0, 1, 2], [3]]


def test_lists_are_stacked():
    assert make_numpy_dataset([np.ones(2), np.zeros(2)])[1].tolist() == [0, 0]
    assert len(make_numpy_dataset(([1, 2, 3], np.ones(3)))) == 3


@pytest.mark.parametrize(
    ("arrays", "error", "message"),
    [
        ((np.ones(3), np.ones(4)), ValueError, r"same length.*\[3, 4\]"),
        (np.array(1.0), ValueError, "scalar"),
        ({}, ValueError, "no arrays"),
        ({"x": "text"}, TypeError, "str"),
    ],
)
def test_wrong_arrays(arrays, error, message):
    with pytest.raises(error, match=message):
        make_numpy_dataset(arrays)


def test_methods_of_tf_are_another_datasets():
    dataset = make_numpy_dataset(np.arange(4))
    with pytest.raises(AttributeError, match=r"no attribute 'batch'. .* ts.data.Dataset.from_tensor_slices"):
        dataset.batch(2)
    assert len(copy.copy(dataset)) == 4
