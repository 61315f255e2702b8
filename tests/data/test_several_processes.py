"""Every process reads its part: together the parts are what one process with all replicas reads."""

import random
from functools import partial
from itertools import chain, product

import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    ConcatDataset,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    Sampler,
    Subset,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

from tests.data.fake_workers import one_process, run_ranks
from torchstrategy.base.values import PerReplica, get_shares
from torchstrategy.data.batch import TensorSpec
from torchstrategy.data.distribute import distribute_dataset
from torchstrategy.errors import DisagreementError

TOPOLOGIES = [(2, 1), (3, 1), (2, 2), (4, 1)]


class Recording(torch.utils.data.Dataset):
    """Remembers which examples were loaded."""

    def __init__(self, num_examples):
        self.num_examples = num_examples
        self.loaded = []

    def __len__(self):
        return self.num_examples

    def __getitem__(self, index):
        self.loaded.append(index)
        return {"x": torch.full((2,), float(index)), "i": index, "name": f"n{index}"}


class LazySampler(Sampler):
    """Draws from torch's default generator at every batch."""

    def __init__(self, num_batches):
        self.num_batches = num_batches

    def __len__(self):
        return self.num_batches

    def __iter__(self):
        for _ in range(self.num_batches):
            yield torch.randint(100, (3,)).tolist()


class RandomStream(IterableDataset):
    def __iter__(self):
        for _ in range(3):
            yield torch.randint(100, (5,))


class Subclass(DataLoader):
    pass


class Doubling(DataLoader):
    def __iter__(self):
        for batch in super().__iter__():
            if len(batch) == self.batch_size:
                yield batch * 2


def values(element):
    leaves = element.values if isinstance(element, PerReplica) else (element,)
    return [leaf.tolist() for leaf in leaves]


def epochs(make, placement, workers, num_epochs=2, use_random_numbers=False):
    """Read the epochs' elements as (values of the local replicas, shares)."""
    dataset = distribute_dataset(make(), placement, workers)
    result = []
    for _ in range(num_epochs):
        elements = []
        for element in dataset:
            elements.append((values(element), get_shares(element).shares))
            if use_random_numbers and workers is not None:
                torch.rand(workers.rank)  # as a model with dropout on a share of another size would
        result.append(elements)
    return result


def joined(ranks):
    """Put the ranks' local values of each step together, checking that they agree about the shares."""
    result = []
    for per_epoch in zip(*ranks, strict=True):
        steps = []
        for elements in zip(*per_epoch, strict=True):
            assert len({shares for _, shares in elements}) == 1
            steps.append((list(chain(*(local for local, _ in elements))), elements[0][1]))
        result.append(steps)
    return result


def compare(make, processes, num_local, num_epochs=2):
    ranks = run_ranks(processes, lambda placement, workers: epochs(make, placement, workers, num_epochs), num_local)
    state = torch.get_rng_state()
    torch.manual_seed(0)  # as rank 0's
    one = epochs(make, one_process(processes * num_local), None, num_epochs)
    torch.set_rng_state(state)
    assert joined(ranks) == one
    return one


@pytest.mark.slow
@pytest.mark.parametrize(("processes", "num_local"), TOPOLOGIES)
def test_sequential_loaders_of_many_sizes(processes, num_local):
    for num_examples, batch_size, drop_last in product((0, 1, 2, 5, 9, 12), (1, 3, 4, 7), (False, True)):
        make = partial(DataLoader, range(num_examples), batch_size, drop_last=drop_last)
        compare(make, processes, num_local, 1)


def make_seeded(kind):
    generator = torch.Generator().manual_seed(torch.initial_seed())  # differs between ranks
    return {
        "loader": lambda: DataLoader(range(11), 4, shuffle=True, generator=generator),
        "sampler": lambda: DataLoader(range(11), 4, sampler=RandomSampler(range(11), generator=generator)),
        "replacement": lambda: DataLoader(
            range(11), 4, sampler=RandomSampler(range(11), replacement=True, num_samples=70, generator=generator)
        ),
        "batch_sampler": lambda: DataLoader(
            range(11), batch_sampler=BatchSampler(SubsetRandomSampler([1, 3, 5, 7], generator), 3, drop_last=False)
        ),
    }[kind]()


@pytest.mark.parametrize("kind", ["loader", "sampler", "replacement", "batch_sampler"])
@pytest.mark.parametrize(("processes", "num_local"), [(2, 1), (2, 2)])
def test_shuffling_by_a_generator_of_the_datas_own(kind, processes, num_local):
    first, second = compare(lambda: make_seeded(kind), processes, num_local)
    assert first != second


@pytest.mark.parametrize(
    "make",
    [
        lambda: DataLoader(range(11), 4, shuffle=True),
        lambda: DataLoader(range(11), sampler=WeightedRandomSampler([1.0] * 11, 9), batch_size=4),
        lambda: DataLoader(range(11), sampler=SubsetRandomSampler(range(8)), batch_size=3),
        lambda: DataLoader(torch.arange(12).view(3, 4), batch_size=None, shuffle=True),
        lambda: DataLoader(range(40), 4, shuffle=True, num_workers=1, prefetch_factor=3),
    ],
)
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_shuffling_by_the_default_generator_follows_the_chief(make):
    for processes, num_local in ((2, 1), (2, 2)):
        first, second = compare(make, processes, num_local)
        assert first != second


def test_the_order_stays_the_same_when_models_draw_differently():
    for make in (
        lambda: DataLoader(range(100), batch_sampler=LazySampler(6)),
        lambda: DataLoader(RandomStream(), None),
        RandomStream,
    ):
        ranks = run_ranks(3, lambda placement, workers, m=make: epochs(m, placement, workers, 3, True))
        orders = [[tuple(chain(*local)) for local, _ in steps] for steps in joined(ranks)]
        assert len({batch for steps in orders for batch in steps}) == sum(map(len, orders)), "an epoch repeats batches"


def test_a_ranks_own_random_stream_is_not_touched():
    def draws(placement, workers):
        list(distribute_dataset(DataLoader(range(5), 2, shuffle=True, generator=torch.Generator()), placement, workers))
        return torch.rand(3).tolist()

    ranks = run_ranks(3, draws, seed=7)
    for rank in (1, 2):
        torch.manual_seed(7 + rank)
        torch.empty((), dtype=torch.int64).random_(generator=torch.Generator())
        assert ranks[rank] == torch.rand(3).tolist()
    assert len({tuple(drawn) for drawn in ranks}) == 3


@pytest.mark.parametrize(("processes", "num_local"), TOPOLOGIES)
def test_each_example_is_loaded_once_and_only_where_it_is_needed(processes, num_local):
    def load(placement, workers):
        data = Recording(11)
        elements = list(distribute_dataset(DataLoader(data, 4, shuffle=True), placement, workers))
        local = [values(element["i"]) for element in elements]
        names = [element["name"] for element in elements]
        used = sorted(i for step in local for part in step for i in part)
        extra = len(data.loaded) - len(used)
        return used, extra, sum(not any(step) for step in local), names

    ranks = run_ranks(processes, load, num_local)
    assert sorted(i for used, *_ in ranks for i in used) == list(range(11))
    for _, extra, num_empty_steps, _ in ranks:
        assert extra == num_empty_steps  # one example, for the structure of an empty batch


def test_empty_parts_keep_structure_dtypes_and_shapes():
    def last(placement, workers):
        return list(distribute_dataset(DataLoader(Recording(5), 4), placement, workers))[-1]

    for element in run_ranks(4, last)[1:]:
        assert element["x"].shape == (0, 2)
        assert element["i"].dtype == torch.int64
        assert element["name"] == []
        assert get_shares(element["x"]).shares == (1, 0, 0, 0)
    empty = run_ranks(2, last, num_local=2)[1]
    assert [value.shape for value in empty["x"].values] == [(0, 2), (0, 2)]
    assert empty["name"].values == ([], [])


@pytest.mark.filterwarnings("ignore:.*pin_memory:UserWarning")
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_every_option_of_the_loader_is_kept():
    def collate(batch):
        return torch.tensor(batch) + 100

    def start(worker_id):
        torch.manual_seed(worker_id)

    def read(placement, workers):
        loader = Subclass(
            range(8),
            4,
            num_workers=1,
            collate_fn=collate,
            pin_memory=True,
            timeout=20,
            worker_init_fn=start,
            multiprocessing_context="fork",
            generator=torch.Generator(),
            prefetch_factor=4,
            persistent_workers=True,
        )
        dataset = distribute_dataset(loader, placement, workers)
        copy = dataset._source._loader
        assert type(copy) is Subclass
        options = loader.__dict__
        changed = {name for name in options if options[name] is not copy.__dict__[name]}
        assert changed == {"batch_sampler", "dataset", "collate_fn", "worker_init_fn"}
        return [[values(element) for element in dataset] for _ in range(2)]

    assert run_ranks(2, read) == [[[[[100, 101]], [[104, 105]]]] * 2, [[[[102, 103]], [[106, 107]]]] * 2]


def test_a_loader_that_iterates_in_its_own_way_is_read_whole():
    def read(placement, workers):
        return [values(element) for element in distribute_dataset(Doubling(range(10), 4), placement, workers)]

    assert run_ranks(2, read) == [[[[0, 2]], [[8, 10]]], [[[4, 6]], [[12, 14]]]]


def test_batches_that_a_collate_fn_makes_smaller_are_counted_as_they_are():
    def collate(examples):
        return torch.tensor([value for value in examples if value != 2])

    def read(placement, workers):
        dataset = distribute_dataset(DataLoader(range(6), 4, collate_fn=collate), placement, workers)
        return [(values(element), get_shares(element).shares) for element in dataset]

    assert run_ranks(2, read) == [
        [([[0, 1]], (2, 1)), ([[4]], (1, 1))],
        [([[3]], (2, 1)), ([[5]], (1, 1))],
    ]


def test_a_dataset_that_leaves_examples_out_is_an_error():
    class Filtered(Dataset):
        def __len__(self):
            return 4

        def __getitems__(self, indices):
            return [torch.tensor(i) for i in indices if i != 1]

    def read(placement, workers):
        return list(distribute_dataset(DataLoader(Filtered(), 4), placement, workers))

    with pytest.raises(ValueError, match=r"__getitems__ gave \[1\] examples where 2 were asked for"):
        run_ranks(2, read)


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_loader_that_is_being_iterated_can_be_distributed():
    def read(placement, workers):
        loader = DataLoader(range(4), 2, num_workers=1, persistent_workers=True)
        first = next(iter(loader)).tolist()
        return first, [values(element) for element in distribute_dataset(loader, placement, workers)]

    assert run_ranks(2, read) == [([0, 1], [[[0]], [[2]]]), ([0, 1], [[[1]], [[3]]])]


def test_out_of_order_loading_is_refused_with_a_warning():
    def read(placement, workers):
        loader = DataLoader(range(4), 2, num_workers=1, in_order=False)
        with pytest.warns(UserWarning, match="in_order=False"):
            source = distribute_dataset(loader, placement, workers)._source
        assert not loader.in_order
        return source._loader.in_order

    (in_order,) = run_ranks(1, read)
    assert in_order


def test_arrays_and_lists_of_batches():
    arrays = (torch.arange(7), torch.arange(7) * 2)

    def read(placement, workers):
        by_size = distribute_dataset(arrays, placement, workers, batch_size=4)
        batches = distribute_dataset([torch.arange(4), torch.arange(4, 7)], placement, workers)
        num_talks = len(workers.operations)
        first = [values(y) for _, y in by_size]
        assert workers.operations[num_talks:] == ["number of the batch to go on with"]  # their shares are arithmetic
        return first, [values(x) for x in batches], len(by_size), batches.element_spec

    ranks = run_ranks(2, read)
    assert [first for first, *_ in ranks] == [[[[0, 2]], [[8, 10]]], [[[4, 6]], [[12]]]]
    assert [second for _, second, *_ in ranks] == [[[[0, 1]], [[4, 5]]], [[[2, 3]], [[6]]]]
    assert ranks[0][2:] == (2, TensorSpec((None,), torch.int64))


def by_rank(data):
    """Give each rank other data."""
    return lambda placement, workers: list(distribute_dataset(data[workers.rank](), placement, workers))


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (
            [lambda: DataLoader(range(8), 2), lambda: DataLoader(range(6), 2)],
            r"data that they divide.*rank 0: 4 batches.*rank 1: 3 batches",
        ),
        ([lambda: DataLoader([1, 2], 2), lambda: DataLoader([2, 1], 2)], "2 examples, of which checksum"),
        (
            [lambda: DataLoader([(torch.zeros(2), "a")], 1), lambda: DataLoader([(torch.zeros(2), "b")], 1)],
            "1 examples, of which checksum",
        ),
        ([lambda: DataLoader(range(8), 2)] * 2 + [lambda: DataLoader(range(1, 9), 2, sampler=range(1, 8))], "rank 2"),
        (
            [
                lambda: DataLoader(range(9), batch_sampler=[[0, 1], [2, 3]]),
                lambda: DataLoader(range(9), batch_sampler=[[0, 1], [3, 2]]),
            ],
            r"order of the index batches so far.*rank 1: \[2",
        ),
        (
            [lambda: [torch.ones(2)] * 2, lambda: [torch.ones(2)]],
            r"next global batch.*rank 0: number 1: float32\[2\]; rank 1: None",
        ),
        (
            [lambda: [torch.ones(2)], lambda: [torch.ones(3)]],
            r"rank 0: number 0: float32\[2\]; rank 1: number 0: float32\[3\]",
        ),
        (
            [
                lambda: DataLoader(range(4), 2, shuffle=True),
                lambda: DataLoader(range(4), 2, shuffle=True, generator=torch.Generator()),
            ],
            "torch generators",
        ),
    ],
)
def test_ranks_that_disagree_are_named(data, message):
    with pytest.raises(DisagreementError, match=message):
        run_ranks(len(data), by_rank(data))


class Listing(Dataset):
    def __init__(self, **lists):
        self.__dict__.update(lists)

    def __len__(self):
        return 4

    def __getitem__(self, index):
        return index


@pytest.mark.parametrize(
    ("lists", "said"),
    [
        ([{"files": [f"/{folder}/{i}.png" for i in range(4)]} for folder in "ab"], None),
        ([{"files": list(files), "labels": [0] * 4} for files in ("abcd", "abdc")], "its files differ"),
        ([{"pairs": [(f"/x/{name}", 0) for name in files]} for files in ("abcd", "bacd")], "its pairs differ"),
        ([{"x": torch.arange(4.0) + rank} for rank in range(2)], "its x differ"),
        ([{"cache": [None] * 4, "rank": rank, "other": [rank]} for rank in range(2)], None),
    ],
)
def test_datasets_that_list_other_examples_are_told(lists, said, recwarn):
    datasets = [Listing(**own) for own in lists]
    for data in (datasets, [Subset(ConcatDataset([dataset]), range(3)) for dataset in datasets]):
        run_ranks(2, by_rank([partial(DataLoader, own, 2) for own in data]))
    told = [str(warning.message) for warning in recwarn]
    assert len(told) == (0 if said is None else 2)
    assert all("The dataset of rank 1 has other examples than rank 0's" in text for text in told)
    assert said is None or (f": {said}." in told[0] and f"its datasets[0].{said[4:]}." in told[1])


def test_shuffling_by_python_is_found_out():
    class PythonShuffle(Sampler):
        def __len__(self):
            return 20

        def __iter__(self):
            return iter(random.sample(range(20), 20))

    make = lambda: DataLoader(range(20), 4, sampler=PythonShuffle())  # noqa: E731
    with pytest.raises(DisagreementError, match="torch generator"):
        run_ranks(2, by_rank([make, make]))


def test_arrays_of_different_length_are_an_error():
    def distribute(placement, workers):
        distribute_dataset(torch.ones(4 + workers.rank), placement, workers, batch_size=2)

    with pytest.raises(DisagreementError, match=r"rank 0: \[4, 2, \d+\]; rank 1: \[5, 2, \d+\]"):
        run_ranks(2, distribute)


def test_components_need_a_batch_dimension_in_every_hosting():
    def collate(batch):
        return torch.tensor(batch), torch.tensor(3.0)

    with pytest.raises(IndexError, match="Component 1"):
        run_ranks(2, by_rank([lambda: DataLoader(range(4), 2, collate_fn=collate)] * 2))


def test_element_spec_talks_to_nobody():
    def spec(placement, workers):
        loader = DataLoader(TensorDataset(torch.ones(4, 3)), 2, shuffle=True)
        result = distribute_dataset(loader, placement, workers).element_spec
        assert not workers.operations
        return result

    assert run_ranks(2, spec) == [[TensorSpec((None, 3), torch.float32)]] * 2
