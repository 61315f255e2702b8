"""Random numbers of data loading: the same for any number of workers, other ones for each batch and replica."""

import copy
import pickle
import random

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, Subset, default_collate, get_worker_info

import torchstrategy as ts
from tests.data.fake_workers import run_ranks
from torchstrategy.base.values import local_results
from torchstrategy.data.distribute import distribute_dataset
from torchstrategy.data.seeding import IndexBatch, SeededDataset, _mix, seed_batches, step_seed


class Augmented(Dataset):
    """Each example: its index and one number of every source."""

    def __init__(self, size=12):
        self.size = size
        self.fail_at = None

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        if index == self.fail_at:
            raise ValueError("broken example")
        return {"index": index, "torch": torch.rand(3), "numpy": np.random.randn(3), "python": random.gauss(0, 1)}


class InBatches(Augmented):
    def __getitems__(self, indices):
        assert type(indices) is list
        noise = torch.rand(len(indices))
        return [{**self[index], "noise": value} for index, value in zip(indices, noise, strict=True)]


class SeededBatches:
    """Gives index batches with seeds, as the strategy's loader does."""

    def __init__(self, size=12, batch_size=4, replica_id=0, epoch_seed=5):
        self.batches = [list(range(i, min(i + batch_size, size))) for i in range(0, size, batch_size)]
        self.replica_id = replica_id
        self.epoch_seed = epoch_seed

    def __iter__(self):
        for step, batch in enumerate(self.batches):
            yield IndexBatch(batch, step_seed(self.epoch_seed, step, self.replica_id))

    def __len__(self):
        return len(self.batches)


def make_loader(dataset=None, num_workers=0, replica_id=0, epoch_seed=5, **kwargs):
    dataset = Augmented() if dataset is None else dataset
    sampler = SeededBatches(replica_id=replica_id, epoch_seed=epoch_seed)
    loader = DataLoader(dataset, batch_sampler=sampler, num_workers=num_workers, **kwargs)
    seed_batches(loader)
    return loader


def assert_equal(left, right):
    torch.testing.assert_close(left, right, rtol=0, atol=0)


def move_all_streams():
    torch.rand(7), np.random.rand(7), random.random()


def draw_all():
    return torch.rand(3).tolist(), np.random.rand(3).tolist(), [random.random() for _ in range(3)]


def seed_all(seed):
    torch.manual_seed(seed), np.random.seed(seed), random.seed(seed)


def noisy_collate(examples):
    batch = default_collate(examples)
    mixed = torch.cat([torch.rand(2).double(), torch.from_numpy(np.random.rand(2))]) + random.random()
    batch["mixed"] = mixed.repeat(len(examples), 1)
    return batch


@pytest.mark.parametrize("dataset", [Augmented(), InBatches(), Subset(Augmented(20), list(range(3, 15)))])
def test_any_number_of_workers_loads_the_same(dataset):
    expected = list(make_loader(dataset, collate_fn=noisy_collate))
    for num_workers in (1, 2):
        move_all_streams()
        assert_equal(list(make_loader(dataset, num_workers, collate_fn=noisy_collate)), expected)


def test_augmentation_differs_between_examples_batches_replicas_and_epochs():
    runs = [make_loader(replica_id=r, epoch_seed=e) for r in (None, 0, 1) for e in (5, 6)]
    batches = [batch for run in runs for batch in run]
    for name in ("torch", "numpy", "python"):
        values = torch.cat([batch[name].flatten() for batch in batches])
        assert len(values.unique()) == len(values), name


def test_torch_and_numpy_draw_different_words():
    class Words(Augmented):
        def __getitem__(self, index):
            return torch.randint(2**32, (64,)), np.random.randint(2**32, size=64)

    for torch_words, numpy_words in make_loader(Words()):
        assert not set(torch_words.flatten().tolist()) & set(numpy_words.flatten().tolist())


def test_a_batch_does_not_depend_on_batches_before():
    expected = list(make_loader())
    sampler = SeededBatches()
    dataset = SeededDataset(Augmented(), default_collate)
    for i in (2, 0, 1, 1):
        move_all_streams()
        assert_equal(dataset.__getitems__(list(sampler)[i]), expected[i])


def test_loading_in_the_programs_process_moves_no_stream():
    def program(load):
        seed_all(3)
        items = iter(make_loader())
        drawn = [draw_all()]
        for _ in range(3):
            if load:
                next(items)
            drawn.append([draw_all(), random.gauss(0, 1)])
        return drawn

    assert program(load=True) == program(load=False)


def test_pythons_stream_goes_on_wherever_it_stands():
    """Its state is a block of 624 words and a position, which loading must not lose at a block's border either."""
    dataset, batch = SeededDataset(Augmented(), default_collate), IndexBatch([0, 1], 7)

    def program(load):
        random.seed(3)
        drawn = []
        for count in [0, 0, 1, 620, 1, 1, 1, 1, 1, 0, 623, 624, 625, 1248, 1]:
            if load:
                dataset.__getitems__(batch)
            drawn += [random.getrandbits(32) for _ in range(count)]
        return drawn

    assert program(load=True) == program(load=False)


def test_an_error_while_loading_gives_the_streams_back():
    dataset = Augmented()
    dataset.fail_at = 1
    iterator = iter(make_loader(dataset))
    numpy_bits = np.random.get_bit_generator()
    seed_all(3)
    expected = draw_all()
    seed_all(3)
    with pytest.raises(ValueError, match="broken example"):
        next(iterator)
    assert draw_all() == expected
    assert np.random.get_bit_generator() is numpy_bits


def test_the_programs_numpy_generator_may_be_another_one():
    bits = np.random.get_bit_generator()
    expected = list(make_loader())
    np.random.set_bit_generator(np.random.PCG64(1))
    try:
        assert_equal(list(make_loader()), expected)
        assert isinstance(np.random.get_bit_generator(), np.random.PCG64)
    finally:
        np.random.set_bit_generator(bits)


def test_seeding_inside_a_dataset_holds_and_does_not_leak():
    class Fixed(Augmented):
        def __getitem__(self, index):
            torch.manual_seed(index)
            return torch.rand(2)

    seed_all(3)
    expected = draw_all()
    seed_all(3)
    batch = next(iter(make_loader(Fixed())))
    assert_equal(batch[1], torch.rand(2, generator=torch.Generator().manual_seed(1)))
    seed_all(3)
    assert draw_all() == expected


def test_index_batch_is_a_list_and_keeps_its_seed_when_pickled():
    batch = IndexBatch(range(3), 2**64 - 1)
    assert batch == [0, 1, 2]
    for again in (pickle.loads(pickle.dumps(batch)), copy.copy(batch), copy.deepcopy(batch)):
        assert again == batch
        assert isinstance(again, IndexBatch)
        assert again.seed == 2**64 - 1


def test_seeded_dataset_shows_the_inner_one():
    inner = Augmented(7)
    inner.note = "mine"
    dataset = SeededDataset(inner, default_collate)
    assert isinstance(dataset, Dataset)
    assert len(dataset) == 7
    assert dataset[3]["index"] == 3
    assert dataset.note == "mine"
    assert not hasattr(dataset, "unknown")
    again = pickle.loads(pickle.dumps(dataset))
    assert (again.note, len(again), again.inner.size) == ("mine", 7, 7)


def test_seeded_dataset_has_a_length_only_if_the_inner_one_has():
    class Endless(Dataset):
        def __getitem__(self, index):
            return index

    with pytest.raises(TypeError):
        len(SeededDataset(Endless(), default_collate))


class OpenedByWorker(Augmented):
    handle = None

    def __getitem__(self, index):
        info = get_worker_info()
        return index, self.handle, info.dataset is self


def open_handle(worker_id):
    dataset = get_worker_info().dataset
    assert type(dataset) is OpenedByWorker
    dataset.handle = 100 + worker_id


@pytest.mark.slow
@pytest.mark.parametrize("context", ["fork", "spawn"])
def test_worker_init_fn_meets_the_users_dataset(context):
    loader = make_loader(OpenedByWorker(), num_workers=1, worker_init_fn=open_handle, multiprocessing_context=context)
    for _, handles, is_same in loader:
        assert handles.unique().tolist() == [100]
        assert is_same.all()


def test_step_seeds_are_distinct_and_spread():
    seeds = [step_seed(e, s, r) for e in range(10) for s in range(100) for r in (None, *range(9))]
    assert len({seed & 0xFFFFFFFF for seed in seeds}) > len(seeds) - 10
    assert len(set(seeds)) == len(seeds)
    assert all(0 <= seed < 2**64 for seed in seeds)
    bits = torch.tensor([[seed >> i & 1 for i in range(64)] for seed in seeds], dtype=torch.float64)
    assert ((bits.mean(0) - 0.5).abs() < 0.03).all()


def test_step_seed_is_fixed():
    """A changed formula would make a resumed epoch differ from the one that was begun."""
    assert step_seed(2**64 + 1, 2, 3) == step_seed(1, 2, 3) == 14056738641343212577
    assert _mix(0) == 0xE220A8397B1DCDAF  # the published first number of SplitMix64


def two_epochs(devices, num_workers, persistent_workers, shuffle):
    """What the replicas of this process get, and what the program draws afterwards."""
    ts.utils.set_random_seed(3)
    strategy = ts.MirroredStrategy(devices)
    workers = {"num_workers": num_workers, "persistent_workers": persistent_workers}
    loader = DataLoader(Augmented(7), 3, shuffle, collate_fn=noisy_collate, **workers)
    dataset = strategy.experimental_distribute_dataset(loader)
    epochs = []
    for _ in range(2):
        elements = list(dataset)
        torch.rand(len(elements))  # as a model would
        epochs.append([numbers_of(strategy, element) for element in elements])
    return epochs, draw_all()


def numbers_of(strategy, element):
    """For each local replica."""
    columns = {name: strategy.experimental_local_results(value) for name, value in element.items()}
    return [{name: values[i].tolist() for name, values in columns.items()} for i in range(len(columns["index"]))]


@pytest.mark.slow
@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize("devices", [["cpu:0"], ["cpu:0", "cpu:1"]])
def test_any_number_of_workers_end_to_end(devices, shuffle):
    expected = two_epochs(devices, 0, False, shuffle)
    assert expected[0][0] != expected[0][1]
    for num_workers, persistent_workers in ((1, False), (2, False), (2, True)):
        assert two_epochs(devices, num_workers, persistent_workers, shuffle) == expected


def read_ranks(num_local, num_workers, shuffle):
    """For each rank, what its replicas get in two epochs."""

    def read(placement, workers):
        loader = DataLoader(Augmented(7), 3, shuffle, num_workers=num_workers, persistent_workers=num_workers == 2)
        dataset = distribute_dataset(loader, placement, workers)
        return [[local_results(element["numpy"], num_local) for element in dataset] for _ in range(2)]

    return run_ranks(2, read, num_local, seed=4)


@pytest.mark.slow
@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize("num_local", [1, 2])
def test_any_number_of_workers_on_every_rank(num_local, shuffle):
    expected = read_ranks(num_local, 0, shuffle)
    values = torch.cat([part.flatten() for rank in expected for epoch in rank for step in epoch for part in step])
    assert len(values.unique()) == len(values) == 2 * 7 * 3
    for num_workers in (1, 2):
        assert_equal(read_ranks(num_local, num_workers, shuffle), expected)


def test_one_process_draws_the_same_augmentation_for_any_number_of_replicas():
    def batches(count):
        epochs, _ = two_epochs([f"cpu:{i}" for i in range(count)], 0, False, shuffle=True)
        return [[row for replica in step for row in replica["torch"]] for epoch in epochs for step in epoch]

    assert batches(1) == batches(2) == batches(3)
