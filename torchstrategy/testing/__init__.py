"""Helpers for tests of distributed programs: processes to call functions in, clusters, and pytest fixtures of both."""

from torchstrategy.testing.cluster import LocalCluster
from torchstrategy.testing.processes import Outcome, ProcessPool, RemoteError, run_in_processes

__all__ = ["LocalCluster", "Outcome", "ProcessPool", "RemoteError", "run_in_processes"]
