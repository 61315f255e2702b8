"""Datasets distributed over processes."""

import os

import pytest
import torch

import torchstrategy as ts

Dataset = ts.data.Dataset


def numbers_of(name):
    return range(10 * int(name), 10 * int(name) + 10)


def add_noise(x):
    return x, torch.rand(())


def make(kind):
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


@pytest.mark.parametrize("kind", ["positions", "elements", "files", "hint"])
def test_every_example_once_on_two_processes(process_pool, kind):
    ranks = process_pool(2).run(read_stop_and_resume, kind, 3)
    for epoch in range(2):
        numbers = [number for rank in ranks for step in rank[epoch] for number in step]
        assert sorted(numbers) == list(range(40))
        assert len({len(rank[epoch]) for rank in ranks}) == 1
    assert all(rank[2] for rank in ranks)
