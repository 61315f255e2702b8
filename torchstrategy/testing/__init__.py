"""Helpers for tests of distributed programs: worker processes to call functions in, and a pytest fixture of them."""

from torchstrategy.testing.processes import Outcome, ProcessPool, RemoteError, run_in_processes

__all__ = ["Outcome", "ProcessPool", "RemoteError", "run_in_processes"]
