"""Batches of arrays: positions, agreement between processes, and that nothing large is kept."""

import copy
import tracemalloc
from functools import partial
from itertools import chain

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import torchstrategy as ts
from tests.data.profiles import quick
from tests.data.resuming import through_a_file
from tests.fit.input_data import joined, on_ranks, read, read_epochs, stand_in
from torchstrategy.base.devices import Placement
from torchstrategy.errors import DisagreementError, InvalidArgumentError
from torchstrategy.fit.inputs import make_batches

LAYOUTS = [(1, 1), (1, 2), (1, 3), (2, 1), (2, 2), (3, 1)]


def arguments(num_examples=23, batch_size=4, *, shuffle=True):
    numbers = np.arange(num_examples)
    return {"x": numbers, "y": -numbers, "batch_size": batch_size, "shuffle": shuffle}


def global_batches(steps):
    return [list(chain(*replicas)) for replicas in steps]


def run(layout, counts, state=None, seed=0, **changes):
    """A program that reads some steps of each epoch (``None``: all), perhaps from a state on.

    Returns:
        The global batches of each epoch, and the state at the end.
    """

    def fn(strategy):
        dataset = make_batches(strategy, **arguments(**changes)).dataset
        if state is not None:
            dataset.load_state_dict(through_a_file(state))
        return [read(dataset, count) for count in counts], through_a_file(dataset.state_dict())

    ranks = on_ranks(layout, fn, seed)
    assert all(state == ranks[0][1] for _, state in ranks)
    return [global_batches(joined([read[i] for read, _ in ranks])) for i in range(len(counts))], ranks[0][1]


@quick(40)
@given(first=st.sampled_from(LAYOUTS), second=st.sampled_from(LAYOUTS), stop=st.integers(1, 6), shuffle=st.booleans())
def test_an_epoch_goes_on_with_another_number_of_replicas(first, second, stop, shuffle):
    (whole,), _ = run((1, 1), [None], seed=3, shuffle=shuffle)
    (before,), state = run(first, [stop], seed=3, shuffle=shuffle)
    assert state["step"] == stop
    (after, following), _ = run(second, [None, None], state, seed=99, shuffle=shuffle)
    assert before + after == whole
    assert sorted(chain(*following)) == list(range(23))
    assert (following != whole) == shuffle


def test_a_finished_epoch_is_followed_by_a_new_order():
    (whole,), state = run((1, 2), [None], seed=3)
    assert state["is_finished"]
    (following,), _ = run((1, 2), [None], state, seed=4)
    assert sorted(chain(*following)) == list(range(23))
    assert following != whole


def test_a_state_is_small_and_does_not_grow():
    _, state = run((1, 1), [3], num_examples=5000)
    assert set(state["position"]) == {"step", "is_finished", "sizes", "seed"}
    assert len(str(state)) < 200


@pytest.mark.parametrize("changes", [{"num_examples": 24}, {"batch_size": 5}])
def test_a_state_of_other_arrays(changes):
    _, state = run((1, 1), [2])
    with pytest.raises(InvalidArgumentError, match=r"arrays with \[examples, batch size\] \[23, 4\], these have"):
        run((1, 1), [None], state, **changes)


def test_on_an_accelerator_the_position_is_that_of_the_user():
    """There a batch is read before it is asked for."""
    strategy = stand_in(Placement(1, 0, (torch.device("meta"),)))
    dataset = make_batches(strategy, torch.arange(10), batch_size=2, shuffle=True).dataset
    iterator = iter(dataset)
    batches = [next(iterator), next(iterator)]
    assert [batch.device.type for batch in batches] == ["meta", "meta"]
    assert dataset.state_dict()["step"] == 2


def test_two_iterations_at_once_are_independent():
    dataset = make_batches(ts.get_strategy(), torch.arange(10), batch_size=2, shuffle=True).dataset
    first, second = iter(dataset), iter(dataset)
    batches = [(next(first), next(second)) for _ in range(5)]
    for column in zip(*batches, strict=True):
        assert sorted(torch.cat(column).tolist()) == list(range(10))


def test_the_order_is_a_function_of_torchs_seed():
    def orders(seed):
        torch.manual_seed(seed)
        dataset = make_batches(ts.get_strategy(), torch.arange(10), shuffle=True).dataset
        return [batch.tolist() for _ in range(2) for batch in dataset]

    assert orders(1) == orders(1)
    assert orders(1)[0] != orders(1)[1]
    assert orders(1) != orders(2)


def test_ranks_that_were_seeded_alike_stay_alike():
    def fn(strategy):
        torch.manual_seed(7)
        list(make_batches(strategy, **arguments()).dataset)
        return torch.rand(1).item()

    assert len(set(on_ranks((3, 1), fn))) == 1


def test_data_in_order_takes_nothing_from_the_random_stream():
    before = torch.get_rng_state()
    list(make_batches(ts.get_strategy(), torch.arange(10)).dataset)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("other", [{"num_examples": 24}, {"batch_size": 3}])
def test_ranks_with_other_arrays(other):
    def fn(strategy):
        return make_batches(strategy, **arguments(**(other if strategy.workers.rank == 1 else {})))

    with pytest.raises(DisagreementError, match="number of examples, batch size and checksum of the arrays"):
        on_ranks((2, 1), fn)


def test_ranks_with_other_values():
    def fn(strategy):
        return make_batches(strategy, np.arange(5) + strategy.workers.rank)

    with pytest.raises(DisagreementError, match="Pass the same arrays on every rank"):
        on_ranks((2, 1), fn)


def test_ranks_with_other_states():
    _, state = run((1, 1), [2])

    def fn(strategy):
        dataset = make_batches(strategy, **arguments()).dataset
        dataset.load_state_dict({**state, "position": {**state["position"], "step": strategy.workers.rank}})
        next(iter(dataset))

    with pytest.raises(DisagreementError, match=r"begin with batches \[0, 1\]"):
        on_ranks((2, 1), fn)


def test_the_ranks_talk_once_an_epoch():
    def fn(strategy):
        dataset = make_batches(strategy, **arguments()).dataset
        del strategy.workers.operations[:]
        read(dataset)
        return strategy.workers.operations

    assert [len(operations) for operations in on_ranks((2, 1), fn)] == [1, 1]


def test_shares_of_one_batch_have_memory_of_their_own():
    """A replica that changes its share in place does not change another's, or the array."""
    x = torch.arange(4)
    strategy = ts.MirroredStrategy(["cpu:0", "cpu:1"])
    for shuffle in (False, True):
        (element,) = make_batches(strategy, x, shuffle=shuffle).dataset
        other = element.values[1].clone()
        element.values[0].fill_(-1)
        assert torch.equal(element.values[1], other)
    assert x.tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_no_copy_of_the_arrays_is_made(dtype):
    x = np.zeros((2000, 1000), dtype)
    tracemalloc.start()
    try:
        batches = make_batches(ts.get_strategy(), x, batch_size=10, shuffle=True)
        next(iter(batches.dataset))
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < x.nbytes / 20


def test_description():
    strategy = ts.MirroredStrategy(["cpu:0", "cpu:1"])
    dataset = make_batches(strategy, torch.arange(5), batch_size=2).dataset
    assert dataset.explain_sharding() == "Batches are cut from arrays. 2 replicas in all."
    assert dataset.element_spec.values[0] == ts.data.TensorSpec((None,), torch.int64)
    assert len(dataset) == 3
    assert copy.copy(dataset).state_is_collective is False


# Real processes


def read_in_a_process(num_local, counts, state):
    torch.manual_seed(11)
    devices = [f"cpu:{i}" for i in range(num_local)]
    strategy = ts.MirroredStrategy(devices) if num_local > 1 else ts.MultiWorkerMirroredStrategy()
    dataset = make_batches(strategy, **arguments()).dataset
    if state is not None:
        dataset.load_state_dict(state)
    return [read(dataset, count) for count in counts], dataset.state_dict()


@pytest.mark.parametrize("num_local", [1, 2])
def test_two_processes(process_pool, num_local):
    alone = read_epochs((1, 2 * num_local), partial(arguments, shuffle=True), 2, seed=11)
    ranks = process_pool(2).run(read_in_a_process, num_local, [None, 2], None)
    epochs = [joined([read[i] for read, _ in ranks]) for i in range(2)]
    assert epochs == [alone[0], alone[1][:2]]
    ranks = process_pool(2).run(read_in_a_process, num_local, [None], ranks[0][1])
    assert joined([read[0] for read, _ in ranks]) == alone[1][2:]
