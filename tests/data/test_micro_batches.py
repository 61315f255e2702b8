"""Parts of batches: sizes, tags, and all that a batch may hold."""

from collections import namedtuple

import pytest
import torch

import torchstrategy as ts
from torchstrategy.base.values import get_shares, mark_windows, select_replica
from torchstrategy.data.micro_batches import micro_batches

Pair = namedtuple("Pair", ["x", "rest"])


def element(strategy, batch):
    return next(iter(strategy.experimental_distribute_dataset([batch])))


@pytest.mark.parametrize("num_replicas", [1, 2, 3])
@pytest.mark.parametrize("room", [1, 2, 3, 7])
def test_every_example_once_and_as_many_parts_on_each_replica(num_replicas, room):
    strategy = ts.MirroredStrategy([f"cpu:{i}" for i in range(num_replicas)])
    x = torch.arange(7)
    batch = element(strategy, Pair(x, {"name": list("abcdefg"), "none": None, "sparse": torch.eye(7).to_sparse()}))
    parts = micro_batches(batch, num_replicas, room)
    mark_windows([parts])
    shares = get_shares(batch.x).shares
    assert len(parts) == -(-max(shares) // room)
    for replica in range(num_replicas):
        whole = select_replica(replica, batch)
        own = [select_replica(replica, part) for part in parts]
        assert torch.cat([part.x for part in own]).equal(whole.x)
        assert [name for part in own for name in part.rest["name"]] == list(whole.rest["name"])
        assert torch.cat([part.rest["sparse"].to_dense() for part in own]).equal(whole.rest["sparse"].to_dense())
        assert all(part.rest["none"] is None for part in own)
        for part in own:
            tag = get_shares(part.x)
            assert tag.shares[replica] == len(part.x) <= room
            assert tag.divisor == 7
            assert tag.num_parts == len(parts)
    assert get_shares(batch.x).window is None  # the batch is as it was


def test_a_replica_without_examples_gets_empty_parts():
    strategy = ts.MirroredStrategy(["cpu:0", "cpu:1", "cpu:2"])
    parts = micro_batches(element(strategy, torch.arange(4.0)), 3, 1)
    assert [[len(own) for own in part.values] for part in parts] == [[1, 1, 0], [1, 1, 0]]


def test_components_that_do_not_fit_together():
    with pytest.raises(ts.errors.InvalidArgumentError, match=r"\[4, 3\] examples"):
        micro_batches((torch.ones(4), torch.ones(3)), 1, 2)
    strategy = ts.MirroredStrategy(["cpu:0", "cpu:1"])
    one, other = element(strategy, torch.ones(4)), element(strategy, torch.ones(3))
    with pytest.raises(ts.errors.InvalidArgumentError, match="in different ways"):
        micro_batches((one, other), 2, 1)
    assert [part[1] for part in micro_batches((torch.ones(4), 7), 1, 2)] == [7, 7]
    with pytest.raises(ValueError, match="no examples to count"):
        micro_batches({"scalar": torch.tensor(1.0)}, 1, 2)
