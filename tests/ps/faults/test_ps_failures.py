"""tf's fault tolerance tests of parameter servers, by their names."""

import threading
import time

import pytest
import torch

import torchstrategy as ts
from tests.ps.faults.jobs import wait_until
from torchstrategy.base.log import logger

pytestmark = pytest.mark.timeout(60)

Unavailable = ts.errors.UnavailableError


def run_and_kill_ps(job, index=1):
    """Kill a parameter server while functions need it, and wait until the coordinator has the error."""
    job.train_without_end(10)
    job.cluster.kill("ps", index)
    wait_until(lambda: job.coordinator._cluster.queue.is_cancelling, what="the error")


def test_join_raises_unavailable_error_at_ps_failure(job):
    run_and_kill_ps(job)
    with pytest.raises(Unavailable, match=r"/job:ps/task:1 at 127\.0\.0\.1") as info:
        job.coordinator.join()
    # tf's test of the error's type: it is about the parameter server, and says what to do.
    assert "/job:worker" not in str(info.value)
    assert "restore the last checkpoint" in str(info.value)
    notes = getattr(info.value, "__notes__", None)  # Python 3.11
    assert notes is None or any("step" in note and "/job:worker/task:" in note for note in notes)
    for _, result in job.results:
        with pytest.raises((Unavailable, ts.errors.CancelledError)):
            result.fetch()


def test_schedule_raises_unavailable_error_at_ps_failure(job):
    run_and_kill_ps(job)
    with pytest.raises(Unavailable, match="/job:ps/task:1"):
        job.coordinator.schedule(time.time)


def test_done_raises_unavailable_error_at_ps_failure(job):
    run_and_kill_ps(job)
    with pytest.raises(Unavailable, match="/job:ps/task:1"):
        wait_until(job.coordinator.done)


def test_worker_execution_after_ps_failure_raises_expected_error(job):
    run_and_kill_ps(job, 0)
    with pytest.raises(Unavailable, match="/job:ps/task:0"):
        job.coordinator.join()
    net = job.net
    for _ in range(2):
        result = job.coordinator.schedule(lambda: sum(parameter.sum() for parameter in net.parameters()))
        with pytest.raises(Unavailable, match="/job:ps/task:0"):
            job.coordinator.join()
        with pytest.raises(Unavailable, match="/job:ps/task:0"):
            result.fetch()


@pytest.mark.slow
def test_all_parameter_servers_killed(job):
    job.train_without_end(4)
    for index in range(2):
        job.cluster.kill("ps", index)
    with pytest.raises(Unavailable, match="/job:ps/task:"):
        job.coordinator.join()
    with pytest.raises(Unavailable, match="/job:ps/task:1"):
        job.iterations.read_value()


def test_coordinator_reads_and_writes_after_ps_failure(job):
    job.cluster.kill("ps", 1)
    wait_until(lambda: job.strategy._ps_failure(1))
    with pytest.raises(Unavailable, match="/job:ps/task:1"):
        job.iterations.read_value()
    with pytest.raises(Unavailable, match="/job:ps/task:1"):
        job.iterations.assign(3)
    with job.strategy.scope(), pytest.raises(Unavailable, match="/job:ps/task:1"):
        [ts.Variable(1.0) for _ in range(2)]


@pytest.mark.slow
def test_ps_failure_while_recovery_from_worker_failure(job):
    job.train_without_end(10)
    threads = [
        threading.Thread(target=job.cluster.restart, args=("worker", 0)),
        threading.Thread(target=job.cluster.restart, args=("ps", 1)),
    ]
    for thread in threads:
        thread.start()
    with pytest.raises(Unavailable, match="/job:ps/task:1"):
        job.coordinator.join()
    for thread in threads:
        thread.join()


@pytest.mark.slow
def test_worker_returns_when_another_process_is_in_place_of_a_ps(job):
    """It must not take that one, which has no variables, for the one that the coordinator had."""
    job.cluster.restart("ps", 1)
    wait_until(lambda: "was restarted" in str(job.strategy._ps_failure(1)))
    job.cluster.restart("worker", 0)
    with pytest.raises(Unavailable, match="/job:ps/task:1"):
        wait_until(lambda: not job.coordinator.done())


@pytest.mark.slow  # it tries for 10 seconds
def test_worker_returns_after_ps_failure(job):
    """It can't be prepared without the parameter server, and the program is told which one is missing."""
    job.cluster.kill("ps", 1)
    wait_until(lambda: job.strategy._ps_failure(1))
    job.cluster.restart("worker", 0)
    with pytest.raises(Unavailable, match="/job:ps/task:1"):
        wait_until(lambda: not job.coordinator.done())


def test_ps_that_no_function_needs(job):
    with job.strategy.scope():
        variables = [ts.Variable(1.0, trainable=False) for _ in range(2)]
    v = next(v for v in variables if v.binding.spec.parts[0].ps == 0)
    job.cluster.kill("ps", 1)
    wait_until(lambda: job.strategy._ps_failure(1))

    def add():
        v.assign_add(1.0)
        return float(v)

    results = [job.coordinator.schedule(add) for _ in range(10)]
    job.coordinator.join()
    assert max(result.fetch() for result in results) == float(v) == 11.0


@pytest.mark.parametrize("is_busy", [False, True])
def test_restarted_ps_does_not_recover(job, is_busy):
    if is_busy:
        job.train_without_end(4)
    job.cluster.restart("ps", 1)
    if not is_busy:
        job.train(1)
    with pytest.raises(Unavailable, match=r"/job:ps/task:1 .* restore the last checkpoint"):
        job.coordinator.join()
    wait_until(lambda: "was restarted" in str(job.strategy._ps_failure(1)))
    for _ in range(2):
        with pytest.raises(Unavailable, match="/job:ps/task:1"):
            job.iterations.read_value()
    job.train(1)
    with pytest.raises(Unavailable, match="was restarted"):
        job.coordinator.join()


def test_restored_after_ps_failure(job, make_job, tmp_path):
    """What the error says to do: a new coordinator, and the last checkpoint."""
    job.train(5)
    job.coordinator.join()
    weights = job.net.weight.detach().clone()
    path = ts.train.Checkpoint(net=job.net, optimizer=job.optimizer, iterations=job.iterations).save(tmp_path / "model")
    run_and_kill_ps(job)
    with pytest.raises(Unavailable):
        job.coordinator.join()
    job.close()
    job.cluster.restart("ps", 1)
    new = make_job(job.cluster)
    ts.train.Checkpoint(net=new.net, optimizer=new.optimizer, iterations=new.iterations).restore(path)
    assert torch.equal(new.net.weight.detach(), weights)
    assert int(new.iterations) == 5
    new.train(4)
    new.finish()
    assert int(new.iterations) == 9


def test_death_is_noticed_by_the_closed_connection(job):
    """Long before the heartbeat's deadline, which is 10 seconds here; the log has the times."""
    job.train_without_end(4)
    for task, has_noticed in (
        (("worker", 0), lambda: not job.workers[0].can_run),
        (("ps", 1), lambda: job.strategy._ps_failure(1) is not None),
    ):
        start = time.monotonic()
        job.cluster.kill(*task)
        wait_until(has_noticed)
        seconds = time.monotonic() - start
        logger.info("The coordinator noticed the death of %s %d after %.0f ms.", *task, 1000 * seconds)
        assert seconds < 8
    with pytest.raises(Unavailable):
        job.coordinator.join()
    seconds = time.monotonic() - start
    logger.info("The program had the error %.0f ms after the parameter server was killed.", 1000 * seconds)
    assert seconds < 8
