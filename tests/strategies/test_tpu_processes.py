"""One process for each chip, by a stand-in for the chips: the numbers of MultiWorkerMirroredStrategy, and the order."""

import contextlib
import functools

import pytest
import torch

import torchstrategy as ts
from tests import programs
from tests.programs import largest_difference
from tests.strategies import tpu_process_programs as chips

DOUBLE = torch.float64
PROGRAMS = {
    "sgd": {"dtype": DOUBLE, "epochs": 2},
    "adam, accumulated": {"dtype": DOUBLE, "optimizer_name": "adam", "accumulation": 3, "epochs": 2},
    "conv net": {"net": "conv", "dtype": DOUBLE},
    "fewer examples than replicas": {"dtype": DOUBLE, "num_examples": 7, "batch_size": 3, "epochs": 2},
    "clipped": {"dtype": DOUBLE, "clip": 0.1},
}
COLLECTIVE = ["sync", ("sum", "torch.float64"), "sync"]


@pytest.fixture(scope="module")
def process_pool():
    """Pools of this module's own: in their processes the TPU system stays initialised."""
    with contextlib.ExitStack() as stack:
        yield functools.cache(lambda size: stack.enter_context(ts.testing.ProcessPool(size)))


@pytest.fixture
def path(tmp_path):
    """A file in which the stand-ins find each other."""
    return str(tmp_path / "meeting")


@pytest.mark.parametrize(("name", "size"), [*((name, 2) for name in PROGRAMS), ("fewer examples than replicas", 4)])
def test_chips_train_like_one_process(name, size, path, process_pool):
    expected = programs.train([], **PROGRAMS[name])
    for on_chips, on_cpus in process_pool(size).run(chips.train_on_chips_and_on_cpus, path, **PROGRAMS[name]):
        assert largest_difference(expected, on_chips) <= 1e-10
        assert largest_difference(on_cpus, on_chips) <= 1e-10


@pytest.mark.slow
def test_buffers_metrics_collectives_and_checkpoints(path, tmp_path, process_pool):
    for on_chips, on_cpus in process_pool(3).run(chips.everything_on_chips_and_on_cpus, path, str(tmp_path)):
        assert on_chips["restored"]
        for key in ("rows", "weights", "buffers"):
            assert largest_difference(on_chips[key], on_cpus[key]) <= 1e-10
        for key in ("accuracy", "mean"):
            assert on_chips[key] == pytest.approx(on_cpus[key], abs=1e-10)


def test_a_collective_is_a_program_of_its_own(path, process_pool):
    """What was traced runs first, then the sums of each dtype, and at the end of the run all the rest."""
    first, second = process_pool(2).run(chips.events_of_a_step, path)
    assert first == second
    expected = [*COLLECTIVE, "sync", ("sum", "torch.float32"), "sync", "sync"]
    assert [sorted(map(str, events)) for events in first] == [sorted(map(str, expected))] * 4
    for events in first:
        assert all(events[i - 1] == events[i + 1] == "sync" for i, event in enumerate(events) if event != "sync")
        assert events[-1] == "sync"


def test_every_dtype(path, process_pool):
    n, rows = 3, 40_000
    sum_of_one = sum(i % 5 for i in range(rows))
    for found in process_pool(n).run(chips.sums, path):
        assert found.pop("empty") == [0, 2]
        assert found.pop("flags") == [False, True, False]
        assert set(found.values()) == {n * sum_of_one + rows * (0 + 1 + 2)}


def test_a_rank_that_can_not_run_what_it_traced_stops_all_before_the_launch(path):
    (told, events), (own, _) = ts.testing.run_in_processes(chips.fail_before_a_launch, 2, path)
    assert own == "RuntimeError: the compiler ran out of memory"
    assert told.startswith("ReplicaFailedError: Rank 1 (replica 1) failed in Strategy.run")
    assert "the compiler ran out of memory" in told
    assert events == ["sync"]  # its own part; no collective was launched


def test_ranks_in_different_collectives(path, process_pool):
    for message in process_pool(2).run(chips.leave_one_out, path):
        assert "The ranks are not in the same collective" in message


@pytest.mark.slow
def test_two_processes_with_one_device(path, process_pool):
    for message in process_pool(2).run(chips.one_device_twice, path):
        assert message.startswith("The processes drive the XLA devices [0, 0], in the order of ranks")
