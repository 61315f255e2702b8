import dataclasses

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

from tests.data.fake_workers import one_process, run_ranks
from torchstrategy.base.options import InputOptions, InputReplicationMode
from torchstrategy.base.values import PerReplica, get_shares
from torchstrategy.data.batch import TensorSpec
from torchstrategy.data.distribute import distribute_from_function
from torchstrategy.data.own_streams import InputContext
from torchstrategy.errors import DisagreementError

PER_REPLICA = InputOptions(experimental_replication_mode=InputReplicationMode.PER_REPLICA)


def batches(num_examples, batch_size, start=0):
    return list(torch.arange(start, start + num_examples).split(batch_size)) if num_examples else []


def values(element):
    leaves = element.values if isinstance(element, PerReplica) else (element,)
    return [leaf.tolist() for leaf in leaves]


def read(data, num_replicas, options=None):
    return [values(e) for e in distribute_from_function(lambda _: data, one_process(num_replicas), None, options)]


@pytest.mark.parametrize(
    ("num_examples", "batch_size", "num_replicas", "steps"),
    [
        (3, 1, 2, [[[0], [1]], [[2], []]]),
        (5, 1, 3, [[[0], [1], [2]], [[3], [4], []]]),
        (1, 2, 2, [[[0], []]]),
        (0, 2, 2, []),
        (8, 2, 2, [[[0, 1], [2, 3]], [[4, 5], [6, 7]]]),
        (3, 2, 1, [[[0, 1]], [[2]]]),
    ],
)
def test_consecutive_batches_go_to_the_replicas_in_turn(num_examples, batch_size, num_replicas, steps):
    assert read(batches(num_examples, batch_size), num_replicas) == steps


def test_batches_are_not_split_and_carry_their_shares():
    loader = DataLoader(TensorDataset(torch.ones(5, 2), torch.arange(5)), 3)
    dataset = distribute_from_function(lambda _: loader, one_process(3), None)
    for _ in range(2):
        ((x, y),) = dataset
        assert [value.shape for value in x.values] == [(3, 2), (2, 2), (0, 2)]
        assert get_shares(x).shares == get_shares(y).shares == (3, 2, 0)
        assert y.values[2].dtype == torch.int64


def test_the_users_tensors_stay_untagged():
    data = batches(2, 1)
    for num_replicas in (1, 2):
        list(distribute_from_function(lambda _: data, one_process(num_replicas), None))
        assert [get_shares(tensor) for tensor in data] == [None, None]


@pytest.mark.parametrize("scalar", [torch.tensor(0.5), 0.5, "text"])
def test_what_stands_beside_the_examples_does_not_drop_the_last_round(scalar):
    elements = [(torch.arange(2) + 2 * i, scalar) for i in range(3)]
    found = [
        [leaf.values for leaf in element]
        for element in distribute_from_function(lambda _: elements, one_process(2), None)
    ]
    assert [[share.tolist() for share in shares] for shares, _ in found] == [[[0, 1], [2, 3]], [[4, 5], []]]
    assert all(value == scalar for _, scalars in found for value in scalars)


def test_an_incomplete_last_round_of_scalars_is_dropped():
    scalars = [torch.tensor(i) for i in range(5)]
    assert read(scalars, 2) == [[0, 1], [2, 3]]
    assert read(scalars, 1) == [[0], [1], [2], [3], [4]]
    assert [e.values for e in distribute_from_function(lambda _: [1, 2, 3], one_process(2), None)] == [(1, 2)]


def test_the_function_is_called_at_once_with_a_context():
    contexts = []

    def fn(context):
        contexts.append(context)
        return batches(3, 1)

    dataset = distribute_from_function(fn, one_process(2), None)
    assert contexts == [InputContext(1, 0, 2)]
    list(dataset), list(dataset)
    assert len(contexts) == 1
    assert dataset.element_spec.values == (TensorSpec((None,), torch.int64),) * 2
    with pytest.raises(TypeError, match="not known"):
        len(dataset)


def test_one_pipeline_for_each_replica():
    contexts = []

    def fn(context):
        contexts.append(context)
        return batches(3 - context.input_pipeline_id, 1)

    dataset = distribute_from_function(fn, one_process(2), None, PER_REPLICA)
    assert contexts == [InputContext(2, 0, 2), InputContext(2, 1, 2)]
    assert [values(e) for e in dataset] == [[[0], [0]], [[1], [1]], [[2], []]]


def test_options():
    with pytest.raises(ValueError, match="experimental_place_dataset_on_device"):
        read(batches(2, 1), 2, InputOptions(experimental_place_dataset_on_device=True))
    assert read(batches(2, 1), 2, InputOptions(experimental_fetch_to_device=False)) == [[[0], [1]]]
    # what one dataset was made with has no effect on the next one, as it has in tf
    read(batches(2, 1), 2, PER_REPLICA)
    assert read(batches(2, 1), 2) == [[[0], [1]]]


def test_what_the_function_returns_is_checked():
    for data, message in [
        (None, "must return a DataLoader"),
        (3, "Received: 3"),
        ("text", "iterable of batches"),
        (iter([1]), "only once"),
        (TensorDataset(torch.ones(2)), "must return a DataLoader"),
    ]:
        with pytest.raises(TypeError, match=message):
            distribute_from_function(lambda _, data=data: data, one_process(2), None)


def test_batches_of_one_step_must_have_one_structure():
    with pytest.raises(ValueError, match="same nested structure"):
        read([torch.ones(1), (torch.ones(1),)], 2)


def test_ranks_go_on_until_all_are_out_of_data():
    def fn(context):
        return batches([5, 1][context.input_pipeline_id], 1, 10 * context.input_pipeline_id)

    def read_rank(placement, workers):
        dataset = distribute_from_function(fn, placement, workers)
        return [[(values(e), get_shares(e).shares) for e in dataset] for _ in range(2)]

    first, second = run_ranks(2, read_rank, num_local=2)
    assert first[0] == first[1]
    assert first[0] == [([[0], [1]], (1, 1, 1, 0)), ([[2], [3]], (1, 1, 0, 0)), ([[4], []], (1, 0, 0, 0))]
    assert [step for step, _ in second[0]] == [[[10], []], [[], []], [[], []]]
    assert [shares for _, shares in second[0]] == [shares for _, shares in first[0]]


def test_contexts_of_several_processes():
    def contexts(placement, workers):
        seen = []
        for options in (None, PER_REPLICA):
            distribute_from_function(lambda context: seen.append(context) or [], placement, workers, options)
        return seen

    assert run_ranks(2, contexts, num_local=2) == [
        [InputContext(2, 0, 4), InputContext(4, 0, 4), InputContext(4, 1, 4)],
        [InputContext(2, 1, 4), InputContext(4, 2, 4), InputContext(4, 3, 4)],
    ]


def test_a_users_own_distributed_sampler_is_right_here():
    def fn(context):
        data = torch.arange(6)
        sampler = DistributedSampler(data, context.num_input_pipelines, context.input_pipeline_id, shuffle=False)
        return DataLoader(data, context.get_per_replica_batch_size(4), sampler=sampler)

    def read_rank(placement, workers):
        return [values(e) for e in distribute_from_function(fn, placement, workers)]

    assert run_ranks(2, read_rank) == [[[[0, 2]], [[4]]], [[[1, 3]], [[5]]]]


def test_scalars_end_where_a_rank_ends():
    def read_rank(placement, workers):
        scalars = [torch.tensor(i) for i in range(3 - workers.rank)]
        return [values(e) for e in distribute_from_function(lambda _: scalars, placement, workers)]

    assert run_ranks(2, read_rank) == [[[0], [1]]] * 2


def test_a_rank_without_any_data_gets_empty_batches_of_the_others_structure():
    def read_rank(placement, workers):
        rows = [{"x": torch.ones(2, 3), "names": ["a", "b"], "none": None, "pair": (torch.ones(2),)}]
        data = rows if workers.rank == 0 else []
        (element,) = distribute_from_function(lambda _: data, placement, workers)
        return element["x"].shape, element["names"], element["none"], element["pair"][0].tolist()

    none = ((0, 3), [], None, [])
    assert run_ranks(3, read_rank) == [((2, 3), ["a", "b"], None, [1, 1]), none, none]
    assert run_ranks(2, lambda p, w: list(distribute_from_function(lambda _: [], p, w))) == [[], []]


def test_a_rank_without_any_data_gets_empty_arrays_of_strings():
    def read_rank(placement, workers):
        data = [{"names": np.array([["a", "b"]])}] if workers.rank == 0 else []
        (element,) = distribute_from_function(lambda _: data, placement, workers)
        return element["names"].shape

    assert run_ranks(2, read_rank) == [(1, 2), (0, 2)]


@dataclasses.dataclass
class Point:
    x: torch.Tensor


def test_a_structure_that_cannot_be_sent_is_an_error_on_every_rank():
    def read_rank(placement, workers):
        data = [Point(torch.ones(2))] if workers.rank == 0 else []
        with pytest.raises(RuntimeError, match=r"gave ranks \[1, 2\] no data at all"):
            list(distribute_from_function(lambda _: data, placement, workers))
        return True

    assert run_ranks(3, read_rank) == [True] * 3


@pytest.mark.parametrize(
    ("second", "message"),
    [
        ((torch.ones(1), torch.ones(1)), r"rank 0: float32 tensor.*\n.*rank 1: .*, float32 tensor .*tuple"),
        (torch.ones(1, 1), r"rank 1: float32 tensor of 2 dimensions"),
        (torch.ones(1, dtype=torch.int64), r"rank 1: int64 tensor"),
    ],
)
def test_different_structures_are_an_error(second, message):
    def read_rank(placement, workers):
        data = [torch.ones(1), torch.ones(1)] if workers.rank == 0 else [torch.ones(1), second]
        list(distribute_from_function(lambda _: data, placement, workers))

    with pytest.raises(DisagreementError, match=message):
        run_ranks(2, read_rank)
