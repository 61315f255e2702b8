"""After some faults all ranks go on, to the weights of an undisturbed run: nobody is taken for dead, or for stalled."""

import pytest
import torch

import torchstrategy as ts
from tests.multi_worker import programs
from torchstrategy.testing.faults import Fault

NUM_STEPS = 20
HOURS = 3600.0


@pytest.fixture(scope="module")
def undisturbed():
    with ts.testing.ProcessPool(2, launcher="TF_CONFIG") as pool:
        return pool.run(programs.train_and_listen, NUM_STEPS)


def check(undisturbed, fault, heartbeat_s, network=None):
    with ts.testing.ProcessPool(2, launcher="TF_CONFIG", network=network) as pool:
        arguments = {"fault": fault, "inside": bool(fault.rank), "heartbeat_s": heartbeat_s}
        found = pool.run(programs.train_and_listen, NUM_STEPS, **arguments)
    for (totals, weights, lines), (expected_totals, expected, _) in zip(found, undisturbed, strict=True):
        assert lines == []
        assert torch.equal(weights, expected)
        assert totals == expected_totals


@pytest.mark.end_to_end
@pytest.mark.parametrize("rank", range(2))
@pytest.mark.parametrize("hours", [9, -9])
def test_a_wall_clock_that_jumps(undisturbed, monkeypatch, hours, rank):
    monkeypatch.setenv("TORCHSTRATEGY_STALL_S", "30")  # 9 hours are more than any limit
    check(undisturbed, Fault("jump", rank, 5, seconds=hours * HOURS), heartbeat_s=10)


@pytest.mark.slow
@pytest.mark.parametrize("rank", range(2))
def test_a_slow_rank(undisturbed, rank):
    check(undisturbed, Fault("slow", rank, 5, seconds=0.2), heartbeat_s=1)


@pytest.mark.slow
@pytest.mark.parametrize("rank", range(2))
def test_native_code_that_keeps_all_threads_from_running(undisturbed, rank):
    """For longer than the heartbeat: on this host the kernel says that the process is not stopped."""
    check(undisturbed, Fault("stall", rank, 5, seconds=4), heartbeat_s=1)


@pytest.mark.slow
@pytest.mark.parametrize("rank", range(2))
def test_native_code_on_another_host_for_less_than_the_heartbeat(undisturbed, network, rank):
    check(undisturbed, Fault("stall", rank, 5, seconds=2), heartbeat_s=10, network=network(2))


@pytest.mark.slow
@pytest.mark.parametrize("rank", range(2))
def test_a_rank_that_is_stopped_for_less_than_the_heartbeat(undisturbed, rank):
    check(undisturbed, Fault("pause", rank, 5, seconds=2), heartbeat_s=10)
