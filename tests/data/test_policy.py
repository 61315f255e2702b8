import pytest
import torch
from torch.utils.data import DataLoader

from tests.data.fake_workers import one_process, run_ranks
from torchstrategy.base.options import AutoShardPolicy
from torchstrategy.data.distribute import distribute_dataset
from torchstrategy.data.pipeline.dataset import Dataset
from torchstrategy.data.pipeline.dataset_options import Options
from torchstrategy.data.policy import choose_sharding
from torchstrategy.errors import DisagreementError, InvalidArgumentError, NotFoundError

FILE, AUTO, DATA, OFF, HINT = (AutoShardPolicy[name] for name in ("FILE", "AUTO", "DATA", "OFF", "HINT"))


def rows(name):
    """Stand for the examples of a file: its number times ten, and one more."""
    return [torch.tensor([10 * int(name[-1])]), torch.tensor([10 * int(name[-1]) + 1])]


def files(*names):
    return Dataset.from_files(names, rows)


def with_off(data):
    options = Options()
    options.experimental_distribute.auto_shard_policy = OFF
    return data.with_options(options)


def choose(data, asked, size):
    return run_ranks(size, lambda placement, workers: choose_sharding(data, asked, workers).policy)


@pytest.mark.parametrize(
    ("asked", "size", "expected"),
    [(None, 2, FILE), (AUTO, 3, FILE), (FILE, 3, FILE), (DATA, 2, DATA), (OFF, 2, OFF), (HINT, 2, HINT)],
)
def test_what_is_chosen_for_three_files(asked, size, expected):
    data = files("a0", "a1", "a2")
    assert choose(data, asked, size) == [expected] * size
    assert choose(DataLoader(data, 2), asked, size) == [expected] * size


@pytest.mark.parametrize("data", [[torch.ones(2)], DataLoader(range(3))])
def test_auto_cuts_batches_of_what_is_not_files(data):
    assert choose(data, None, 2) == [DATA, DATA]
    with pytest.raises(NotFoundError, match=r"unshardable.*from_files.*DATA"):
        choose(data, FILE, 2)


def test_one_process_reads_all_files():
    data = files("a0", "a1")
    assert choose_sharding(data, None, None).policy is DATA
    assert choose_sharding(data, FILE, None).policy is FILE
    assert choose_sharding([torch.ones(1)], FILE, None).policy is FILE  # as in tf


def test_the_dataset_says_the_policy_unless_the_call_does():
    assert choose(with_off(files("a0", "a1")), None, 2) == [OFF, OFF]
    assert choose(with_off(files("a0", "a1")), DATA, 2) == [DATA, DATA]


def test_fewer_files_than_processes(caplog):
    data = files("a0", "a1")
    with pytest.raises(
        InvalidArgumentError, match=r"Could not apply FILE.*only has 2 file\(s\).*3 processes.*at least 3"
    ):
        choose(data, FILE, 3)
    with caplog.at_level("WARNING", "torchstrategy"):
        assert choose(data, AUTO, 3) == [DATA] * 3
    lines = [record.getMessage() for record in caplog.records if record.name == "torchstrategy"]
    assert lines == [
        "AutoShardPolicy.DATA: chosen by AUTO instead of FILE, because the dataset only has 2 file(s), but there are 3 "
        "processes. Every process reads all files."
    ]


def test_ranks_with_other_files_are_named():
    def choose_of_rank(placement, workers):
        names = ("a0", "a1") if workers.rank == 0 else ("a1", "a0")
        return choose_sharding(files(*names), None, workers)

    with pytest.raises(DisagreementError, match=r"hash of their names.*rank 0.*rank 1.*same order"):
        run_ranks(2, choose_of_rank)
    with pytest.raises(DisagreementError, match=r"sharding policy.*rank 0: \['OFF'.*rank 1: \['FILE'"):
        run_ranks(2, lambda p, w: choose_sharding(files("a0", "a1"), FILE if w.rank else OFF, w))


def test_a_policy_is_no_string():
    with pytest.raises(TypeError, match=r"ts\.data\.AutoShardPolicy.*'FILE'"):
        choose_sharding([], "FILE", None)


def test_what_explain_sharding_says():
    data = files("a0", "a1", "a2")

    def explain(placement, workers):
        loader = DataLoader(range(4), 2)
        return [
            distribute_dataset(DataLoader(data, 2), placement, workers).explain_sharding(),
            distribute_dataset(loader, placement, workers).explain_sharding(),
        ]

    of_files, of_loader = run_ranks(2, explain)[0]
    assert of_files == (
        "FILE: chosen by AUTO; of 3 files each process reads its own (process 0: 2, process 1: 1). Each process cuts "
        "its own stream into minibatches for its replicas. 2 replicas in all."
    )
    assert of_loader == (
        "DATA: the data is not a list of files. Each process loads only its own part of a batch. 2 replicas in all."
    )
    assert "one process reads everything" in distribute_dataset(data, one_process(2), None).explain_sharding()


def test_a_pipeline_that_files_cannot_divide_is_not_divided_by_auto():
    assert choose(files("a0", "a1").batch(3, drop_remainder=True), AUTO, 2) == [DATA, DATA]
    assert choose(files("a0", "a1").batch(3, drop_remainder=True), FILE, 2) == [FILE, FILE]


def test_attributes_of_other_datasets_mean_nothing():
    class Odd(torch.utils.data.Dataset):
        num_files = 3
        files = ("a", "b")

        def options(self, required):
            raise AssertionError(required)

        def __len__(self):
            return 2

        def __getitem__(self, i):
            return i

    assert choose(DataLoader(Odd(), 1), None, 2) == [DATA, DATA]
