"""Pytest fixtures; import them in a ``conftest.py``: ``from torchstrategy.testing.fixtures import process_pool``."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import pytest

from torchstrategy import testing  # whose members are imported when a test wants one

if TYPE_CHECKING:
    from torchstrategy.testing.local_cluster import LocalCluster
    from torchstrategy.testing.processes import ProcessPool

__all__ = ["local_cluster", "process_pool"]


@pytest.fixture(scope="session")
def process_pool() -> Iterator[Callable[[int], ProcessPool]]:
    """``process_pool(n)`` returns a pool of n processes, kept for the whole test session."""
    pools: dict[int, ProcessPool] = {}

    def get(size: int) -> ProcessPool:
        if size not in pools:
            pools[size] = testing.ProcessPool(size)
        return pools[size]

    yield get
    for pool in pools.values():
        pool.close()


@pytest.fixture(scope="session")
def local_cluster() -> Iterator[Callable[..., LocalCluster]]:
    """``local_cluster(num_workers, num_ps)`` returns a cluster, kept for the whole test session.

    Servers that an earlier test has killed or stopped are there again.
    """
    clusters: dict[tuple[int, int], LocalCluster] = {}

    def get(num_workers: int, num_ps: int = 1) -> LocalCluster:
        key = (num_workers, num_ps)
        if key not in clusters:
            clusters[key] = testing.LocalCluster(num_workers, num_ps)
        return clusters[key].start()

    yield get
    for cluster in clusters.values():
        cluster.close()
