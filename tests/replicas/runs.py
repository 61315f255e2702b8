"""What tests of replicas in one process call, inside of `run` and around it."""

import torch

import torchstrategy as ts


def on_replicas(strategy, fn):
    """Return what a function returns on each replica; values that are equal on all come as one."""
    results = strategy.experimental_local_results(strategy.run(fn))
    return results if len(results) > 1 else results * strategy.num_replicas_in_sync


def replica_id():
    return ts.get_replica_context().replica_id_in_sync_group


def all_reduce(value=1.0):
    return ts.get_replica_context().all_reduce("sum", torch.tensor(value)).item()


def assert_usable(strategy):
    """Assert that the replicas still meet."""
    assert set(on_replicas(strategy, all_reduce)) == {float(strategy.num_replicas_in_sync)}


class Boom(Exception):
    """An error of the program's own."""
