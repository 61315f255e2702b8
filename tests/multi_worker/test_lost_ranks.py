"""A rank that is killed, stopped, ended or fails at any step is named on all others, and nobody else is."""

import random
import re
import signal
import threading
import time
from pathlib import Path

import pytest

import torchstrategy as ts
from tests.multi_worker import programs
from tests.multi_worker.lost import KINDS, blamed, check_survivors
from torchstrategy.testing.faults import Fault

NUM_STEPS = 50
HEARTBEAT_S = 1.0
SAMPLE = [(0, 0), (1, 1), (2, 2), (0, 17), (2, 31), (1, 49)]


def lose(size, fault, inside, network=None, program=programs.train, **options):
    with ts.testing.ProcessPool(size, launcher="TF_CONFIG", network=network) as pool:
        silent = [fault.rank] if fault.kind in ("stop", "hang") else []
        arguments = {"fault": fault, "inside": inside, "heartbeat_s": HEARTBEAT_S, **options}
        return pool.outcomes(program, NUM_STEPS, silent=silent, **arguments)


def check_killed(rank, step, size=3):
    outcomes = lose(size, Fault("kill", rank, step), inside=bool(step % 2))
    assert "exit code -9" in str(outcomes[rank].error)
    # The promise is a second; a loaded machine may need more.
    seconds = check_survivors(outcomes, rank, timeout_s=10)
    print(f"rank {rank}, step {step}: the others knew after {max(seconds):.3f} s")


def check_stopped(rank, step, size=3):
    check_survivors(lose(size, Fault("stop", rank, step), inside=bool(step % 2)), rank)


@pytest.mark.end_to_end
@pytest.mark.parametrize(("rank", "step"), SAMPLE)
def test_a_killed_rank_is_named(rank, step):
    check_killed(rank, step)


@pytest.mark.slow
@pytest.mark.parametrize(("rank", "step"), SAMPLE[:4])
def test_a_stopped_rank_is_named(rank, step):
    check_stopped(rank, step)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("check", [check_killed, check_stopped])
def test_any_rank_at_any_step(check):
    for step in range(NUM_STEPS):
        check(step % 3, step)  # each rank inside and outside of a step


@pytest.mark.slow
@pytest.mark.parametrize("rank", range(2))
def test_one_of_two_is_named(rank):
    check_killed(rank, 5, size=2)
    check_stopped(rank, 6, size=2)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["kill", "stop", "error"])
@pytest.mark.parametrize("rank", range(4))
def test_any_rank_of_a_tree_is_named_though_it_cuts_the_tree(rank, kind):
    outcomes = lose(4, Fault(kind, rank, 5), inside=True, program=programs.train_in_a_chain)
    check_survivors(outcomes, rank)


def check_on_two_hosts(network, rank, kind):
    outcomes = lose(4, Fault(kind, rank, 5), inside=True, network=network(2))
    check_survivors(outcomes, rank)


@pytest.mark.slow
@pytest.mark.parametrize(("rank", "kind"), [(0, "kill"), (2, "kill"), (3, "kill"), (3, "stop"), (1, "error")])
def test_one_of_two_ranks_on_each_of_two_hosts_is_named(network, rank, kind):
    check_on_two_hosts(network, rank, kind)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["kill", "stop", "error"])
@pytest.mark.parametrize("rank", range(4))
def test_any_of_two_ranks_on_each_of_two_hosts_is_named(network, rank, kind):
    check_on_two_hosts(network, rank, kind)


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_of_another_host_in_native_code_is_not_taken_for_a_stopped_one(network, rank):
    with ts.testing.ProcessPool(2, launcher="TF_CONFIG", network=network(2)) as pool:
        found = pool.run(programs.hold_the_lock, rank, 4)  # four times the heartbeat
        assert [total for total, _ in found] == [2.0, 2.0]
        beating = [Path(f"/proc/{pid}") for _, pid in found]
        assert all(path.exists() for path in beating)
        for own in range(2):
            pool.send_signal(own, signal.SIGKILL)
        deadline = time.monotonic() + 20
        while any(path.exists() for path in beating):
            assert time.monotonic() < deadline, "it outlives its parent"
            time.sleep(0.05)


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, *(pytest.param(rank, marks=pytest.mark.slow) for rank in (1, 2))])
def test_a_stopped_rank_is_named_by_the_deadline_if_that_comes_first(rank):
    outcomes = lose(3, Fault("stop", rank, 5), inside=True, deadline_s=3.0, heartbeat_s=60.0)
    check_survivors(outcomes, rank)
    assert all("did not complete within 3 s" in str(outcomes[other].error) for other in {0, 1, 2} - {rank})


@pytest.mark.slow
def test_a_replica_that_hangs_in_its_own_thread_shows_its_stack():
    with ts.testing.ProcessPool(2, launcher="TF_CONFIG") as pool:
        outcomes = pool.outcomes(programs.hang_in_a_replica, silent=[1])
    assert isinstance(outcomes[0].error, ts.errors.DeadlineExceededError)
    assert blamed(outcomes[0].error) == set()
    assert "Not arrived: rank 1." in str(outcomes[0].error)
    assert "the_place_to_hang" in str(outcomes[0].error)


@pytest.mark.slow
@pytest.mark.parametrize("rank", range(3))
@pytest.mark.parametrize(
    ("inside", "expected"),
    [
        (True, "Rank {0} (replica {0}) failed in Strategy.run: OSError: injected"),
        (False, "Rank {0} failed in its program"),
    ],
)
def test_an_error_reaches_the_others(rank, inside, expected):
    outcomes = lose(3, Fault("error", rank, 3), inside)
    assert isinstance(outcomes[rank].error, OSError)
    check_survivors(outcomes, rank)
    for other in {0, 1, 2} - {rank}:
        assert expected.format(rank) in str(outcomes[other].error)
        assert "OSError: injected" in str(outcomes[other].error)


@pytest.mark.slow
def test_a_rank_that_ends_its_program_early_is_named():
    outcomes = lose(3, Fault("exit", 1, 3), inside=False)
    check_survivors(outcomes, 1)
    for other in (0, 2):
        assert "Rank 1 has ended its program" in str(outcomes[other].error)


@pytest.mark.slow
def test_a_rank_that_hangs_runs_into_the_deadline_and_shows_its_stack():
    outcomes = lose(3, Fault("hang", 1, 3), inside=False, deadline_s=3)
    for other in (0, 2):
        error = outcomes[other].error
        assert isinstance(error, ts.errors.DeadlineExceededError)
        assert "did not complete within 3 s" in str(error)
        assert "Arrived: ranks 0, 2. Not arrived: rank 1." in str(error)
        assert "faults.py" in str(error)  # where the rank waits
        assert "programs.py" in str(error)  # who called that


@pytest.mark.slow
@pytest.mark.parametrize("rank", range(3))
@pytest.mark.parametrize("inside", [False, True])
def test_a_lost_message_ends_all_at_the_deadline(rank, inside):
    """Or sooner: a rank that sees the next message in place of the lost one says so. None goes on with wrong sums."""
    for outcome in lose(3, Fault("lost", rank, 3), inside, deadline_s=3):
        assert isinstance(outcome.error, (*KINDS, ts.errors.DisagreementError)), outcome


@pytest.mark.slow
@pytest.mark.parametrize("rank", range(3))
def test_half_a_message_ends_all(rank):
    for outcome in lose(3, Fault("torn", rank, 3), inside=True, deadline_s=3):
        assert isinstance(outcome.error, KINDS), outcome


@pytest.mark.end_to_end
@pytest.mark.parametrize(
    ("size", "rank", "message", "num_floats", "what"),
    [
        (3, 1, 1, 1, "torch.float32[1]"),  # of a record
        pytest.param(3, 1, 3, 3_000_000, "12,000,000 bytes", marks=pytest.mark.slow),  # of what is in shared memory
    ],
)
def test_a_broken_connection_is_told_to_those_who_have_all_of_theirs(size, rank, message, num_floats, what):
    with ts.testing.ProcessPool(size, launcher="TF_CONFIG") as pool:
        outcomes = pool.outcomes(programs.break_a_connection, rank, message, num_floats)
    for own, outcome in enumerate(outcomes):
        # not at the deadline
        assert isinstance(outcome.error, ts.errors.ReplicaFailedError), f"rank {own}: {outcome.error!r}"
        found = re.search(
            r"Rank (\d) has lost its connection to another rank in (.*) at programs\.py:\d+ \(break_a_connection\): "
            r"the connection to rank (\d) broke: ",
            str(outcome.error),
        )
        assert found, f"rank {own}: {outcome.error}"
        assert {int(found[1]), int(found[3])} == {0, rank}
        assert what in found[2]
        assert blamed(outcome.error) == set()


@pytest.mark.slow
def test_ranks_that_end_one_after_the_other_have_lost_nobody():
    with ts.testing.ProcessPool(3, launcher="TF_CONFIG") as pool:
        assert pool.run(programs.end_one_after_the_other) == [[], [], []]


def kill_at_some_time(tmp_path, size, program, *args, number, victim, delay_s):
    """Send a signal to a rank some time after all ranks have begun their work."""

    def strike():
        while len(list(tmp_path.iterdir())) < size and not ended.wait(0.01):
            pass
        time.sleep(delay_s)
        pool.send_signal(victim, number)

    ended = threading.Event()
    with ts.testing.ProcessPool(size, launcher="TF_CONFIG") as pool:
        pool.run(programs.rank)
        thread = threading.Thread(target=strike)
        thread.start()
        try:
            silent = [victim] if number == signal.SIGSTOP else []
            outcomes = pool.outcomes(program, *args, tmp_path, silent=silent)
        finally:
            ended.set()
            thread.join()
    for path in tmp_path.iterdir():
        path.unlink()
    return outcomes


def check_random(tmp_path, seed, num_floats):
    draw = random.Random(seed)
    number = draw.choice([signal.SIGKILL, signal.SIGKILL, signal.SIGSTOP])
    victim, delay_s = draw.randrange(3), draw.random() * 0.2
    outcomes = kill_at_some_time(
        tmp_path, 3, programs.reduce_for_ever, num_floats, number=number, victim=victim, delay_s=delay_s
    )
    check_survivors(outcomes, victim)


@pytest.mark.slow
@pytest.mark.parametrize("num_floats", [1, 3_000_000])
@pytest.mark.parametrize("seed", range(2))
def test_a_rank_lost_in_the_middle_of_a_collective_is_named(tmp_path, seed, num_floats):
    check_random(tmp_path, seed, num_floats)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("num_floats", [1, 10_000, 3_000_000])
def test_a_rank_lost_at_any_time_is_named(tmp_path, num_floats):
    for seed in range(100, 120):
        check_random(tmp_path, seed, num_floats)
