import copy
import pickle

import pytest
import torch

import torchstrategy as ts
from torchstrategy.base.values import BatchShares, get_shares, local_results, regroup, select_replica, set_shares


def test_regroup_keeps_what_is_the_same_object():
    shared = torch.ones(1)
    result = regroup(
        [{"same": shared, "own": torch.zeros(1), "n": None}, {"same": shared, "own": torch.ones(1), "n": None}]
    )
    assert result["same"] is shared
    assert result["n"] is None
    assert [float(value) for value in result["own"].values] == [0.0, 1.0]
    with pytest.raises(ValueError, match="same nested structure"):
        regroup([(1,), (1, 2)])


def test_select_replica_reaches_every_leaf():
    value = ts.PerReplica((1, 2))
    assert select_replica(1, {"a": value, "b": (value, 5)}) == {"a": 2, "b": (2, 5)}
    with pytest.raises(IndexError, match="holds 2 values"):
        select_replica(2, value)


def test_local_results():
    value = ts.PerReplica((1, 2))
    assert local_results(value, 2) == (1, 2)
    assert local_results(3, 2) == (3,)
    assert local_results([value, 7], 2) == ([1, 7], [2, 7])


def test_a_per_replica_can_not_be_used_as_a_tensor():
    value = ts.PerReplica((torch.ones(1), torch.ones(1)))
    assert value == value
    assert value != ts.PerReplica(value.values)
    for use in (bool, lambda v: v.shape, lambda v: v.numpy()):
        with pytest.raises((TypeError, AttributeError), match=r"strategy.run"):
            use(value)
    for use in (len, iter, lambda v: v + 1, lambda v: v[0]):
        with pytest.raises(TypeError):
            use(value)
    with pytest.raises(ValueError, match="experimental_local_results"):
        torch.add(value, 1)


def test_copies_and_pickles():
    value = ts.PerReplica((1, 2), BatchShares((3, 4)))
    for other in (copy.copy(value), copy.deepcopy(value), pickle.loads(pickle.dumps(value))):
        assert other.values == (1, 2)
        assert other.shares == BatchShares((3, 4))
    assert isinstance(pickle.loads(pickle.dumps(ts.Mirrored((1,)))), ts.Mirrored)


def test_shares():
    shares = BatchShares((2, 2, 1))
    assert shares.total == 5
    tensor = set_shares(torch.ones(2), shares)
    assert get_shares(tensor) is shares
    assert get_shares(tensor + 1) is None
    grouped = set_shares(ts.PerReplica((torch.ones(2), torch.ones(1))), shares)
    assert get_shares(grouped) is get_shares(grouped.values[1]) is shares
    assert get_shares("x") is None


@pytest.mark.parametrize(
    "use",
    [
        float,
        int,
        lambda value: f"{value:.3f}",
        lambda value: value + 1.0,
        lambda value: 1.0 + value,
        lambda value: sum([value]),
        lambda value: value / 2,
        lambda value: 2 - value,
        lambda value: 3 * value,
    ],
)
def test_using_a_per_replica_as_a_number_says_what_to_write(use):
    value = ts.PerReplica((torch.tensor(1.0), torch.tensor(2.0)))
    with pytest.raises(TypeError, match="reduce"):
        use(value)


def test_printing_a_per_replica_shows_each_value():
    value = ts.PerReplica((torch.tensor(1.0), torch.tensor(2.0)))
    assert f"{value}" == str(value) == "PerReplica:{\n  0: tensor(1.),\n  1: tensor(2.)\n}"


@pytest.mark.parametrize("use", [len, lambda v: v > 1, lambda v: v[0], float])
def test_a_per_replica_says_what_to_write(use):
    with pytest.raises(TypeError, match=r"strategy\.reduce"):
        use(ts.PerReplica((1.0, 2.0)))
