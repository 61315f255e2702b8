"""Datasets of strategies of one process."""

import copy
import gc
import multiprocessing
import time
from itertools import chain

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, TensorDataset
from torch.utils.data.distributed import DistributedSampler

import torchstrategy as ts
from tests.data.fake_workers import one_process
from torchstrategy.base.devices import Placement
from torchstrategy.base.options import InputOptions, InputReplicationMode
from torchstrategy.base.values import BatchShares, PerReplica, get_shares
from torchstrategy.data.batch import TensorSpec
from torchstrategy.data.distribute import distribute_dataset
from torchstrategy.data.distributed_dataset import DistributedDataset, DistributedIterator
from torchstrategy.data.split import share_bounds, share_sizes
from torchstrategy.errors import InvalidArgumentError, OutOfRangeError, UnimplementedError


class Stream(IterableDataset):
    def __init__(self, num_examples):
        self.num_examples = num_examples

    def __iter__(self):
        return iter(range(self.num_examples))


class Failing(torch.utils.data.Dataset):
    def __len__(self):
        return 4

    def __getitem__(self, index):
        if index == 2:
            raise KeyError("example 2 is broken")
        return index


def values(element):
    leaves = element.values if isinstance(element, PerReplica) else (element,)
    return [leaf.tolist() for leaf in leaves]


def read(data, num_replicas, **arguments):
    return [values(e) for e in distribute_dataset(data, one_process(num_replicas), None, **arguments)]


def expected(num_examples, batch_size, num_replicas, drop_last=False):
    steps = []
    for start in range(0, num_examples, batch_size):
        batch = list(range(num_examples))[start : start + batch_size]
        if drop_last and len(batch) < batch_size:
            continue
        steps.append([batch[a:b] for a, b in share_bounds(share_sizes(len(batch), num_replicas))])
    return steps


@pytest.mark.parametrize("num_replicas", [1, 2, 3, 4])
@pytest.mark.parametrize("drop_last", [False, True])
def test_every_example_goes_to_one_replica_in_order(num_replicas, drop_last):
    for num_examples in range(0, 14, 3):
        for batch_size in (1, 2, 4, 5, 9):
            loader = DataLoader(range(num_examples), batch_size, drop_last=drop_last)
            steps = expected(num_examples, batch_size, num_replicas, drop_last)
            assert read(loader, num_replicas) == steps
            dataset = distribute_dataset(loader, one_process(num_replicas), None)
            assert len(dataset) == len(steps)


@pytest.mark.parametrize(
    "make",
    [
        lambda: (list(range(7)), 4),
        lambda: (torch.arange(7), 4),
        lambda: (np.arange(7), 4),
        lambda: (Stream(7), 4),
        lambda: (DataLoader(Stream(7), batch_size=4), None),
        lambda: (DataLoader(torch.arange(7).split(4), batch_size=None), None),
        lambda: (DataLoader(range(7), batch_sampler=[[0, 1, 2, 3], (4, 5, 6)]), None),
        lambda: ([torch.arange(4), np.arange(4, 7)], None),
    ],
)
def test_kinds_of_data(make):
    data, batch_size = make()
    for num_replicas in (1, 3):
        assert read(data, num_replicas, batch_size=batch_size) == expected(7, 4, num_replicas)


def test_structures_of_arrays():
    arrays = {"x": np.arange(10.0).reshape(5, 2), "y": (torch.arange(5),)}
    dataset = distribute_dataset(arrays, one_process(2), None, batch_size=4)
    assert len(dataset) == 2
    last = list(dataset)[-1]
    assert values(last["x"]) == [[[8, 9]], []]
    assert values(last["y"][0]) == [[4], []]
    assert last["x"].values[1].shape == (0, 2)


def test_batches_carry_their_shares():
    for num_replicas, shares in ((1, (5,)), (2, (3, 2)), (4, (2, 2, 1, 0))):
        x, y = next(iter(distribute_dataset([(torch.ones(5, 2), torch.ones(5))], one_process(num_replicas), None)))
        assert get_shares(x) == get_shares(y) == BatchShares(shares)
        assert get_shares(x).total == 5


def test_iterations_start_anew_and_may_overlap():
    dataset = distribute_dataset(DataLoader(range(3), 2), one_process(2), None)
    assert [[values(a), values(b)] for a, b in zip(dataset, dataset, strict=True)] == [
        [[[0], [1]]] * 2,
        [[[2], []]] * 2,
    ]


def test_replicas_of_one_process_draw_what_one_replica_draws():
    orders = []
    for num_replicas in (1, 3):
        torch.manual_seed(3)
        dataset = distribute_dataset(DataLoader(range(10), 4, shuffle=True), one_process(num_replicas), None)
        orders.append([list(chain(*values(e))) for _ in range(2) for e in dataset])
        orders.append(torch.rand(1).item())
    torch.manual_seed(3)
    loader = DataLoader(range(10), 4, shuffle=True)
    assert orders[0] == orders[2] == [batch.tolist() for _ in range(2) for batch in loader]
    assert orders[1] == orders[3] == torch.rand(1).item()


def test_the_end_is_told_in_every_style():
    dataset = distribute_dataset([torch.arange(2)], one_process(2), None)
    iterator = iter(dataset)
    assert type(dataset) is DistributedDataset
    assert type(iterator) is DistributedIterator
    assert iter(iterator) is iterator
    assert values(iterator.get_next()) == [[0], [1]]
    with pytest.raises(OutOfRangeError, match="End of the dataset"):
        iterator.get_next()
    with pytest.raises(StopIteration):
        next(iterator)
    optional = iterator.get_next_as_optional()
    assert not optional.has_value()
    with pytest.raises(InvalidArgumentError, match="no value"):
        optional.get_value()
    optional = iter(dataset).get_next_as_optional()
    assert optional.has_value()
    assert values(optional.get_value()) == [[0], [1]]


def test_replica_functions_do_not_read():
    """As in tf: each replica would take an element of its own, with the shares of all."""
    strategy = ts.MirroredStrategy(["cpu:0", "cpu:1"])
    iterator = iter(strategy.experimental_distribute_dataset(torch.arange(4), batch_size=4))
    with pytest.raises(ValueError, match=r"args=\(next\(iterator\),\)"):
        strategy.run(lambda: next(iterator))
    read = ts.get_strategy().run(lambda: next(iterator))
    assert values(read) == [[0, 1], [2, 3]]


def test_element_spec_costs_no_random_numbers_and_starts_no_workers():
    def fail(worker_id):
        raise AssertionError("a worker was started")

    loader = DataLoader(TensorDataset(torch.ones(5, 2), torch.arange(5)), 4, shuffle=True)
    dataset = distribute_dataset(loader, one_process(2), None)
    state = torch.get_rng_state()
    x, y = dataset.element_spec
    assert x.values == (TensorSpec((None, 2), torch.float32),) * 2
    assert y.values == (TensorSpec((None,), torch.int64),) * 2
    assert torch.equal(torch.get_rng_state(), state)
    generator = torch.Generator().manual_seed(1)
    before = generator.get_state()
    loader = DataLoader(
        range(5), 4, shuffle=True, generator=generator, num_workers=1, persistent_workers=True, worker_init_fn=fail
    )
    assert distribute_dataset(loader, one_process(1), None).element_spec == TensorSpec((None,), torch.int64)
    assert torch.equal(generator.get_state(), before)
    with pytest.raises(ValueError, match="empty"):
        _ = distribute_dataset([], one_process(2), None).element_spec


def test_unknown_length():
    dataset = distribute_dataset(DataLoader(Stream(3), 2), one_process(2), None)
    with pytest.raises(TypeError, match="not known"):
        len(dataset)


def test_an_error_in_the_data_comes_unchanged_and_ends_the_iterator():
    iterator = iter(distribute_dataset(DataLoader(Failing(), 2), one_process(2), None))
    next(iterator)
    with pytest.raises(KeyError, match="example 2 is broken"):
        next(iterator)
    with pytest.raises(RuntimeError, match=r"ended with an error before.*broken.*iter\(dataset\)"):
        next(iterator)


@pytest.mark.parametrize("persistent", [False, True])
def test_loader_workers_run_and_stop_when_the_iterator_is_dropped(persistent):
    loader = DataLoader(range(100), 4, num_workers=1, persistent_workers=persistent, prefetch_factor=3)
    dataset = distribute_dataset(loader, one_process(2), None)
    others = set(multiprocessing.active_children())  # such as a session's worker processes
    gc.collect()
    gc.disable()  # dropping the last reference must be enough
    try:
        iterator = iter(dataset)
        assert values(next(iterator)) == [[0, 1], [2, 3]]
        assert len(set(multiprocessing.active_children()) - others) == 1
        del iterator
        if persistent:
            assert [values(e) for e in dataset] == expected(100, 4, 2)
            del dataset, loader
        deadline = time.monotonic() + 10
        while set(multiprocessing.active_children()) - others and time.monotonic() < deadline:
            time.sleep(0.01)
        assert not set(multiprocessing.active_children()) - others
    finally:
        gc.enable()


def test_loaders_draw_on_the_cpu_inside_an_accelerators_scope():
    dataset = distribute_dataset(DataLoader(range(4), 2, shuffle=True), one_process(1), None)
    with torch.device("meta"):  # stands for an accelerator as default device
        assert sorted(i for batch in dataset for i in batch.tolist()) == [0, 1, 2, 3]


def test_not_a_dataset():
    placement = one_process(2)
    for data, error, message in [
        (None, ValueError, "None"),
        (3, TypeError, "3 is not a dataset"),
        ("text", TypeError, "not a dataset"),
        (iter([torch.ones(2)]), TypeError, "iterated only once"),
        ((x for x in [torch.ones(2)]), TypeError, "generator can be iterated only once"),
        (lambda: iter([torch.ones(2)]), TypeError, r"yields batches make one by ts\.data\.Dataset\.from_generator"),
        (torch.ones(3, 2), ValueError, "batch_size="),
        ((np.ones(3), np.ones(3)), ValueError, "batch_size="),
        (TensorDataset(torch.ones(3)), ValueError, "batch_size="),
        (distribute_dataset([torch.ones(2)], placement, None), TypeError, "already"),
        (DataLoader([0, 1], sampler=DistributedSampler([0, 1], 2, 0)), ValueError, "DistributedSampler"),
    ]:
        with pytest.raises(error, match=message):
            distribute_dataset(data, placement, None)


def test_what_a_loader_has_is_asked_of_the_loader():
    dataset = distribute_dataset([torch.ones(2), torch.ones(1)], one_process(2), None)
    with pytest.raises(AttributeError, match=r"has no 'dataset'. Ask what was distributed, .*: loader\.dataset\."):
        len(dataset.dataset)
    with pytest.raises(AttributeError, match=r"loader\.sampler\. Each epoch has an order of its own"):
        dataset.sampler.set_epoch(1)
    with pytest.raises(AttributeError, match=r"has no 'unknown'\.$"):
        _ = dataset.unknown
    assert len(copy.copy(dataset)) == 2


def test_batch_size_is_checked():
    placement = one_process(2)
    for size in (0, -1, 2.0, True, "4"):
        with pytest.raises(ValueError, match="positive integer"):
            distribute_dataset(torch.ones(3), placement, None, batch_size=size)
    with pytest.raises(ValueError, match="batch size of its own"):
        distribute_dataset(DataLoader([1]), placement, None, batch_size=2)
    with pytest.raises(TypeError, match="Can't batch a generator"):
        distribute_dataset((x for x in [1]), placement, None, batch_size=2)


def test_unbatched_scalars_are_an_index_error():
    iterator = iter(distribute_dataset([torch.tensor(1), torch.tensor(2)], one_process(2), None))
    with pytest.raises(IndexError, match="no batch dimension"):
        next(iterator)


def test_options():
    placement = one_process(2)
    per_replica = InputOptions(experimental_replication_mode=InputReplicationMode.PER_REPLICA)
    with pytest.raises(UnimplementedError, match="PER_REPLICA"):
        distribute_dataset([torch.ones(2)], placement, None, per_replica)
    assert read([torch.arange(2)], 2, options=InputOptions(experimental_place_dataset_on_device=True)) == [[[0], [1]]]
    options = InputOptions(experimental_fetch_to_device=False)
    assert read([torch.arange(2)], 2, options=options) == [[[0], [1]]]


def on_accelerators(num_replicas):
    """The meta device stands for an accelerator: copies to it are asked for in the same way."""
    return Placement(num_replicas, 0, (torch.device("meta"),) * num_replicas)


def test_parts_are_moved_to_the_replicas_device_and_tagged_there():
    for num_replicas in (1, 2):
        data = [(torch.ones(4, 2), ["a", "b", "c", "d"])]
        x, names = next(iter(distribute_dataset(data, on_accelerators(num_replicas), None)))
        leaves = x.values if num_replicas > 1 else (x,)
        assert {leaf.device.type for leaf in leaves} == {"meta"}
        assert get_shares(x).total == 4
        assert (names.values if num_replicas > 1 else names)[0] == (["a", "b"] if num_replicas > 1 else "a")
    options = InputOptions(experimental_fetch_to_device=False)
    assert next(iter(distribute_dataset([torch.ones(4)], on_accelerators(1), None, options))).device.type == "cpu"


@pytest.mark.parametrize("num_ahead", [1, 3])
def test_elements_are_read_ahead_on_accelerators_only(num_ahead):
    class Counting:
        num_read = 0

        def __iter__(self):
            for _ in range(6):
                self.num_read += 1
                yield torch.ones(2)

    options = InputOptions(experimental_per_replica_buffer_size=num_ahead)
    for placement, ahead in ((one_process(1), 0), (on_accelerators(1), num_ahead)):
        data = Counting()
        iterator = iter(distribute_dataset(data, placement, None, options))
        next(iterator)
        assert data.num_read == 1 + ahead
        assert len(list(iterator)) == 5


def test_an_error_that_was_met_ahead_comes_in_its_turn():
    iterator = iter(distribute_dataset(DataLoader(Failing(), 2), on_accelerators(1), None))
    assert next(iterator).shape == (2,)
    with pytest.raises(KeyError, match="example 2 is broken"):
        next(iterator)


def test_an_iterator_knows_the_specification_and_goes_on_from_a_state():
    dataset = distribute_dataset(torch.arange(6), one_process(1), None, batch_size=2)
    iterator = iter(dataset)
    assert iterator.element_spec == dataset.element_spec
    next(iterator)
    state = iterator.state_dict()
    rest = [batch.tolist() for batch in iterator]
    iterator.load_state_dict(state)
    assert [batch.tolist() for batch in iterator] == rest == [[2, 3], [4, 5]]


@pytest.mark.parametrize("other", [torch.arange(8), [torch.arange(2)] * 3])
def test_a_state_of_other_data_is_refused(other):
    dataset = distribute_dataset(torch.arange(6), one_process(1), None, batch_size=2)
    next(iter(dataset))
    batch_size = 2 if isinstance(other, torch.Tensor) else None
    another = distribute_dataset(other, one_process(1), None, batch_size=batch_size)
    another.load_state_dict(dataset.state_dict())
    with pytest.raises(InvalidArgumentError, match="The state to resume from"):
        next(iter(another))


def test_an_interrupted_iterator_is_finished():
    def stops():
        yield torch.ones(1)
        raise KeyboardInterrupt

    class Data:
        def __iter__(self):
            return stops()

    iterator = iter(distribute_dataset(Data(), one_process(1), None))
    next(iterator)
    with pytest.raises(KeyboardInterrupt):
        next(iterator)
    with pytest.raises(RuntimeError, match="interrupted by KeyboardInterrupt"):
        next(iterator)


def test_iterations_that_share_persistent_workers_are_told_apart():
    loader = DataLoader(range(8), 2, num_workers=1, persistent_workers=True)
    dataset = distribute_dataset(loader, one_process(1), None)
    first, second = iter(dataset), iter(dataset)
    next(first)
    next(second)
    with pytest.raises(RuntimeError, match="taken over its persistent workers"):
        next(first)
    assert [batch.tolist() for batch in second] == [[2, 3], [4, 5], [6, 7]]
