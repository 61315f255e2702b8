"""Helpers for tests of distributed programs: processes to call functions in, clusters, and pytest fixtures of both.

``verify_replication`` compares a program's numbers with those of one replica.
"""

from __future__ import annotations

import typing

from torchstrategy.base import later

if typing.TYPE_CHECKING:
    from torchstrategy.testing.local_cluster import LocalCluster
    from torchstrategy.testing.processes import Outcome, ProcessPool, RemoteError, run_in_processes
    from torchstrategy.testing.verification.api import VerificationReport, verify_replication

__all__ = [
    "LocalCluster",
    "Outcome",
    "ProcessPool",
    "RemoteError",
    "VerificationReport",
    "run_in_processes",
    "verify_replication",
]

_HOMES = {
    "LocalCluster": "torchstrategy.testing.local_cluster",
    "Outcome": "torchstrategy.testing.processes",
    "ProcessPool": "torchstrategy.testing.processes",
    "RemoteError": "torchstrategy.testing.processes",
    "VerificationReport": "torchstrategy.testing.verification.api",
    "run_in_processes": "torchstrategy.testing.processes",
    "verify_replication": "torchstrategy.testing.verification.api",
}

if not typing.TYPE_CHECKING:
    __getattr__, __dir__ = later.import_later(__name__, _HOMES)
