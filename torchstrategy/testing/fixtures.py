"""A pytest fixture; import it in a ``conftest.py``: ``from torchstrategy.testing.fixtures import process_pool``."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from torchstrategy.testing.processes import ProcessPool

__all__ = ["process_pool"]


@pytest.fixture(scope="session")
def process_pool() -> Iterator[Callable[[int], ProcessPool]]:
    """``process_pool(n)`` returns a pool of n processes, kept for the whole test session."""
    pools: dict[int, ProcessPool] = {}

    def get(size: int) -> ProcessPool:
        if size not in pools:
            pools[size] = ProcessPool(size)
        return pools[size]

    yield get
    for pool in pools.values():
        pool.close()
