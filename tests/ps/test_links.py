"""Connections to parameter servers of this process that are lost, and made again."""

import pickle
import queue
import threading
import time
import weakref

import pytest
import torch

import torchstrategy as ts
from tests.clusters import new_cluster
from tests.ps.transport.servers import cut_connections_to
from torchstrategy.errors import UnavailableError
from torchstrategy.ps import links
from torchstrategy.ps.client import ParameterClient
from torchstrategy.ps.layout import Placer
from torchstrategy.ps.links import ServerLink, grace_seconds
from torchstrategy.ps.store import Key
from torchstrategy.ps.transport import wires
from torchstrategy.ps.transport.control_loop import ControlLoop
from torchstrategy.ps.transport.sockets import zmq

WAIT_S = 20.0


class OneServer:
    """A server with a link to it, and what goes wrong between them."""

    def __init__(self, grace_s):
        self.cluster = new_cluster(["ps", "worker"])
        self.server = ts.Server(self.cluster, "ps", 0)
        self.loop = ControlLoop()
        self.link = ServerLink(0, self.cluster["ps"][0], grace_s=grace_s)
        self.link.connect(self.loop, {"role": "coordinator", "incarnation": 1})
        assert self.link.wait(WAIT_S)
        self.client = ParameterClient([self.link])
        (self.spec,) = (Placer(1).place(0, "v", (4,), torch.float32, True),)
        self.num_answers = 0

    def lose(self):
        """Lose the connection, and wait until this is known."""
        is_done = threading.Event()

        def lose():
            self.link.peer._lose("by the test")
            is_done.set()

        self.loop.call_soon(lose)
        assert is_done.wait(WAIT_S)

    def lose_replies(self, kind, count=1, *, of="tensor"):
        """Lose the connection when requests of a kind were answered, before the answers arrive."""
        service = self.server._service
        answer = getattr(service, of)

        def answer_and_lose(session, message):
            reply = answer(session, message)
            if message.kind == kind:
                self.num_answers += 1
                if self.num_answers <= count:
                    self.lose()
            return reply

        setattr(service, of, answer_and_lose)

    def close(self):
        self.loop.close()
        self.server.stop()


@pytest.fixture
def make():
    made = []

    def make_one(grace_s=10.0):
        made.append(OneServer(grace_s))
        return made[-1]

    yield make_one
    for one in made:
        one.close()


def make_optimizer(client, spec):
    plain = torch.optim.SGD([torch.nn.Parameter(torch.zeros(4))], 1.0)
    groups = [{**plain.param_groups[0], "params": [0]}]
    definition = pickle.dumps({"class": torch.optim.SGD, "defaults": plain.defaults, "groups": groups})
    client.define_optimizer(0, definition, [spec])


@pytest.mark.parametrize("is_encrypted", [False, True])
def test_a_change_is_made_once_if_only_the_tensor_connection_breaks_while_it_is_made(make, is_encrypted):
    """The control connection stands, so the request comes again before it was answered."""
    one = make()
    if is_encrypted:
        one.link.peer.connection["tensors"].update(unix=None, port=None)
    one.client.create(one.spec, torch.zeros(4))
    update, begun, calls = one.server._service.held.store.update, threading.Event(), []

    def slow(changes):
        calls.append(None)
        begun.set()
        time.sleep(0.5)
        return update(changes)

    one.server._service.held.store.update = slow

    def cut():
        begun.wait(WAIT_S)
        wire = one.link._channel._wire
        if is_encrypted:
            cut_connections_to(int(wire._socket.last_endpoint.rpartition(b":")[2]))
        else:
            wire.shut()

    thread = threading.Thread(target=cut)
    thread.start()
    one.client.update(one.spec, "assign_add", torch.ones(4))
    thread.join()
    assert value_of(one) == [1.0] * 4
    assert len(calls) == 1


def test_a_server_that_stands_but_answers_nobody_is_not_waited_for_without_end(make, monkeypatch):
    one = make(grace_s=0.5)
    one.client.create(one.spec, torch.zeros(4))
    monkeypatch.setattr(one.link, "_is_there", lambda: False)
    one.link._channel._wire.shut()
    monkeypatch.setattr(links.TensorChannel, "_connect", lambda *_: exec("raise OSError('stuck')"))
    with pytest.raises(UnavailableError, match=r"asked in vain for 0\.5 seconds: it is stuck"):
        one.client.update(one.spec, "assign_add", torch.ones(4))


def test_a_change_that_was_interrupted_is_not_sent_again(make, monkeypatch):
    """Its tensors are the program's own by then."""
    one = make()
    one.client.create(one.spec, torch.zeros(4))
    value = torch.ones(4)

    def interrupted(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(one.link, "receive", interrupted)
        patch.setattr(one.link._channel._wire, "send", lambda message: None)  # it is lost on its way
        with pytest.raises(KeyboardInterrupt):
            one.client.update(one.spec, "assign_add", value)
    value.fill_(100.0)
    one.lose()
    assert value_of(one) == [0.0] * 4


def test_a_change_that_is_interrupted_right_after_it_was_sent_has_its_reply_taken(make, monkeypatch):
    one = make()
    one.client.create(one.spec, torch.zeros(4))
    send = one.link.send

    def interrupted(message):
        send(message)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(one.link, "send", interrupted)
        with pytest.raises(KeyboardInterrupt):
            one.client.update(one.spec, "assign_add", torch.ones(4))
    assert value_of(one) == [1.0] * 4


@pytest.mark.parametrize("is_encrypted", [False, True])
def test_a_reply_that_is_interrupted_while_it_is_taken_is_not_waited_for(make, monkeypatch, is_encrypted):
    """It has come, and nothing more will."""
    one = make()
    if is_encrypted:
        one.link.peer.connection["tensors"].update(unix=None, port=None)
    one.client.create(one.spec, torch.zeros(4))
    wire = one.link._channel._wire
    receive = wire.receive

    def interrupted(*arguments):
        receive(*arguments)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(wire, "receive", interrupted)
        with pytest.raises(KeyboardInterrupt):
            one.client.update(one.spec, "assign_add", torch.ones(4))
    assert value_of(one) == [1.0] * 4


@pytest.mark.parametrize("is_encrypted", [False, True])
def test_nothing_follows_a_change_that_was_sent_in_part(make, monkeypatch, is_encrypted):
    """Ctrl-C in the middle: the server would take the next request for the rest of it."""
    one = make()
    if is_encrypted:
        one.link.peer.connection["tensors"].update(unix=None, port=None)
    (spec,) = (Placer(1).place(0, "v", (100_000,), torch.float32, True),)
    one.client.create(spec, torch.zeros(100_000))

    def interrupted(connection, buffers):
        connection.sendall(b"".join(map(bytes, buffers))[:200_000])
        raise KeyboardInterrupt

    def interrupted_frames(frames, flags):
        zmq_socket.send(frames[0], flags | zmq.SNDMORE)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        if is_encrypted:
            zmq_socket = one.link._channel._wire._socket
            patch.setattr(zmq_socket, "send_multipart", interrupted_frames)
        else:
            patch.setattr(wires, "_send_all", interrupted)
        with pytest.raises(KeyboardInterrupt):
            one.client.update(spec, "assign_add", torch.ones(100_000))
    one.client.update(spec, "assign_add", torch.full((100_000,), 2.0))
    assert set(one.client.pull([spec], {})[0][1].tolist()) == {2.0}


def value_of(one):
    return one.client.pull([one.spec], {})[0][1].tolist()


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize(
    ("kind", "change"),
    [
        ("update", lambda client, spec: client.update(spec, "assign_add", torch.ones(4))),
        ("scatter", lambda client, spec: client.scatter(spec, "scatter_add", torch.arange(4), torch.ones(4))),
        ("push", lambda client, spec: client.push(0, {0: -torch.ones(4)})),
        ("write", lambda client, spec: client.write_from(spec, torch.ones(4))),
    ],
)
def test_a_change_whose_reply_is_lost_is_made_once(make, kind, change, count):
    one = make()
    one.client.create(one.spec, torch.zeros(4))
    make_optimizer(one.client, one.spec)
    one.lose_replies(kind, count)
    change(one.client, one.spec)
    assert value_of(one) == [1.0] * 4
    change(one.client, one.spec)
    assert value_of(one) == ([1.0] if kind == "write" else [2.0]) * 4
    assert one.num_answers == count + 2


def test_what_is_made_while_the_reply_is_lost(make):
    one = make()
    one.lose_replies("create")
    one.client.create(one.spec, torch.zeros(4))
    one.num_answers = 0
    one.lose_replies("optimizer", of="control")
    make_optimizer(one.client, one.spec)
    one.client.push(0, {0: -torch.ones(4)})
    assert value_of(one) == [1.0] * 4


def test_a_value_whose_reply_is_lost_is_read_again(make):
    one = make()
    one.client.create(one.spec, torch.arange(4.0))
    one.lose_replies("pull")
    assert value_of(one) == [0, 1, 2, 3]
    one.num_answers = 0
    one.lose_replies("rows")
    assert one.client.pull_rows(one.spec, torch.tensor([3, 1])).tolist() == [3, 1]


def test_a_part_is_read_anew_when_its_snapshot_is_gone(make):
    """Its pieces are of one moment."""
    one = make()
    one.client.create(one.spec, torch.zeros(4))
    service, num_pieces = one.server._service, 0
    answer = service.tensor

    def change_and_lose(session, message):
        nonlocal num_pieces
        reply = answer(session, message)
        num_pieces += message.kind == "read"
        if message.kind == "read" and num_pieces == 2:
            service.held.store.update([(Key(0, 0), "assign", torch.ones(4))])
            one.lose()
        return reply

    service.tensor = change_and_lose
    out = torch.full((4,), -1.0)
    one.client.read_into(one.spec, out, 4)
    assert out.tolist() == [1.0] * 4
    assert num_pieces == 6


def test_without_a_grace_time_a_lost_reply_is_an_error(make):
    one = make(0.0)
    one.client.create(one.spec, torch.zeros(4))
    one.lose_replies("update")
    with pytest.raises(UnavailableError, match="/job:ps/task:0"):
        one.client.update(one.spec, "assign_add", torch.ones(4))


def test_a_server_that_ends_is_not_waited_for(make):
    one = make(60.0)
    one.client.create(one.spec, torch.zeros(4))
    start = time.monotonic()
    one.server.stop()
    with pytest.raises(UnavailableError, match="nothing listens there any more"):
        value_of(one)
    assert time.monotonic() - start < 10
    assert not one.link.is_away


def test_a_server_that_is_back_while_its_failure_is_asked_for_has_none(make):
    one = make()
    reads = iter(["by the test"])  # and `None` from then on, as `ready` sets it on the loop's thread

    class Returning(ServerLink):
        _lost = property(lambda _: next(reads, None), lambda _, value: None)

    one.link._lost_at = time.monotonic()
    one.link.__class__ = Returning
    assert one.link.failure is None


def test_a_newer_coordinator_has_taken_the_server_over_meanwhile(make):
    one = make()
    one.client.create(one.spec, torch.zeros(4))
    reopen, one.link.peer.open = one.link.peer.open, lambda: None
    one.lose()
    newer = ServerLink(0, one.cluster["ps"][0])
    newer.connect(one.loop, {"role": "coordinator", "incarnation": 2})
    assert newer.wait(WAIT_S)
    assert one.link.is_away
    one.loop.call_soon(reopen)
    with pytest.raises(UnavailableError, match="newer coordinator"):
        value_of(one)


def test_a_newer_coordinator_takes_the_server_over_while_it_is_asked_for(make):
    one = make()
    one.client.create(one.spec, torch.zeros(4))
    reopen, one.link.peer.open = one.link.peer.open, lambda: None
    one.lose()
    newer = ServerLink(0, one.cluster["ps"][0])
    newer.connect(one.loop, {"role": "coordinator", "incarnation": 2})
    assert newer.wait(WAIT_S)
    one.link.answered.clear()

    def be_refused():
        error = one.link.peer.unavailable()  # as it was before the refusal came
        one.loop.call_soon(reopen)
        assert one.link.wait(WAIT_S)
        raise error

    one.link._ask_why = be_refused
    with pytest.raises(UnavailableError, match="newer coordinator"):
        value_of(one)


def test_a_long_wait_is_told(make, monkeypatch, caplog):
    monkeypatch.setattr(links, "_SECONDS_TO_LINE_OF_AWAY", 0.01)
    one = make()
    one.client.create(one.spec, torch.zeros(4))
    answers = iter([False] * 4)
    one.link._is_there = lambda: next(answers, True)
    one.lose_replies("pull")
    with caplog.at_level("INFO"):
        assert value_of(one) == [0.0] * 4
    (line,) = [line for line in caplog.messages if line.startswith("Waiting for")]
    assert line.startswith("Waiting for /job:ps/task:0 at 127.0.0.1:")
    assert line.endswith(", which is out of reach, for up to 10 seconds")


def test_what_was_sent_is_let_go_of(make):
    one = make()
    one.client.create(one.spec, torch.zeros(4))
    value = torch.ones(4)
    reference = weakref.ref(value)
    one.client.update(one.spec, "assign", value)
    del value
    assert reference() is None
    assert one.link._request is None


def test_closing_ends_the_wait(make):
    one = make(60.0)
    one.client.create(one.spec, torch.zeros(4))
    one.link._is_there = lambda: False
    threading.Timer(0.2, one.loop.close).start()
    one.lose_replies("pull")
    with pytest.raises(UnavailableError):
        value_of(one)


def test_the_loops_thread_does_not_wait(make):
    one = make(60.0)
    errors = queue.Queue()

    def fail():
        raise UnavailableError("by the test")

    def persist():
        one.link.peer._lose("by the test")
        try:
            one.link._persist(fail)
        except UnavailableError as error:
            errors.put(error)

    one.loop.call_soon(persist)
    assert str(errors.get(timeout=WAIT_S)) == "by the test"


def test_a_server_that_was_asked_is_away_until_it_answers(make):
    one = make()
    assert not one.link.is_away
    asked, request = [], one.link.peer.request
    one.link.peer.request = lambda *question: asked.append(question)
    one.link.ask()
    one.link.ask()
    assert one.link.is_away
    assert one.link.failure is None
    (question,) = asked
    request(*question)
    deadline = time.monotonic() + WAIT_S
    while one.link.is_away:
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.parametrize("seconds", [-1, float("inf"), float("nan"), True, "3"])
def test_a_wrong_grace_time(seconds):
    with pytest.raises(ValueError, match="ps_grace_s must be None or a number of seconds, at least 0"):
        grace_seconds(seconds)


def test_the_grace_time_of_the_environment(monkeypatch):
    monkeypatch.delenv("TORCHSTRATEGY_PS_GRACE_S", raising=False)
    assert grace_seconds() == 30
    monkeypatch.setenv("TORCHSTRATEGY_PS_GRACE_S", "2.5")
    assert (grace_seconds(), grace_seconds(7)) == (2.5, 7)
    monkeypatch.setenv("TORCHSTRATEGY_PS_GRACE_S", "soon")
    with pytest.raises(ValueError, match="TORCHSTRATEGY_PS_GRACE_S must be a number"):
        grace_seconds()
