"""Datasets in a ``DataLoader``: every element comes once over all worker processes."""

from types import SimpleNamespace

import pytest
import torch
from torch.utils.data import DataLoader

import torchstrategy as ts
from torchstrategy.data.pipeline import iteration

Dataset = ts.data.Dataset


def numbers_of(name):
    return range(10 * int(name), 10 * int(name) + 10)


def plus_zero(x):
    return x + 0


def as_it_was(count, x):
    return count + 1, x


def itself(window):
    return window


DATASETS = {
    "earlier elements": (
        Dataset.range(23).repeat(2).unique().scan(0, as_it_was).take_while(torch.is_tensor),
        range(23),
    ),
    "counter": (Dataset.counter().take(23), range(23)),
    "windows": (Dataset.range(23).window(5).flat_map(itself), range(23)),
    "groups": (Dataset.range(23).group_by_window(lambda x: x % 2, lambda key, group: group, 4), range(23)),
    "several": (Dataset.sample_from_datasets([Dataset.range(9), Dataset.range(9, 23)], seed=2), range(23)),
    "positions": (Dataset.range(23).shuffle(5).map(plus_zero), range(23)),
    "generator": (Dataset.from_generator(numbers_of, args=("0",)).shuffle(5, seed=1), range(10)),
    "many files": (Dataset.from_files(["0", "1", "2"], numbers_of).shuffle(7), range(30)),
    "one file": (Dataset.from_files(["0"], numbers_of).shuffle(7), range(10)),
    "part of files": (Dataset.from_files(["0", "1", "2"], numbers_of).take(15), range(15)),
}


@pytest.mark.parametrize("name", DATASETS)
@pytest.mark.parametrize("batch_size", [None, 4])
def test_every_element_comes_once(name, batch_size):
    dataset, expected = DATASETS[name]
    for num_workers in (0, 2):
        loader = DataLoader(dataset, batch_size=batch_size, num_workers=num_workers)
        for _ in range(2 if num_workers == 0 else 1):
            numbers = torch.cat([batch.reshape(-1) for batch in loader]).tolist()
            assert sorted(numbers) == list(expected)


def test_batches_of_the_dataset_are_shared_out():
    loader = DataLoader(Dataset.range(10).batch(3), batch_size=None, num_workers=2)
    assert [batch.tolist() for batch in loader] == [[0, 1, 2], [3, 4, 5], [6, 7, 8], [9]]
    assert len(loader) == 4


@pytest.mark.slow
@pytest.mark.parametrize("persistent_workers", [False, True])
def test_epochs_differ_and_torchs_seed_decides(persistent_workers):
    for seed in (None, 1):
        dataset = Dataset.range(40).shuffle(40, seed)
        runs = []
        for _ in range(2):
            torch.manual_seed(3)
            loader = DataLoader(dataset, batch_size=8, num_workers=2, persistent_workers=persistent_workers)
            runs.append([torch.cat(list(loader)).tolist() for _ in range(2)])
            del loader
        assert runs[0] == runs[1]
        assert runs[0][0] != runs[0][1]


def test_a_single_worker_has_new_orders_too():
    loader = DataLoader(Dataset.range(40).shuffle(40, seed=1), batch_size=40, num_workers=1)
    first, second = (next(iter(loader)).tolist() for _ in range(2))
    assert first != second
    assert sorted(first) == sorted(second) == list(range(40))


@pytest.fixture
def as_worker(monkeypatch):
    """Make this process look like a loader's worker: torch's workers end slowly after an error."""
    return lambda: monkeypatch.setattr(
        iteration, "get_worker_info", lambda: SimpleNamespace(id=1, num_workers=2, seed=8)
    )


def test_one_order_for_ever_needs_a_seed(as_worker):
    kept, drawn = (Dataset.range(10).shuffle(10, reshuffle_each_iteration=False) for _ in range(2))
    order = [int(x) for x in drawn]
    as_worker()
    with pytest.raises(ValueError, match="needs a seed in the worker processes"):
        list(kept)
    assert [int(x) for x in drawn] == order[1::2]


def test_a_state_of_the_whole_dataset_is_refused(as_worker):
    dataset = Dataset.range(10)
    elements = iter(dataset)
    next(elements)
    dataset.load_state_dict(dataset.state_dict())
    as_worker()
    with pytest.raises(ts.errors.InvalidArgumentError, match="same number of workers"):
        list(dataset)
