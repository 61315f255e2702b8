"""A real cluster, and a strategy that is connected to it."""

import pytest

import torchstrategy as ts


@pytest.fixture
def cluster(local_cluster):
    return local_cluster(2, 2)


@pytest.fixture
def strategy(cluster):
    made = ts.ParameterServerStrategy(cluster.resolver())
    yield made
    made.close()
