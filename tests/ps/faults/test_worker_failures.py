"""tf's fault tolerance tests of workers, by their names: real processes are killed (SIGKILL) and started again."""

import contextlib
import threading
import time

import numpy as np
import pytest
import torch

import torchstrategy as ts
from tests.ps.faults.jobs import wait_until

pytestmark = pytest.mark.timeout(60)


def restart_in_thread(cluster, index):
    """Kill a worker and start it again, on another thread; ``join`` it."""
    thread = threading.Thread(target=cluster.restart, args=("worker", index))
    thread.start()
    return thread


@pytest.mark.slow
def test_cluster_coordinator_destroyed(cluster, make_job):
    def own_threads():
        return [thread.name for thread in threading.enumerate() if thread.name.startswith("torchstrategy")]

    before = own_threads()
    job = make_job(cluster)
    job.train(2)
    job.coordinator.join()
    assert own_threads() != before
    job.close()
    wait_until(lambda: own_threads() == before, what="the end of the coordinator's threads")


def test_worker_preemption_between_functions(job):
    job.train(2)
    job.coordinator.join()
    assert int(job.iterations) == 2
    job.cluster.restart("worker", 0)
    job.train(2)
    job.coordinator.join()
    assert int(job.iterations) == 4
    job.check_results()


def test_worker_preemption_midst_function(job):
    job.train_without_end(4)
    assert not job.coordinator.done()
    job.cluster.restart("worker", 0)
    job.finish()


def test_one_worker_preemption_with_cancellation(job):
    diary = job.diary

    def normal():
        return torch.rand(()).item()

    def fails():
        diary.pass_gate("fail")
        raise ts.errors.InvalidArgumentError("not a positive number")

    def long(number):
        diary.note(f"worker {ts.coordinator.experimental_get_current_worker_index()} is in the long function")
        diary.pass_gate("end of the long function")

    coordinator = job.coordinator
    for _ in range(3):
        coordinator.schedule(normal)
    coordinator.join()
    long_result = coordinator.schedule(long, args=(0,))
    index = wait_until(lambda: [line.split()[1] for line in diary.lines()])[0]
    failing = coordinator.schedule(fails)
    queued = [coordinator.schedule(normal) for _ in range(5)]
    diary.open_gate("fail")
    wait_until(lambda: coordinator._cluster.queue.is_cancelling, what="the error")
    job.cluster.kill("worker", int(index))
    with pytest.raises(ts.errors.InvalidArgumentError, match="not a positive number"):
        coordinator.join()
    with pytest.raises(ts.errors.InvalidArgumentError):
        failing.fetch()
    with pytest.raises(ts.errors.CancelledError):
        long_result.fetch()  # lost with its worker, and not run again after the error
    for result in queued:
        with contextlib.suppress(ts.errors.CancelledError):  # it may have ended before
            result.fetch()
    coordinator.join()
    assert len([coordinator.schedule(normal).fetch() for _ in range(3)]) == 3
    job.cluster.restart("worker", int(index))
    job.wait_until_ready()
    job.train(4)
    job.finish()


def test_two_workers_preempted(job):
    job.train_without_end(10)
    for index in range(2):
        job.cluster.kill("worker", index)
    assert not job.coordinator.done()
    for index in range(2):
        job.cluster.restart("worker", index)
    job.finish()


@pytest.mark.slow
def test_worker_continuous_failure(job):
    job.train_without_end(10)
    for _ in range(2):
        job.cluster.kill("worker", 0)
        job.wait_until_lost(0)
        assert not job.coordinator.done()
        job.cluster.restart("worker", 0)
    job.finish()


@pytest.mark.slow
def test_function_whose_worker_is_lost_each_time(job):
    """It is tried again as often as it takes."""
    diary = job.diary

    def runs():
        index = ts.coordinator.experimental_get_current_worker_index()
        diary.note(f"worker {index} begins")
        diary.pass_gate(f"{len(diary.lines())} may go on")
        return index

    result = job.coordinator.schedule(runs)
    for count in range(1, 4):
        wait_until(lambda count=count: len(diary.lines()) == count)
        index = int(diary.lines()[-1].split()[1])
        if count == 3:
            diary.open_gate("3 may go on")
            assert result.fetch() == index
        else:
            job.cluster.restart("worker", index)
    job.coordinator.join()
    assert len(diary.lines()) == 3


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["dataset_fn", "dataset"])
def test_handle_dataset_creation_failure(job, kind):
    data = [torch.rand(8, 4) for _ in range(100)]
    dataset = (lambda: data) if kind == "dataset_fn" else data
    thread = restart_in_thread(job.cluster, 0)
    try:
        for _ in range(3):
            job.train(3, job.make_iterator(dataset))
            time.sleep(0.05)
    finally:
        thread.join()
    job.finish()


@pytest.mark.slow
def test_worker_preempted_midst_dataset_creation(job):
    diary = job.diary

    def dataset_fn():
        index = ts.coordinator.experimental_get_current_worker_index()
        diary.note(f"worker {index} makes its dataset")
        if index == 0:
            diary.pass_gate("dataset")
        return [torch.rand(8, 4) for _ in range(100)]

    iterator = job.make_iterator(dataset_fn)
    diary.wait_for("worker 0 makes its dataset")
    job.cluster.kill("worker", 0)
    job.train(4, iterator)
    job.coordinator.join()  # by the other worker
    diary.open_gate("dataset")
    job.cluster.restart("worker", 0)
    diary.wait_for("worker 0 makes its dataset", 2)
    job.wait_until_ready()
    job.train_without_end(4)
    job.finish()


def test_dataset_fn_that_raises(job):
    diary = job.diary

    def dataset_fn():
        diary.note("makes a dataset")
        raise OSError("no such bucket")

    iterator = job.make_iterator(dataset_fn)
    with pytest.raises(OSError, match="no such bucket"):
        wait_until(lambda: not job.coordinator.done())
    for value in iterator._values:
        with pytest.raises(OSError, match="no such bucket"):
            value.fetch()
    with contextlib.suppress(OSError):  # the other worker's
        job.coordinator.join()
    with pytest.raises(OSError, match="no such bucket"):
        job.coordinator.schedule(next, args=(iterator,)).fetch()
    with pytest.raises(OSError, match="no such bucket"):
        job.coordinator.join()
    job.coordinator.join()
    job.cluster.restart("worker", 0)
    diary.wait_for("makes a dataset", 3)  # the returning worker has tried, too
    with pytest.raises(OSError, match="no such bucket"):
        wait_until(lambda: not job.coordinator.done())
    job.train(4, job.make_iterator())
    job.finish()


@pytest.mark.slow
def test_returning_worker_begins_its_dataset_anew(job):
    def which(iterator):
        return ts.coordinator.experimental_get_current_worker_index(), next(iterator)

    job.cluster.kill("worker", 1)
    job.wait_until_lost(1)
    iterator = job.make_iterator(lambda: list(range(1000)))
    assert [job.coordinator.schedule(which, args=(iterator,)).fetch() for _ in range(3)] == [(0, 0), (0, 1), (0, 2)]
    job.cluster.restart("worker", 0)
    job.wait_until_ready(0)
    assert job.coordinator.schedule(which, args=(iterator,)).fetch() == (0, 0)


@pytest.mark.slow
def test_numpy_fetched_after_worker_failure(job):
    v = job.iterations
    result = job.coordinator.schedule(lambda: (v + 1, v - 1))
    assert result.fetch() == (1, -1)
    for index in range(2):
        job.cluster.kill("worker", index)
    assert result.fetch() == (1, -1)
    assert isinstance(result.fetch()[0], np.generic)


def test_tensor_got_after_worker_failure(job):
    v = job.iterations
    late = job.coordinator.schedule(lambda: v + 1)
    job.coordinator.join()
    early = job.coordinator.schedule(lambda: (v + 1, v - 1))
    assert early.get() == (1, -1)
    for index in range(2):
        job.cluster.kill("worker", index)
        job.wait_until_lost(index)
    assert early.get() == (1, -1)
    assert isinstance(early.get()[0], torch.Tensor)
    assert late.get() == 1  # it had not been asked for while its worker was there


@pytest.mark.slow
def test_fetch_from_ps_after_worker_failure(job):
    """Variables can be read at any time while a worker is there, is lost and comes back."""
    job.train(2)
    job.coordinator.join()
    thread = restart_in_thread(job.cluster, 0)
    num_reads = 0
    try:
        while thread.is_alive() or num_reads < 20:
            job.train(1)
            job.coordinator.join()
            assert int(job.iterations.read_value()) >= len(job.results)
            num_reads += 1
    finally:
        thread.join()
    job.finish()


def test_fetch_of_what_lived_on_a_dead_worker(job):
    iterator = job.make_iterator()
    with pytest.raises(TypeError, match="on its worker"):
        iterator._values[0].fetch()
    job.cluster.kill("worker", 0)
    job.wait_until_lost(0)
    with pytest.raises(ts.errors.UnavailableError, match="/job:worker/task:0") as info:
        iterator._values[0].fetch()
    assert "/job:ps" not in str(info.value)  # tf's test of the error's type
    with pytest.raises(TypeError, match="on its worker"):
        iterator._values[1].fetch()
    job.coordinator.join()  # no error of the program


def test_a_dead_worker_holds_nothing_up(job):
    """tf's testAsyncWaitIsNoOp: the others do the work of one that does not come back."""
    job.train_without_end(10)
    job.cluster.kill("worker", 0)
    job.finish()
    assert not job.coordinator._cluster.queue.num_running


@pytest.mark.slow
def test_all_workers_dead_then_one_back_then_both(job):
    for index in range(2):
        job.cluster.kill("worker", index)
        job.wait_until_lost(index)
    job.train(6)
    assert not job.coordinator.done()
    job.cluster.restart("worker", 1)
    job.coordinator.join()
    assert job.diary.lines() == ["worker 1 begins"] * 6
    job.cluster.restart("worker", 0)
    job.wait_until_ready()
    job.train_without_end(6)
    job.finish()


@pytest.mark.slow
def test_worker_that_is_not_there_at_first(cluster, make_job):
    cluster.kill("worker", 0)
    job = make_job(cluster)
    iterator = job.make_iterator()
    job.train(6, iterator)
    job.coordinator.join()
    assert job.diary.lines() == ["worker 1 begins"] * 6
    cluster.restart("worker", 0)
    job.wait_until_ready()
    job.train_without_end(6)
    job.finish()


def test_no_worker_is_there_at_first(cluster, make_job):
    for index in range(2):
        cluster.kill("worker", index)
    job = make_job(cluster)
    job.train(3, job.make_iterator())
    assert not job.coordinator.done()
    for index in range(2):
        cluster.restart("worker", index)
    job.finish()


def test_function_that_ends_its_worker_in_the_regular_way(job):
    """An exit in a function is an error of the function; the worker goes on."""

    def leaves():
        raise SystemExit(3)

    with pytest.raises(RuntimeError, match="SystemExit"):
        job.coordinator.schedule(leaves).fetch()
    with pytest.raises(RuntimeError, match="SystemExit"):
        job.coordinator.join()
    job.train(4)
    job.finish()
    assert all(job.cluster.is_alive("worker", index) for index in range(2))


def test_metrics_of_functions_that_run_again_count_once(job):
    diary = job.diary
    with job.strategy.scope():
        metric = ts.metrics.Mean()

    def measure(number):
        metric.update_state(float(number))
        diary.note(f"{number} on worker {ts.coordinator.experimental_get_current_worker_index()}")
        diary.pass_gate("end")

    results = [job.coordinator.schedule(measure, args=(number,)) for number in range(10)]
    index = int(wait_until(diary.lines)[0].split()[-1])
    job.cluster.kill("worker", index)
    diary.open_gate("end")
    job.coordinator.join()
    assert [result.fetch() for result in results] == [None] * 10
    assert len(diary.lines()) > 10
    assert float(metric.result()) == 4.5
