"""Coordinators that are killed, stopped and replaced, over servers that go on."""

import signal
import time

import pytest

import torchstrategy as ts
from tests.ps.faults import programs
from tests.ps.faults.conftest import HEARTBEAT_S
from tests.ps.faults.jobs import Diary, wait_until
from tests.ps.faults.programs import Program

pytestmark = pytest.mark.timeout(90)


@pytest.fixture
def start(tmp_path):
    """``start(fn, cluster, *args)`` starts a program; it ends with the test. Has the attribute ``diary``."""
    started = []

    def start(fn, cluster, *args):
        started.append(Program(fn, cluster, start.diary, *args))
        return started[-1]

    start.diary = Diary(tmp_path)
    yield start
    for program in started:
        program.kill()


@pytest.mark.slow
def test_cluster_state_not_disrupted(cluster, make_job):
    """Coordinators one after another over the same servers, whatever became of the one before."""
    first = make_job(cluster)
    first.train(4)
    first.coordinator.join()
    first.close()

    second = make_job(cluster)
    assert int(second.iterations) == 0
    second.train_without_end(4)
    cluster.kill("ps", 1)
    with pytest.raises(ts.errors.UnavailableError):
        second.coordinator.join()
    cluster.restart("ps", 1)

    third = make_job(cluster)  # the second one was not closed
    third.train_without_end(4)
    cluster.restart("worker", 0)
    third.finish()
    with pytest.raises(ts.errors.UnavailableError):
        second.coordinator.schedule(time.time).fetch()
    third.train(4)
    third.finish()


def test_old_coordinator_is_refused(job, make_job):
    """Two in one process, one after the other: everything that the older one tries says so."""
    job.train(2)
    job.coordinator.join()
    new = make_job(job.cluster)
    new.train_without_end(2)
    newer = "newer coordinator"
    with pytest.raises(ts.errors.UnavailableError, match=newer):
        job.iterations.assign(7)
    with pytest.raises(ts.errors.UnavailableError, match=newer):
        job.iterations.read_value()
    with pytest.raises(ts.errors.UnavailableError, match=newer):
        [job.coordinator.schedule(time.time).fetch() for _ in range(2)]
    for _ in range(2):
        with pytest.raises(ts.errors.UnavailableError, match=newer):
            job.coordinator.join()
    new.finish()
    assert int(new.iterations) == 2


@pytest.mark.slow
def test_stopped_coordinator_that_returns_is_refused(quick_cluster, make_job, start):
    program = start(programs.stream, quick_cluster)
    start.diary.wait_for("streams")
    program.send_signal(signal.SIGSTOP)
    job = make_job(quick_cluster)
    job.train_without_end(4)
    program.send_signal(signal.SIGCONT)
    assert program.wait() == 1
    assert start.diary.lines()[-1].startswith("ends with ")
    assert "UnavailableError" in start.diary.lines()[-1]
    assert "newer coordinator" in start.diary.lines()[-1]
    job.finish()
    assert int(job.iterations) == 4


@pytest.mark.slow
@pytest.mark.parametrize("heartbeats", [0.2, 2.0])
def test_stopped_coordinator_goes_on(quick_cluster, start, heartbeats):
    """Nobody has taken its place, and the servers still have all that it had made."""
    program = start(programs.stream, quick_cluster)
    start.diary.wait_for("streams")
    program.send_signal(signal.SIGSTOP)
    time.sleep(heartbeats * HEARTBEAT_S)
    program.send_signal(signal.SIGCONT)
    time.sleep(0.5)
    start.diary.open_gate("end")
    program.wait()
    assert start.diary.lines() == ["streams", "ends well"]


@pytest.mark.end_to_end
def test_killed_coordinator_restores_a_checkpoint(cluster, start, tmp_path):
    diary = start.diary
    arguments = (programs.train, cluster, str(tmp_path / "model"), 60, 10)
    program = start(*arguments)
    diary.wait_for("saved at 20")
    program.kill()
    num_saved = max(int(line.split()[-1]) for line in diary.lines())
    assert 20 <= num_saved < 60
    second = start(*arguments)
    assert second.wait() == 0
    begins = [int(line.split()[-1]) for line in diary.lines() if line.startswith("begins")]
    assert begins[0] == 0
    assert num_saved <= begins[1] <= num_saved + 10  # it may have saved without having noted that
    assert diary.lines()[-2:] == ["has trained 60", "ends well"]


def test_functions_of_a_killed_coordinator_change_nothing(cluster, make_job, start):
    """They still run when the next coordinator comes, whose variables have the same numbers."""
    program = start(programs.run_without_end, cluster)
    for index in range(2):
        start.diary.wait_for(f"worker {index} adds")
    program.kill()
    job = make_job(cluster)
    job.train_without_end(2)  # at once: the workers don't wait for what the old one had them run
    with job.strategy.scope():
        variables = [ts.Variable(0, trainable=False) for _ in range(3)]
    for index in range(2):
        start.diary.wait_for(f"worker {index} is refused")
    assert [int(v) for v in variables] == [0, 0, 0]
    job.finish()
    assert int(job.iterations) == 2


@pytest.mark.slow
def test_two_coordinators_at_the_same_moment(cluster, start):
    """One of them goes on, the other is told."""
    diary = start.diary
    for _ in range(2):
        start(programs.stream, cluster)
    wait_until(lambda: any(line.startswith("ends with") for line in diary.lines()), what="a refusal")
    diary.wait_for("streams")
    diary.open_gate("end")
    wait_until(lambda: len([line for line in diary.lines() if line.startswith("ends")]) == 2, what="the other's end")
    ends = sorted(line for line in diary.lines() if line.startswith("ends"))
    assert ends[0] == "ends well"
    assert "newer coordinator" in ends[1]
