"""The processes that train together, as one of them sees them before it has met the others; and their heartbeat."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import Any

__all__ = ["Job", "heartbeat_seconds"]


def heartbeat_seconds() -> float:
    """Return after how many seconds without a sign of life a process counts as gone.

    Returns:
        ``TORCHSTRATEGY_HEARTBEAT_S``, by default 10.

    Raises:
        ValueError: the variable is no positive number.
    """
    text = os.environ.get("TORCHSTRATEGY_HEARTBEAT_S", "10")
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < float("inf"):
        raise ValueError(f"TORCHSTRATEGY_HEARTBEAT_S must be a positive number of seconds. Received: {text!r}")
    return seconds


@dataclass(frozen=True)
class Job:
    """A job of several processes.

    Args:
        source: what described it, such as ``"TF_CONFIG"``, ``"torchrun"``, ``"SLURM"`` or a resolver's class.
        reason: one sentence that says why this source was taken, for logs.
        cluster_spec: a ``ts.cluster_resolver.ClusterSpec`` of all tasks; with torchrun only what is known, the address
            of the first one.
        task_type: this process's job, such as ``"chief"`` or ``"worker"``; ``None`` where there are no names.
        task_id: its index in that job.
        rank: its number among the processes that train together, chief first.
        size: how many these are.
        address: host of the key-value store at which they meet.
        port: the store's port.
        hosted: whether the launcher keeps the store; else rank 0 does.
        attempt: how often the launcher has restarted the job.
        local_rank: its number on its host, ``None`` if the source does not say, or if all the GPUs that this process
            sees are its own.
        local_size: processes on its host, ``None`` if the source does not say.
        resolver: the ``ts.cluster_resolver.ClusterResolver`` that was asked, for ``Strategy.cluster_resolver``.
    """

    source: str
    reason: str
    cluster_spec: Any
    task_type: str | None
    task_id: int | None
    rank: int
    size: int
    address: str
    port: int
    hosted: bool = False
    attempt: int = 0
    local_rank: int | None = None
    local_size: int | None = None
    resolver: Any = field(default=None, compare=False, repr=False)
