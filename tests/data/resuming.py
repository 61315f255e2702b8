"""Programs that stop and go on: data sets of every kind, ranks that are threads, and a relay of runs."""

import io
import itertools
from functools import partial
from itertools import chain

import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, Sampler, SubsetRandomSampler
from torchdata.stateful_dataloader import StatefulDataLoader

import torchstrategy as ts
from tests.data.data_sets import Stream, distributor
from tests.data.fake_workers import run_ranks
from torchstrategy.base.options import AutoShardPolicy
from torchstrategy.data.distribute import distribute_from_function

END = 10**6  # steps until the end of an epoch

# Data whose global batches every process divides


class Numbers(IterableDataset):
    """A stream that knows its position, as torchdata's loader asks for it."""

    def __init__(self, num_examples):
        self._num_examples = num_examples
        self._next = 0

    def __iter__(self):
        start, self._next = self._next, 0
        for i in range(start, self._num_examples):
            self._next = i + 1
            yield i
        self._next = 0

    def state_dict(self):
        return {"next": self._next}

    def load_state_dict(self, state):
        self._next = state["next"]


class Shuffled:
    """A re-iterable of global batches that draws from torch's default generator."""

    def __init__(self, num_examples, batch_size):
        self._num_examples = num_examples
        self._batch_size = batch_size

    def __iter__(self):
        return iter(torch.randperm(self._num_examples).split(self._batch_size))


class LazyBatches(Sampler):
    """Draws each batch when it is asked for it."""

    def __init__(self, num_examples, batch_size):
        self._num_examples = num_examples
        self._batch_size = batch_size

    def __len__(self):
        return -(-self._num_examples // self._batch_size)

    def __iter__(self):
        left = list(range(self._num_examples))
        while left:
            size = min(self._batch_size, len(left))
            yield [left.pop(int(torch.randint(len(left), ()))) for _ in range(size)]


def own_generator():
    """A generator with a state that differs from rank to rank and from start to start of the program."""
    return torch.Generator().manual_seed(torch.initial_seed() % 1000)


def batch_sampler(num_examples, batch_size):
    sampler = SubsetRandomSampler(range(num_examples), own_generator())
    return BatchSampler(sampler, batch_size, drop_last=False)


def numbers(num_examples):
    return torch.arange(num_examples)


def pipeline(num_examples, batch_size):
    dataset = ts.data.Dataset.from_tensor_slices(numbers(num_examples)).shuffle(5)
    return dataset.repeat(2).batch(batch_size).prefetch(2)


def seeded_pipeline(num_examples, batch_size):
    dataset = ts.data.Dataset.from_tensor_slices(numbers(num_examples)).map(lambda x: x + 0)
    return dataset.shuffle(7, seed=3).batch(batch_size)


DATA = {
    "shuffled loader": lambda n, b: DataLoader(range(n), b, shuffle=True),
    "loader with a generator": lambda n, b: DataLoader(range(n), b, shuffle=True, generator=own_generator()),
    "batch sampler": lambda n, b: DataLoader(range(n), batch_sampler=batch_sampler(n, b)),
    "lazy batch sampler": lambda n, b: DataLoader(range(n), batch_sampler=LazyBatches(n, b)),
    "stateful loader": lambda n, b: StatefulDataLoader(range(n), b, shuffle=True),
    "stateful stream loader": lambda n, b: StatefulDataLoader(Numbers(n), b),
    "stream loader": lambda n, b: DataLoader(NumbersOf(n, shuffle=True), b),
    "batches": Shuffled,
    "arrays": lambda n, b: numbers(n),
    "pipeline": pipeline,
    "seeded pipeline": seeded_pipeline,
}
WITH_WORKERS = {
    "shuffled loader": lambda n, b: DataLoader(range(n), b, shuffle=True, num_workers=2, prefetch_factor=4),
    "stream loader": lambda n, b: DataLoader(NumbersOf(n, shuffle=True), b, num_workers=2, prefetch_factor=4),
    "stateful stream loader": lambda n, b: StatefulDataLoader(Numbers(n), b, num_workers=1, prefetch_factor=4),
}
GENERATOR_OF_ITS_OWN = ("loader with a generator", "batch sampler")


class NumbersOf(Stream):
    """Only the examples' numbers."""

    def __iter__(self):
        return (example["number"] for example in super().__iter__())


def distribute_data(source, num_examples, batch_size):
    """Return what distributes the data with the call of a strategy."""

    def distribute(call, _placement, _workers):
        arguments = {"batch_size": batch_size} if source is DATA["arrays"] else {}
        return call(source(num_examples, batch_size), **arguments)

    return distribute


# Data of which each process reads its own


def read_file(name):
    """A file of this name holds the numbers from the first to before the second."""
    start, stop = map(int, str(name).split("-"))
    return iter(range(start, stop))


def files(num_examples, num_files):
    """Cut the examples into files of different sizes, one of them empty."""
    bounds = sorted({(i * i * num_examples) // (num_files - 1) ** 2 for i in range(num_files)})
    bounds = [*bounds, *[num_examples] * (num_files + 1 - len(bounds))]
    return [f"{start}-{stop}" for start, stop in itertools.pairwise(bounds)]


def distribute_files(num_examples, batch_size, shuffle=False, policy=AutoShardPolicy.FILE, num_workers=None):
    def distribute(call, _placement, _workers):
        dataset = ts.data.Dataset.from_files(files(num_examples, 7), read_file)
        dataset = dataset.shuffle(4) if shuffle else dataset
        if num_workers is None:
            return call(dataset.batch(batch_size), auto_shard_policy=policy)
        loader = DataLoader(dataset, batch_size, num_workers=num_workers)
        return call(loader, auto_shard_policy=policy)

    return distribute


def distribute_off(source, num_examples, batch_size):
    def distribute(call, _placement, _workers):
        return call(source(num_examples, batch_size), auto_shard_policy=AutoShardPolicy.OFF)

    return distribute


def distribute_function(num_examples, batch_size, kind):
    """Every pipeline has every P-th number, in batches for one replica."""

    def dataset_fn(context):
        own = range(context.input_pipeline_id, num_examples, context.num_input_pipelines)
        size = max(1, batch_size // context.num_replicas_in_sync)
        if kind == "loader":
            return DataLoader(own, size, shuffle=len(own) > 0)
        if kind == "stateful":
            return StatefulDataLoader(own, size, shuffle=len(own) > 0)
        return ts.data.Dataset.from_tensor_slices(torch.tensor(list(own), dtype=torch.int64)).shuffle(3).batch(size)

    def distribute(_call, placement, workers):
        return distribute_from_function(dataset_fn, placement, workers)

    return distribute


OWN = {
    "files": distribute_files,
    "shuffled files": partial(distribute_files, shuffle=True),
    "AUTO files": partial(distribute_files, shuffle=True, policy=AutoShardPolicy.AUTO),
    "loader of files": partial(distribute_files, num_workers=0),
    "function of loaders": partial(distribute_function, kind="loader"),
    "function of stateful loaders": partial(distribute_function, kind="stateful"),
    "function of pipelines": partial(distribute_function, kind="pipeline"),
    "OFF": partial(distribute_off, DATA["shuffled loader"]),
    "OFF pipeline": partial(distribute_off, DATA["seeded pipeline"]),
}


# Reading a part


def local_numbers(element):
    leaves = element.values if isinstance(element, ts.PerReplica) else (element,)
    return [leaf.tolist() for leaf in leaves]


def read_steps(dataset, num_steps):
    """Read so many steps, or until the end, which the iterator is then asked for; a model draws random numbers."""
    iterator = iter(dataset)
    steps = []
    while len(steps) < num_steps and (element := next(iterator, None)) is not None:
        steps.append(local_numbers(element))
        torch.rand(2)
    return steps


def through_a_file(state):
    buffer = io.BytesIO()
    torch.save(state, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=True)


def same(a, b):
    """Compare two states."""
    if isinstance(a, torch.Tensor):
        return isinstance(b, torch.Tensor) and torch.equal(a, b)
    if isinstance(a, dict):
        return isinstance(b, dict) and a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    return a == b


def run(distribute, layout, num_steps, state=None, seed=0):
    """A program that starts, reads some steps and stops; it may go on with a state.

    Returns:
        For each step the numbers of each replica, and the state.
    """
    num_processes, num_local = layout

    def on_a_rank(placement, workers):
        dataset = distribute(distributor(placement, workers if num_processes > 1 else None), placement, workers)
        if state is not None:
            dataset.load_state_dict(through_a_file(state))
        read = [read_steps(dataset, count) for count in num_steps]
        return read, through_a_file(dataset.state_dict())

    def alone(placement, _workers):
        return on_a_rank(placement, None)

    ranks = run_ranks(num_processes, alone if num_processes == 1 else on_a_rank, num_local, seed)
    states = [left for _, left in ranks]
    assert all(same(states[0], other) for other in states[1:]), "the ranks' states differ"
    epochs = [joined([read[i] for read, _ in ranks]) for i in range(len(num_steps))]
    return epochs, states[0]


def joined(ranks):
    assert len({len(steps) for steps in ranks}) == 1, "the ranks have different numbers of steps"
    return [[numbers for part in parts for numbers in part] for parts in zip(*ranks, strict=True)]


def relay(distribute, layouts, stops, seed=0, num_epochs=0):
    """Stop at each of these steps and go on with the next layout; the last one reads an epoch more.

    Args:
        num_epochs: epochs that are read before the one of the first stop.

    Returns:
        The global batches of each epoch.
    """
    state, epochs = None, [[]]
    for i, (layout, stop) in enumerate(zip(layouts, [*stops[: len(layouts) - 1], None], strict=True)):
        counts = [END, END] if stop is None else [*[END] * (num_epochs if i == 0 else 0), stop]
        read, state = run(distribute, layout, counts, state, seed + 1000 * i)
        for steps, count in zip(read, counts, strict=True):
            epochs[-1] += [list(chain(*step)) for step in steps]
            if len(steps) < count:
                epochs.append([])
    return epochs[:-1]


def flat(steps):
    return list(chain(*chain(*steps)))
