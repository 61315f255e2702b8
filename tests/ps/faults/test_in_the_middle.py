"""Tasks killed in the middle of what takes a while: a push, a result, a checkpoint."""

import random
import time

import pytest
import torch
from torch import nn

import torchstrategy as ts
from tests.ps.faults.jobs import wait_until

pytestmark = pytest.mark.timeout(60)

NUM_KILLS = 4
NUM_ELEMENTS = 2_000_000  # 8 MB, which take some milliseconds


def kill_now_and_then(job, seed, fn=None, make_args=None):
    """Kill and restart workers, at random moments; return the results of functions scheduled before each."""
    source = random.Random(seed)
    results = []
    for _ in range(NUM_KILLS):
        job.wait_until_ready()
        if fn is not None:
            for _ in range(6):
                results.append(job.coordinator.schedule(fn, args=make_args(len(results))))
        time.sleep(source.uniform(0.02, 0.12))
        job.cluster.restart("worker", source.randrange(2))
    return results


@pytest.mark.end_to_end
def test_push_is_whole_or_nothing(cluster, make_job):
    job = make_job(cluster, variable_partitioner=ts.experimental.partitioners.FixedShardsPartitioner(2))
    with job.strategy.scope():
        weight = nn.ParameterList([nn.Parameter(torch.zeros(NUM_ELEMENTS))])
        optimizer = torch.optim.SGD(weight.parameters(), lr=1.0)
    parameter = weight[0]
    ones = torch.ones(())
    diary = job.diary

    def push():
        while not diary.is_open("end"):
            parameter.grad = -ones.expand(NUM_ELEMENTS)
            optimizer.step()

    for _ in range(4):
        job.coordinator.schedule(push)
    kill_now_and_then(job, seed=0)
    diary.open_gate("end")
    job.coordinator.join()
    for part in parameter.detach().chunk(2):
        assert float(part[0]) > 0
        assert bool((part == part[0]).all())


@pytest.mark.slow
def test_result_is_whole_or_comes_again(job):
    def fill(number):
        return {"number": number, "values": torch.full((NUM_ELEMENTS,), float(number))}

    results = kill_now_and_then(job, 1, fill, lambda number: (number,))
    for number, result in enumerate(results):
        value = result.get()
        assert value["number"] == number
        assert bool((value["values"] == number).all())
    job.coordinator.join()


@pytest.mark.slow
def test_function_with_large_arguments(job):
    """Workers are killed while they receive them, too."""

    def add_up(values):
        return float(values.sum(dtype=torch.float64))

    values = torch.ones(NUM_ELEMENTS)
    results = kill_now_and_then(job, 2, add_up, lambda number: (values * number,))
    assert [result.fetch() for result in results] == [number * NUM_ELEMENTS for number in range(len(results))]
    job.coordinator.join()


def test_bounded_staleness(cluster, make_job):
    """A lost function does not hold the others up for ever, and they stay in order."""
    job = make_job(cluster, max_staleness=0)
    job.goes_on.assign(True)
    job.train(1)
    wait_until(job.diary.lines)
    for _ in range(2):
        index = int(job.diary.lines()[-1].split()[1])
        count = len(job.diary.lines())
        job.cluster.restart("worker", index)
        wait_until(lambda count=count: len(job.diary.lines()) > count, what="the next try")
    job.train(9)
    job.finish()
    assert int(job.iterations) == 10


def test_checkpoint_without_a_parameter_server(job, tmp_path):
    """The error names the server, and the last checkpoint is still the last one."""
    checkpoint = ts.train.Checkpoint(net=job.net, optimizer=job.optimizer, iterations=job.iterations)
    manager = ts.train.CheckpointManager(checkpoint, str(tmp_path / "model"), max_to_keep=3)
    job.train(2)
    job.coordinator.join()
    last = manager.save()
    job.cluster.kill("ps", 1)
    with pytest.raises(ts.errors.UnavailableError, match="/job:ps/task:1"):
        manager.save()
    assert manager.latest_checkpoint == last
    assert ts.train.CheckpointManager(checkpoint, str(tmp_path / "model"), max_to_keep=3).latest_checkpoint == last
