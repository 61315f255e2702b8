"""Ranks that don't expect the same of sums during ``backward`` train as ever, or all of them raise."""

import pytest

from tests.gradients import disagreement_programs as programs
from tests.gradients.early_programs import errors_after_a_failure_at_different_points


@pytest.mark.parametrize("implementation", ["AUTO", "RING"])
def test_gradients_that_can_travel_early_on_some_ranks_only(implementation, process_pool):
    for reference, overlapped, taken in process_pool(2).run(
        programs.run_with_parameters_elsewhere_on_rank_1, implementation
    ):
        assert overlapped == reference
        assert not any(taken)


def test_a_plan_on_one_rank(process_pool):
    for error in process_pool(2).run(programs.error_of_a_plan_on_one_rank, "AUTO"):
        assert "rank 0: the sum of gradients" in error
        assert "rank 1: the plan of the sums of gradients" in error


def test_nothing_follows_different_sums(process_pool):
    for errors in process_pool(2).run(errors_after_a_failure_at_different_points, "AUTO"):
        assert [error.split(": ")[1] for error in errors[1:]] == ["DisagreementError", "ReplicaFailedError"]
        assert "Start the job again" in errors[-1]
