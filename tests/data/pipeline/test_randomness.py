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


@pytest.mark.parametrize("length", [1, 2])
def test_inner_datasets_have_new_orders_in_each_repetition(length):
    dataset = Dataset.range(2).interleave(lambda n: Dataset.range(30).shuffle(30), length).repeat(2)
    numbers = plain(dataset)
    assert numbers[:60] != numbers[60:]
    assert sorted(numbers[:60]) == sorted(numbers[60:])


def test_resuming_in_a_later_repetition_of_inner_datasets():
    def make():
        return Dataset.range(2).flat_map(lambda n: Dataset.range(9).shuffle(9)).repeat(3)

    dataset = make()
    elements = iter(dataset)
    for _ in range(23):
        next(elements)
    resumed = make()
    resumed.load_state_dict(dataset.state_dict())
    assert plain(resumed) == plain(elements)


def test_a_cache_that_inner_datasets_share_is_resumed():
    def make():
        inner = Dataset.range(9).shuffle(9).cache()
        return Dataset.range(4).flat_map(lambda n: inner)

    dataset = make()
    first = plain(dataset)
    elements = iter(dataset)
    for _ in range(12):
        next(elements)
    resumed = make()
    resumed.load_state_dict(dataset.state_dict())
    rest = plain(elements)
    assert plain(resumed) == rest
    assert first[:9] == first[9:18] != rest[-9:]


def test_a_cache_that_is_read_twice_has_one_order():
    inner = Dataset.range(9).shuffle(9).cache()
    pairs = Dataset.zip(inner, inner)
    for dataset in (pairs, Dataset.range(2).flat_map(lambda n: pairs)):
        assert all(a == b for a, b in dataset)


def test_a_cache_after_repeat_keeps_each_repetition():
    numbers = plain(Dataset.range(2).map(lambda _: torch.rand(())).repeat(2).cache())
    assert len(set(numbers)) == 4


def test_parts_of_a_split_fit_together_wherever_they_are_used():
    hint = ts.data.SHARD_HINT

    def split():
        shuffled = Dataset.range(10).shuffle(10, reshuffle_each_iteration=False)
        return shuffled.take(3), shuffled.skip(3)

    cached = Dataset.range(10).shuffle(10).cache()
    for first, second in (split(), (cached.take(3), cached.skip(3))):
        parts = [part.shard(hint, hint).shard_by_hint(1, 0) for part in (first, second)]
        assert sorted(number for part in parts for number in plain(part)) == list(range(10))

    def both(_):
        first, second = split()
        return first.concatenate(second)

    assert sorted(plain(Dataset.range(2).flat_map(both))) == sorted([*range(10), *range(10)])


def test_a_dataset_that_is_used_twice_stays_one_when_hints_are_filled_in():
    for inner in (Dataset.range(9).shuffle(9).cache(), Dataset.range(9).shuffle(9, reshuffle_each_iteration=False)):
        pairs = Dataset.zip(inner, inner).shard(ts.data.SHARD_HINT, ts.data.SHARD_HINT).shard_by_hint(2, 1)
        assert all(a == b for a, b in pairs)
