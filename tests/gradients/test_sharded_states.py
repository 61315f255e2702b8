"""Optimizer states that are split over ranks change no number, no gradient and no checkpoint."""

import pytest

import torchstrategy as ts
from tests.gradients import sharded_programs as programs
from tests.gradients.early_programs import PROGRAMS


def check_equal(results):
    for found in results:
        for name, (whole, split) in found.items():
            assert split == pytest.approx(whole, abs=1e-5 if name == "types_and_buffers" else 1e-10), name
            assert split == results[0][name][1], name  # on all ranks


def test_programs_get_the_same_numbers(process_pool):
    check_equal(process_pool(2).run(programs.run, ["closure"], "AUTO"))


@pytest.mark.slow
@pytest.mark.parametrize("route", ["AUTO", "RING"])
def test_all_programs_get_the_same_numbers(route, process_pool):
    check_equal(process_pool(2).run(programs.run, list(PROGRAMS), route))


@pytest.mark.slow
def test_three_processes_get_the_same_numbers(process_pool):
    check_equal(process_pool(3).run(programs.run, list(PROGRAMS), "AUTO", timeout_s=280))


@pytest.mark.parametrize(
    ("num_processes", "names"),
    [(2, ["Adam"]), *(pytest.param(n, list(programs.OPTIMIZERS), marks=pytest.mark.slow) for n in (2, 4))],
)
def test_optimizers_get_the_same_numbers_with_a_part_of_the_states(num_processes, names, process_pool):
    results = process_pool(num_processes).run(programs.optimizers, names)
    for name in names:
        for whole, split in (found[name] for found in results):
            assert split[0] == pytest.approx(whole[0], abs=1e-10)
            assert split[1] == whole[1]  # every gradient is the sum on every rank
            assert split[2] == whole[2]  # all of the states
        sizes = [found[name][1][3] for found in results]
        assert sum(sizes) == results[0][name][0][3]
        assert max(sizes) < 0.8 * sum(sizes)


@pytest.mark.parametrize(
    ("asked", "devices", "error", "text"),
    [
        (True, ["cpu:0", "cpu:1"], ValueError, "Start a process for each device, by torchrun"),
        ("yes", ["cpu:0"], TypeError, "True, False, or a list of further optimizer classes"),
        ([int], ["cpu:0"], TypeError, "Received: .<class 'int'>"),
    ],
)
@pytest.mark.parametrize("strategy", [ts.MirroredStrategy, ts.MultiWorkerMirroredStrategy])
def test_what_can_not_be_split_is_refused(strategy, asked, devices, error, text):
    with pytest.raises(error, match=text):
        strategy(devices=devices, shard_optimizer_states=asked)
