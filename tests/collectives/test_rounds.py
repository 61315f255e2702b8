"""Rounds in a store that outlives them: who meets whom, whatever the order in which the processes come."""

import os
import threading
import time

import pytest
from torch.distributed import HashStore

import torchstrategy as ts
from tests.collectives.test_rendezvous import job_of
from torchstrategy.collectives import rounds
from torchstrategy.collectives.joining import Roll, store_of_job


def job(rank, size):
    return job_of(rank, size, hosted=True, port=7)


class Process(threading.Thread):
    """A rank that gathers with the others of its round."""

    def __init__(self, store, rank, size, timeout_s=20.0):
        super().__init__(daemon=True)
        self.number = self.error = None
        self._store, self._job, self._timeout_s = store, job(rank, size), timeout_s
        self.start()

    def run(self):
        roll = Roll(self._job.rank, self._job.size)
        try:
            self.number = rounds.enter_round(self._store, self._job, time.monotonic() + self._timeout_s)
            own = store_of_job(self._store, self.number)
            rounds.wait_for_all(own, self._job, {}, self._timeout_s, roll=roll)
        except (RuntimeError, ts.errors.OpError) as error:
            self.error = error

    def end(self):
        self.join(20)
        assert self.error is None
        return self.number


def meet(store, size, order=None):
    processes = []
    for rank in order or range(size):
        processes.append(Process(store, rank, size))
        time.sleep(0.05)
    numbers = {process.end() for process in processes}
    assert len(numbers) == 1
    return numbers.pop()


@pytest.mark.parametrize("order", [[0, 1, 2], [2, 1, 0], [1, 0, 2]])
def test_rounds_of_any_size_one_after_the_other(order):
    store = HashStore()
    assert meet(store, 3, order) == 1
    assert meet(store, 3, order) == 2  # those who come before rank 0 find the last round, in which nobody waits
    assert meet(store, 2) == 3
    assert meet(store, 3, order) == 4


def test_a_round_to_which_a_rank_did_not_come_is_left_alone():
    """Rank 2 of the first round ended before it came; rank 2 of the second one comes first."""
    store = HashStore()
    left = [Process(store, 0, 3, 0.5), Process(store, 1, 3, 0.5)]
    for process in left:
        process.join(20)
    assert all("Rank 2 did not make its strategy" in str(process.error) for process in left)
    early = Process(store, 2, 3)
    time.sleep(0.1)
    assert early.number is None
    assert meet(store, 3, [0, 1]) == early.end() == 2


def test_a_store_of_one_round():
    store = HashStore()
    rounds.mark_as_of_one_round(store)
    assert rounds.enter_round(store, job(1, 2), time.monotonic()) == 0


@pytest.mark.parametrize(("size", "message"), [(0, r"read data\.$"), (3, "were 3 processes, and these are 2")])
def test_without_a_round(size, message):
    store = HashStore()
    if size:
        rounds.enter_round(store, job(0, size), time.monotonic() + 1)
    with pytest.raises(ts.errors.DeadlineExceededError, match=message):
        rounds.enter_round(store, job(1, 2), time.monotonic() + 0.05)


def test_a_process_whose_launcher_has_ended(monkeypatch):
    parents = iter([10, 1])
    monkeypatch.setattr(os, "getppid", lambda: next(parents))
    with pytest.raises(RuntimeError, match="launcher has ended"):
        rounds.enter_round(HashStore(), job(1, 2), time.monotonic() + 5)


def test_an_orphan_of_an_earlier_round_holds_nobody(monkeypatch):
    """It would say for minutes that it waits, as rank 0, and those of the next round would come to it."""
    parent = [10]
    monkeypatch.setattr(os, "getppid", lambda: parent[0])
    orphan = Process(HashStore(), 0, 2)
    time.sleep(0.1)
    parent[0] = 1
    orphan.join(20)
    assert "launcher has ended" in str(orphan.error)
