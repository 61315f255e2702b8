"""What the coordinator does when workers and parameter servers are lost, without processes: each step is the test's."""

import pytest

import torchstrategy as ts
from tests.ps.coordinator.fakes import FakeCluster, error_reply
from tests.ps.coordinator.test_dispatch import make_resource
from torchstrategy.ps.results import encode_result
from torchstrategy.ps.states import PeerState
from torchstrategy.ps.transport.messages import Message

OK = Message("ok", {})


def finish_all(fake):
    """Answer all closures until nothing is left."""
    while any(fake.running()):
        for peer in fake.peers:
            while peer.running():
                peer.done()
    fake.queue.join()


def test_closures_of_a_lost_worker_run_elsewhere_and_first():
    fake = FakeCluster(2)
    results = fake.schedule_many(8)
    assert fake.running() == [[0, 2], [1, 3]]
    fake.peers[0].lose()
    assert fake.running() == [[], [1, 3]]
    fake.peers[1].done()
    assert fake.running() == [[], [3, 0]]
    fake.peers[1].done()
    assert fake.running() == [[], [0, 2]]
    finish_all(fake)
    assert all(result.fetch() is None for result in results)


def test_two_workers_at_once():
    fake = FakeCluster(3)
    results = fake.schedule_many(9)
    fake.peers[0].lose()
    fake.peers[2].lose()
    finish_all(fake)
    assert all(result.fetch() is None for result in results)


def test_all_workers_are_lost_and_one_comes_back():
    fake = FakeCluster(2)
    fake.schedule_many(4)
    for peer in fake.peers:
        peer.lose()
    assert not fake.queue.is_done()
    fake.schedule()  # still takes more
    fake.peers[1].connect()
    finish_all(fake)


def test_repeated_failures():
    fake = FakeCluster(1)
    result = fake.schedule()
    for _ in range(5):
        fake.peers[0].lose()
        assert not fake.queue.is_done()
        fake.peers[0].connect()
        assert fake.peers[0].running() == [0]
    fake.peers[0].done("at last")
    assert result.fetch() == "at last"


def test_worker_lost_between_closures():
    fake = FakeCluster(1)
    fake.schedule()
    fake.peers[0].done()
    fake.peers[0].lose()
    assert fake.queue.is_done()
    fake.peers[0].connect()
    fake.schedule()
    assert fake.peers[0].running() == [1]


def test_worker_lost_while_it_is_prepared():
    fake = FakeCluster(1, connect=False)
    fake.schedule()
    peer = fake.peers[0]
    peer.connect(prepare=False)
    peer.lose()
    peer.connect(prepare=False)
    assert peer.kinds() == ["configure"]
    peer.answer("configure", OK)
    assert peer.running() == [0]


def test_worker_lost_while_it_makes_a_dataset():
    fake = FakeCluster(2)
    dataset = make_resource(fake)
    result = fake.schedule(resources=[dataset._ts_resource_id])
    fake.peers[0].lose()
    with pytest.raises(ts.errors.UnavailableError, match="connection closed"):
        dataset._values[0].fetch()
    fake.queue.raise_error()  # not an error of the program
    fake.peers[0].connect()
    assert fake.peers[0].kinds() == ["resource"]
    fake.peers[0].answer("resource", OK)
    fake.peers[0].done(3)
    assert result.fetch() == 3
    with pytest.raises(TypeError):
        dataset._values[0].fetch()


def test_returning_worker_gets_everything_anew():
    fake = FakeCluster(1)
    dataset = make_resource(fake)
    fake.peers[0].answer("resource", OK)
    fake.schedule(definitions=("f",), resources=[dataset._ts_resource_id])
    fake.peers[0].answer("define", OK)
    fake.peers[0].lose()
    fake.peers[0].seen.clear()
    fake.peers[0].connect()
    fake.peers[0].answer("resource", OK)
    assert [message.kind for message in fake.peers[0].seen] == ["configure", "resource", "define", "run"]


def test_connected_anew_without_a_loss_between():
    fake = FakeCluster(1)
    fake.schedule()
    fake.peers[0].connect()
    assert [m.kind for m in fake.peers[0].seen] == ["configure", "run", "configure", "run"]
    _, callback = fake.peers[0].open.pop(0)
    callback(encode_result("of the old connection"))
    fake.loop.run()
    assert not fake.queue.is_done()
    fake.peers[0].done()
    fake.queue.join()


def test_answers_from_before_a_loss_are_not_heard():
    fake = FakeCluster(1)
    result = fake.schedule()
    callback = fake.peers[0].open[0][1]
    fake.peers[0].open.clear()
    fake.peers[0].lose()
    fake.peers[0].connect()
    callback(encode_result("stale"))
    assert not fake.queue.is_done()
    fake.peers[0].done("fresh")
    assert result.fetch() == "fresh"


def test_worker_lost_during_cancellation():
    fake = FakeCluster(2)
    results = fake.schedule_many(6)
    assert fake.running() == [[0, 2], [1, 3]]
    fake.peers[1].fail(ValueError("bad"))
    fake.peers[0].lose()
    with pytest.raises(ts.errors.CancelledError):
        results[0].fetch()
    assert not fake.queue.is_done()  # worker 1 has yet to take back number 3
    fake.peers[1].answer("run", Message("cancelled", {}), number=3)
    with pytest.raises(ValueError, match="bad"):
        fake.queue.join()
    fake.queue.join()
    fake.peers[0].connect()
    assert fake.running() == [[], []]
    fake.schedule()
    finish_all(fake)


def test_fetch_after_a_failure():
    fake = FakeCluster(2)
    fetched = fake.schedule()
    fake.peers[0].done(1)
    fake.peers[0].lose()
    assert fetched.fetch() == 1  # the result is here, whatever became of its worker


def test_request_fails_before_the_loss_is_told():
    fake = FakeCluster(2)
    result = fake.schedule()
    peer = fake.peers[0]
    peer.state, peer.reason = PeerState.LOST, "connection closed"
    ((_, callback),) = peer.open
    peer.open.clear()
    callback(ts.errors.UnavailableError("connection closed"))
    fake.loop.run()
    assert fake.running() == [[], [0]]
    peer.handler.lost(peer, "connection closed")
    assert fake.running() == [[], [0]]
    fake.peers[1].done(2)
    assert result.fetch() == 2


# Parameter servers


def test_lost_ps_is_an_error():
    fake = FakeCluster(2)
    results = fake.schedule_many(6)
    fake.backend.lost[1] = ts.errors.UnavailableError("/job:ps/task:1 can't be reached")
    fake.peers[0].fail(ts.errors.UnavailableError("refused"), ps=1)
    for peer in fake.peers:
        for number in peer.running():
            peer.answer("run", Message("cancelled", {}), number=number)
    with pytest.raises(ts.errors.UnavailableError, match="/job:ps/task:1") as info:
        fake.queue.join()
    assert any("/job:worker/task:0" in note for note in info.value.__notes__)
    with pytest.raises(ts.errors.UnavailableError, match="/job:ps/task:1"):
        results[0].fetch()
    with pytest.raises(ts.errors.CancelledError):
        results[5].fetch()


def test_closures_that_dont_need_the_lost_ps_go_on():
    fake = FakeCluster(1)
    fake.backend.lost[1] = ts.errors.UnavailableError("/job:ps/task:1 can't be reached")
    result = fake.schedule()
    fake.peers[0].done(4)
    fake.queue.join()
    assert result.fetch() == 4


def test_ps_that_is_there_is_tried_again():
    fake = FakeCluster(2, max_ps_failures=2)
    result = fake.schedule()
    fake.peers[0].fail(ts.errors.UnavailableError("timed out"), ps=0)
    assert fake.running() == [[], [0]]  # another worker tries
    fake.peers[1].fail(ts.errors.UnavailableError("timed out"), ps=0)
    assert fake.running() == [[], []]  # both wait a moment
    fake.loop.advance(1.0)
    assert fake.all_running() == [0]
    peer = next(peer for peer in fake.peers if peer.running())
    peer.fail(ts.errors.UnavailableError("timed out again"), ps=0)
    with pytest.raises(ts.errors.UnavailableError, match="timed out again"):
        fake.queue.join()
    with pytest.raises(ts.errors.UnavailableError, match="timed out again"):
        result.fetch()


def test_ps_that_is_away_is_waited_for():
    """However often it fails: it does not count."""
    fake = FakeCluster(1, max_ps_failures=1)
    result = fake.schedule()
    fake.backend.away.add(0)
    for _ in range(4):
        fake.peers[0].fail(ts.errors.UnavailableError("timed out"), ps=0)
        fake.loop.advance(5.0)
        assert fake.running() == [[]]
        fake.backend.away.clear()
        fake.loop.advance(1.0)
        assert fake.running() == [[0]]
        fake.backend.away.add(0)
    fake.peers[0].done(4)
    fake.queue.join()
    assert result.fetch() == 4
    assert fake.backend.asked == []


def test_ps_that_is_away_and_does_not_come_back():
    fake = FakeCluster(1)
    fake.schedule()
    fake.backend.away.add(0)
    fake.peers[0].fail(ts.errors.UnavailableError("timed out"), ps=0)
    fake.loop.advance(5.0)
    fake.queue.raise_error()
    fake.backend.away.clear()
    fake.backend.lost[0] = ts.errors.UnavailableError("/job:ps/task:0 can't be reached")
    fake.loop.advance(1.0)
    fake.peers[0].fail(ts.errors.UnavailableError("timed out"), ps=0)
    with pytest.raises(ts.errors.UnavailableError, match="/job:ps/task:0"):
        fake.queue.join()


def test_ps_that_a_worker_cannot_reach_is_asked():
    fake = FakeCluster(1)
    fake.schedule()
    fake.peers[0].fail(ts.errors.UnavailableError("timed out"), ps=1)
    assert fake.backend.asked == [1]
    fake.loop.advance(1.0)
    finish_all(fake)


def test_worker_that_comes_back_while_a_ps_is_away():
    """The program is told once that the parameter server does not come back."""
    fake = FakeCluster(1, connect=False)
    fake.backend.away.add(0)
    peer = fake.peers[0]
    peer.connect(prepare=False)
    failure = error_reply(ts.errors.UnavailableError("no ps 0"))
    peer.answer("configure", failure)
    fake.loop.advance(11.0)
    fake.queue.raise_error()
    fake.backend.lost[0] = ts.errors.UnavailableError("/job:ps/task:0 can't be reached")
    peer.answer("configure", failure)
    with pytest.raises(ts.errors.UnavailableError, match="/job:ps/task:0"):
        fake.queue.raise_error()
    fake.loop.advance(11.0)
    peer.answer("configure", failure)
    fake.queue.raise_error()


def test_dataset_that_needs_a_ps_that_is_away():
    fake = FakeCluster(1, max_ps_failures=1)
    dataset = make_resource(fake)
    fake.backend.away.add(0)
    for _ in range(4):
        fake.peers[0].answer("resource", error_reply(ts.errors.UnavailableError("timed out")))
        fake.loop.advance(1.0)
    fake.queue.raise_error()
    fake.backend.away.clear()
    fake.peers[0].answer("resource", error_reply(ts.errors.UnavailableError("timed out")))
    fake.loop.advance(1.0)
    fake.queue.raise_error()
    fake.peers[0].answer("resource", OK)
    fake.schedule(resources=[dataset._ts_resource_id])
    finish_all(fake)


def test_worker_lost_while_it_waits_to_try_again():
    fake = FakeCluster(1)
    fake.schedule()
    fake.peers[0].fail(ts.errors.UnavailableError("timed out"), ps=0)
    fake.peers[0].lose()
    fake.loop.advance(5.0)
    fake.peers[0].connect()
    assert fake.running() == [[0]]
    finish_all(fake)


def test_ps_lost_while_a_worker_comes_back():
    fake = FakeCluster(1)
    result = fake.schedule()
    fake.peers[0].lose()
    fake.backend.lost[0] = ts.errors.UnavailableError("/job:ps/task:0 can't be reached")
    fake.peers[0].connect(prepare=False)
    failure = error_reply(ts.errors.UnavailableError("no ps 0"))
    fake.peers[0].answer("configure", failure)
    with pytest.raises(ts.errors.UnavailableError, match="/job:ps/task:0"):
        fake.queue.join()
    with pytest.raises(ts.errors.CancelledError):
        result.fetch()


def test_preparation_is_tried_again():
    fake = FakeCluster(1, connect=False)
    fake.schedule()
    peer = fake.peers[0]
    peer.connect(prepare=False)
    failure = error_reply(ts.errors.UnavailableError("no ps 0"))
    for _ in range(3):
        peer.answer("configure", failure)
        assert peer.kinds() == []
        fake.loop.advance(11.0)
        assert peer.kinds() == ["configure"]
    fake.queue.raise_error()
    peer.answer("configure", OK)
    finish_all(fake)


def test_preparation_that_raises_is_an_error_once():
    fake = FakeCluster(1, connect=False)
    fake.schedule()
    peer = fake.peers[0]
    peer.connect(prepare=False)
    failure = error_reply(ValueError("another version"))
    peer.answer("configure", failure)
    with pytest.raises(ValueError, match="another version"):
        fake.queue.join()
    fake.loop.advance(11.0)
    peer.answer("configure", failure)
    fake.queue.join()


def test_dataset_that_a_ps_did_not_answer_is_tried_again():
    fake = FakeCluster(1)
    dataset = make_resource(fake)
    failure = error_reply(ts.errors.UnavailableError("timed out"))
    fake.peers[0].answer("resource", failure)
    fake.schedule(resources=[dataset._ts_resource_id])
    assert fake.peers[0].kinds() == []
    fake.loop.advance(1.0)
    assert fake.peers[0].kinds() == ["resource"]
    fake.peers[0].answer("resource", OK)
    finish_all(fake)


def test_iterator_of_a_dataset_that_is_tried_again():
    fake = FakeCluster(1)
    dataset = make_resource(fake)
    iterator = make_resource(fake, "iterator", of=dataset._ts_resource_id)
    fake.schedule(resources=[iterator._ts_resource_id])
    fake.peers[0].answer("resource", error_reply(ts.errors.UnavailableError("timed out")))
    fake.peers[0].answer("resource", error_reply(ValueError("There is no dataset 0")))
    fake.queue.raise_error()
    fake.loop.advance(1.0)
    assert fake.peers[0].answer("resource", OK).fields["kind"] == "dataset"
    assert fake.all_running() == []
    assert fake.peers[0].answer("resource", OK).fields["kind"] == "iterator"
    finish_all(fake)


def test_iterator_of_a_dataset_that_fails_in_the_end():
    fake = FakeCluster(1, max_ps_failures=1)
    dataset = make_resource(fake)
    iterator = make_resource(fake, "iterator", of=dataset._ts_resource_id)
    for _ in range(2):
        fake.peers[0].answer("resource", error_reply(ts.errors.UnavailableError("timed out")))
        if fake.peers[0].kinds():
            fake.peers[0].answer("resource", error_reply(ValueError("There is no dataset 0")))
        fake.loop.advance(1.0)
    with pytest.raises(ts.errors.UnavailableError, match="timed out"):
        fake.queue.join()
    while fake.peers[0].kinds():
        fake.peers[0].answer("resource", error_reply(ValueError("There is no dataset 0")))
    fake.queue.join()
    result = fake.schedule(resources=[iterator._ts_resource_id])
    with pytest.raises(ts.errors.UnavailableError, match="timed out"):
        result.fetch()


def test_dataset_that_needs_a_lost_ps():
    fake = FakeCluster(1)
    make_resource(fake)
    fake.backend.lost[0] = ts.errors.UnavailableError("/job:ps/task:0 can't be reached")
    failure = error_reply(ts.errors.UnavailableError("timed out"))
    fake.peers[0].answer("resource", failure)
    with pytest.raises(ts.errors.UnavailableError):
        fake.queue.join()


# Refusals


def test_refused_by_one_worker():
    fake = FakeCluster(2)
    fake.schedule_many(4)
    peer = fake.peers[0]
    peer.state = PeerState.REFUSED
    peer.handler.refused(peer, "wrong key")
    fake.loop.run()
    while fake.peers[1].running():
        fake.peers[1].done()
    with pytest.raises(ts.errors.UnavailableError, match=r"task:0 .* refused this coordinator: wrong key"):
        fake.queue.join()
    fake.schedule()
    finish_all(fake)


def test_refused_by_all_workers():
    fake = FakeCluster(2, connect=False)
    for peer in fake.peers:
        peer.handler.refused(peer, "wrong key")
    for _ in range(2):
        with pytest.raises(ts.errors.UnavailableError, match="wrong key"):
            fake.queue.join()


def test_newer_coordinator_took_over():
    fake = FakeCluster(2)
    result = fake.schedule()
    fenced = Message("error", {"type": "FencedError", "message": "a newer coordinator has taken over"})
    fake.peers[0].answer("run", fenced)
    for _ in range(2):
        with pytest.raises(ts.errors.UnavailableError, match="newer coordinator"):
            fake.queue.join()
    with pytest.raises(ts.errors.CancelledError, match="newer coordinator"):
        result.fetch()


def test_a_worker_is_told_how_many_of_its_functions_failed():
    fake = FakeCluster(1)
    fake.schedule_many(2)
    runs = [m.fields["failures"] for m in fake.peers[0].seen if m.kind == "run"]
    assert runs == [0, 0]
    fake.peers[0].fail(ValueError("oh"), number=0)
    fake.peers[0].answer("run", Message("cancelled", {}), number=1)
    with pytest.raises(ValueError, match="oh"):
        fake.queue.join()
    fake.schedule()
    assert fake.peers[0].seen[-1].fields["failures"] == 1
    fake.peers[0].lose()
    fake.peers[0].connect()
    assert fake.peers[0].seen[-1].fields["failures"] == 0
