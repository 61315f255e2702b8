"""Replicas of one process that run at the same time, each in a thread of its own."""

import threading
import time

import pytest
import torch
from torch import nn

import torchstrategy as ts
from tests.programs import guide_losses
from tests.replicas.runs import Boom, all_reduce, assert_usable, replica_id
from torchstrategy.base.log import info_once


@pytest.fixture
def concurrent():
    return ts.MirroredStrategy(["cpu:0", "cpu:1", "cpu:2"], concurrent=True)


def test_concurrent_replicas_really_overlap():
    strategy = ts.MirroredStrategy(["cpu:0", "cpu:1"], concurrent=True)
    barrier = threading.Barrier(2, timeout=5)
    strategy.run(barrier.wait)


def test_concurrent_guide_program_equals_turns():
    concurrent = guide_losses(["cpu:0", "cpu:1"])
    original = ts.MirroredStrategy

    class Concurrent(original):
        def __init__(self, devices):
            super().__init__(devices, concurrent=True)

    ts.MirroredStrategy = Concurrent
    try:
        assert guide_losses(["cpu:0", "cpu:1"]) == pytest.approx(concurrent, abs=1e-7)
    finally:
        ts.MirroredStrategy = original


@pytest.mark.slow
def test_many_short_concurrent_runs(concurrent):
    """Everything that replica functions use at once: metrics, variables, losses, buffers, logs, fresh parameters."""
    with concurrent.scope():
        model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(0.2), nn.Linear(4, 1))
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
        metric = ts.metrics.Mean()
        counter = ts.Variable(torch.zeros(()), aggregation=ts.VariableAggregation.SUM)
    x = torch.arange(36.0).view(12, 3)
    batch = next(iter(concurrent.experimental_distribute_dataset(x, batch_size=12)))

    def step(x, i):
        optimizer.zero_grad()
        losses = model(x).square().sum(dim=1)
        ts.nn.compute_average_loss(losses, global_batch_size="actual").backward()
        info_once(f"message {i}")
        optimizer.step()
        metric.update_state(losses.detach() * 0 + 1)
        counter.assign_add(torch.ones(()))
        return all_reduce()

    for i in range(150):
        assert set(concurrent.run(step, args=(batch, i)).values) == {3.0}
    assert metric.result() == 1
    assert counter == 450
    first, *others = concurrent.experimental_local_results(model[0].weight)
    for other in others:
        torch.testing.assert_close(other, first, rtol=0, atol=0)


def test_concurrent_replicas_say_a_message_once(concurrent, monkeypatch):
    monkeypatch.setattr("torchstrategy.base.log._said", set())
    said = []
    monkeypatch.setattr("torchstrategy.base.log.logger.info", said.append)
    barrier = threading.Barrier(3)

    def fn(i):
        barrier.wait(10)
        info_once(f"message {i}")

    for i in range(50):
        concurrent.run(fn, args=(i,))
    assert said == [f"message {i}" for i in range(50)]


@pytest.mark.parametrize("failing", [0, 1, 2])
def test_concurrent_runs_that_fail_and_others_in_between(concurrent, failing):
    def fn(fails):
        for k in range(3):
            if fails and replica_id() == failing and k == 1:
                raise Boom
            all_reduce()

    num_threads = torch.get_num_threads()
    for i in range(40):
        if i % 2:
            with pytest.raises(Boom):
                concurrent.run(fn, args=(True,))
        else:
            concurrent.run(fn, args=(False,))
    assert_usable(concurrent)
    assert torch.get_num_threads() == num_threads


def test_failed_replica_0_waits_for_running_ones(concurrent):
    done = []

    def fn():
        if replica_id() == 0:
            raise Boom
        time.sleep(0.05)
        done.append(replica_id())

    with pytest.raises(Boom):
        concurrent.run(fn)
    assert sorted(done) == [1, 2]
    assert_usable(concurrent)


def test_interrupt_of_the_wait_after_a_failure(monkeypatch, concurrent):
    assert_usable(concurrent)
    hold = threading.Event()
    thread_class = type(concurrent.hosting._runners[0]._threads[0])
    wait = thread_class.wait_paused

    def interrupted(self):
        raise KeyboardInterrupt

    def fn():
        if replica_id() == 0:
            monkeypatch.setattr(thread_class, "wait_paused", interrupted)
            raise Boom
        hold.wait(5)

    with pytest.raises(KeyboardInterrupt):
        concurrent.run(fn)
    monkeypatch.setattr(thread_class, "wait_paused", wait)
    assert_usable(concurrent)
    hold.set()
    assert_usable(concurrent)


def test_threads_are_divided_between_concurrent_replicas(concurrent):
    before = torch.get_num_threads()
    torch.set_num_threads(6)
    try:

        def fn():
            inside = torch.get_num_threads()
            merged = ts.get_replica_context().merge_call(lambda _: torch.get_num_threads())
            return inside, merged, torch.get_num_threads()

        results = concurrent.experimental_local_results(concurrent.run(lambda: [list(fn())]))
        assert all(result == [[2, 6, 2]] for result in results)
        assert torch.get_num_threads() == 6
    finally:
        torch.set_num_threads(before)


def test_the_search_for_edits_leaves_the_cores_to_the_replicas(concurrent, monkeypatch):
    """A team of threads spins for milliseconds after its work, which was a fifth of a small network's step."""
    with concurrent.scope():
        model = nn.Linear(4, 2)
    seen = []
    equal = torch.equal

    def spy(first, second):
        if first.shape == model.weight.shape:
            seen.append(torch.get_num_threads())
        return equal(first, second)

    before = torch.get_num_threads()
    torch.set_num_threads(6)
    try:
        concurrent.run(model.zero_grad)
        monkeypatch.setattr(torch, "equal", spy)
        concurrent.run(lambda: monkeypatch.undo() if replica_id() == 0 else None)
        assert seen
        assert set(seen) == {1}
        assert torch.get_num_threads() == 6
    finally:
        torch.set_num_threads(before)
