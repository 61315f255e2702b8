"""States of distributed data sets: where they may be taken, what refuses them, and how they outlive the processes."""

import itertools
import json
import os
import random
import signal
from collections import Counter
from functools import partial
from itertools import chain

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

import torchstrategy as ts
from tests.data.resuming import (
    DATA,
    END,
    OWN,
    distribute_data,
    flat,
    joined,
    local_numbers,
    read_steps,
    relay,
    run,
    same,
    through_a_file,
)
from tests.programs import cpu_devices

FORKS = pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
pytestmark = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning")  # torchdata's use of torch


# Where a state is taken


@pytest.fixture
def numbers_dataset():
    """A new distributed data set of ten numbers, two at a time."""
    strategy = ts.MirroredStrategy(cpu_devices(2))

    def make(shuffle=False, num_examples=10, batch_size=2, **arguments):
        loader = DataLoader(range(num_examples), batch_size, shuffle=shuffle, **arguments)
        return strategy.experimental_distribute_dataset(loader)

    return make


def test_the_start_and_the_end_of_an_epoch(numbers_dataset):
    dataset = numbers_dataset()
    states = [dataset.state_dict()]
    iterator = iter(dataset)
    states.append(dataset.state_dict())
    first = [local_numbers(next(iterator)) for _ in range(5)]
    all_given = dataset.state_dict()
    assert next(iterator, None) is None
    states.append(dataset.state_dict())
    assert flat(first) == list(range(10))
    assert [state["is_finished"] for state in (*states, all_given)] == [False, False, True, False]
    for state in states:
        other = numbers_dataset()
        other.load_state_dict(through_a_file(state))
        assert flat(read_steps(other, END)) == list(range(10)), "a whole epoch"
    other = numbers_dataset()
    other.load_state_dict(through_a_file(all_given))
    assert read_steps(other, END) == [], "what is left of the epoch"
    assert flat(read_steps(other, END)) == list(range(10))


def test_a_state_is_not_changed_by_what_comes_after(numbers_dataset):
    dataset = numbers_dataset(shuffle=True)
    iterator = iter(dataset)
    first = [local_numbers(next(iterator)) for _ in range(2)]
    state = dataset.state_dict()
    stored = through_a_file(state)
    rest = [local_numbers(element) for element in iterator]
    assert same(state, stored)
    for _ in range(2):  # the same data set goes back, and again
        dataset.load_state_dict(state)
        assert read_steps(dataset, END) == rest
    assert sorted(flat(first + rest)) == list(range(10))


ONE_POSITION = ("stateful stream loader",)  # the user's own stream can't be read twice at the same time


@pytest.mark.parametrize("kind", sorted(set(DATA) - set(ONE_POSITION)))
def test_of_two_iterators_each_has_a_state(kind):
    check_other_iterations(kind, lambda dataset, again: (dataset, dataset))


@pytest.mark.parametrize("kind", sorted(set(DATA) - set(ONE_POSITION)))
def test_data_may_be_distributed_twice(kind):
    """One pipeline for training and for evaluation."""
    check_other_iterations(kind, lambda dataset, again: (dataset, again()))


@pytest.mark.parametrize("kind", DATA)
def test_the_specification_of_elements_moves_nothing(kind):
    check_other_iterations(kind, lambda dataset, again: (dataset, None))


def check_other_iterations(kind, datasets):
    """Read three steps while another iteration goes on, and let a new data set read the rest."""
    strategy = ts.MirroredStrategy(cpu_devices(2))
    arguments = {"batch_size": 2} if kind == "arrays" else {}
    data = DATA[kind](12, 2)

    def distribute(source):
        return strategy.experimental_distribute_dataset(source, **arguments)

    dataset, other = datasets(distribute(data), lambda: distribute(data))
    iterator = iter(dataset)
    first = [local_numbers(next(iterator)) for _ in range(3)]
    if other is None:
        assert dataset.element_spec is not None
    else:
        next(iter(other))
    state = through_a_file(iterator.state_dict())
    rest = [local_numbers(element) for element in iterator]
    restored = distribute(DATA[kind](12, 2))
    restored.load_state_dict(state)
    assert read_steps(restored, END) == rest
    times = 2 if kind == "pipeline" else 1
    assert Counter(flat(first + rest)) == Counter(dict.fromkeys(range(12), times))


@pytest.mark.parametrize(
    "other",
    [{"num_examples": 12}, {"num_examples": 4}, {"batch_size": 3}, {"drop_last": True, "num_examples": 7}],
    ids=str,
)
def test_a_state_of_other_data_is_refused(numbers_dataset, other):
    dataset = numbers_dataset(shuffle=True)
    read_steps(dataset, 3)
    stranger = numbers_dataset(shuffle=True, **other)
    with pytest.raises(ValueError, match="same"):
        stranger.load_state_dict(dataset.state_dict()) or next(iter(stranger))


def test_the_default_strategys_datasets_have_other_positions():
    def make(strategy):
        return strategy.experimental_distribute_dataset(ts.data.Dataset.range(12).batch(4))

    plain, distributed = make(ts.get_strategy()), make(ts.OneDeviceStrategy("cpu:0"))
    for one, other in ((plain, distributed), (distributed, plain)):
        next(iter(one))
        with pytest.raises(TypeError, match=r"with one replica ts\.OneDeviceStrategy"):
            other.load_state_dict(one.state_dict())
        assert len(list(other)) == 3


@pytest.mark.parametrize("state", [None, {}, {"step": 3}, {"kind": "index batches", "step": 1}, [1, 2], "state"])
def test_what_is_no_state_is_refused(numbers_dataset, state):
    dataset = numbers_dataset()
    iterator = iter(dataset)
    next(iterator)
    before = dataset.state_dict()
    with pytest.raises((TypeError, ValueError), match="state"):
        dataset.load_state_dict(state)
    assert same(dataset.state_dict(), before), "the data set was changed"


def test_a_state_of_another_order_is_refused(numbers_dataset):
    dataset = numbers_dataset(shuffle=True)
    read_steps(dataset, 3)
    state = dataset.state_dict()
    in_order = numbers_dataset()
    in_order.load_state_dict(state)
    with pytest.raises(ValueError, match=r"same data.* set the epoch of then"):
        next(iter(in_order))


class NumpyShuffled:
    def __iter__(self):
        return iter(torch.from_numpy(np.random.permutation(40)).split(2))


def test_an_iterable_of_another_order_is_noticed():
    """It is no error, because the values of the same examples differ too where they are augmented."""
    strategy = ts.MirroredStrategy(cpu_devices(2))
    np.random.seed(0)
    dataset = strategy.experimental_distribute_dataset(NumpyShuffled())
    read_steps(dataset, 11)
    state = dataset.state_dict()
    np.random.seed(0)
    same_order = strategy.experimental_distribute_dataset(NumpyShuffled())
    same_order.load_state_dict(state)
    assert len(read_steps(same_order, END)) == 9
    np.random.seed(1)
    other_order = strategy.experimental_distribute_dataset(NumpyShuffled())
    other_order.load_state_dict(state)
    with pytest.warns(UserWarning, match="examples are lost and repeated"):
        next(iter(other_order))


def test_iterables_of_other_lengths_are_refused():
    strategy = ts.MirroredStrategy(cpu_devices(2))

    def distribute(num_batches):
        return strategy.experimental_distribute_dataset(list(torch.arange(2 * num_batches).split(2)))

    dataset = distribute(5)
    read_steps(dataset, 3)
    for num_batches in (2, 4, 6):
        other = distribute(num_batches)
        other.load_state_dict(dataset.state_dict())
        with pytest.raises(ValueError, match="same dataset"):
            next(iter(other))


def test_a_pipeline_of_other_operations_is_refused():
    strategy = ts.MirroredStrategy(cpu_devices(2))
    numbers_in_threes = ts.data.Dataset.range(12).batch(3)
    dataset = strategy.experimental_distribute_dataset(numbers_in_threes)
    read_steps(dataset, 2)
    for other in (ts.data.Dataset.range(12).batch(4), ts.data.Dataset.range(12).shuffle(3, seed=1).batch(3)):
        stranger = strategy.experimental_distribute_dataset(other)
        with pytest.raises(ValueError, match=r"pipeline|dataset"):
            stranger.load_state_dict(dataset.state_dict()) or next(iter(stranger))


class Augmented(torch.utils.data.Dataset):
    """Adds random numbers of three kinds to each example."""

    def __len__(self):
        return 23

    def __getitem__(self, index):
        return index + (torch.rand(()).item() + np.random.rand() + random.random()) / 4


@pytest.mark.slow
@FORKS
@pytest.mark.parametrize("layout", [(1, 2), (2, 1), (2, 2)], ids=str)
def test_augmentation_goes_on_as_it_would_have(layout):
    epochs = []
    for num_workers in (0, 2):
        source = partial(augmented_loader, num_workers)
        distribute = distribute_data(source, 23, 4)
        (first, second), _ = run(distribute, layout, [END, END])
        (relayed, _) = relay(distribute, [layout, layout], [2])
        assert relayed == [flat([step]) for step in first]
        assert first != second
        epochs.append([first, second])
    assert epochs[0] == epochs[1], "the number of loader workers matters"


def augmented_loader(num_workers, num_examples, batch_size):
    return DataLoader(Augmented(), batch_size, shuffle=True, num_workers=num_workers)


# In checkpoints, and after a real end of the processes


@pytest.mark.parametrize("what", ["dataset", "iterator"])
def test_a_checkpoint_holds_the_position(what, tmp_path):
    """Of the data set, or, as in tf's guide, of the iterator."""

    def begin(num_replicas):
        strategy = ts.MirroredStrategy(cpu_devices(num_replicas))
        dataset = strategy.experimental_distribute_dataset(DataLoader(range(23), 4, shuffle=True))
        held = dataset if what == "dataset" else iter(dataset)
        return held, ts.train.Checkpoint(data=held, step=ts.Variable(torch.tensor(0)))

    torch.manual_seed(5)
    expected = [flat([local_numbers(element)]) for element in begin(1)[0]]
    read = []
    for i, num_replicas in enumerate((4, 2, 3)):
        torch.manual_seed(5 if i == 0 else 100 + i)
        held, checkpoint = begin(num_replicas)
        if i:
            checkpoint.restore(str(tmp_path / f"stop{i - 1}")).assert_consumed()
        read += [flat([step]) for step in read_steps(held, 2)]
        checkpoint.write(str(tmp_path / f"stop{i}"))
    assert read == expected


PROGRAMS = {
    "loader": partial(distribute_data, DATA["shuffled loader"], 43, 4),
    "stateful stream loader": partial(distribute_data, DATA["stateful stream loader"], 43, 4),
    "pipeline": partial(distribute_data, DATA["seeded pipeline"], 43, 4),
    "arrays": partial(distribute_data, DATA["arrays"], 43, 4),
    "files": partial(OWN["shuffled files"], 43, 4),
    "function": partial(OWN["function of stateful loaders"], 43, 4),
}
IN_ORDER = ("loader", "stateful stream loader", "pipeline", "arrays")


def train(folder, num_local, num_steps, *, is_killed=False):
    """Restore what is there, read a part of each data set and save; maybe go on reading until the process is killed.

    The numbers that count are those read before the checkpoint.
    """
    strategy = ts.MirroredStrategy(cpu_devices(num_local) if num_local > 1 else None)
    rank = 0 if strategy.workers is None else strategy.workers.rank
    torch.manual_seed(os.getpid())
    call = strategy.experimental_distribute_dataset
    datasets = {name: make()(call, strategy.placement, strategy.workers) for name, make in PROGRAMS.items()}
    checkpoint = ts.train.Checkpoint(**{name.replace(" ", "_"): dataset for name, dataset in datasets.items()})
    latest = ts.train.latest_checkpoint(folder)
    if latest is not None:
        checkpoint.restore(latest).assert_consumed()
    iterators = {name: iter(dataset) for name, dataset in datasets.items()}
    read = {
        name: [local_numbers(element) for element in itertools.islice(iterator, num_steps)]
        for name, iterator in iterators.items()
    }
    checkpoint.save(os.path.join(folder, "ckpt"))
    if is_killed:
        with open(os.path.join(folder, f"read-by-{rank}.json"), "w") as file:
            json.dump(read, file)
        for iterator in iterators.values():
            next(iterator)
        strategy.workers.exchange("end", None)
        os.kill(os.getpid(), signal.SIGKILL)
    return read


def parts_of(ranks):
    return {name: [list(chain(*step)) for step in joined([read[name] for read in ranks])] for name in PROGRAMS}


@pytest.mark.end_to_end
@pytest.mark.parametrize(
    "layouts", [[(2, 1), (3, 1)], pytest.param([(4, 1), (2, 1), (3, 1), (2, 2)], marks=pytest.mark.slow)], ids=str
)
def test_processes_are_killed_and_others_go_on(layouts, tmp_path, process_pool):
    """The first ones are killed; after the others, one process with two replicas reads the rest."""
    (num_killed, num_local), *others = layouts
    with ts.testing.ProcessPool(num_killed) as pool, pytest.raises(ts.testing.RemoteError, match="exit code -9"):
        pool.run(train, str(tmp_path), num_local, 3, is_killed=True)
    killed = [json.loads((tmp_path / f"read-by-{rank}.json").read_text()) for rank in range(num_killed)]
    parts = [parts_of(killed)]
    parts += [parts_of(process_pool(size).run(train, str(tmp_path), local, 2)) for size, local in others]
    parts.append(parts_of([train(str(tmp_path), 2, END)]))
    for name in PROGRAMS:
        batches = [batch for part in parts for batch in part[name]]
        assert sorted(chain(*batches)) == list(range(43)), name
        if name in IN_ORDER:
            assert [len(batch) for batch in batches] == [4] * 10 + [3], name
    for name in ("arrays", "stateful stream loader"):
        assert list(chain(*(batch for part in parts for batch in part[name]))) == list(range(43))


# What is saved


def ones(number):
    return [torch.ones(4) for _ in range(number)]


STREAM = {"num_read", "is_finished", "sample", "random", "data"}
KEYS = {
    "index batches": ({"step", "checksum", "is_finished", "random"}, lambda: DataLoader(range(12), 4), None),
    "global batches": ({"step", "length", *STREAM}, lambda: ones(3), None),
    "function": ({"step", "is_finished", "pipelines", "num_replicas"}, None, None),
    "own streams": (
        {"step", "is_finished", "pipelines", "batch_size", "layout", "next_size"},
        lambda: ones(3),
        ts.data.AutoShardPolicy.OFF,
    ),
}


def saved_states(kind):
    """Return what each of two processes saves after the first step."""
    _, make, policy = KEYS[kind]
    strategy = ts.MirroredStrategy(["cpu:0"])
    if make is None:
        dataset = strategy.distribute_datasets_from_function(lambda _: ones(3))
    else:
        dataset = strategy.experimental_distribute_dataset(make(), auto_shard_policy=policy)
    iterator = iter(dataset)
    next(iterator)
    return dataset.state_dict()


@pytest.mark.parametrize("kind", KEYS)
def test_what_a_state_holds(kind, process_pool):
    """Checkpoints of earlier versions hold it: another key would lose or repeat examples of a training that goes on."""
    for state in process_pool(2).run(saved_states, kind):
        assert set(state) == {"kind", "step", "is_finished", "position"}
        assert (state["step"], state["is_finished"]) == (1, False)
        assert set(state["position"]) == KEYS[kind][0]
        for pipeline in state["position"].get("pipelines", []):
            assert set(pipeline) == {"reader", "leftover"}
            assert set(pipeline["reader"]) == STREAM
