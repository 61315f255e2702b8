"""Ranks as threads of one process, so that what each rank reads can be compared without starting processes.

One rank runs at a time. The turn passes where the ranks talk, and each rank keeps a random state of its own.
"""

import json
import threading

import torch

from torchstrategy.base.devices import Placement


class FakeWorkers:
    def __init__(self, rank, job):
        self.rank = rank
        self.size = job.size
        self.operations = []
        self.failures = []
        self._job = job

    def exchange(self, operation, payload):
        self.operations.append(operation)
        return self._job.exchange(self.rank, operation, payload)

    def broadcast_object(self, operation, payload):
        return self.exchange(operation, payload if self.rank == 0 else None)[0]

    def report_failure(self, operation, error):
        self.failures.append((operation, error))


class _Job:
    def __init__(self, size):
        self.size = size
        self.turn = threading.Lock()
        self.barrier = threading.Barrier(size)
        self.slots = [None] * size

    def exchange(self, rank, operation, payload):
        self.slots[rank] = (operation, json.dumps(payload))
        state = torch.get_rng_state()
        self.turn.release()
        try:
            self.barrier.wait(30)
            slots = list(self.slots)
            self.barrier.wait(30)
        finally:
            self.turn.acquire()
            torch.set_rng_state(state)
        operations = {slot[0] for slot in slots}
        if len(operations) > 1:
            raise AssertionError(f"the ranks are at different operations: {operations}")
        return [json.loads(slot[1]) for slot in slots]


def run_ranks(size, fn, num_local=1, seed=0):
    """Call ``fn(placement, workers)`` as each rank and return the results, or raise the first error."""
    job = _Job(size)

    def call(rank):
        with job.turn:
            torch.manual_seed(seed + rank)
            devices = tuple(torch.device("cpu", i) for i in range(num_local))
            try:
                return fn(Placement(size * num_local, rank * num_local, devices), FakeWorkers(rank, job))
            except BaseException:
                job.barrier.abort()
                raise

    results, errors = [None] * size, []

    def run(rank):
        try:
            results[rank] = call(rank)
        except BaseException as error:  # noqa: BLE001 - raised below
            errors.append(error)

    state = torch.get_rng_state()
    # Not an executor: a loader worker forked from one of its threads would try to join that thread at its end.
    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    torch.set_rng_state(state)
    for error in sorted(errors, key=lambda error: isinstance(error, threading.BrokenBarrierError)):
        raise error
    return results


def one_process(num_replicas):
    """The placement of a strategy of one process."""
    return Placement(num_replicas, 0, tuple(torch.device("cpu", i) for i in range(num_replicas)))
