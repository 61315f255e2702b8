from collections import OrderedDict, UserDict, namedtuple
from dataclasses import dataclass

import numpy as np
import pytest
import torch

from tests.data.fake_workers import one_process
from torchstrategy.base.values import BatchShares, PerReplica, get_shares
from torchstrategy.data.batch import (
    TensorSpec,
    batch_length,
    components,
    describe,
    empty_like,
    join_parts,
    split_batch,
)
from torchstrategy.data.prefetch import DeviceCopies
from torchstrategy.errors import InvalidArgumentError

Pair = namedtuple("Pair", "x y")


@dataclass
class Record:
    x: torch.Tensor
    y: torch.Tensor


def split(batch, num_replicas):
    placement = one_process(num_replicas)
    copies = DeviceCopies(placement, to_device=True)
    return copies.finish(copies.start(split_batch(components(batch), placement)))


def values(leaf):
    return [value.tolist() for value in leaf.values]


def test_nested_structures_are_kept():
    x = torch.arange(3)
    batch = {"a": (x, [x + 3]), "b": Pair(x, OrderedDict(c=x)), "d": Record(x, x + 6)}
    result = split(batch, 2)
    assert values(result["a"][0]) == [[0, 1], [2]]
    assert values(result["a"][1][0]) == [[3, 4], [5]]
    assert isinstance(result["b"], Pair)
    assert type(result["b"].y) is OrderedDict
    assert values(result["d"].y) == [[6, 7], [8]]


def test_mappings_become_dicts_and_numpy_arrays_tensors():
    result = split(UserDict(x=np.arange(3), y=UserDict(z=np.ones((3, 2)))), 2)
    assert type(result) is dict
    assert values(result["x"]) == [[0, 1], [2]]
    assert result["y"]["z"].values[1].shape == (1, 2)
    assert isinstance(split(np.arange(2), 1), torch.Tensor)


def test_shares_are_views_of_the_batch():
    x = torch.zeros(4, 2)
    for value in split(x, 3).values:
        assert value.untyped_storage().data_ptr() == x.untyped_storage().data_ptr()


def test_components_of_different_batch_sizes_are_refused():
    with pytest.raises(InvalidArgumentError, match=r"have \[4, None, 3\] examples.*arguments of their own"):
        split((torch.arange(4), None, torch.arange(3)), 2)
    assert split((torch.arange(4), torch.arange(3)), 1)[1].tolist() == [0, 1, 2]


def test_one_replica_gets_plain_tagged_tensors_and_the_users_tensor_stays_untagged():
    x = torch.arange(3)
    result = split(x, 1)
    assert torch.equal(result, x)
    assert get_shares(result) == BatchShares((3,))
    assert get_shares(result).total == 3
    assert get_shares(x) is None


def test_empty_shares_keep_dtype_and_other_dimensions():
    x = split(torch.zeros(1, 2, 3, dtype=torch.float16), 3)
    assert [(tuple(value.shape), value.dtype) for value in x.values[1:]] == [((0, 2, 3), torch.float16)] * 2
    assert split(torch.zeros(0, 2), 2).values[0].shape == (0, 2)


def test_lists_of_strings_are_one_component():
    names = split({"name": ["a", "b", "c"]}, 2)["name"]
    assert names.values == (["a", "b"], ["c"])
    assert type(names.values[0]) is list
    assert split((["a", "b"],), 1) == (["a", "b"],)
    assert split(np.array(["a", "b", "c"]), 3).values[2].tolist() == ["c"]


def test_none_goes_to_every_replica():
    x, none = split((torch.arange(2), None), 2)
    assert none is None
    assert isinstance(x, PerReplica)


@pytest.mark.parametrize("layout", [torch.jagged, torch.strided])
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_nested_tensors(layout):
    ragged = torch.nested.nested_tensor([torch.ones(2), torch.zeros(3), torch.ones(1)], layout=layout)
    parts = split(ragged, 2).values
    assert [[row.tolist() for row in part.unbind()] for part in parts] == [[[1, 1], [0, 0, 0]], [[1]]]
    assert [part.size(0) for part in split(ragged, 4).values] == [1, 1, 1, 0]
    assert describe(ragged) == TensorSpec((None, None), torch.float32)


def test_sparse_tensors():
    parts = split(torch.eye(3).to_sparse(), 2).values
    assert [part.to_dense().tolist() for part in parts] == [[[1, 0, 0], [0, 1, 0]], [[0, 0, 1]]]


@pytest.mark.parametrize("leaf", [torch.tensor(1.0), 3, "text", np.float32(1), {1}])
def test_a_component_without_batch_dimension_is_an_error_for_several_replicas(leaf):
    assert split((torch.arange(2), leaf), 1)[1] is leaf
    with pytest.raises(IndexError, match=r"Component 1 .* 2 replicas"):
        split((torch.arange(2), leaf), 2)


def test_a_dataset_of_datasets_is_an_error():
    with pytest.raises(ValueError, match="dataset of datasets"):
        split(torch.utils.data.TensorDataset(torch.arange(2)), 2)


def test_parts_of_different_structure_are_an_error():
    with pytest.raises(ValueError, match="same nested structure"):
        join_parts([components((torch.ones(1),)), components([torch.ones(1)])], [None])


def test_empty_like_and_lengths():
    batch = components({"x": torch.ones(2, 3), "s": ["a", "b"], "n": None})
    empty = empty_like(batch)
    assert [batch_length(leaf) for leaf in batch.leaves] == [2, 2, None]
    assert [batch_length(leaf) for leaf in empty.leaves] == [0, 0, None]
    assert empty.leaves[0].shape == (0, 3)


def test_specs():
    specs = [describe(leaf) for leaf in components((torch.ones(2, 3), torch.tensor(1), ["a"], 3, None)).leaves]
    assert specs == [
        TensorSpec((None, 3), torch.float32),
        TensorSpec((), torch.int64),
        TensorSpec((None,), str),
        TensorSpec((), int),
        None,
    ]
