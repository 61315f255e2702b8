"""What the ranks learn of each other, several watches in one process."""

import logging
import sys
import threading
import time
import types

import pytest
from torch.distributed import HashStore
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from torchstrategy.base.log import raised_by_all
from torchstrategy.collectives import failures, notices
from torchstrategy.collectives.failures import FailureWatch
from torchstrategy.errors import DisagreementError, InvalidArgumentError, ReplicaFailedError


@pytest.fixture(params=["pairs", 1])
def watches(request, monkeypatch):
    """A function that makes the watches of a layout of hosts, each in a thread; in pairs, or in a tree."""
    if request.param != "pairs":
        monkeypatch.setattr(notices, "MAX_MESH_SIZE", 1)
        monkeypatch.setattr(notices, "_NUM_CHILDREN", request.param)
    made = {}
    hooks = sys.excepthook, threading.excepthook

    def make(hosts, only=None, store=None):
        store = store or HashStore()

        def join(rank):
            made[rank] = FailureWatch(store, rank, hosts, "127.0.0.1", 20.0)

        threads = [threading.Thread(target=join, args=(r,)) for r in (range(len(hosts)) if only is None else only)]
        for thread in threads:
            thread.start()
        return made, threads

    def make_all(hosts):
        _, threads = make(hosts)
        for thread in threads:
            thread.join(timeout=30)
        return [made[rank] for rank in range(len(hosts))]

    make_all.some = make
    yield make_all
    for watch in made.values():
        watch.close()
    sys.excepthook, threading.excepthook = hooks


def until(condition, seconds=20.0):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not come to that"
        time.sleep(0.01)


def raised(error):
    try:
        raise error
    except type(error) as caught:
        return type(caught), caught, caught.__traceback__


def test_the_error_of_another_rank_is_printed_without_a_traceback(watches, capsys, monkeypatch):
    on_uncaught = watches([0])[0]._on_uncaught
    kind, error, trace = raised(ReplicaFailedError("Rank 1 failed: ValueError: boom"))
    on_uncaught(kind, error, trace)
    printed = capsys.readouterr().err.splitlines()
    assert printed[0] == "torchstrategy.errors.ReplicaFailedError: Rank 1 failed: ValueError: boom"
    assert [line for line in printed if line.startswith(("Traceback", "  File"))] == []
    if sys.version_info >= (3, 11):
        assert printed[1].startswith(f"At {__file__}:")
        assert printed[1].endswith(" in raised.")  # nobody else has raised anything
    assert error.__traceback__ is trace
    monkeypatch.setenv("TORCHSTRATEGY_FULL_TRACEBACK", "1")
    on_uncaught(kind, error, trace)
    assert capsys.readouterr().err.startswith("Traceback")


def test_what_all_ranks_raise_is_printed_with_one_traceback(watches, capsys, monkeypatch, tmp_path):
    first, second = watches([0, 0])
    first._previous_hook = second._previous_hook = sys.__excepthook__  # here each has the other's, or is it
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))
    for watch, begin in (
        (first, "Traceback"),
        (second, "torchstrategy.errors.DisagreementError: rank 0: 1; rank 1: 2"),
    ):
        (tmp_path / "error.json").unlink(missing_ok=True)
        watch._on_uncaught(*raised(DisagreementError("rank 0: 1; rank 1: 2")))
        assert capsys.readouterr().err.startswith(begin)
        assert ("Traceback" in (tmp_path / "error.json").read_text()) == (begin == "Traceback")
        watch._on_uncaught(*raised(raised_by_all(InvalidArgumentError("rank 0: 1; rank 1: 2"))))
        assert capsys.readouterr().err.startswith(begin.replace("Disagreement", "InvalidArgument"))


def test_whose_traceback_is_to_be_read(watches, capsys):
    first, second = watches([0, 0])
    second.report("reading", OSError("no disk"))
    until(lambda: first.failure is not None)
    first._on_uncaught(*raised(ReplicaFailedError("Rank 1 failed in reading: OSError: no disk")))
    if sys.version_info >= (3, 11):
        assert " in raised; the traceback is the other rank's.\n" in capsys.readouterr().err


def test_an_interruption_is_printed_without_the_librarys_calls(watches, capsys):
    watch = watches([0])[0]
    namespace = {}
    exec(compile("def receive(): raise KeyboardInterrupt", failures.__file__, "exec"), namespace)
    try:
        namespace["receive"]()
    except KeyboardInterrupt as error:
        watch._on_uncaught(KeyboardInterrupt, error, error.__traceback__)
    printed = capsys.readouterr().err
    assert "in test_an_interruption" in printed
    assert "in receive" not in printed


def test_torchrun_is_told_of_the_cause_only(watches, monkeypatch, tmp_path, capsys):
    on_uncaught = watches([0])[0]._on_uncaught
    path = tmp_path / "error.json"
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(path))
    on_uncaught(*raised(ReplicaFailedError("Rank 1 failed: ValueError: boom")))
    assert not path.exists()
    on_uncaught(*raised(ValueError("boom")))
    assert capsys.readouterr().err.endswith("ValueError: boom\n")
    failure = ProcessFailure(local_rank=0, pid=7, exitcode=1, error_file=str(path))
    assert failure.message["message"] == "ValueError: boom"
    assert failure.message["extraInfo"]["py_callstack"].endswith("ValueError: boom\n")
    assert abs(failure.timestamp - time.time()) < 100


def test_a_failure_that_comes_before_the_watch_is_complete(watches):
    store, hosts = HashStore(), (0, 0, 1)
    made, first = watches.some(hosts, only=(0, 2), store=store)
    until(lambda: 2 in made)  # rank 0 still waits for rank 1
    reporting = threading.Thread(target=made[2].report, args=("reading", OSError("early")))
    reporting.start()
    time.sleep(0.1)
    _, second = watches.some(hosts, only=(1,), store=store)
    for thread in [*first, *second, reporting]:
        thread.join(timeout=20)
    until(lambda: all(made[rank].failure is not None for rank in range(3)))
    assert {made[rank].failure["error"] for rank in range(3)} == {"OSError: early"}
    assert "rank 1: start-up" in made[0].where_is_everyone()
    assert all(made[rank]._plane.is_connected for rank in range(3))


def test_a_rank_that_is_taken_for_stopped_knows_better(watches):
    first, second, third = watches((0, 0, 0))
    first._plane.post("lost", [1, False])
    until(lambda: third.failure is not None)
    first.where_is_everyone()  # the second has read the message before
    assert third.failure["rank"] == 1
    assert second.failure is None
    first._plane.post("back", 1)
    until(lambda: third.failure is None)


def test_a_rank_that_leaves_is_no_failure(watches):
    first, second, third = watches((0, 0, 1))
    second.close()
    until(lambda: 1 in first.gone and 1 in third.gone)
    assert 2 not in first.gone
    assert first.failure is third.failure is None
    assert first.wait_for_report(20.0) is None  # at once
    assert "Rank 1 has ended its program. " in third.where_is_everyone()
    gone = third.gone
    first.close()  # because of that
    until(lambda: 0 in third.gone)
    assert "Rank 0" in third.where_is_everyone()
    assert "Rank 0" not in third.where_is_everyone(gone)
    assert "rank 0: has ended its program" in third.where_is_everyone(gone)
    third.report_lost("has lost rank 1", gone)
    assert third.failure["error"].endswith("has lost rank 1. Rank 1 has ended its program")


@pytest.mark.parametrize(
    ("error", "how"),
    [
        (None, ""),
        (KeyboardInterrupt(), " after KeyboardInterrupt"),
        (SystemExit(3), " after SystemExit: 3"),
        (ReplicaFailedError("Rank 1 does not answer.\nMore."), " after ReplicaFailedError: Rank 1 does not answer"),
    ],
)
def test_what_has_ended_a_rank_is_said(watches, error, how):
    first, second = watches((0, 0))
    if error is not None:
        first._tell_end(error)
    first.close()
    until(lambda: second.gone)
    assert f"rank 0: has ended its program{how}\n" in second.where_is_everyone()
    assert ("all ranks must make this call" in second.unmet) == (not how)
    assert second.failure is None


def test_an_error_that_ends_the_thread_of_a_rank_is_told(watches, monkeypatch):
    shown = []
    monkeypatch.setattr(threading, "excepthook", shown.append)
    first, second = watches((0, 0))
    for error in (SystemExit(3), UnreadableError()):
        thread = types.SimpleNamespace(ident=first._main_thread, name="training")
        threading.excepthook(threading.ExceptHookArgs((type(error), error, None, thread)))
    until(lambda: second.failure is not None)
    assert second.failure["rank"] == 0
    assert len(shown) == 2
    assert second.failure["error"] == "UnreadableError: <its message can't be read>"


def test_a_log_that_fails_does_not_end_the_watch(watches):
    """Else this rank would seem to have died."""
    ranks = watches((0, 0, 0))
    failing = logging.Handler()
    failing.emit = lambda record: 1 / 0
    failures.logger.addHandler(failing)
    try:
        ranks[1].report("run", ValueError("boom"))
        ranks[0]._plane.post("lost", [1, False])
        until(lambda: ranks[2].failure is not None and ranks[2]._silent)
        assert all(rank._plane.is_connected for rank in ranks)
        assert "rank 0: start-up" in ranks[2].where_is_everyone()
    finally:
        failures.logger.removeHandler(failing)


class UnreadableError(Exception):
    def __str__(self):
        raise OSError("no text")


def test_very_long_places_can_be_told(watches):
    first, second = watches((0, 0))
    second.position = "in all_reduce(" + "*, " * 500_000 + ") at here.py:1"
    assert "rank 1: in all_reduce(*, *, " in first.where_is_everyone()
    second.report(second.position, OSError("x" * 2_000_000))
    assert first.failure["operation"].startswith("in all_reduce(")
    assert first._plane.is_connected
    assert second._plane.is_connected


def test_a_failure_of_all_is_outlived_again_and_again(watches):
    ranks = watches((0, 0, 1))
    for number in range(3):
        threads = []
        for watch in ranks:
            watch.num_collectives += 1
            threads.append(threading.Thread(target=watch.report, args=("run", ValueError(str(number)))))
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(timeout=20)
        assert all(watch.failure is not None for watch in ranks)
        assert all(watch.recover() for watch in ranks)
        assert all(watch.failure is None for watch in ranks)


def test_a_failure_of_all_is_outlived_if_one_is_late(watches):
    """The others wait in their next collective meanwhile."""
    ranks = watches((0, 0, 0))
    for watch in ranks:
        watch.num_collectives += 1
    outcomes = {}

    def fail_and_go_on(number):
        ranks[number].report("run", ValueError("x"))
        ranks[number].num_collectives += 1
        outcomes[number] = ranks[number].recover()

    threads = [threading.Thread(target=fail_and_go_on, args=(number,)) for number in range(3)]
    for thread in threads[:2]:
        thread.start()
    until(lambda: all(watch.num_collectives == 2 for watch in ranks[:2]))
    until(lambda: all(watch._failures._aware[0].get(2) == 0b11 for watch in ranks[:2]))  # each knows of the other one
    threads[2].start()
    for thread in threads:
        thread.join(timeout=20)
    assert outcomes == {0: True, 1: True, 2: True}


def test_a_failure_is_not_outlived_if_another_rank_goes_on(watches):
    first, second, third = watches((0, 0, 1))
    for watch in (first, second, third):
        watch.num_collectives = 1
    outcome = []
    first.report("run", ValueError("x"))
    second.report("run", ValueError("y"))
    thread = threading.Thread(target=lambda: outcome.append(first.recover()))
    thread.start()
    time.sleep(0.1)
    assert outcome == []  # the third may be about to fail
    third.num_collectives = 2
    assert not third.recover()
    thread.join(timeout=5)  # where it would wait for ten seconds
    assert outcome == [False]


def test_all_ranks_ask_at_once_and_each_answers_once(watches):
    ranks = watches((0, 0, 1, 2, 3))
    texts = [None] * 5

    def ask(number):
        texts[number] = ranks[number].where_is_everyone()

    for _ in range(2):
        threads = [threading.Thread(target=ask, args=(number,)) for number in range(5)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(timeout=20)
        assert all(f"rank {rank}: start-up" in text for text in texts for rank in range(5))
    assert ranks[0]._question <= 4


def test_which_collectives_a_failed_rank_had_got_through(watches):
    ranks = watches((0, 0, 0))
    for watch in ranks:
        watch.num_collectives = 3
    assert not ranks[0].is_past(3)  # nobody has failed
    ranks[1].report("run", ValueError("x"))
    assert [ranks[0].is_past(number) for number in (2, 3, 4)] == [True, True, False]
    ranks[2].note_given_up()
    ranks[2].num_collectives += 1
    ranks[2].report("run", ValueError("y"))
    assert [ranks[0].is_past(number) for number in (2, 3, 4)] == [True, False, False]


def test_a_lost_rank_has_got_through_nothing(watches):
    ranks = watches((0, 0))
    ranks[0].num_collectives = 1
    ranks[0]._lose(1, closed=True)
    assert ranks[0].failure is not None
    assert not ranks[0].is_past(1)


def test_ranks_behind_one_that_does_not_answer_are_not_blamed(watches):
    ranks = watches((0, 0, 1, 1))
    deaf = ranks[2]._plane
    reached, blocked = threading.Event(), threading.Event()

    def pass_nothing_on(now):  # as the first rank of the second host would, stopped
        reached.set()
        blocked.wait(30)

    deaf._find_silent = pass_nothing_on
    deaf._wake()
    assert reached.wait(30)  # else it may answer for itself first
    try:
        text = ranks[1].where_is_everyone()
        line = ranks[1].snapshot().line
    finally:
        blocked.set()
    assert text.startswith("Rank 2 does not answer (killed, stopped, cut off, or native code keeps its interpreter). ")
    assert line.count("does not answer") == 1
    assert "is does not" not in line
    assert "is can't" not in line
    assert "rank 3: can't be asked" in text
    assert "rank 0: start-up" in text


def test_a_replica_in_a_thread_of_its_own_shows_its_stack(watches):
    first, second = watches((0, 0))
    ended = threading.Event()
    thread = threading.Thread(target=ended.wait, args=(30,), name="torchstrategy-replica-0")
    thread.start()
    first.position, second.position = "in a sum at here.py:1", "in a run at there.py:1"
    try:
        text = first.where_is_everyone()
    finally:
        ended.set()
        thread.join()
    assert "in the thread torchstrategy-replica-0:" in text
    assert "in wait: " in text
