import gc
import logging

import pytest

import torchstrategy as ts
from tests.ps.coordinator.fakes import FakeCluster, definition, error_reply
from torchstrategy.base.values import PerWorkerValues
from torchstrategy.ps.coordinator.per_worker import RemoteValue, Resource
from torchstrategy.ps.transport.messages import Message


def test_a_closure_waits_for_a_worker():
    fake = FakeCluster(1, connect=False)
    result = fake.schedule()
    assert fake.peers[0].seen == []
    fake.peers[0].connect(prepare=False)
    assert fake.peers[0].kinds() == ["configure"]
    fake.peers[0].answer("configure", Message("ok", {}))
    assert fake.peers[0].kinds() == ["run"]
    fake.peers[0].done(7)
    assert result.fetch() == 7
    assert fake.queue.is_done()


def test_idle_workers_first_then_a_second_one_each():
    fake = FakeCluster(2)
    fake.schedule_many(3)
    assert fake.running() == [[0], [1]]  # one queued closure could not keep both busy
    fake.schedule()
    assert fake.running() == [[0, 2], [1]]
    fake.schedule_many(10)
    assert fake.running() == [[0, 2], [1, 3]]
    fake.peers[1].done()
    assert fake.running() == [[0, 2], [3, 4]]


def test_answers_go_on_without_the_program():
    fake = FakeCluster(1)
    results = fake.schedule_many(5)
    for i in range(5):
        fake.peers[0].done(i)
    assert [result.fetch() for result in results] == list(range(5))


def test_a_closure_behind_a_slow_one_goes_to_an_idle_worker(monkeypatch):
    fake = FakeCluster(2)
    fake.schedule_many(4)
    assert fake.running() == [[0, 2], [1]]
    fake.peers[1].done()
    fake.peers[1].done()
    assert fake.running() == [[0, 2], []]
    fake.cluster.workers[0].in_flight[0].since -= 1.0  # it has been running for a second
    fake.loop.advance(0.2)
    cancel = fake.peers[0].answer("cancel", Message("ok", {}))
    assert cancel.fields == {"closures": [2]}
    fake.peers[0].answer("run", Message("cancelled", {}), number=2)
    assert fake.running() == [[0], [2]]


def test_nothing_is_taken_from_a_fast_worker():
    fake = FakeCluster(2)
    fake.schedule_many(4)
    fake.peers[1].done()
    fake.peers[1].done()
    fake.loop.advance(0.2)
    assert "cancel" not in fake.peers[0].kinds()
    fake.cluster.workers[0].in_flight[0].since -= 1.0
    fake.peers[0].done()
    fake.loop.advance(1.0)  # number 2 runs, nothing waits
    assert "cancel" not in fake.peers[0].kinds()


@pytest.mark.parametrize("staleness", [0, 1, 2])
def test_max_staleness(staleness):
    fake = FakeCluster(4, max_staleness=staleness)
    fake.schedule_many(8)
    assert fake.all_running() == list(range(staleness + 1))
    fake.peers[0].done(number=0)
    running = sorted(fake.all_running())
    assert running == list(range(1, staleness + 2))
    if staleness:
        # The oldest one runs on: nothing may start that is further ahead.
        newest = max(running)
        peer = next(peer for peer in fake.peers if peer.running() == [newest])
        peer.done()
        assert sorted(fake.all_running()) == list(range(1, newest))


def test_staleness_0_runs_in_order():
    fake = FakeCluster(3, max_staleness=0)
    fake.schedule_many(5)
    order = []
    while any(fake.running()):
        peer = next(peer for peer in fake.peers if peer.running())
        order.append(peer.done().fields["closure"])
    assert order == [0, 1, 2, 3, 4]


def test_definitions_go_once_to_each_worker_before_the_closure():
    fake = FakeCluster(2)
    for _ in range(4):
        fake.schedule(definitions=("object", "function"))
    for peer in fake.peers:
        kinds = [(m.kind, m.fields.get("key")) for m in peer.seen if m.kind in ("define", "run")]
        assert kinds[:3] == [("define", "object"), ("define", "function"), ("run", None)]
        assert [kind for kind, _ in kinds[3:]] == ["run"] * (len(kinds) - 3)


def test_a_definition_that_was_replaced_is_sent_again():
    fake = FakeCluster(1)
    old, new = definition("f.1"), definition("f.2", replaces=["f.1"])
    for made in (old, new, old):
        fake.schedule(definitions=(made,))
    for _ in range(3):
        fake.peers[0].done()
    sent = [message.fields["key"] for message in fake.peers[0].seen if message.kind == "define"]
    assert sent == ["f.1", "f.2", "f.1"]


def test_definition_that_cant_be_read():
    fake = FakeCluster(1)
    first = fake.schedule(definitions=("broken",))
    fake.peers[0].answer("define", error_reply(ModuleNotFoundError("No module named 'x'")))
    with pytest.raises(ModuleNotFoundError, match="No module named 'x'") as info:
        first.fetch()
    assert any("/job:worker/task:0 at 127.0.0.1:0" in note for note in info.value.__notes__)
    fake.peers[0].fail(ValueError("no definition"))  # what the closure says to that is not heard
    with pytest.raises(ModuleNotFoundError):
        fake.queue.join()
    second = fake.schedule(definitions=("broken",))
    fake.peers[0].answer("define", Message("ok", {}))
    fake.peers[0].done(1)
    assert second.fetch() == 1


def test_error_of_a_closure():
    fake = FakeCluster(2)
    results = [fake.schedule("train_step") for _ in range(8)]
    assert fake.running() == [[0, 2], [1, 3]]
    fake.peers[0].fail(ZeroDivisionError("by zero"))
    for peer, numbers in zip(fake.peers, ([2], [1, 3]), strict=True):
        assert peer.answer("cancel", Message("ok", {})).fields == {"closures": numbers}
    fake.peers[0].answer("run", Message("cancelled", {}), number=2)
    fake.peers[1].answer("run", Message("cancelled", {}), number=3)
    assert not fake.queue.is_done()  # number 1 still runs
    fake.peers[1].done("late")
    with pytest.raises(ZeroDivisionError, match="by zero") as info:
        fake.queue.join()
    notes = "\n".join([*info.value.__notes__, str(info.value.__cause__)])  # which has it before Python 3.11
    assert "train_step, which /job:worker/task:0 at 127.0.0.1:0 ran" in notes
    assert "ZeroDivisionError: by zero" in notes  # the traceback there
    assert results[1].fetch() == "late"
    for number in (2, 3, 4, 7):
        with pytest.raises(ts.errors.CancelledError):
            results[number].fetch()
    with pytest.raises(ZeroDivisionError):
        results[0].fetch()
    fake.queue.join()
    again = fake.schedule()
    fake.peers[0].done(5)
    assert again.fetch() == 5


def test_an_answer_that_is_an_error():
    fake = FakeCluster(1)
    result = fake.schedule()
    fake.peers[0].answer("run", Message("error", {"type": "ValueError", "message": "not configured"}))
    with pytest.raises(ValueError, match="not configured"):
        result.fetch()


def test_a_closure_that_is_too_large():
    fake = FakeCluster(1)
    fake.peers[0].max_bytes = 10
    result = fake.schedule(blob=b"x" * 11)
    with pytest.raises(ValueError, match="too large"):
        result.fetch()
    with pytest.raises(ValueError, match="too large"):
        fake.queue.join()
    fake.schedule()
    assert fake.running() == [[1]]


def test_what_came_cant_be_taken_in():
    fake = FakeCluster(1)

    def absorb(reply):
        raise RuntimeError("the metric was deleted")

    fake.cluster.absorb = absorb
    result = fake.schedule()
    fake.peers[0].done()
    with pytest.raises(RuntimeError, match="the metric was deleted"):
        fake.queue.join()
    with pytest.raises(RuntimeError, match="the metric was deleted"):
        result.fetch()


def test_side_results_are_taken_before_the_closure_ends():
    fake = FakeCluster(1)
    seen = []
    fake.backend.absorb = lambda reply: seen.append(fake.queue.is_done())
    fake.cluster.absorb = fake.backend.absorb
    fake.schedule()
    fake.peers[0].done()
    assert seen == [False]
    assert fake.queue.is_done()


# Per-worker values


def make_resource(fake, kind="dataset", of=None):
    cluster = fake.cluster
    values = [RemoteValue(kind, cluster.idle) for _ in cluster.workers]
    resource = Resource(cluster.resources.next_id(), kind, f"the {kind}", values, blob=b"data", of=of)
    own = PerWorkerValues(resource.values)
    own._ts_resource_id = resource.id
    cluster.add(resource)
    cluster.resources.drop_with(own)
    fake.loop.run()
    return own


def test_the_same_error_of_a_dataset_on_several_workers_is_told_once():
    fake = FakeCluster(2)
    dataset = make_resource(fake)
    for peer, error in zip(fake.peers, (OSError("no such file"), OSError("no such file")), strict=True):
        peer.answer("resource", error_reply(error))
        if peer is fake.peers[0]:
            with pytest.raises(OSError, match="no such file"):
                fake.queue.join()
    fake.queue.join()
    closure = fake.schedule(resources=[dataset._ts_resource_id])
    with pytest.raises(OSError, match="no such file"):
        fake.queue.join()
    with pytest.raises(OSError, match="no such file"):
        closure.fetch()


def test_dataset_is_made_on_all_workers_before_closures():
    fake = FakeCluster(2)
    dataset = make_resource(fake)
    fake.schedule(resources=[dataset._ts_resource_id])
    assert [peer.kinds() for peer in fake.peers] == [["resource"], ["resource"]]
    message = fake.peers[1].answer("resource", Message("ok", {}))
    assert message.fields == {"id": 0, "kind": "dataset", "of": None}
    assert message.blobs == (b"data",)
    assert fake.running() == [[], [0]]
    with pytest.raises(TypeError, match="it is on its worker"):
        dataset._values[1].fetch()


def test_worker_that_comes_later_makes_everything_in_order():
    fake = FakeCluster(2, connect=False)
    dataset = make_resource(fake)
    iterator = make_resource(fake, "iterator", of=dataset._ts_resource_id)
    fake.schedule(resources=[iterator._ts_resource_id])
    peer = fake.peers[1]
    peer.connect()
    assert peer.kinds() == ["resource", "resource"]
    assert peer.answer("resource", Message("ok", {})).fields["kind"] == "dataset"
    assert fake.running() == [[], []]
    assert peer.answer("resource", Message("ok", {})).fields == {"id": 1, "kind": "iterator", "of": 0}
    assert fake.running() == [[], [0]]


def test_dataset_function_that_raises():
    fake = FakeCluster(1)
    dataset = make_resource(fake)
    iterator = make_resource(fake, "iterator", of=dataset._ts_resource_id)
    queued = fake.schedule(resources=[iterator._ts_resource_id])
    fake.peers[0].answer("resource", error_reply(OSError("no such file")))
    with pytest.raises(ts.errors.CancelledError):
        queued.fetch()
    with pytest.raises(OSError, match="no such file") as info:
        fake.queue.join()
    assert any("made the dataset" in note for note in info.value.__notes__)
    fake.peers[0].answer("resource", error_reply(ValueError("no dataset 0")))
    fake.queue.join()  # the iterator's error is the dataset's
    for values in (dataset, iterator):
        with pytest.raises(OSError, match="no such file"):
            values._values[0].fetch()
    closure = fake.schedule(resources=[iterator._ts_resource_id])
    with pytest.raises(OSError, match="no such file"):
        closure.fetch()
    with pytest.raises(OSError, match="no such file"):
        fake.queue.join()
    other = fake.schedule()
    fake.peers[0].done(1)
    assert other.fetch() == 1


def test_dropped_datasets_are_forgotten():
    fake = FakeCluster(1)
    dataset = make_resource(fake)
    fake.peers[0].answer("resource", Message("ok", {}))
    del dataset
    gc.collect()
    fake.schedule()
    assert fake.peers[0].answer("forget", Message("ok", {})).fields == {"keys": [], "resources": [0]}
    assert list(fake.cluster.resources) == []
    fake.peers[0].lose()
    fake.peers[0].connect()
    assert "resource" not in fake.peers[0].kinds()


# What the log says


def test_closure_that_nobody_was_told_of():
    """Ctrl-C may come in ``submit`` after the closure was queued: who waits next sees to it."""
    fake = FakeCluster(1)
    fake.cluster._pump_is_due = True
    fake.schedule()
    assert fake.running() == [[]]
    fake.cluster.idle(1.0)
    fake.loop.run()
    assert fake.running() == [[0]]


def test_waiting_without_workers_is_said_every_half_minute(caplog, monkeypatch):
    clock = [1000.0]
    monkeypatch.setattr("torchstrategy.ps.coordinator.cluster.time.monotonic", lambda: clock[0])
    fake = FakeCluster(2, connect=False)
    fake.schedule()
    with caplog.at_level(logging.WARNING, "torchstrategy"):
        for waited_s in range(1, 62):
            clock[0] += 1
            fake.cluster.idle(waited_s)
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == 2
    assert "/job:worker/task:0 at 127.0.0.1:0: not connected yet, nothing has answered yet, for " in lines[0]
    assert "/job:worker/task:1 at 127.0.0.1:1: not connected yet" in lines[0]


def test_waiting_for_a_slow_closure_is_not_said(caplog, monkeypatch):
    clock = [1000.0]
    monkeypatch.setattr("torchstrategy.ps.coordinator.cluster.time.monotonic", lambda: clock[0])
    fake = FakeCluster(1)
    fake.schedule()
    with caplog.at_level(logging.INFO, "torchstrategy"):
        clock[0] += 100
        fake.cluster.idle(100)
    assert caplog.records == []


def test_closed_strategy_ends_the_wait():
    fake = FakeCluster(1)
    result = fake.schedule()
    fake.peers[0].close()
    fake.backend.is_closed = True
    fake.cluster.idle(1.0)
    with pytest.raises(ts.errors.UnavailableError, match="closed"):
        fake.queue.join()
    with pytest.raises(ts.errors.CancelledError, match="closed"):
        result.fetch()


def test_schedule_after_the_strategy_was_closed():
    fake = FakeCluster(1)
    fake.backend.is_closed = fake.loop.is_closed = True
    with pytest.raises(ts.errors.UnavailableError, match="closed"):
        fake.schedule()
