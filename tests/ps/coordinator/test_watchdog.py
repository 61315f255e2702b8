import logging

import pytest

from tests.ps.coordinator.fakes import FakeCluster
from torchstrategy.ps.coordinator.watchdog import Watchdog
from torchstrategy.ps.transport.messages import Message


@pytest.fixture
def fake(monkeypatch, caplog):
    made = FakeCluster(2)
    monkeypatch.setattr("torchstrategy.ps.coordinator.watchdog.time.monotonic", lambda: made.loop.now)
    caplog.set_level(logging.WARNING, "torchstrategy")
    return made


def schedule(fake, watchdog):
    fake.schedule("train_step")
    watchdog.watch()


def test_what_it_says(fake, caplog):
    watchdog = Watchdog(fake.cluster, 10.0)
    schedule(fake, watchdog)
    fake.peers[1].lose()
    fake.loop.advance(9.9)
    assert "No scheduled function has ended" not in caplog.text
    fake.loop.advance(0.2)
    assert "No scheduled function has ended for 10 s; 0 are queued." in caplog.text
    assert "train_step on /job:worker/task:0 at 127.0.0.1:0" in caplog.text
    assert "/job:worker/task:1 at 127.0.0.1:1: lost (connection closed)" in caplog.text
    assert "Threads of /job:worker" not in caplog.text
    fake.peers[0].answer("stacks", Message("stacks", {"text": "in line 3"}))
    assert "Threads of /job:worker/task:0 at 127.0.0.1:0:\nin line 3" in caplog.text


def test_it_says_it_less_and_less_often(fake, caplog):
    schedule(fake, Watchdog(fake.cluster, 10.0))
    fake.loop.advance(80.5)
    assert caplog.text.count("No scheduled function has ended") == 4  # after 10, 20, 40 and 80 s


def test_progress_is_not_stuck(fake, caplog):
    watchdog = Watchdog(fake.cluster, 10.0)
    for _ in range(5):
        schedule(fake, watchdog)
    for _ in range(4):
        fake.loop.advance(8.0)
        next(peer for peer in fake.peers if peer.running()).done()
    assert caplog.text == ""


def test_it_ends_with_the_closures_and_begins_again(fake, caplog):
    watchdog = Watchdog(fake.cluster, 10.0)
    schedule(fake, watchdog)
    fake.peers[0].done()
    fake.loop.advance(100.0)
    assert fake.loop.timers == []
    schedule(fake, watchdog)
    fake.loop.advance(11.0)
    assert "No scheduled function has ended" in caplog.text


def test_none(fake):
    schedule(fake, Watchdog(fake.cluster, 0.0))
    assert fake.loop.timers == []
