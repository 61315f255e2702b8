"""Datasets distributed over processes."""

import itertools
import os

import pytest
import torch

import torchstrategy as ts

Dataset = ts.data.Dataset


def numbers_of(name):
    return range(10 * int(name), 10 * int(name) + 10)


def add_noise(x):
    return x, torch.rand(())


def is_below_40(x):
    return x < 40


def as_it_was(count, x):
    return count + 1, x


def itself(window):
    return window


def remainder(number):
    return number % 4


def remainder_of_first(number, noise):
    return number % 3


def looks_back():
    windows = Dataset.range(25).window(4).flat_map(itself)
    parts = [windows, Dataset.range(25, 50).group_by_window(remainder, lambda key, window: window, 3)]
    mixed = Dataset.sample_from_datasets(parts, [1, 2], seed=4)
    return mixed.shuffle(50, seed=2).repeat(2).filter(is_below_40).unique().scan(0, as_it_was)


def make(kind):
    if kind == "looks back":
        return looks_back().take_while(is_below_40).map(add_noise).batch(6)
    if kind == "buckets":
        noisy = Dataset.range(40).map(add_noise)
        buckets = noisy.bucket_by_sequence_length(remainder_of_first, [1, 2], [4, 5, 6], no_padding=True)
        return buckets.rebatch([6, 3]).ignore_errors()
    if kind == "positions":
        return Dataset.range(40).shuffle(40).map(add_noise).batch(6).prefetch(2)
    if kind == "elements":
        return Dataset.from_generator(lambda: range(40)).shuffle(12).map(add_noise).batch(6)
    if kind == "hint":
        hinted = Dataset.range(40).shard(ts.data.SHARD_HINT, ts.data.SHARD_HINT)
        return hinted.map(add_noise).batch(6)
    return Dataset.from_files(["0", "1", "2", "3"], numbers_of).shuffle(12).map(add_noise).batch(6)


POLICIES = {"hint": ts.data.AutoShardPolicy.HINT}


def read_stop_and_resume(kind, num_steps):
    """Return this rank's numbers of one epoch, and of another that is stopped and resumed."""
    torch.manual_seed(int(os.environ["RANK"]))
    strategy = ts.MirroredStrategy()

    def distribute():
        return strategy.experimental_distribute_dataset(make(kind), auto_shard_policy=POLICIES.get(kind))

    whole = [x.tolist() for x, _ in distribute()]
    first = distribute()
    elements = iter(first)
    part = [next(elements)[0].tolist() for _ in range(num_steps)]
    state = first.state_dict()
    torch.rand(5)
    second = distribute()
    second.load_state_dict(state)
    return (
        whole,
        part + [x.tolist() for x, _ in second],
        [x.tolist() for x, _ in elements] == [x.tolist() for x, _ in read_again(distribute(), state)],
    )


def read_again(distributed, state):
    distributed.load_state_dict(state)
    return list(distributed)


@pytest.mark.parametrize("kind", ["positions", "elements", "files", "hint", "looks back", "buckets"])
def test_every_example_once_on_two_processes(process_pool, kind):
    ranks = process_pool(2).run(read_stop_and_resume, kind, 3)
    for epoch in range(2):
        numbers = [number for rank in ranks for step in rank[epoch] for number in step]
        assert sorted(numbers) == list(range(40))
        assert len({len(rank[epoch]) for rank in ranks}) == 1
    assert all(rank[2] for rank in ranks)


def test_what_looks_back_has_the_same_global_batches_on_two_replicas_and_after_each_step():
    def distribute(num_replicas):
        strategy = ts.MirroredStrategy([f"cpu:{i}" for i in range(num_replicas)])
        return strategy.experimental_distribute_dataset(looks_back().batch(6)), strategy

    def read(distributed, strategy, count=None):
        parts = map(strategy.experimental_local_results, itertools.islice(distributed, count))
        return [[x for part in local for x in part.tolist()] for local in parts]

    expected = [x.tolist() for x in looks_back().batch(6)]
    for num_replicas in (1, 2):
        for step in range(len(expected) + 1):
            first, strategy = distribute(num_replicas)
            elements = iter(first)
            seen = read(elements, strategy, step)
            second, strategy = distribute(3 - num_replicas)
            second.load_state_dict(first.state_dict())
            assert seen + read(second, strategy) == expected
