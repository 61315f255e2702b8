"""Input that can't be right ends in an error that says what, where and what to do; what tf allows is logged."""

import logging

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import (
    BatchSampler,
    ConcatDataset,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    Subset,
    TensorDataset,
)

import torchstrategy as ts
from tests.data.fake_workers import run_ranks
from torchstrategy.base import log
from torchstrategy.data.distribute import distribute_dataset, distribute_from_function
from torchstrategy.errors import DisagreementError, OutOfRangeError

X = torch.arange(6.0).reshape(3, 2)


@pytest.fixture(autouse=True)
def _nothing_said_yet(monkeypatch):
    monkeypatch.setattr(log, "_said", set())


@pytest.fixture
def lines(monkeypatch, caplog):
    """What the library logs, one line each."""
    monkeypatch.setattr(log.logger, "propagate", True)
    caplog.set_level(logging.WARNING, "torchstrategy")
    return lambda: [record.getMessage() for record in caplog.records]


class Same(Dataset):
    """Gives the same example each time."""

    def __init__(self, example, size=6):
        self.example = example
        self.size = size

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        return self.example


class Examples(IterableDataset):
    def __init__(self, *args):
        self.args = args

    def __iter__(self):
        return iter(range(*self.args))


def replicas(count):
    return ts.MirroredStrategy([f"cpu:{i}" for i in range(count)])


def read_by_rank(make, num_local=1, **kwargs):
    """Let rank r read ``make(r)``."""
    return run_ranks(2, lambda p, w: list(distribute_dataset(make(w.rank), p, w, **kwargs)), num_local)


def read_function_by_rank(make, num_local=1):
    return run_ranks(2, lambda p, w: list(distribute_from_function(lambda _: make(w.rank), p, w)), num_local)


OTHER_KINDS = {
    "container": ({"x": X}, (X,)),
    "keys": ({"x": X}, {"y": X}),
    "length": ((X,), (X, X)),
    "dtype": (X, X.int()),
    "dimensions": (X, X[:, 0]),
}


@pytest.mark.parametrize("num_local", [1, 2])
@pytest.mark.parametrize("kinds", OTHER_KINDS.values(), ids=OTHER_KINDS)
class TestOtherStructuresOnAnotherRank:
    def check(self, read, make, num_local, element):
        with pytest.raises(DisagreementError, match=r"(?s)rank 0: .*rank 1: .*very rank") as error:
            read(make, num_local)
        assert f"element {element} of this iteration was read, on rank" in error.value.__notes__[0]

    def test_whole_batches(self, kinds, num_local):
        self.check(read_by_rank, lambda rank: [kinds[0], kinds[rank]], num_local, 1)

    def test_batches_of_a_function(self, kinds, num_local):
        def make(rank):
            return [kinds[0]] * num_local + [kinds[rank]] * num_local

        self.check(read_function_by_rank, make, num_local, 1)

    def test_map_style_loaders(self, kinds, num_local):
        self.check(read_by_rank, lambda rank: DataLoader(Same(kinds[rank]), 3), num_local, 0)


@pytest.mark.parametrize("kinds", OTHER_KINDS.values(), ids=OTHER_KINDS)
def test_other_structures_on_another_replica_of_a_process(kinds):
    dataset = replicas(2).distribute_datasets_from_function(lambda _: [kinds[0], kinds[0], *kinds])
    with pytest.raises(ValueError, match=r"batches for the replicas of one step must have the same") as error:
        list(dataset)
    assert error.value.__notes__ == ["Raised while element 1 of this iteration was read."]


def test_whole_batches_of_other_sizes():
    with pytest.raises(
        DisagreementError, match=r"rank 0: number 1: float32\[3, 2\]; rank 1: number 1: float32\[3, 4\]"
    ):
        read_by_rank(lambda rank: [X, torch.ones(3, 4) if rank else X])


def test_sizes_of_a_functions_batches_may_differ():
    first, second = read_function_by_rank(lambda rank: [X, torch.ones(1, 4) if rank else X])
    assert [tuple(batch.shape) for batch in first + second] == [(3, 2), (3, 2), (3, 2), (1, 4)]


class TestFewerExamplesThanReplicas:
    @pytest.mark.parametrize(
        ("data", "kwargs"),
        [
            (lambda: torch.arange(4), {"batch_size": 2}),
            (lambda: list(range(4)), {"batch_size": 2}),
            (lambda: DataLoader(range(4), 2), {}),
            (lambda: DataLoader(range(4), batch_sampler=BatchSampler(range(4), 2, drop_last=False)), {}),
        ],
    )
    @pytest.mark.parametrize("hosting", ["one process", "processes"])
    def test_works_and_is_said_once(self, data, kwargs, hosting, lines):
        if hosting == "one process":
            strategy = replicas(3)
            for _ in range(2):
                dataset = strategy.experimental_distribute_dataset(data(), **kwargs)
            parts = [batch.values for batch in dataset]
        else:
            parts = list(zip(*run_ranks(3, lambda p, w: list(distribute_dataset(data(), p, w, **kwargs))), strict=True))
        assert [[part.tolist() for part in step] for step in parts] == [[[0], [1], []], [[2], [3], []]]
        (line,) = lines()
        assert "batch size 2 is smaller than the number of replicas, 3" in line
        assert "leaves 1 without examples" in line
        assert "at least 3" in line

    def test_a_partial_last_batch_is_not_said(self, lines):
        assert len(list(replicas(3).experimental_distribute_dataset(torch.arange(4), batch_size=3))) == 2
        assert lines() == []


EMPTY = {
    "list": ([], {}),
    "loader": (DataLoader([], 2), {}),
    "drop_last": (DataLoader(range(3), 5, drop_last=True), {}),
    "iterable": (DataLoader(Examples(0), 2), {}),
    "arrays": (torch.zeros(0, 3), {"batch_size": 4}),
}


class TestNoBatches:
    @pytest.mark.parametrize(("data", "kwargs"), EMPTY.values(), ids=EMPTY)
    def test_no_steps_and_one_line(self, data, kwargs, lines):
        dataset = replicas(2).experimental_distribute_dataset(data, **kwargs)
        assert list(dataset) == list(dataset) == []
        (line,) = lines()
        assert "gave no batches" in line
        assert "drop_last" in line
        with pytest.raises(OutOfRangeError, match="End of the dataset"):
            iter(dataset).get_next()

    @pytest.mark.parametrize(("data", "kwargs"), EMPTY.values(), ids=EMPTY)
    def test_no_specification(self, data, kwargs):
        if isinstance(data, torch.Tensor):
            pytest.skip("an array knows the shapes of its slices")
        dataset = replicas(2).experimental_distribute_dataset(data, **kwargs)
        with pytest.raises(ValueError, match=r"dataset is empty.*at least"):
            dataset.element_spec  # noqa: B018

    @pytest.mark.parametrize("make", [lambda: DataLoader([], 2), lambda: []])
    def test_all_ranks_end(self, make, lines):
        assert read_by_rank(lambda _: make()) == [[], []]
        assert len(lines()) == 1
        assert read_function_by_rank(lambda _: make()) == [[], []]
        assert len(lines()) == 2

    def test_an_exhausted_iterable(self, lines):
        class Once(IterableDataset):
            def __init__(self):
                self.items = iter([X, X])

            def __iter__(self):
                return self.items

        dataset = replicas(2).experimental_distribute_dataset(Once())
        assert len(list(dataset)) == 2
        assert lines() == []
        assert list(dataset) == []
        assert "does not start anew" in lines()[0]

    def test_a_state_at_the_end_is_no_empty_dataset(self, lines):
        dataset = replicas(2).experimental_distribute_dataset(torch.arange(4), batch_size=2)
        iterator = iter(dataset)
        next(iterator), next(iterator)
        again = replicas(2).experimental_distribute_dataset(torch.arange(4), batch_size=2)
        again.load_state_dict(dataset.state_dict())
        assert list(again) == []
        assert lines() == []

    @pytest.mark.parametrize(
        "make",
        [lambda size: [X] * size, lambda size: DataLoader(range(size), 2), lambda size: DataLoader(Examples(size), 1)],
    )
    def test_on_one_rank_only(self, make):
        with pytest.raises(DisagreementError, match=r"rank 0: .*rank 1: .*[Ee]very rank"):
            read_by_rank(lambda rank: make(0 if rank else 4))

    def test_of_a_function_on_one_rank_only(self):
        first, second = read_function_by_rank(lambda rank: [] if rank else [X, X])
        assert [batch.shape[0] for batch in first] == [3, 3]
        assert [tuple(batch.shape) for batch in second] == [(0, 2), (0, 2)]


class HiddenSampler:
    def __init__(self, sampler):
        self.sampler_of_mine = sampler

    def __iter__(self):
        return iter(self.sampler_of_mine)

    def __len__(self):
        return len(self.sampler_of_mine)


class TestDataDividedTwice:
    @pytest.mark.parametrize("num_replicas", [1, 2])
    def test_distributed_sampler(self, num_replicas):
        sampler = DistributedSampler(range(9), 2, 0)
        loaders = [
            DataLoader(range(9), 3, sampler=sampler),
            DataLoader(range(9), batch_sampler=BatchSampler(sampler, 3, drop_last=False)),
        ]
        for loader in loaders:
            with pytest.raises(ValueError, match=r"DistributedSampler.*Remove it"):
                replicas(num_replicas).experimental_distribute_dataset(loader)

    def test_hidden_sampler(self):
        def make(rank):
            return DataLoader(range(9), 3, sampler=HiddenSampler(DistributedSampler(range(9), 2, rank, shuffle=False)))

        with pytest.raises(DisagreementError, match=r"rank 0: .*rank 1: .*no sampler or dataset may divide the data"):
            read_by_rank(make)

    def test_a_function_may_divide(self):
        ranks = read_function_by_rank(
            lambda rank: DataLoader(range(8), 3, sampler=DistributedSampler(range(8), 2, rank))
        )
        assert sorted(value for rank in ranks for batch in rank for value in batch.tolist()) == list(range(8))

    @pytest.mark.parametrize("num_local", [1, 2])
    def test_iterable(self, num_local):
        with pytest.warns(UserWarning, match=r"Ranks \[1\] read other values .*auto_shard_policy=OFF"):
            read_by_rank(lambda rank: DataLoader(Examples(rank, 12, 2), 4), num_local)

    def test_lists_of_strings(self):
        with pytest.warns(UserWarning, match=r"Ranks \[1\] read other values"):
            read_by_rank(lambda rank: [["a", "b" if rank else "c"]])

    def test_equal_data_is_not_warned_of(self):
        batch = {"x": X, "s": ["a", "b", "c"], "b": torch.ones(3, dtype=torch.bfloat16), "o": None}
        batch |= {"n": torch.nested.nested_tensor([X, X[:1], X], layout=torch.jagged), "p": X.to_sparse()}
        batch["z"] = torch.ones(3, 0)
        batch |= {"np": np.array(["u", "v", "w"]), "c": torch.ones(3, dtype=torch.complex64).conj()}
        assert [len(rank) for rank in read_by_rank(lambda _: [batch] * 2)] == [2, 2]

    @pytest.mark.parametrize("indices", [["b", "a"], torch.tensor([1, 0]), np.array([1, 0]), range(1, -1, -1)])
    def test_equal_subsets(self, indices):
        values = {"a": 0, "b": 1} if indices[0] == "b" else [0, 1]
        first, second = read_by_rank(lambda _: DataLoader(Subset(values, indices), 2))
        assert torch.cat(first + second).tolist() == [1, 0]

    @pytest.mark.parametrize(
        "make",
        [
            lambda rank: X + rank,
            lambda rank: {"x": X.numpy(), "y": np.arange(3) + rank},
            lambda rank: torch.cat([X, X + rank]).repeat(20, 1),
        ],
    )
    def test_arrays(self, make):
        with pytest.raises(DisagreementError, match=r"checksum of the arrays.*rank 1: .*same arrays on every rank"):
            read_by_rank(make, batch_size=2)

    @pytest.mark.parametrize(
        "make",
        [
            lambda rank: TensorDataset(torch.arange(6) + rank),
            lambda rank: Subset(range(12), range(rank, 12, 2)),
            lambda rank: ConcatDataset([TensorDataset(X), TensorDataset(X + rank)]),
            lambda rank: torch.utils.data.random_split(range(12), [6, 6], torch.Generator().manual_seed(rank))[0],
        ],
    )
    @pytest.mark.parametrize("is_loader", [True, False])
    def test_map_style_datasets(self, make, is_loader):
        kwargs = {} if is_loader else {"batch_size": 4}
        with pytest.raises(
            DisagreementError, match=r"data that they divide.*rank 1: .*random_split must be seeded alike"
        ):
            read_by_rank(lambda rank: DataLoader(make(rank), 4) if is_loader else make(rank), **kwargs)
        assert read_by_rank(lambda _: DataLoader(make(0), 4))


ITERATED_ONCE = "can be iterated only once"
NO_DATASET = "is not a dataset"
EXAMPLES = "holds examples: pass batch_size="
NO_BATCH_DIMENSION = "no batch dimension.*Batch the dataset"
WRONG_DATA = {
    "None": (lambda: None, ValueError, "must not be None"),
    "int": (lambda: 3, TypeError, NO_DATASET),
    "str": (lambda: "abc", TypeError, NO_DATASET),
    "function": (lambda: len, TypeError, NO_DATASET),
    "class": (lambda: Same, TypeError, NO_DATASET),
    "module": (lambda: nn.Linear(2, 2), TypeError, NO_DATASET),
    "generator": (lambda: (batch for batch in [X]), TypeError, ITERATED_ONCE),
    "iterator": (lambda: iter([X]), TypeError, ITERATED_ONCE),
    "tensor": (lambda: X, ValueError, EXAMPLES),
    "array": (lambda: X.numpy(), ValueError, EXAMPLES),
    "tuple": (lambda: (X, X), ValueError, EXAMPLES),
    "dict": (lambda: {"x": X}, ValueError, EXAMPLES),
    "dataset": (lambda: Same(X), ValueError, EXAMPLES),
    "numbers": (lambda: [1, 2, 3], IndexError, NO_BATCH_DIMENSION),
    "scalars": (lambda: [torch.tensor(1.0)], IndexError, NO_BATCH_DIMENSION),
    "strings": (lambda: ["a", "b"], IndexError, NO_BATCH_DIMENSION),
    "objects": (lambda: [object()], IndexError, NO_BATCH_DIMENSION),
    "examples": (lambda: Examples(3), IndexError, NO_BATCH_DIMENSION),
    "loader of examples": (lambda: DataLoader(Examples(3), None), IndexError, NO_BATCH_DIMENSION),
    "loaders": (lambda: [DataLoader(range(3))], ValueError, "dataset of datasets"),
}


class TestWrongTypes:
    @pytest.mark.parametrize(("make", "kind", "message"), WRONG_DATA.values(), ids=WRONG_DATA)
    def test_dataset(self, make, kind, message):
        with pytest.raises(kind, match=message):
            list(replicas(2).experimental_distribute_dataset(make()))

    @pytest.mark.parametrize(("make", "kind", "message"), WRONG_DATA.values(), ids=WRONG_DATA)
    def test_dataset_on_all_ranks(self, make, kind, message):
        with pytest.raises(kind, match=message):
            read_by_rank(lambda _: make())

    @pytest.mark.parametrize("batch_size", [0, -1, 2.0, True, "3", torch.tensor(3)])
    def test_batch_size(self, batch_size):
        with pytest.raises(ValueError, match="batch_size must be a positive integer"):
            replicas(2).experimental_distribute_dataset(X, batch_size=batch_size)

    def test_batch_size_may_be_numpys(self):
        assert len(replicas(2).experimental_distribute_dataset(X, batch_size=np.int64(2))) == 2

    def test_options(self):
        strategy = replicas(2)
        with pytest.raises(TypeError, match=r"options must be a ts\.InputOptions"):
            strategy.experimental_distribute_dataset([X], options={"prefetch": 1})
        with pytest.raises(TypeError, match=r"options must be a ts\.InputOptions"):
            strategy.distribute_datasets_from_function(lambda _: [X], options=ts.RunOptions())

    def test_policy(self):
        with pytest.raises(TypeError, match="auto_shard_policy must be"):
            replicas(2).experimental_distribute_dataset([X], auto_shard_policy="DATA")

    @pytest.mark.parametrize("dataset", [X, X.numpy(), {"x": X}])
    def test_function_that_returns_a_batch(self, dataset):
        with pytest.raises(TypeError, match=r"returned a \w+, which holds one batch.*list of batches"):
            replicas(2).distribute_datasets_from_function(lambda _: dataset)

    @pytest.mark.parametrize("dataset", [None, 3, "abc", Same(X)])
    def test_function_that_returns_no_dataset(self, dataset):
        with pytest.raises(TypeError, match="must return a DataLoader"):
            replicas(2).distribute_datasets_from_function(lambda _: dataset)

    def test_function_that_returns_a_generator(self):
        with pytest.raises(TypeError, match="only once"):
            replicas(2).distribute_datasets_from_function(lambda _: (batch for batch in [X]))

    def test_no_function(self):
        with pytest.raises(TypeError, match=r"(?s)takes an InputContext.*experimental_distribute_dataset"):
            replicas(2).distribute_datasets_from_function([X])


class TestErrorsSayWhere:
    def test_element(self):
        strategy = replicas(2)
        dataset = strategy.experimental_distribute_dataset([X, X, torch.tensor(1.0)])
        with pytest.raises(IndexError) as error:
            list(dataset)
        assert error.value.__notes__ == ["Raised while element 2 of this iteration was read."]

    def test_element_and_rank(self):
        def make(rank):
            return DataLoader(TensorDataset(torch.arange(8)), 2, collate_fn=fail_at_5)

        with pytest.raises(ZeroDivisionError) as error:
            read_by_rank(make)
        assert error.value.__notes__ == ["Raised while element 2 of this iteration was read, on rank 1."]


def fail_at_5(examples):
    if any(value == 5 for (value,) in examples):
        raise ZeroDivisionError
    return torch.cat([value.reshape(1) for (value,) in examples])


class Flattened(nn.Module):
    def forward(self, x):
        return x.view(x.shape[0], -1)


UNEVEN = {
    "view of nothing": (Flattened, (4, 2, 2), [[2, 2, 0], "cannot reshape tensor of 0 elements"]),
}


def run_on(devices, module, shape):
    """Run a module on a batch of that shape."""
    strategy = ts.MirroredStrategy(devices)
    with strategy.scope():
        model = module()
    (batch,) = strategy.experimental_distribute_dataset([torch.ones(shape)])
    strategy.run(model, args=(batch,))


@pytest.mark.parametrize(("module", "shape", "expected"), UNEVEN.values(), ids=UNEVEN)
class TestUnevenEnds:
    def test_one_process(self, module, shape, expected):
        with pytest.raises((ValueError, RuntimeError)) as error:
            run_on(["cpu:0", "cpu:1", "cpu:2"], module, shape)
        self.check(error.value, expected)

    @pytest.mark.slow
    def test_processes(self, module, shape, expected, process_pool):
        with pytest.raises(ts.testing.RemoteError) as error:
            process_pool(3).run(run_on, None, module, shape)
        self.check(error.value.errors[2], expected)

    def check(self, error, expected):
        shares, message = expected
        assert message in str(error)
        (note,) = [note for note in error.__notes__ if "split into" in note]
        assert f"shares of {shares}" in note
        assert "choose another batch size" in note
        assert "ts.nn.SyncBatchNorm" in note
