"""Workers that come late, never, twice, or to the wrong place."""

import contextlib
import json
import random
import signal
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

import torchstrategy as ts
from tests.multi_worker import programs
from tests.multi_worker.lost import blamed
from tests.multi_worker.strangers import Strangers

SOON_S = 30.0


def outcomes_of(size, program, *args, network=None, **kwargs):
    with ts.testing.ProcessPool(size, launcher="TF_CONFIG", network=network) as pool:
        begin = time.monotonic()
        outcomes = pool.outcomes(program, *args, timeout_s=SOON_S + 1, **kwargs)
        assert max(outcome.at for outcome in outcomes) - begin < SOON_S
    return outcomes


@pytest.mark.end_to_end
@pytest.mark.parametrize("late", [0, 1])
def test_a_late_worker_is_waited_for(late):
    delays = [0.0, 0.0]
    delays[late] = 2.0
    assert [outcome.value for outcome in outcomes_of(2, programs.start, tuple(delays))] == [2.0, 2.0]


@pytest.mark.slow
@pytest.mark.parametrize("missing", [1, 2])
def test_a_worker_that_never_starts_is_named(missing):
    delays = [0.0] * 3
    delays[missing] = -1
    for rank, outcome in enumerate(outcomes_of(3, programs.start, tuple(delays), 2.0)):
        if rank != missing:
            assert isinstance(outcome.error, ts.errors.DeadlineExceededError), outcome.error
            assert f"Rank {missing} (worker {missing} at 127.0.0.1:" in str(outcome.error)
            assert "within 2 s" in str(outcome.error)


@pytest.mark.slow
def test_a_leader_that_never_starts_is_named():
    _, *others = outcomes_of(3, programs.start, (-1, 0.0, 0.0), 2.0)
    for outcome in others:
        assert isinstance(outcome.error, (RuntimeError, ts.errors.DeadlineExceededError))
        assert "ank 0 (worker 0 at 127.0.0.1:" in str(outcome.error)
        assert "2 s" in str(outcome.error)


@pytest.mark.slow
def test_a_port_that_is_taken():
    with socket.create_server(("127.0.0.1", 0)) as other_program:
        leader = f"127.0.0.1:{other_program.getsockname()[1]}"
        for outcome in outcomes_of(2, programs.start, (0.0, 0.0), 3.0, leader=leader):
            assert isinstance(outcome.error, (RuntimeError, ts.errors.DeadlineExceededError))
            assert leader in str(outcome.error)


@pytest.mark.slow
@pytest.mark.parametrize(
    "leader", ["no-such-host.invalid:2222", pytest.param("192.0.2.1:2222", marks=pytest.mark.slow)]
)
def test_a_leader_address_that_leads_nowhere(leader):
    for outcome in outcomes_of(2, programs.start, (0.0, 0.0), 3.0, leader=leader):
        assert isinstance(outcome.error, (RuntimeError, ts.errors.DeadlineExceededError))
        assert leader in str(outcome.error)


@pytest.mark.slow
def test_a_host_that_is_cut_off_at_the_start(network):
    hosts = network(2)
    hosts.cut(1)
    first, last = outcomes_of(2, programs.start, (0.0, 0.0), 3.0, network=hosts)
    assert isinstance(first.error, ts.errors.DeadlineExceededError)
    assert "Rank 1 (worker 1 at 10.77.0.2:" in str(first.error)
    assert "10.77.0.1:" in str(last.error)


@pytest.mark.slow
def test_the_job_starts_over_a_slow_link(network):
    hosts = network(2)
    hosts.shape(1, delay_ms=50, loss_percent=1)
    assert [outcome.value for outcome in outcomes_of(2, programs.start, (0.0, 0.0), network=hosts)] == [2.0, 2.0]
    assert hosts.traffic(1).packets > 0


@pytest.mark.slow
def test_a_keeper_of_the_store_that_is_stopped_when_all_have_met():
    with ts.testing.ProcessPool(3, launcher="TF_CONFIG") as pool:
        _, *others = pool.outcomes(programs.stop_before_connections, 2.0, timeout_s=SOON_S, silent=[0])
    for outcome in others:
        assert isinstance(outcome.error, ts.errors.DeadlineExceededError), outcome.error
        assert "Rank 0 (worker 0 at 127.0.0.1:" in str(outcome.error)
        assert "stopped or cut off" in str(outcome.error)


def lose_while_starting(seed):
    """Kill or stop a rank at some time, most likely while the strategy is made.

    Returns:
        What ended too late, and what does not name the lost rank.
    """
    draw = random.Random(seed)
    victim, number = draw.randrange(3), draw.choice([signal.SIGKILL, signal.SIGSTOP])

    def strike():
        with contextlib.suppress(RuntimeError, ProcessLookupError):  # all has ended already
            pool.send_signal(victim, number)

    with ts.testing.ProcessPool(3, launcher="TF_CONFIG") as pool:
        pool.run(programs.rank)
        timer = threading.Timer(draw.random() * 0.12, strike)
        timer.start()
        begin = time.monotonic()
        outcomes = pool.outcomes(
            programs.sum_of_ones, 3.0, timeout_s=SOON_S + 1, silent=[victim] if number == signal.SIGSTOP else []
        )
        timer.join()
    late, unnamed = [], []
    for rank, outcome in enumerate(outcomes):
        if rank != victim and outcome.error is not None:  # else all was done before
            # Ranks that wait for one another reach their deadlines together, and then name each other, too.
            is_sure = isinstance(outcome.error, ts.errors.ReplicaFailedError)
            is_named = f"Rank {victim} " in str(outcome.error) and (blamed(outcome.error) <= {victim} or not is_sure)
            text = f"seed {seed}: rank {rank} about rank {victim} ({number.name}): {outcome.error!r}"
            late += [text] if outcome.at - begin > SOON_S else []
            unnamed += [] if is_named else [text]
    return late, unnamed


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(2, 6))])
def test_a_rank_lost_while_the_job_starts_ends_the_others(seed):
    late, _ = lose_while_starting(seed)
    assert late == []


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_rank_lost_at_any_time_while_the_job_starts_is_named():
    results = [lose_while_starting(seed) for seed in range(100, 130)]
    late = [text for texts, _ in results for text in texts]
    assert late == []
    # Before the control plane is there, a rank that waits may be taken for the one that it waits for.
    unnamed = [text for _, texts in results for text in texts]
    assert len(unnamed) <= 4, unnamed


class Workers:
    """Workers of one cluster that are started one by one."""

    def __init__(self, size):
        servers = [socket.create_server(("127.0.0.1", 0)) for _ in range(size)]
        self._addresses = [f"127.0.0.1:{server.getsockname()[1]}" for server in servers]
        for server in servers:
            server.close()
        self._pools = []
        self._threads = ThreadPoolExecutor()

    def start(self, index, program, *args, **kwargs):
        """Let a new process be a worker; return the future outcome, and a function that kills it."""
        config = {"cluster": {"worker": self._addresses}, "task": {"type": "worker", "index": index}}
        pool = ts.testing.ProcessPool(1)
        self._pools.append(pool)
        pool.run(programs.rank_of, json.dumps(config))
        future = self._threads.submit(lambda: pool.outcomes(program, *args, timeout_s=SOON_S, **kwargs)[0])
        return future, lambda: pool.send_signal(0, signal.SIGKILL)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._threads.shutdown()
        for pool in self._pools:
            pool.close()


def wait_for_files(folder, number):
    deadline = time.monotonic() + SOON_S
    while len(list(folder.iterdir())) < number:
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.slow
@pytest.mark.parametrize("index", [0, 1])
def test_a_worker_that_is_started_again_alone(tmp_path, index):
    with Workers(3) as workers:
        started = [workers.start(i, programs.train_and_stay, tmp_path) for i in range(3)]
        wait_for_files(tmp_path, 3)
        started[index][1]()
        others = [future for i, (future, _) in enumerate(started) if i != index]
        wait_for_files(tmp_path, 5)  # the others have caught their errors, and go on without training
        again = workers.start(index, programs.sum_of_ones, 3.0)[0].result()
        (tmp_path / "end").write_text("")
        messages = [future.result().value for future in others]
    assert all(f"Rank {index} does not answer" in message for message in messages), messages
    if index == 0:
        assert isinstance(again.error, ts.errors.DeadlineExceededError)
        assert "Rank 1 (worker 1 at 127.0.0.1:" in str(again.error)
        assert "Rank 2 (worker 2 at 127.0.0.1:" in str(again.error)
    else:
        assert isinstance(again.error, RuntimeError)
        assert "Rank 1 (worker 1 at 127.0.0.1:" in str(again.error)
        assert "start the job again" in str(again.error)


@pytest.mark.slow
def test_a_worker_that_is_started_again_when_the_others_have_ended():
    with Workers(2) as workers:
        for future in [workers.start(i, programs.sum_of_ones)[0] for i in range(2)]:
            assert future.result().value == 2.0
    again = Workers(2)
    again._addresses = workers._addresses
    with again:
        outcome = again.start(1, programs.sum_of_ones, 2.0)[0].result()
        assert isinstance(outcome.error, (RuntimeError, ts.errors.DeadlineExceededError))
        assert "can't reach" in str(outcome.error)
        assert "Rank 0 (worker 0 at 127.0.0.1:" in str(outcome.error)
        # Together they can start again at once, at the same addresses.
        for future in [again.start(i, programs.sum_of_ones)[0] for i in range(2)]:
            assert future.result().value == 2.0


@pytest.mark.slow
def test_a_worker_that_is_started_twice(tmp_path):
    with Workers(2) as workers:
        first = workers.start(1, programs.sum_of_ones, 4.0)[0]
        second = workers.start(1, programs.sum_of_ones, 4.0)[0]
        leader = workers.start(0, programs.sum_of_ones, 4.0)[0]
        outcomes = [future.result() for future in (first, second)]
    refused = [str(outcome.error) for outcome in outcomes if outcome.error is not None]
    assert any("has joined this job before" in message for message in refused)
    assert leader.result().value == 2.0 or leader.result().error is not None


@pytest.mark.slow
@pytest.mark.parametrize("implementation", ["AUTO", "RING"])
def test_strangers_at_every_port_hold_up_nobody(implementation):
    with ts.testing.ProcessPool(3, launcher="TF_CONFIG") as pool:
        pool.run(programs.rank)
        with Strangers([process.pid for process in pool._processes]) as strangers:
            # The last one comes late, so that strangers are first everywhere.
            begin = time.monotonic()
            pool.run(programs.start, (0.0, 0.0, 2.0), 20.0, timeout_s=SOON_S)
            assert time.monotonic() - begin < 10.0
            pool.run(programs.train, 20, implementation=implementation, deadline_s=20.0, timeout_s=SOON_S)
        assert len(strangers.seen) > (3 if implementation == "AUTO" else 6), strangers.seen


@pytest.mark.slow
def test_strangers_do_not_use_up_the_files_of_the_store():
    with ts.testing.ProcessPool(2, launcher="TF_CONFIG") as pool, contextlib.ExitStack() as stack:
        pool.run(programs.rank)
        address = ("127.0.0.1", pool._ports.numbers[0])

        def attack():
            while len(callers) < 400:
                try:
                    callers.append(stack.enter_context(socket.create_connection(address, timeout=1)))
                except OSError:
                    time.sleep(0.01)

        callers = []
        thread = threading.Thread(target=attack)
        thread.start()
        values = pool.run(programs.start_with_few_files, (0.0, 3.0), 256, timeout_s=SOON_S)
        thread.join()
    assert values == [2.0, 2.0]


@pytest.mark.slow
@pytest.mark.parametrize("index", [0, 1])
def test_a_worker_that_is_killed_while_others_wait_is_named_at_once(index):
    """The third one never comes; the default time limit is 300 seconds."""
    with Workers(3) as workers:
        started = [workers.start(i, programs.sum_of_ones) for i in range(2)]
        time.sleep(2.0)  # both wait
        begin = time.monotonic()
        started[index][1]()
        error = started[1 - index][0].result().error
        assert time.monotonic() - begin < 15.0
    assert blamed(error) == {index}, error
    assert f"Rank {index} (worker {index} at 127.0.0.1:" in str(error)
    assert "has died while the job was starting (process " in str(error)
    assert index == 0 or "Not here yet: Rank 2 (worker 2 at 127.0.0.1:" in str(error)


@pytest.mark.slow
def test_a_program_that_has_ended_while_another_still_starts():
    with Workers(2) as workers:
        leader, kill = workers.start(0, programs.sum_of_ones, 10.0)
        time.sleep(0.5)
        kill()
        assert "exit code -9" in str(leader.result().error)
        late = workers.start(1, programs.sum_of_ones, 2.0)[0].result()
    assert "Rank 0 (worker 0 at 127.0.0.1:" in str(late.error)
