"""The key-value store that the processes of a job meet in."""

from __future__ import annotations

import functools
from collections import Counter
from datetime import timedelta

from torch.distributed import DistError, PrefixStore, Store, TCPStore  # type: ignore[attr-defined]

__all__ = ["make_store"]

_TIMEOUT = timedelta(seconds=300)
_groups: Counter[tuple[str, int, int]] = Counter()


def make_store(address: str, port: int, rank: int, size: int, *, hosted: bool, attempt: int) -> Store:
    """Connect to the job's store, with a prefix of this group's own.

    Args:
        address: host of the store.
        port: port of the store.
        rank: this process's id; rank 0 hosts the store unless the launcher does.
        size: number of processes.
        hosted: whether the launcher hosts the store.
        attempt: how often the launcher has restarted the job.

    Returns:
        The store. The n-th call in each process gives the same store.

    Raises:
        RuntimeError: the store can't be reached.
    """
    key = (address, port, attempt)
    _groups[key] += 1
    try:
        store = _connect(address, port, rank, size, hosted=hosted)
    except DistError as error:
        raise RuntimeError(
            f"Rank {rank} can't reach the job's store at {address}:{port} within {_TIMEOUT.seconds} s: {error}. "
            "Did all processes start, with the same MASTER_ADDR and MASTER_PORT?"
        ) from error
    return PrefixStore(f"torchstrategy/{attempt}/{_groups[key]}", store)


@functools.cache
def _connect(address: str, port: int, rank: int, size: int, *, hosted: bool) -> Store:
    # multi_tenant: a default process group of the user's may share the port.
    is_master = rank == 0 and not hosted
    return TCPStore(address, port, size, is_master, timeout=_TIMEOUT, multi_tenant=True, wait_for_workers=False)
