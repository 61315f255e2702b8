"""Streams that each process cuts into minibatches of its own. What tf does is in tests/parity/test_cluster_data.py."""

import pytest
import torch
from torch.utils.data import DataLoader

from tests.data.fake_workers import one_process, run_ranks
from tests.data.test_policy import files
from torchstrategy.base.options import AutoShardPolicy
from torchstrategy.base.values import PerReplica, get_shares
from torchstrategy.data.distribute import distribute_dataset
from torchstrategy.data.split import minibatch_sizes
from torchstrategy.errors import InvalidArgumentError

FILE, OFF = AutoShardPolicy.FILE, AutoShardPolicy.OFF


def parts(element):
    return [part.tolist() for part in (element.values if isinstance(element, PerReplica) else [element])]


def read(data, size, policy, num_local=1):
    def read_rank(placement, workers):
        return [parts(e) for e in distribute_dataset(data(), placement, workers, auto_shard_policy=policy)]

    return run_ranks(size, read_rank, num_local)


@pytest.mark.parametrize("batch_size", range(1, 9))
@pytest.mark.parametrize("num_replicas", range(1, 6))
def test_minibatch_sizes_share_out_the_batch(batch_size, num_replicas):
    cycles = [minibatch_sizes(batch_size, num_replicas, first) for first in range(num_replicas)]
    assert all(sum(sizes) == batch_size and max(sizes) - min(sizes) <= 1 for sizes in cycles)
    # in each step the first replicas of all processes get a whole batch together
    assert [sum(column) for column in zip(*cycles, strict=True)] == [batch_size] * num_replicas


def test_processes_with_fewer_files_get_empty_batches_and_shares_are_right():
    def read_rank(placement, workers):
        loader = DataLoader(files("a0", "a1", "a2"), 2, collate_fn=torch.cat)
        dataset = distribute_dataset(loader, placement, workers)
        return [(e.tolist(), get_shares(e).shares) for e in dataset]

    assert run_ranks(2, read_rank) == [
        [([0], (1, 1)), ([1], (1, 1)), ([20], (1, 0)), ([21], (1, 0))],
        [([10], (1, 1)), ([11], (1, 1)), ([], (1, 0)), ([], (1, 0))],
    ]


def test_the_batch_size_is_the_declared_one_not_that_of_a_short_first_batch():
    loader = lambda: DataLoader(range(1), 4)  # noqa: E731
    assert read(loader, 3, OFF) == [[[[0]]]] * 3


def test_nobody_has_data():
    assert read(list, 2, OFF) == [[], []]


def test_components_of_different_lengths_cannot_be_cut():
    data = lambda: [(torch.ones(2), torch.ones(3))]  # noqa: E731
    with pytest.raises(InvalidArgumentError, match=r"\[2, 3\] examples.*same batch size.*arguments of their own"):
        read(data, 2, OFF)
    with pytest.raises(IndexError, match="no batch dimension"):
        read(lambda: [torch.tensor(1)], 2, OFF)


def test_strings_and_structures_are_cut():
    data = [{"x": torch.arange(3), "names": ["a", "b", "c"], "none": None}]
    dataset = distribute_dataset(data, one_process(2), None, auto_shard_policy=OFF)
    (element,) = list(dataset)
    assert parts(element["x"]) == [[0, 1], [2]]
    assert element["names"].values == (["a", "b"], ["c"])
    assert element["none"] is None


def test_an_infinite_stream_on_one_rank_only_does_not_end_and_does_not_hang():
    class Endless:
        def __iter__(self):
            while True:
                yield torch.ones(2)

    def read_rank(placement, workers):
        data = [torch.zeros(2)] if workers.rank else Endless()
        iterator = iter(distribute_dataset(data, placement, workers, auto_shard_policy=OFF))
        return [next(iterator).tolist() for _ in range(5)]

    assert run_ranks(2, read_rank) == [[[1]] * 5, [[0], [0], [], [], []]]


def test_a_state_that_only_one_rank_loads_is_an_error():
    state = run_ranks(2, lambda p, w: _after_one(p, w))[0]

    def go_on(placement, workers):
        dataset = distribute_dataset([torch.arange(4)] * 2, placement, workers, auto_shard_policy=OFF)
        if workers.rank == 0:
            dataset.load_state_dict(state)
        return next(iter(dataset))

    with pytest.raises(RuntimeError, match=r"different steps.*\[1, 0\].*same state on every rank"):
        run_ranks(2, go_on)


def _after_one(placement, workers):
    dataset = distribute_dataset([torch.arange(4)] * 2, placement, workers, auto_shard_policy=OFF)
    next(iter(dataset))
    return dataset.state_dict()
