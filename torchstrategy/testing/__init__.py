"""Helpers for tests of distributed programs: processes to call functions in, clusters, and pytest fixtures of both."""

from __future__ import annotations

import typing

from torchstrategy import later

if typing.TYPE_CHECKING:
    from torchstrategy.testing.cluster import LocalCluster
    from torchstrategy.testing.processes import Outcome, ProcessPool, RemoteError, run_in_processes

__all__ = ["LocalCluster", "Outcome", "ProcessPool", "RemoteError", "run_in_processes"]

_HOMES = {
    "LocalCluster": "torchstrategy.testing.cluster",
    "Outcome": "torchstrategy.testing.processes",
    "ProcessPool": "torchstrategy.testing.processes",
    "RemoteError": "torchstrategy.testing.processes",
    "run_in_processes": "torchstrategy.testing.processes",
}

if not typing.TYPE_CHECKING:
    __getattr__, __dir__ = later.import_later(__name__, _HOMES)
