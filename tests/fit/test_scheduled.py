"""How far ahead of the results steps are scheduled, and the order of the results; without a cluster."""

import types

import pytest

import torchstrategy as ts
from torchstrategy.fit.cluster_steps import ScheduledSteps


class Coordinator:
    """Runs functions when their results are asked for; notes what happens."""

    def __init__(self, num_workers, max_staleness=None):
        spec = ts.cluster_resolver.ClusterSpec({"worker": [f"host{i}:1" for i in range(num_workers)]})
        self.strategy = types.SimpleNamespace(cluster_spec=spec, max_staleness=max_staleness)
        self.events = []
        self.error = None

    def schedule(self, fn, args):
        self.events.append(("schedule", *args))
        return types.SimpleNamespace(get=lambda: self.run(fn, args))

    def run(self, fn, args):
        try:
            return fn(*args)
        except ZeroDivisionError as error:
            self.error = self.error or error
            raise ts.errors.CancelledError("because another one failed") from None

    def join(self):
        error, self.error = self.error, None
        if error is not None:
            raise error


def executions(count):
    return ((number, lambda x: 10 * x, (number,)) for number in range(count))


def run(coordinator, count, must_wait=lambda: False, *, is_training=True):
    results = []
    for tag, value in ScheduledSteps(coordinator, is_training=is_training).results(executions(count), must_wait):
        coordinator.events.append(("take", tag))
        results.append(value)
    return results


def largest_lead(events):
    lead = largest = 0
    for kind, _ in events:
        lead += 1 if kind == "schedule" else -1
        largest = max(largest, lead)
    return largest


@pytest.mark.parametrize(
    ("num_workers", "max_staleness", "is_training", "lead"),
    [(2, None, True, 8), (3, None, False, 12), (2, 0, True, 1), (2, 2, True, 3), (2, 100, True, 8), (2, 0, False, 8)],
)
def test_how_far_ahead(num_workers, max_staleness, is_training, lead):
    coordinator = Coordinator(num_workers, max_staleness)
    assert run(coordinator, 30, is_training=is_training) == [10 * i for i in range(30)]
    assert largest_lead(coordinator.events) == lead


def test_waiting_for_what_is_under_way():
    coordinator = Coordinator(2)

    def must_wait():
        return sum(kind == "schedule" for kind, _ in coordinator.events) % 5 == 0

    run(coordinator, 15, must_wait)
    scheduled = [number for kind, number in coordinator.events if kind == "schedule"]
    assert scheduled == list(range(15))
    for barrier in (5, 10):
        assert coordinator.events.index(("schedule", barrier)) > coordinator.events.index(("take", barrier - 1))


def test_fewer_than_there_may_be():
    assert run(Coordinator(2), 3) == [0, 10, 20]
    assert run(Coordinator(2), 0) == []


def test_the_error_that_came_first_is_raised():
    coordinator = Coordinator(1)
    steps = ScheduledSteps(coordinator, is_training=True)
    with pytest.raises(ZeroDivisionError):
        list(steps.results(iter([("tag", lambda: 1 / 0, ())]), lambda: False))
    steps.wait()
