"""The example of the guide."""

import torch

import torchstrategy as ts


def square(x):
    return x.square().sum()


def test_a_lost_worker_is_replaced(local_cluster):
    cluster = local_cluster(num_workers=2, num_ps=1)
    strategy = ts.ParameterServerStrategy(cluster.resolver())
    coordinator = ts.coordinator.ClusterCoordinator(strategy)
    results = [coordinator.schedule(square, args=(torch.tensor([float(i), 1.0]),)) for i in range(20)]
    cluster.kill("worker", 0)
    coordinator.join()
    assert [float(result.fetch()) for result in results] == [i**2 + 1 for i in range(20)]
    strategy.close()
