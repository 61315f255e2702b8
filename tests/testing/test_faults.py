"""What each fault does to a process."""

import pytest

import torchstrategy as ts
from torchstrategy.testing.faults import Fault


def five_steps(fault):
    for step in range(5):
        fault.strike(0, step)
    return step


@pytest.mark.parametrize(("kind", "text"), [("kill", "exit code -9"), ("exit", "exit code 0"), ("error", "injected")])
def test_a_fault_ends_the_call(kind, text):
    with ts.testing.ProcessPool(1) as pool:
        (outcome,) = pool.outcomes(five_steps, Fault(kind, 0, 3))
    assert text in str(outcome.error)
    assert isinstance(outcome.error, OSError) == (kind == "error")


@pytest.mark.parametrize("kind", ["stop", "hang"])
def test_a_silent_process_does_not_answer_and_is_ended(kind):
    with ts.testing.ProcessPool(1) as pool:
        (outcome,) = pool.outcomes(five_steps, Fault(kind, 0, 3), timeout_s=0.5)
        assert isinstance(outcome.error, TimeoutError)
        assert pool.run(five_steps, Fault(kind, 1, 3)) == [4]


@pytest.mark.parametrize("elsewhere", [Fault("kill", 1, 3), Fault("kill", 0, 5)])
def test_other_ranks_and_steps_are_spared(elsewhere):
    assert five_steps(elsewhere) == 4
