"""Clusters that the tests of this folder share, and jobs on them."""

import pytest

import torchstrategy as ts
from tests.ps.faults.jobs import Job

#: Seconds of silence after which a task counts as lost, where tests stop processes.
HEARTBEAT_S = 2.0


@pytest.fixture
def cluster(local_cluster):
    """Two workers and two parameter servers, all there."""
    return local_cluster(2, 2)


@pytest.fixture(scope="session")
def _quick_cluster():
    environment = {"TORCHSTRATEGY_HEARTBEAT_S": str(HEARTBEAT_S)}
    with ts.testing.LocalCluster(2, 2, environment=environment) as cluster:
        yield cluster


@pytest.fixture
def quick_cluster(_quick_cluster, monkeypatch):
    """The same, for tests that stop processes: silence is a loss after ``HEARTBEAT_S``, for this process, too."""
    monkeypatch.setenv("TORCHSTRATEGY_HEARTBEAT_S", str(HEARTBEAT_S))
    return _quick_cluster.start()


@pytest.fixture
def make_job(tmp_path):
    """``make_job(cluster)`` returns a job; it ends with the test."""
    jobs = []

    def make(cluster, **options):
        folder = tmp_path / str(len(jobs))
        folder.mkdir()
        jobs.append(Job(cluster, folder, **options))
        return jobs[-1]

    yield make
    for job in jobs:
        job.close()


@pytest.fixture
def job(cluster, make_job):
    """A job whose workers are there."""
    job = make_job(cluster)
    job.wait_until_ready()
    return job
