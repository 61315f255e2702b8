"""Where orders come from: torch's stream or a seed, and nothing else."""

import random

import numpy as np
import pytest
import torch

import torchstrategy as ts

Dataset = ts.data.Dataset


def plain(dataset):
    return [element.tolist() for element in dataset]


SOURCES = [Dataset.range(50), Dataset.from_generator(lambda: range(50))]
sources = pytest.mark.parametrize("source", SOURCES, ids=["positions", "elements"])


@sources
def test_torchs_seed_decides_an_order_without_seed(source):
    dataset = source.shuffle(50).repeat(2)
    orders = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        orders.append(plain(dataset))
    assert orders[0] == orders[1] != orders[2]
    assert orders[0][:50] != orders[0][50:]
    assert plain(dataset) != orders[2]


@sources
@pytest.mark.parametrize("buffer_size", [10, 50, 100])
def test_a_seed_decides_the_order(source, buffer_size):
    def make():
        return source.shuffle(buffer_size, seed=4)

    torch.manual_seed(0)
    first, second = make(), make()
    orders = [plain(first), plain(first)]
    torch.manual_seed(1)
    assert [plain(second), plain(second)] == orders
    assert orders[0] != orders[1]
    assert plain(source.shuffle(buffer_size, seed=5)) != orders[0]
    assert plain(make().repeat(2))[:50] == orders[0]


def test_positions_and_elements_are_shuffled_alike():
    for size in (3, 50):
        assert plain(SOURCES[0].shuffle(size, seed=1)) == plain(SOURCES[1].shuffle(size, seed=1))


@sources
def test_the_order_may_be_kept(source):
    for seed in (None, 3):
        dataset = source.shuffle(50, seed, reshuffle_each_iteration=False).repeat(2)
        order = plain(dataset)
        assert order[:50] == order[50:]
        assert plain(dataset) == order
    # the usual way to split data
    shuffled = source.shuffle(50, reshuffle_each_iteration=False)
    assert sorted(plain(shuffled.take(10)) + plain(shuffled.skip(10))) == list(range(50))


def test_datasets_derived_in_each_epoch_have_different_orders():
    shuffled = Dataset.range(50).shuffle(50, seed=1)
    assert plain(shuffled.batch(50)) != plain(shuffled.batch(50))


def test_only_the_first_next_draws_and_only_from_torch():
    states = (random.getstate(), np.random.get_state()[1].tolist())
    for dataset, is_random in [
        (Dataset.range(9).shuffle(3), True),
        (Dataset.range(9).shuffle(3, seed=1), False),
        (Dataset.range(9).batch(2).interleave(lambda x: Dataset.from_tensors(x)), False),
    ]:
        before = torch.get_rng_state()
        elements = iter(dataset)
        assert torch.equal(torch.get_rng_state(), before)
        next(elements)
        after = torch.get_rng_state()
        assert torch.equal(before, after) != is_random
        for _ in elements:
            pass
        assert torch.equal(torch.get_rng_state(), after)
    assert (random.getstate(), np.random.get_state()[1].tolist()) == states


def test_datasets_inside_datasets_are_shuffled_differently():
    dataset = Dataset.range(6).flat_map(lambda _: Dataset.range(20).shuffle(20)).batch(20)
    torch.manual_seed(0)
    orders = plain(dataset)
    assert len({tuple(order) for order in orders}) == 6
    assert plain(dataset) != orders
    torch.manual_seed(0)
    again = Dataset.range(6).flat_map(lambda _: Dataset.range(20).shuffle(20)).batch(20)
    assert plain(again) == orders


def test_prefetching_changes_no_order():
    torch.manual_seed(0)
    expected = plain(Dataset.range(30).shuffle(30).repeat(2).batch(4))
    torch.manual_seed(0)
    assert plain(Dataset.range(30).shuffle(30).repeat(2).prefetch(3).batch(4).prefetch(2)) == expected


def test_every_order_is_about_equally_likely():
    for source in (Dataset.range(3), Dataset.from_generator(lambda: range(3))):
        dataset = source.shuffle(3, seed=0).repeat(600).batch(3)
        orders = [tuple(order) for order in plain(dataset)]
        counts = [orders.count(order) for order in set(orders)]
        assert len(counts) == 6
        assert all(60 < count < 140 for count in counts)
