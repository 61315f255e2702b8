"""A server and its clients in one process: what arrives where, and what errors say."""

import os
import queue
import socket
import threading
import weakref

import pytest
import torch

from tests.ps.transport.servers import (
    SECRET,
    WAIT_S,
    channel_to,
    connect,
    connected,
    connections_to,
    cut_connections_to,
    looping,
    serving,
    wait_until,
)
from torchstrategy.errors import DeadlineExceededError, NotFoundError, UnavailableError
from torchstrategy.ps.states import PeerState
from torchstrategy.ps.transport import peer as peer_module
from torchstrategy.ps.transport.channel import TensorChannel
from torchstrategy.ps.transport.limits import Limits
from torchstrategy.ps.transport.listener import Listener
from torchstrategy.ps.transport.messages import FencedError, Message, RefusedError, encode
from torchstrategy.ps.transport.sockets import is_refused


@pytest.fixture
def server():
    with serving() as (listener, service):
        yield listener, service


@pytest.fixture
def loop():
    with looping() as loop:
        yield loop


# --- the control connection


def test_hello_and_welcome(server, loop):
    listener, service = server
    peer, handler = connect(loop, listener.address, incarnation=7)
    assert handler.next_event() == ("ready", {"greeting": "hi", "server": listener.incarnation})
    assert service.next_event() == ("admit", 7)
    assert peer.state is PeerState.READY


def test_requests_carry_all_and_are_answered_in_order(server, loop):
    peer, _ = connected(loop, server[0].address)
    replies = queue.Queue()
    for number in range(20):
        message = Message("a", {"number": number}, (torch.full((3,), number),), (bytes([number]) * 3,))
        peer.request(message, replies.put)
    for number in range(20):
        reply = replies.get(timeout=WAIT_S)
        assert reply.fields == {"number": number}
        assert reply.tensors[0].tolist() == [number] * 3
        assert reply.blobs == (bytes([number]) * 3,)


def test_errors_come_back_as_what_they_were(server, loop):
    peer, _ = connected(loop, server[0].address)
    with pytest.raises(ValueError, match=r"^no good$"):
        peer.call(Message("fail", {"text": "no good"}))
    with channel_to(peer) as channel, pytest.raises(KeyError, match="no key"):
        channel.call(Message("fail", {"text": "no key"}))


def test_a_reply_may_come_later_and_from_any_thread(server, loop):
    listener, service = server
    peer, handler = connected(loop, listener.address)
    replies = queue.Queue()
    numbers = [peer.request(Message("later", {}), replies.put) for _ in range(2)]
    wait_until(lambda: len(service.sessions) == 2)
    (session, _) = service.sessions
    for number in reversed(numbers):
        threading.Thread(target=session.reply, args=(number, Message("late", {"of": number}))).start()
    assert {replies.get(timeout=WAIT_S).fields["of"] for _ in numbers} == set(numbers)
    session.reply(numbers[0], Message("once more", {}))
    assert handler.next_event()[1].kind == "once more"


def test_a_call_that_is_not_answered_in_time(server, loop):
    peer, _ = connected(loop, server[0].address)
    with pytest.raises(DeadlineExceededError, match=r"has not answered a message of kind 'later' within 0\.05 s"):
        peer.call(Message("later", {}), timeout_seconds=0.05)
    assert peer.call(Message("echo", {"a": 1})).fields == {"a": 1}


def test_a_call_on_the_loops_own_thread_would_hang(server, loop):
    peer, _ = connected(loop, server[0].address)
    errors = queue.Queue()

    def call():
        try:
            peer.call(Message("echo", {}))
        except RuntimeError as error:
            errors.put(error)

    loop.call_soon(call)
    assert "its own thread" in str(errors.get(timeout=WAIT_S))


def test_a_callback_that_fails_harms_no_one_else(server, loop, caplog):
    peer, _ = connected(loop, server[0].address)
    peer.request(Message("echo", {}), lambda reply: 1 / 0)
    assert peer.call(Message("echo", {"a": 1})).fields == {"a": 1}
    assert "A callback of the control loop has failed" in caplog.text


def test_a_reply_that_cannot_be_sent_is_an_error(loop):
    with serving(limits=Limits(max_control_bytes=10_000)) as (listener, _):
        peer, _ = connected(loop, listener.address)
        with pytest.raises(ValueError, match="TORCHSTRATEGY_MAX_CONTROL_BYTES"):
            peer.call(Message("big", {"num_bytes": 20_000}))
        assert peer.call(Message("big", {"num_bytes": 5_000})).tensors[0].shape == (5_000,)


def test_a_request_that_is_too_large_is_not_sent(server, loop):
    peer, _ = connected(loop, server[0].address, limits=Limits(max_control_bytes=1000))
    with pytest.raises(ValueError, match="TORCHSTRATEGY_MAX_CONTROL_BYTES"):
        peer.call(Message("a", {}, (), (bytes(2000),)))
    assert server[1].messages == []


def test_a_refusal_is_told_and_final(loop):
    with serving() as (listener, service):
        service.refuses = "Not today."
        peer, handler = connect(loop, listener.address)
        assert handler.next_event() == ("refused", "Not today.")
        assert peer.state is PeerState.REFUSED
        with pytest.raises(UnavailableError, match="Not today"):
            peer.call(Message("echo", {}))


def test_a_hello_without_incarnation_is_refused(server, loop):
    _, handler = connect(loop, server[0].address, incarnation=None)
    assert "incarnation" in handler.next_event()[1]
    _, handler = connect(loop, server[0].address, role=3)
    assert "role" in handler.next_event()[1]


def test_a_closed_peer(server, loop):
    listener, service = server
    peer, _ = connected(loop, listener.address)
    assert service.next_event() == ("admit", 1)
    replies = queue.Queue()
    peer.request(Message("later", {}), replies.put)
    peer.close()
    assert isinstance(replies.get(timeout=WAIT_S), UnavailableError)
    assert service.next_event() == ("lost", 1)
    with pytest.raises(UnavailableError, match="closed the connection"):
        peer.call(Message("echo", {}))


def test_a_closed_loop(server):
    with looping() as loop:
        peer, _ = connected(loop, server[0].address)
        replies = queue.Queue()
        peer.request(Message("later", {}), replies.put)
    assert isinstance(replies.get(timeout=WAIT_S), UnavailableError)
    with pytest.raises(UnavailableError, match="closed"):
        peer.call(Message("echo", {}))
    with pytest.raises(RuntimeError, match="closed"):
        loop.call_soon(print)
    loop.close()  # again


def test_a_server_that_goes_and_comes_back(loop):
    with serving() as (first, _):
        peer, handler = connected(loop, first.address)
        channel = TensorChannel(peer)
        replies = queue.Queue()
        peer.request(Message("later", {}), replies.put)
    assert handler.next_event()[0] == "lost"
    assert isinstance(replies.get(timeout=WAIT_S), UnavailableError)
    with pytest.raises(UnavailableError, match="lost"):
        channel.call(Message("echo", {}))
    wait_until(lambda: peer.is_gone)
    with serving(first.address) as (second, _):
        event, welcome = handler.next_event()
        assert (event, welcome["server"]) == ("ready", second.incarnation)
        assert not peer.is_gone
        assert second.incarnation != first.incarnation
        assert peer.call(Message("echo", {"a": 1})).fields == {"a": 1}
        with channel_to(peer) as channel:
            assert channel.call(Message("echo", {"a": 2})).fields == {"a": 2}


def test_a_server_that_was_refused_for_a_moment_is_not_gone(loop, monkeypatch):
    """As by a firewall that is set up anew."""
    probes = queue.Queue()
    monkeypatch.setattr(peer_module, "is_refused", lambda end_point: probes.put(end_point) or True)
    monkeypatch.setattr(peer_module, "_GONE_AFTER_S", 3600.0, raising=False)
    with serving() as (listener, _):
        peer, handler = connected(loop, listener.address)
    assert handler.next_event()[0] == "lost"
    for _ in range(3):
        probes.get(timeout=WAIT_S)
        assert not peer.is_gone
    with serving(listener.address):
        assert handler.next_event()[0] == "ready"


def test_a_request_on_a_connection_that_zeromq_has_made_anew_was_lost(loop, server):
    """The loop was busy, and has not seen yet that the first one has ended; the server knows nothing of the second."""
    peer, handler = connected(loop, server[0].address)
    replies = queue.Queue()

    def request_late():
        cut_connections_to(peer._port)
        peer._send(encode(Message("echo", {})), replies.put, next(peer._numbers))
        peer._socket.poll(1000 * WAIT_S)

    loop.call_soon(request_late)
    assert isinstance(replies.get(timeout=WAIT_S), UnavailableError)
    assert [handler.next_event()[0] for _ in range(2)] == ["lost", "ready"]
    assert peer.call(Message("echo", {"a": 1})).fields == {"a": 1}


def test_a_server_that_is_silent_is_not_gone(loop):
    """Something listens at its address, as at that of a process that is stopped."""
    with serving() as (listener, _):
        peer, handler = connected(loop, listener.address)
    with socket.create_server(("127.0.0.1", peer._port)):
        assert handler.next_event()[0] == "lost"
        seen = []
        loop.call_soon(lambda: seen.append(is_refused(peer._end_point)))
        wait_until(lambda: seen)
        assert seen == [False]
    assert is_refused(peer._end_point)


def test_a_server_that_comes_later(loop):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    peer, handler = connect(loop, f"127.0.0.1:{port}", name="/job:ps/task:0")
    with pytest.raises(UnavailableError, match=f"^/job:ps/task:0 at 127.0.0.1:{port} is not available"):
        peer.call(Message("echo", {}))
    with serving(f"127.0.0.1:{port}"):
        assert handler.next_event()[0] == "ready"


@pytest.mark.parametrize("address", ["127.0.0.1", "127.0.0.1:", ":80", "host:port", "host:99999", ""])
def test_an_address_that_is_none(loop, address):
    with pytest.raises(ValueError, match="must be host:port"):
        connect(loop, address)


def test_a_port_that_is_taken(server):
    with pytest.raises(OSError, match=r"127\.0\.0\.1:\d+ can't be listened at"):
        Listener(server[0].address, server[1], secret=SECRET).start()


def test_names_and_ipv6(loop):
    for address in ("localhost:0", "[::1]:0"):
        with serving(address) as (listener, _):
            peer, _ = connected(loop, listener.address)
            with channel_to(peer, unix=None) as channel:
                assert channel.call(Message("echo", {"a": 1})).fields == {"a": 1}


# --- tensor connections


KINDS = {
    "unix": ({}, {}),
    "tcp": ({"encrypt_tensors": False}, {"unix": None}),
    "curve": ({}, {"unix": None, "port": None}),
}


@pytest.fixture(params=KINDS)
def any_channel(request, loop):
    """A channel of each kind, its service and peer."""
    options, changes = KINDS[request.param]
    address = "0.0.0.0:0" if request.param == "tcp" else "127.0.0.1:0"
    with serving(address, **options) as (listener, service):
        peer, _ = connected(loop, listener.address.replace("0.0.0.0", "127.0.0.1"))
        with channel_to(peer, **changes) as channel:
            assert channel.kind == request.param
            yield channel, service, peer


def test_tensors_there_and_back(any_channel):
    channel, _, _ = any_channel
    sent = (torch.arange(5), torch.tensor(2.5, dtype=torch.bfloat16), torch.empty(0, 3), torch.randn(1000, 1000).T)
    for _ in range(2):
        reply = channel.call(Message("a", {"x": [1]}, sent))
        assert reply.fields == {"x": [1]}
        for there, back in zip(sent, reply.tensors, strict=True):
            assert there.dtype == back.dtype
            assert torch.equal(there, back)
            back.add_(1)  # may be written to
    assert torch.equal(sent[0], torch.arange(5))


def test_many_small_tensors(any_channel):
    sent = tuple(torch.full((number % 4,), number) for number in range(2000))
    reply = any_channel[0].call(Message("a", {}, sent))
    assert all(map(torch.equal, sent, reply.tensors))


def test_what_was_received_stays_when_more_comes(any_channel):
    channel, service, _ = any_channel
    service.value = torch.zeros(1 << 20)
    first = channel.call(Message("pull", {})).tensors[0]
    service.value = torch.ones(1 << 20)
    second = channel.call(Message("pull", {})).tensors[0]
    assert (first.sum().item(), second.sum().item()) == (0.0, float(1 << 20))


def test_the_server_holds_nothing_of_what_it_has_sent(any_channel):
    channel, service, _ = any_channel
    channel.call(Message("pull", {}))
    gone = weakref.ref(service.value)
    service.value = None
    channel.call(Message("echo", {}))
    assert gone() is None


def test_what_is_waited_for_when_only_the_tensor_connection_is_cut(loop, server):
    """ZeroMQ makes the connection anew, on which nothing would come."""
    peer, _ = connected(loop, server[0].address)
    with channel_to(peer, **KINDS["curve"][1]) as channel:
        channel.send(Message("wait", {}))
        while server[1].next_event()[0] != "waiting":
            pass
        cut_connections_to(int(channel._wire._socket.last_endpoint.rpartition(b":")[2]))
        with pytest.raises(UnavailableError, match=r"tensor connection to .* is lost"):
            channel.receive(timeout_seconds=WAIT_S)
    assert peer.call(Message("echo", {"a": 1})).fields == {"a": 1}


@pytest.mark.parametrize("kind", ["tcp", "curve"])
def test_the_kernel_looks_whether_a_silent_tensor_connection_stands(loop, kind):
    options, changes = KINDS[kind]
    with serving("0.0.0.0:0", **options) as (listener, _):
        peer, _ = connected(loop, listener.address.replace("0.0.0.0", "127.0.0.1"))
        with channel_to(peer, **changes) as channel:
            channel.call(Message("echo", {}))
            wire = channel._wire
            port = (
                wire.socket.getpeername()[1] if kind == "tcp" else int(wire._socket.last_endpoint.rpartition(b":")[2])
            )
            assert [c.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) for c in connections_to(port)] == [1]


def test_a_port_for_tensors_that_can_not_be_reached(loop, server, monkeypatch):
    peer, _ = connected(loop, server[0].address)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    monkeypatch.setattr(peer, "call", lambda message: Message("opened", {"port": port}))
    with channel_to(peer, **KINDS["curve"][1]) as channel, pytest.raises(UnavailableError, match="could not be made"):
        channel.call(Message("echo", {}), WAIT_S)


def test_blobs_do_not_travel_here(any_channel):
    channel, service, _ = any_channel
    with pytest.raises(TypeError, match="control connection"):
        channel.call(Message("a", {}, (), (b"x",)))
    with pytest.raises(TypeError, match="control connection"):
        channel.call(Message("blobs", {}))
    assert service.messages == ["blobs"]
    assert channel.call(Message("echo", {"a": 1})).fields == {"a": 1}


def test_one_request_at_a_time(any_channel):
    channel, _, _ = any_channel
    with pytest.raises(RuntimeError, match="nothing to receive"):
        channel.receive()
    channel.send(Message("a", {}))
    with pytest.raises(RuntimeError, match="must be received"):
        channel.send(Message("a", {}))
    assert channel.receive().kind == "echo"


def test_a_reply_that_takes_longer(any_channel):
    channel, service, _ = any_channel
    channel.send(Message("wait", {"a": 1}))
    with pytest.raises(DeadlineExceededError, match=r"within 0\.05 s"):
        channel.receive(timeout_seconds=0.05)
    service.gate.set()
    assert channel.receive(timeout_seconds=WAIT_S).fields == {"a": 1}


def test_a_lost_server_ends_the_wait(any_channel):
    channel, service, peer = any_channel
    channel.send(Message("wait", {}))
    service.next_event()
    threading.Timer(0.05, peer.close).start()
    with pytest.raises(UnavailableError, match="lost: this process has closed the connection"):
        channel.receive()
    with pytest.raises(UnavailableError):
        channel.call(Message("echo", {}))


def test_a_channel_needs_a_peer_that_is_ready(loop):
    peer, _ = connect(loop, "127.0.0.1:1")
    with pytest.raises(UnavailableError, match="not available"):
        TensorChannel(peer)


def test_a_closed_channel_is_closed_at_the_server(any_channel):
    channel, _, _ = any_channel
    channel.call(Message("echo", {}))
    service_threads = [thread for thread in threading.enumerate() if thread.name == "torchstrategy-tensors"]
    assert service_threads
    channel.close()
    wait_until(lambda: not any(thread.is_alive() for thread in service_threads))
    with pytest.raises(UnavailableError, match="closed the channel"):
        channel.call(Message("echo", {}))


def test_a_client_that_goes_while_it_is_served(any_channel):
    channel, service, _ = any_channel
    channel.send(Message("wait", {}))
    service.next_event()
    threads = [thread for thread in threading.enumerate() if thread.name == "torchstrategy-tensors"]
    channel.close()
    service.gate.set()
    wait_until(lambda: not any(thread.is_alive() for thread in threads))


def test_requests_of_many_threads_arrive_in_order(server, loop):
    """Their numbers grow, or the server would take some for replays; also over a new connection."""
    peer, _ = connected(loop, server[0].address)
    replies = queue.Queue()

    def ask():
        for _ in range(200):
            peer.request(Message("a", {}), replies.put)

    threads = [threading.Thread(target=ask) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert {replies.get(timeout=WAIT_S).kind for _ in range(800)} == {"echo"}


def test_threads_may_share_a_channel(any_channel):
    channel, _, _ = any_channel
    wrong = []

    def work(number):
        for _ in range(20):
            reply = channel.call(Message("a", {"number": number}, (torch.full((1000,), number),)))
            if reply.fields["number"] != number or not torch.equal(reply.tensors[0], torch.full((1000,), number)):
                wrong.append(number)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_clients_do_not_wait_for_each_other(server, loop):
    listener, service = server
    peer, _ = connected(loop, listener.address)
    with channel_to(peer) as slow, channel_to(peer) as quick:
        slow.send(Message("wait", {}))
        assert quick.call(Message("echo", {"a": 1})).fields == {"a": 1}
        service.gate.set()
        assert slow.receive().kind == "echo"


def test_so_many_requests_are_worked_on_at_once(loop):
    with serving(num_tensor_threads=1) as (listener, service):
        peer, _ = connected(loop, listener.address)
        with channel_to(peer) as first, channel_to(peer) as second:
            first.send(Message("wait", {}))
            wait_until(lambda: service.messages == ["wait"])
            second.send(Message("echo", {}))
            with pytest.raises(DeadlineExceededError):
                second.receive(timeout_seconds=0.1)
            service.gate.set()
            assert second.receive().kind == "echo"


# --- taking over


def test_a_newer_coordinator_takes_over(server, loop):
    listener, service = server
    old, old_handler = connected(loop, listener.address, incarnation=1)
    with channel_to(old) as channel:
        connected(loop, listener.address, incarnation=2)
        assert [service.next_event() for _ in range(3)] == [("admit", 1), ("superseded", 2), ("admit", 2)]
        event, reason = old_handler.next_event()
        assert event == "refused"
        assert "newer coordinator (incarnation 2)" in reason
        with pytest.raises(UnavailableError, match="newer coordinator"):
            old.call(Message("echo", {}))
        with pytest.raises(UnavailableError, match="newer coordinator"):
            channel.call(Message("echo", {}))
    _, again = connect(loop, listener.address, incarnation=1)
    assert "newer coordinator (incarnation 2) has this server" in again.next_event()[1]
    assert service.messages == []


def test_workers_of_the_same_coordinator_are_let_in(server, loop):
    listener, service = server
    coordinator, _ = connected(loop, listener.address, incarnation=5)
    worker, _ = connected(loop, listener.address, incarnation=5, role="worker")
    for peer in (coordinator, worker):
        assert peer.call(Message("echo", {})).kind == "echo"
    assert [session.role for session in service.sessions] == ["coordinator", "worker"]


def test_a_new_coordinator_waits_for_the_old_ones_calls(server, loop):
    listener, service = server
    old, _ = connected(loop, listener.address, incarnation=1)
    channel = TensorChannel(old)
    channel.send(Message("wait", {}))
    wait_until(lambda: service.messages == ["wait"])
    assert [service.next_event() for _ in range(2)] == [("admit", 1), ("waiting", 1)]
    new, handler = connect(loop, listener.address, incarnation=2)
    with pytest.raises(queue.Empty):
        handler.events.get(timeout=0.2)
    assert new.state is PeerState.CONNECTING
    service.gate.set()
    assert handler.next_event()[0] == "ready"
    order = [service.next_event() for _ in range(3)]
    assert sorted(order) == [("admit", 2), ("lost", 1), ("superseded", 2)]
    assert order.index(("superseded", 2)) < order.index(("admit", 2))


def test_a_client_that_is_back_waits_for_its_own_calls(server, loop):
    """What it asks for again is asked for after that."""
    listener, service = server
    peer, handler = connected(loop, listener.address)
    channel = TensorChannel(peer)
    channel.send(Message("wait", {}))
    assert [service.next_event() for _ in range(2)] == [("admit", 1), ("waiting", 1)]
    loop.call_soon(lambda: peer._lose("by the test"))
    assert handler.next_event() == ("lost", "by the test")
    with pytest.raises(queue.Empty):
        handler.events.get(timeout=0.2)
    service.gate.set()
    assert handler.next_event()[0] == "ready"


def test_a_client_that_is_back_before_its_end_was_seen(loop):
    """A hello drops the client's earlier session."""
    with serving() as (listener, service):
        peer, _ = connected(loop, listener.address)
        other, other_handler = connect(loop, listener.address)
        assert other_handler.next_event()[0] == "ready"
        channel = TensorChannel(peer)
        channel.send(Message("wait", {}))
        assert [service.next_event() for _ in range(3)] == [("admit", 1), ("admit", 1), ("waiting", 1)]
        other._hello["client"] = peer._hello["client"]
        loop.call_soon(lambda: other._lose("by the test"))
        assert other_handler.next_event()[0] == "lost"
        with pytest.raises(queue.Empty):
            other_handler.events.get(timeout=0.2)
        service.gate.set()
        assert other_handler.next_event()[0] == "ready"


def test_a_message_on_its_way_when_the_coordinator_changes(server, loop):
    """The session is invalid before its client hears of it."""
    listener, service = server
    peer, _ = connected(loop, listener.address)
    peer.call(Message("echo", {}))
    with channel_to(peer) as channel:
        channel.call(Message("echo", {}))
        service.sessions[0].invalidate("taken over")
        with pytest.raises(FencedError, match="taken over"):
            peer.call(Message("change", {}))
        with pytest.raises(FencedError, match="taken over"):
            channel.call(Message("change", {}))
    assert service.messages == ["echo", "echo"]


def test_error_classes():
    assert issubclass(FencedError, RefusedError)
    assert issubclass(RefusedError, UnavailableError)
    assert issubclass(NotFoundError, FileNotFoundError)


# --- what is left behind


def test_nothing_is_left_behind():
    def descriptors():
        return len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else 0

    def use_all():
        with serving() as (listener, _), looping() as loop:
            for changes in ({}, {"unix": None, "port": None}):
                peer, _ = connected(loop, listener.address)
                with channel_to(peer, **changes) as channel:
                    channel.call(Message("echo", {}, (torch.ones(1 << 20),)))
            connected(loop, listener.address)
            TensorChannel(connected(loop, listener.address)[0])

    def threads():
        return {thread.name for thread in set(threading.enumerate()) - threads_before}

    threads_before = set(threading.enumerate())
    use_all()
    wait_until(lambda: not threads())
    before = descriptors()
    for _ in range(3):
        use_all()
    wait_until(lambda: not threads())
    assert descriptors() <= before
