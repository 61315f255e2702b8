"""Functions in the processes of real workers."""

import os
import sys
import time

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import torchstrategy as ts


@pytest.fixture
def cluster(local_cluster):
    return local_cluster(2, 1)


@pytest.fixture
def coordinator(cluster):
    strategy = ts.ParameterServerStrategy(cluster.resolver())
    yield ts.coordinator.ClusterCoordinator(strategy)
    strategy.close()


def run(coordinator, function, *args):
    result = coordinator.schedule(function, args=args)
    coordinator.join()
    return result.fetch()


def test_results_of_all_kinds(coordinator):
    def give(x):
        return {"tensor": x + 1, "pid": os.getpid(), 3: (None, "text", [True, 2.5])}, np.arange(2)

    result, array = run(coordinator, give, torch.ones(2))
    assert result["pid"] != os.getpid()
    assert np.asarray(result["tensor"]).tolist() == [2, 2]
    assert result[3] == (None, "text", [True, 2.5])
    assert array.tolist() == [0, 1]


@pytest.mark.parametrize(
    ("function", "error", "message"),
    [
        (lambda: sys.exit(3), RuntimeError, "SystemExit: 3"),
        (lambda: {}["key"], KeyError, "key"),
        (lambda: torch.ones(2) @ torch.ones(3), RuntimeError, "inconsistent tensor size"),
        (lambda: torch.nn.Linear(1, 1), TypeError, "A function that is scheduled may return"),
        (lambda: next(iter([])), ts.errors.OutOfRangeError, "End of sequence"),
    ],
)
def test_errors_come_back(coordinator, function, error, message):
    with pytest.raises(error, match=message):
        run(coordinator, function)


def loader():
    return DataLoader(TensorDataset(torch.arange(4)), batch_size=2, num_workers=1)


def test_a_loader_may_have_processes_of_its_own(coordinator):
    dataset = coordinator.create_per_worker_dataset(loader)
    results = [coordinator.schedule(lambda it: next(it)[0].tolist(), args=(iter(dataset),)) for _ in range(2)]
    coordinator.join()
    assert {tuple(result.fetch()) for result in results} <= {(0, 1), (2, 3)}


def test_workers_draw_different_numbers(coordinator):
    def draw():
        return ts.coordinator.experimental_get_current_worker_index(), torch.rand(1).item(), np.random.rand()

    results = [coordinator.schedule(draw) for _ in range(20)]
    coordinator.join()
    numbers = {result.fetch()[1:] for result in results}
    assert len(numbers) == 20


def test_a_worker_survives_its_coordinator(cluster):
    pids = set()
    for _ in range(2):
        strategy = ts.ParameterServerStrategy(cluster.resolver())
        coordinator = ts.coordinator.ClusterCoordinator(strategy)
        results = [coordinator.schedule(os.getpid) for _ in range(20)]
        coordinator.join()
        pids |= {result.fetch() for result in results}
        strategy.close()
    assert pids <= {cluster.pid("worker", 0), cluster.pid("worker", 1)}


def test_a_closure_that_never_ends_does_not_keep_the_worker_from_others(cluster, tmp_path):
    path = tmp_path / "running"

    def hang():
        path.touch()
        time.sleep(1000)

    strategy = ts.ParameterServerStrategy(cluster.resolver())
    coordinator = ts.coordinator.ClusterCoordinator(strategy)
    for _ in range(2):
        coordinator.schedule(hang)
    while not path.exists():
        time.sleep(0.01)
    newer = ts.ParameterServerStrategy(cluster.resolver())
    assert run(ts.coordinator.ClusterCoordinator(newer), lambda: "done") == "done"
    with pytest.raises(ts.errors.UnavailableError, match="newer coordinator"):
        coordinator.join()
    newer.close()
    strategy.close()
    for index in range(2):  # for the tests after this one
        cluster.kill("worker", index)
