"""What goes wrong on one rank ends every rank, with a message that names the rank."""

import re
import time

import pytest

import torchstrategy as ts
from tests.multi_process import programs


def errors_of(pool, program, *args):
    start = time.monotonic()
    with pytest.raises(ts.testing.RemoteError) as caught:
        pool.run(program, *args)
    assert time.monotonic() - start < 50  # nobody waited for a time-out of the pool
    return caught.value.errors


@pytest.mark.parametrize("kind", ["raises", "raises after an early start"])
def test_an_exception_names_the_rank_on_every_rank(kind, process_pool):
    errors = errors_of(process_pool(2), programs.fails, kind)
    assert isinstance(errors[1], ValueError)
    assert isinstance(errors[0], ts.errors.ReplicaFailedError)
    assert "Rank 1 (replica 1) failed in Strategy.run: ValueError: boom" in str(errors[0])


def test_bad_data_on_one_rank_is_named_on_the_other(process_pool):
    errors = errors_of(process_pool(2), programs.bad_data_on_one_rank)
    assert isinstance(errors[1], OSError)
    assert "Rank 1 failed in reading the dataset: OSError: shard-3.npz is damaged" in str(errors[0])


def test_a_killed_rank_is_named(process_pool):
    errors = errors_of(process_pool(2), programs.fails, "dies")
    assert isinstance(errors[0], ts.errors.ReplicaFailedError)
    # A busy machine tells of the broken connection first; where each rank is follows then.
    assert re.search("[Rr]ank 1:? does not answer: its process has died", str(errors[0]))
    assert re.search(r"(waiting for it|lost its connection to another rank) in all_reduce\(SUM\)", str(errors[0]))


def test_different_collectives_are_named_with_their_call_sites(process_pool):
    errors = errors_of(process_pool(2), programs.fails, "returns")
    for error in errors.values():
        assert isinstance(error, ts.errors.DisagreementError)
        assert "rank 0: all_reduce(SUM)" in str(error)
        assert "rank 1: Strategy.reduce(SUM)" in str(error)
        assert "programs.py" in str(error)


@pytest.mark.parametrize(("kind", "expected"), [("shapes", "[3]"), ("dtypes", "torch.float64")])
def test_different_tensors_are_named_before_data_moves(kind, expected, process_pool):
    errors = errors_of(process_pool(2), programs.fails, kind)
    for error in errors.values():
        assert isinstance(error, ts.errors.InvalidArgumentError)
        assert f"rank 1: [[{expected}" in str(error) or expected in str(error)


def test_a_rank_that_leaves_out_a_batch_is_noticed_at_the_next_sum(process_pool):
    errors = errors_of(process_pool(2), programs.skips_a_batch)
    for error in errors.values():
        assert isinstance(error, ts.errors.DisagreementError)
        assert "rank 0: batch 3 of its iteration\n  rank 1: batch 4 of its iteration" in str(error)


def test_a_late_rank_runs_into_the_deadline_and_is_located(process_pool):
    errors = errors_of(process_pool(2), programs.fails, "sleeps")
    assert isinstance(errors[0], ts.errors.DeadlineExceededError)
    assert "did not complete within 3 s" in str(errors[0])
    assert "rank 0: in all_reduce(SUM)" in str(errors[0])
    assert "rank 1: after joining the MirroredStrategy" in str(errors[0])


def test_strategies_that_are_used_in_another_order_are_told_apart(process_pool):
    errors = errors_of(process_pool(2), programs.uses_two_strategies_in_another_order)
    assert any("Arrived: rank 0. Not arrived: rank 1." in str(error) for error in errors.values())
    for error in errors.values():
        assert isinstance(error, ts.errors.DeadlineExceededError)
        assert "rank 0: in Strategy.reduce(SUM) (collective number" in str(error)
        assert "rank 1: in Strategy.reduce(SUM) of strategy number 2 (collective number" in str(error)


def test_a_failure_outside_run_ends_the_other_rank(process_pool):
    with pytest.raises(ts.testing.RemoteError) as caught:
        process_pool(2).run(programs.fails_outside, timeout_s=10)
    assert isinstance(caught.value.errors[1], OSError)


def test_the_job_goes_on_after_a_failure_of_all_ranks(process_pool):
    assert process_pool(2).run(programs.fail_together) == [["ValueError: everywhere", 2.0] * 2] * 2


def test_the_job_does_not_go_on_after_a_failure_of_one_rank():
    with ts.testing.ProcessPool(2) as pool:
        (waited, *refused_there), (failed, *refused) = pool.run(programs.fail_alone)
    assert failed == "ValueError: alone"
    assert "Rank 1 (replica 1) failed in Strategy.run: ValueError: alone" in waited
    assert "waiting for it in all_reduce(SUM)" in waited
    assert all("Rank 1 (replica 1) failed in Strategy.run: ValueError: alone" in text for text in refused_there)
    assert "this rank failed earlier" in refused[0]
    assert "ReplicaFailedError" in refused[1]


def test_a_rank_that_fails_after_a_collective_lets_the_others_through_it():
    with ts.testing.ProcessPool(2) as pool:
        (through, refused), failed = pool.run(programs.fail_after_a_collective)
    assert failed == ["2.0", "ValueError: after it"]
    assert through == "2.0"
    assert "Rank 1 (replica 1) failed in Strategy.run: ValueError: after it" in refused


@pytest.mark.parametrize(
    ("rank", "how", "expected"),
    [
        (0, "kill", "Rank 0 does not answer"),
        (1, "exit", "Rank 1 has ended its program"),
        pytest.param(0, "stop", "Rank 0 does not answer", marks=pytest.mark.slow),
    ],
)
def test_a_lost_rank_is_named(rank, how, expected):
    start = time.monotonic()
    with ts.testing.ProcessPool(2) as pool, pytest.raises(ts.testing.RemoteError) as caught:
        pool.run(programs.lose, rank, how)
    assert time.monotonic() - start < 50
    error = caught.value.errors[1 - rank]
    kind = ts.errors.DeadlineExceededError if how == "stop" else ts.errors.ReplicaFailedError
    assert isinstance(error, kind)
    assert "all_reduce(SUM)" in str(error)
    assert expected in str(error).splitlines()[0]
    if how == "exit":
        assert str(error).startswith("Rank 0 can't complete all_reduce(SUM)")
        assert "): all ranks must make this call equally often, not only inside `if strategy.is_chief:`. " in str(error)
        assert "connection" not in str(error)


@pytest.mark.end_to_end
def test_a_strategy_made_on_one_rank_only_is_named():
    with ts.testing.ProcessPool(2) as pool, pytest.raises(ts.testing.RemoteError) as caught:
        pool.run(programs.strategy_on_one_rank)
    assert list(caught.value.errors) == [0]
    assert "Rank 1 did not make its strategy within 1 s" in str(caught.value.errors[0])
