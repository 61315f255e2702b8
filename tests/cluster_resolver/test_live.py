"""Two processes that train together find each other by each of the resolvers."""

import os

import pytest

from tests.cluster_resolver.live_programs import RESOLVERS, train_under_srun, train_with
from tests.clusters import free_ports

TOGETHER = [(2, 3.0, True), (2, 3.0, False)]


@pytest.mark.parametrize("kind", RESOLVERS)
def test_a_given_resolver(kind, process_pool):
    assert process_pool(2).run(train_with, kind, free_ports(2)) == TOGETHER


def test_a_slurm_step(process_pool):
    results = process_pool(2).run(train_under_srun, os.getpid())
    assert [result for _, result in results] == TOGETHER
    assert [task for task, _ in results] == [("SlurmClusterResolver", "worker", rank) for rank in (0, 1)]
