import json
import threading

import pytest
import torch
from torch import nn

import torchstrategy as ts
from tests.programs import cpu_devices
from torchstrategy.base.labels import label, make_profiler


def recorded(program, path):
    """Return the library's labels of a program with their threads and times, in the order of their beginning."""
    with make_profiler() as profile:
        program()
    profile.export_chrome_trace(str(path))
    events = json.loads(path.read_text())["traceEvents"]
    labels = [event for event in events if event.get("name", "").startswith("ts::")]
    return sorted(labels, key=lambda event: (event["ts"], -event["dur"]))


def names(labels):
    return [event["name"].removeprefix("ts::") for event in labels]


def is_within(inner, outer):
    return outer["tid"] == inner["tid"] and outer["ts"] <= inner["ts"] < outer["ts"] + outer["dur"]


class Unreadable:
    def __str__(self):
        raise AssertionError("nobody asked for it")


def test_nothing_is_made_without_a_profiler():
    assert label("merge", Unreadable()) is label("wait")
    with label("merge", Unreadable()), label("merge"):
        pass


def test_a_label(tmp_path):
    def program():
        with label("move", "the sum of gradients", 12, "bytes"), label("wait"):
            pass

    labels = recorded(program, tmp_path / "trace.json")
    assert names(labels) == ["move the sum of gradients 12 bytes", "wait"]
    assert is_within(labels[1], labels[0])


def test_threads_are_seen_that_ran_before(tmp_path):
    may_go_on = threading.Event()

    def work():
        may_go_on.wait()
        with label("replica", 1):
            pass

    thread = threading.Thread(target=work)
    thread.start()

    def program():
        with label("replica", 0):
            may_go_on.set()
            thread.join()

    labels = recorded(program, tmp_path / "trace.json")
    assert names(labels) == ["replica 0", "replica 1"]
    assert labels[0]["tid"] != labels[1]["tid"]


class Training:
    """A model with its step."""

    def __init__(self, devices, **options):
        self.strategy = ts.MirroredStrategy(devices, **options)
        self.batches = self.strategy.experimental_distribute_dataset(torch.ones(8, 2), batch_size=4)
        with self.strategy.scope():
            self.model = nn.Linear(2, 1)
            self.optimizer = torch.optim.SGD(self.model.parameters(), 0.1)

    def epoch(self):
        for batch in self.batches:
            self.strategy.run(self.step, args=(batch,))

    def step(self, x):
        self.optimizer.zero_grad()
        self.model(x).sum().backward()
        self.optimizer.step()


def test_one_replica(tmp_path):
    labels = recorded(Training(cpu_devices(1)).epoch, tmp_path / "trace.json")
    assert names(labels) == ["input", "replica 0", "input", "replica 0", "input"]


@pytest.mark.parametrize("concurrent", [False, True], ids=["in turns", "concurrent"])
def test_replicas_of_one_process(tmp_path, concurrent):
    training = Training(cpu_devices(2), concurrent=concurrent)
    training.epoch()  # which starts the threads, before the profiler starts
    labels = recorded(training.epoch, tmp_path / "trace.json")
    by_name = {name: [event for event in labels if event["name"] == f"ts::{name}"] for name in set(names(labels))}
    assert {name: len(events) for name, events in by_name.items()} == {
        "input": 3,
        "replica 0": 2,
        "replica 1": 2,
        "meet the sum of gradients": 4,
        "merge": 2,
    }
    threads = {event["tid"] for event in by_name["replica 1"]}
    assert len(threads) == 1
    assert threads.isdisjoint({event["tid"] for event in by_name["replica 0"]})
    replicas = by_name["replica 0"] + by_name["replica 1"]
    assert all(sum(is_within(event, one) for one in replicas) == 1 for event in by_name["meet the sum of gradients"])


def test_the_default_strategy(tmp_path):
    labels = recorded(lambda: ts.get_strategy().run(lambda: None), tmp_path / "trace.json")
    assert names(labels) == ["replica 0"]


def test_fit_waits_for_input(tmp_path):
    model = ts.Model(nn.Linear(2, 1))
    model.compile("sgd", "mse")
    model.fit(torch.ones(2, 2), torch.ones(2, 1), batch_size=1, verbose=0)
    labels = recorded(
        lambda: model.fit(torch.ones(2, 2), torch.ones(2, 1), batch_size=1, verbose=0), tmp_path / "trace.json"
    )
    outer = [event for event in labels if not any(is_within(event, one) for one in labels if one is not event)]
    assert names(outer) == ["input", "replica 0", "input", "replica 0", "input"]
