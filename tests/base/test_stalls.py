"""A stall is said once, by one rank, with who waits where; the stacks are in a file."""

import os
import re
import threading
import time
from pathlib import Path

import pytest
import torch

import torchstrategy as ts
from torchstrategy.base import stalls


@pytest.mark.parametrize("text", ["-1", "soon", "nan"])
def test_bad_settings(monkeypatch, text):
    monkeypatch.setenv("TORCHSTRATEGY_STALL_S", text)
    with pytest.raises(ValueError, match="TORCHSTRATEGY_STALL_S must be a number of seconds"):
        stalls.stall_seconds()


def test_settings(monkeypatch):
    assert stalls.stall_seconds() == 60
    monkeypatch.setenv("TORCHSTRATEGY_STALL_S", "0")
    assert stalls.stall_seconds() == float("inf")


def stacks_in(text):
    """Return the file's content, and delete it."""
    path = Path(re.search(r"Stacks: (\S+)", text)[1])
    content = path.read_text()
    path.unlink()
    return content


def test_is_said_once(monkeypatch, caplog):
    now = [1000.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    waiting = stalls.Waiting(lambda seconds: stalls.Stall(f"{seconds:.0f} s of nothing.", ["a stack"]))
    waiting.check(60)
    waiting.begin()
    now[0] += 59
    waiting.check(60)
    assert caplog.messages == []
    now[0] += 2
    waiting.check(60)
    waiting.check(60)
    (line,) = caplog.messages
    assert line.startswith("61 s of nothing.")
    assert stacks_in(line) == "61 s of nothing.\na stack\n"
    waiting.begin()
    now[0] += 119  # what went on after all may take twice as long from then on
    waiting.check(60)
    waiting.begin(is_first=True)
    now[0] += 599
    waiting.check(60)
    waiting.end()
    now[0] += 100
    waiting.check(60)
    assert len(caplog.messages) == 1


@pytest.mark.parametrize("slow", [0, 1, 2])
@pytest.mark.parametrize("concurrent", [False, True])
def test_a_replica_of_this_process(slow, concurrent, caplog):
    """Whichever replica does not go on is named, and its line is in the file."""
    strategy = ts.MirroredStrategy(["cpu:0", "cpu:1", "cpu:2"], concurrent=concurrent)
    reached, go_on = threading.Event(), threading.Event()

    def meet():
        context = ts.get_replica_context()
        if wait[0] and context.replica_id_in_sync_group == slow:
            reached.set()
            go_on.wait(60)  # the line that must be shown
        return context.all_reduce("sum", torch.ones(1))

    wait = [False]
    strategy.run(meet)
    wait[0] = True
    waiting = strategy.hosting._runners[0]._waiting

    def look():
        assert reached.wait(60)
        time.sleep(0.02)
        waiting.check(0.001)
        go_on.set()

    thread = threading.Thread(target=look)
    thread.start()
    strategy.run(meet)
    thread.join()
    (line,) = [message for message in caplog.messages if "No progress" in message]
    assert f"replica:{slow}" in line or f"replica {slow}" in line.lower(), line
    assert "# the line that must be shown" in stacks_in(line)


def wait_for_the_other(late):
    strategy = ts.MultiWorkerMirroredStrategy()
    workers = strategy.workers
    workers.exchange("meeting", 0)
    lines = []
    if workers.rank == late:
        time.sleep(1.0)  # the line that must be shown
    else:
        handler = stalls.logger.warning
        stalls.logger.warning = lambda text, *args: lines.append(text % args)
        try:
            watch = threading.Timer(0.5, workers._waiting.check, (0.1,))
            watch.start()
            workers.exchange("meeting", 1)
            watch.join()
        finally:
            stalls.logger.warning = handler
        return lines, [stacks_in(line) for line in lines], workers.rank
    workers.exchange("meeting", 1)
    return lines, [], workers.rank


@pytest.mark.parametrize("late", [0, 2])
def test_a_rank(process_pool, late):
    results = process_pool(3).run(wait_for_the_other, late)
    lines = [line for lines, _, _ in results for line in lines]
    assert len(lines) == 1, lines  # of the first one that waits
    first = min(set(range(3)) - {late})
    assert f"rank {first} waits in meeting" in lines[0]
    assert f"Not arrived: rank {late}" in lines[0]
    assert f"rank {late} is after meeting" in lines[0]
    (stacks,) = [text for _, texts, _ in results for text in texts]
    assert "# the line that must be shown" in stacks
    assert all(f"--- rank {rank}: " in stacks for rank in range(3))


def test_the_watch_goes_by_itself(monkeypatch, caplog):
    monkeypatch.setitem(stalls._state, "pid", 0)
    monkeypatch.setenv("TORCHSTRATEGY_STALL_S", "0.05")
    monkeypatch.setattr(stalls, "_all", type(stalls._all)())
    waiting = stalls.Waiting(lambda seconds: stalls.Stall("Nothing.", []))
    with monkeypatch.context() as patch:
        patch.setenv("TORCHSTRATEGY_STALL_S", "soon")
        with pytest.raises(ValueError, match="TORCHSTRATEGY_STALL_S"):
            stalls.watch_for_stalls(waiting)
    stalls.watch_for_stalls(waiting)
    waiting.begin()
    while not caplog.messages:
        time.sleep(0.01)
    stacks_in(caplog.messages[0])
    waiting.end()
    assert stalls._state["pid"] == os.getpid()
