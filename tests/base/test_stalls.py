"""A stall is said once, by one rank, with who waits where; the stacks are in a file."""

import contextlib
import json
import os
import re
import signal
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

import torchstrategy as ts
from torchstrategy.base import stalls
from torchstrategy.cli import doctor, main


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


def größte_zahl(reached, go_on):
    reached.set()
    go_on.wait(60)  # the line that must be shown


def test_stacks_of_threads_with_odd_names(monkeypatch):
    reached, go_on = threading.Event(), threading.Event()
    thread = threading.Thread(target=größte_zahl, args=(reached, go_on), name="wörker")
    thread.start()
    assert reached.wait(60)
    try:
        text = "\n".join(stalls.stacks_of_threads([thread]))
        assert re.search(
            rf'--- wörker\n.*File "{__file__}", line \d+, in größte_zahl\n +go_on.wait.*shown\n', text, re.S
        )
        assert "Thread wörker:\n" in stalls.stacks_of_others()
        assert threading.current_thread().name not in stalls.stacks_of_others()
        (line,) = stalls.stack_of_program(thread.ident)[-3:-2]
        assert re.match(rf"{__file__}:\d+ in größte_zahl: go_on.wait\(60\)", line)

        def without_files(*args, **kwargs):
            raise FileNotFoundError("No usable temporary directory")

        monkeypatch.setattr("tempfile.TemporaryFile", without_files)
        assert stalls.stack_of_program(thread.ident) == []
    finally:
        go_on.set()
        thread.join()


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


def wait_for_a_file(path):
    strategy = ts.MultiWorkerMirroredStrategy()
    workers = strategy.workers
    if workers.rank == 1:
        (path / str(os.getpid())).write_text("")
        wait_for(path / "go on")  # the line that must be shown
    workers.exchange("meeting", 1)


def wait_for(file):
    while not file.exists():
        time.sleep(0.01)


def ask(port, capsys, *options):
    """Return what the doctor says of the job with this port; others may run on this host."""
    main(["doctor", "--job", "--json", *options])
    findings = json.loads(capsys.readouterr().out)["findings"]
    return [one["detail"] for one in findings if one["name"] == f"127.0.0.1:{port}"], findings


@pytest.mark.end_to_end
def test_a_running_job_is_asked_from_the_shell(tmp_path, capsys):
    with ts.testing.ProcessPool(2) as pool, ThreadPoolExecutor() as threads:
        ended = threads.submit(pool.run, wait_for_a_file, tmp_path)
        try:
            detail = ""
            deadline = time.monotonic() + 60
            is_waiting = False  # rank 1, before the question was asked
            while "is in meeting" not in detail or not is_waiting:
                assert time.monotonic() < deadline, detail
                is_waiting = bool(list(tmp_path.iterdir()))
                port = pool._ports.numbers[0] if pool._ports else 0
                detail = "".join(ask(port, capsys)[0])
            first, last = (process.pid for process in pool._processes)
            assert f"2 ranks, of which here: rank 0 (process {first}), rank 1 (process {last})" in detail
            assert "Rank 0 is in meeting" in detail
            assert "Arrived: rank 0. Not arrived: rank 1. rank 1 is" in detail
            path = Path(re.search(r"Stacks: (\S+)", detail)[1])
            assert path.stat().st_mode & 0o777 == 0o600
            stacks = stacks_in(detail)
            assert "# the line that must be shown" in stacks
            assert all(f"--- rank {rank}: " in stacks for rank in range(2))
            pool.send_signal(0, signal.SIGSTOP)  # then the other one answers
            ((detail,), findings) = ask(port, capsys)
            assert any(one["name"] == f"process {first}" and "does not answer" in one["detail"] for one in findings)
            assert "of which here: rank 1" in detail
            assert "--- rank 0: does not answer" in stacks_in(detail)
        finally:
            with contextlib.suppress(RuntimeError):
                pool.send_signal(0, signal.SIGCONT)
            (tmp_path / "go on").write_text("")
        ended.result()
    assert ask(port, capsys)[0] == []


def test_no_job_is_running(monkeypatch, capsys):
    monkeypatch.setattr(doctor, "find_processes", list)
    assert main(["doctor", "--job"]) == 1
    assert "no process of this user belongs to a running job" in capsys.readouterr().out


def test_other_users_get_no_answer(monkeypatch):
    requests = stalls.Requests.answer({"job": "a", "rank": 0, "size": 1}, lambda: stalls.Stall("Nothing.", []))
    try:
        name = "\0" + requests.listener.getsockname()[1:].decode()
        (own,) = [one for one in stalls.find_processes() if one.pid == os.getpid()]
        assert own.about == {"job": "a", "rank": 0, "size": 1}
        monkeypatch.setattr(stalls, "_user_of", lambda connection: (os.getpid(), 12345))
        monkeypatch.setattr(os, "geteuid", lambda: 54321)
        assert not [one for one in stalls.find_processes() if one.pid == os.getpid()]
        with socket.socket(socket.AF_UNIX) as stranger:
            stranger.settimeout(20)
            stranger.connect(name)
            assert stranger.recv(100) == b""
    finally:
        requests.close()
        requests._thread.join(timeout=20)
        assert not requests._thread.is_alive()


def test_a_forked_child_does_not_listen():
    requests = stalls.Requests.answer({}, lambda: stalls.Stall("Nothing.", []))
    pid = os.fork()
    if pid == 0:
        os._exit(requests.listener.fileno() == -1)
    requests.close()
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 1
