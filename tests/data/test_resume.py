"""A run that ends at any step goes on with exactly what was missing, on any number of replicas and processes."""

import itertools
from collections import Counter
from functools import partial
from itertools import chain

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader, IterableDataset, RandomSampler, TensorDataset

import torchstrategy as ts
from tests.data.profiles import quick, thorough
from tests.data.resuming import (
    DATA,
    END,
    GENERATOR_OF_ITS_OWN,
    OWN,
    WITH_WORKERS,
    distribute_data,
    distribute_files,
    local_numbers,
    relay,
    run,
    through_a_file,
)
from tests.programs import cpu_devices
from torchstrategy.data.prefetch import DeviceCopies

FOUR_TWO_THREE = [
    [(4, 1), (2, 1), (3, 1)],
    [(1, 4), (1, 2), (1, 3)],
    [(2, 2), (1, 2), (3, 1)],
    [(1, 4), (2, 1), (1, 3)],
    [(4, 1), (1, 2), (3, 1)],
    [(3, 1), (2, 2), (2, 1)],
]
FORKS = pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
pytestmark = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning")  # torchdata's use of torch


def check_data(kind, source, num_examples, batch_size, layouts, stops, seed=0, num_epochs=0):
    """The global batches are those of a run that was never stopped."""
    distribute = distribute_data(source, num_examples, batch_size)
    epochs = relay(distribute, layouts, stops, seed, num_epochs)
    times = 2 if kind == "pipeline" else 1
    for batches in epochs:
        assert Counter(chain(*batches)) == Counter(dict.fromkeys(range(num_examples), times))
    read, _ = run(distribute, layouts[0], [END] * len(epochs), None, seed)
    uninterrupted = [[list(chain(*step)) for step in steps] for steps in read]
    assert epochs[: num_epochs + 1] == uninterrupted[: num_epochs + 1]
    if kind in GENERATOR_OF_ITS_OWN:
        assert epochs == uninterrupted, "the order of later epochs is another one"


def check_own(kind, num_examples, batch_size, layouts, stops, seed=0, num_epochs=0):
    """Nothing is lost and nothing is repeated; with the replicas as they were, nothing changes at all."""
    distribute = OWN[kind](num_examples, batch_size)
    epochs = relay(distribute, layouts, stops, seed, num_epochs)
    times = layouts[0][0] if kind.startswith("OFF") else 1
    for batches in epochs[: num_epochs + 1]:
        assert Counter(chain(*batches)) == Counter(dict.fromkeys(range(num_examples), times))
    for batches in epochs[num_epochs + 1 :]:
        found = Counter(chain(*batches))
        assert set(found) == set(range(num_examples))
        assert len(set(found.values())) == 1
    if len(set(layouts)) == 1:
        read, _ = run(distribute, layouts[0], [END] * (num_epochs + 1), None, seed)
        assert epochs[: num_epochs + 1] == [[list(chain(*step)) for step in steps] for steps in read]


@pytest.mark.parametrize("layouts", FOUR_TWO_THREE, ids=str)
@pytest.mark.parametrize("kind", DATA)
def test_the_same_batches_in_the_same_order(kind, layouts):
    check_data(kind, DATA[kind], 43, 4, layouts, [3, 4])


@pytest.mark.parametrize("layouts", FOUR_TWO_THREE, ids=str)
@pytest.mark.parametrize("kind", OWN)
def test_streams_of_each_process_lose_and_repeat_nothing(kind, layouts):
    check_own(kind, 43, 5, layouts, [3, 2])


@pytest.mark.parametrize("layout", [(1, 2), (2, 1), (2, 2), (3, 1)], ids=str)
@pytest.mark.parametrize("kind", OWN)
def test_streams_of_as_many_processes_go_on_as_they_were(kind, layout):
    check_own(kind, 43, 5, [layout] * 3, [3, 2])


@pytest.mark.parametrize("kind", OWN)
def test_the_next_epoch_of_functions_and_files_may_have_other_replicas(kind):
    for layouts in ([(1, 1), (1, 2)], [(1, 2), (2, 1), (1, 1)], [(2, 1), (3, 1), (2, 2)]):
        check_own(kind, 18, 7, layouts, [20, 20])


@pytest.mark.parametrize("kind", ["shuffled loader", "pipeline", "shuffled files", "function of loaders"])
def test_what_is_on_its_way_to_an_accelerator_does_not_count(kind, monkeypatch):
    monkeypatch.setattr(DeviceCopies, "is_needed", True)  # elements are then read ahead
    layouts = [(4, 1), (2, 1), (1, 3)]
    if kind in DATA:
        check_data(kind, DATA[kind], 43, 4, layouts, [2, 3], num_epochs=1)
    else:
        check_own(kind, 43, 4, layouts, [2, 3], num_epochs=1)


@pytest.mark.slow
@FORKS
@pytest.mark.parametrize("kind", WITH_WORKERS)
def test_what_loader_workers_read_ahead_does_not_count(kind):
    check_data(kind, WITH_WORKERS[kind], 43, 4, [(2, 1), (1, 2), (3, 1)], [2, 3])


@pytest.mark.slow
@FORKS
def test_what_loader_workers_read_ahead_of_files_does_not_count(monkeypatch):
    monkeypatch.setitem(OWN, "loader of files", partial(distribute_files, num_workers=2))
    check_own("loader of files", 43, 5, [(2, 1), (1, 2), (3, 1)], [2, 3])


def test_going_on_does_not_move_the_programs_random_stream():
    """What draws next, such as the order of the next epoch, is then as in a run that was not interrupted."""
    loader = DataLoader(TensorDataset(torch.arange(9)), 2, shuffle=True)
    dataset = ts.OneDeviceStrategy("cpu:0").experimental_distribute_dataset(loader)
    next(iter(dataset))
    dataset.load_state_dict(dataset.state_dict())
    before = torch.get_rng_state()
    assert len(list(dataset)) == 4
    assert torch.equal(torch.get_rng_state(), before)


LAYOUTS = st.sampled_from([(p, n) for p in range(1, 5) for n in range(1, 5) if p * n <= 5])
# Before the first step there is no order yet that could be kept.
STOPS = st.tuples(st.integers(1, 20), *[st.integers(0, 20)] * 3)


def cases(kinds, max_examples, max_batch):
    """Draw the arguments of ``check_data`` and ``check_own``."""
    return given(
        kind=st.sampled_from(list(kinds)),
        num_examples=st.integers(1, max_examples),
        batch_size=st.integers(1, max_batch),
        layouts=st.lists(LAYOUTS, min_size=2, max_size=4),
        stops=STOPS,
        seed=st.integers(0, 99),
        num_epochs=st.sampled_from([0, 0, 1, 2]),
    )


@pytest.mark.slow
@cases(DATA, 60, 16)
@quick(40)
def test_any_stops(kind, **case):
    check_data(kind, DATA[kind], **case)


@pytest.mark.slow
@cases(OWN, 60, 16)
@quick(40)
def test_any_stops_of_own_streams(**case):
    check_own(**case)


@pytest.mark.slow
@pytest.mark.timeout(900)
@cases(DATA, 200, 32)
@thorough(300)
def test_any_stops_thoroughly(kind, **case):
    check_data(kind, DATA[kind], **case)


@pytest.mark.slow
@pytest.mark.timeout(900)
@cases(OWN, 200, 32)
@thorough(300)
def test_any_stops_of_own_streams_thoroughly(**case):
    check_own(**case)


# Back to where an iteration began


class Drawn(IterableDataset):
    """Batches that a generator of its own draws."""

    def __init__(self):
        self._generator = torch.Generator().manual_seed(7)

    def __iter__(self):
        for _ in range(3):
            yield torch.randint(99, (4,), generator=self._generator)


def seeded():
    return torch.Generator().manual_seed(3)


def shuffled(**options):
    return ts.data.Dataset.range(10).shuffle(10, seed=3, **options)


BEGINNINGS = {
    "pipeline": lambda: shuffled().batch(4),
    "pipeline that goes on for ever": lambda: shuffled().batch(4).repeat(),
    "pipeline of one order": lambda: shuffled(reshuffle_each_iteration=False).batch(4),
    "generator of a loader": lambda: DataLoader(range(10), 4, shuffle=True, generator=seeded()),
    "generator of a sampler": lambda: DataLoader(range(10), 4, sampler=RandomSampler(range(10), generator=seeded())),
    "generator of the data": Drawn,
    "generator of a loader's stream": lambda: DataLoader(Drawn(), batch_size=None),
    "loader of a pipeline": lambda: DataLoader(shuffled(), 4),
    "loader of a pipeline's batches": lambda: DataLoader(shuffled().batch(4), batch_size=None),
}


def rollback(make, num_before, num_after, *, is_begun, is_fresh):
    """Return the elements that came after a state was taken, and those that come after it was put back."""
    strategy = ts.MirroredStrategy(cpu_devices(2))
    dataset = strategy.experimental_distribute_dataset(make())
    elements = chain.from_iterable(itertools.repeat(dataset))  # epoch after epoch
    for _ in range(num_before):
        next(elements)
    if is_begun:
        iter(dataset)
    state = through_a_file(dataset.state_dict())
    if is_begun or not num_before:
        elements = chain.from_iterable(itertools.repeat(dataset))
    expected = [local_numbers(next(elements)) for _ in range(7)]
    if is_fresh:
        dataset = strategy.experimental_distribute_dataset(make())
    elements = chain.from_iterable(itertools.repeat(dataset))
    for _ in range(num_after):
        next(elements)
    dataset.load_state_dict(state)
    elements = chain.from_iterable(itertools.repeat(dataset))
    return expected, [local_numbers(next(elements)) for _ in range(7)]


@pytest.mark.parametrize("kind", BEGINNINGS)
def test_a_state_of_a_beginning_brings_its_order_back(kind):
    for num_before, num_after, is_begun, is_fresh in itertools.product((0, 2, 4), (0, 2, 5), (False, True), (0, 1)):
        expected, got = rollback(BEGINNINGS[kind], num_before, num_after, is_begun=is_begun, is_fresh=is_fresh)
        assert got == expected, (num_before, num_after, is_begun, is_fresh)
