"""Strangers, damage and replays: nothing changes, and it is logged."""

import contextlib
import os
import socket
import struct

import pytest
import torch
import zmq

from tests.ps.transport.servers import SECRET, WAIT_S, channel_to, connect, connected, looping, serving, wait_until
from torchstrategy.base.addresses import split_address
from torchstrategy.errors import UnavailableError
from torchstrategy.ps.states import PeerState
from torchstrategy.ps.transport.channel import TensorChannel
from torchstrategy.ps.transport.gatekeeper import greet_server, secure_client
from torchstrategy.ps.transport.limits import Limits, RefusalLog
from torchstrategy.ps.transport.listener import Listener
from torchstrategy.ps.transport.messages import Message, encode
from torchstrategy.ps.transport.secret import Seal, Secret, make_secret


@pytest.fixture
def loop():
    with looping() as loop:
        yield loop


@pytest.fixture
def server():
    """A server with a plain TCP port for tensors, an honest client, and what it has been asked."""
    with serving("0.0.0.0:0", encrypt_tensors=False) as (listener, service):
        yield listener, service


def local(listener):
    return listener.address.replace("0.0.0.0", "127.0.0.1")


@pytest.fixture
def honest(server, loop):
    peer, _ = connected(loop, local(server[0]))
    return peer


def check_unharmed(server, honest):
    """The honest client is served, and the service has seen no one else."""
    _, service = server
    assert honest.call(Message("honest", {"a": 1})).fields == {"a": 1}
    with channel_to(honest) as channel:
        assert channel.call(Message("honest", {"a": 2})).fields == {"a": 2}
    assert set(service.messages) == {"honest"}


def wait_for_log(caplog, text):
    wait_until(lambda: any(text in record.getMessage() for record in caplog.records))


# --- the control port


GARBAGE = {
    "random": os.urandom(1000),
    "http": b"GET / HTTP/1.1\r\nHost: a\r\n\r\n",
    "zeros": bytes(100_000),
    "a greeting and no more": b"\xff" + bytes(8) + b"\x7f\x03\x01" + b"CURVE".ljust(20, b"\0") + bytes(32),
    "a greeting without encryption": b"\xff" + bytes(8) + b"\x7f\x03\x01" + b"NULL".ljust(20, b"\0") + bytes(32),
    "a huge command": (
        b"\xff" + bytes(8) + b"\x7f\x03\x01" + b"CURVE".ljust(20, b"\0") + bytes(32) + b"\x06" + b"\xff" * 8
    ),
}


@pytest.mark.parametrize("data", GARBAGE.values(), ids=GARBAGE.keys())
def test_garbage_at_the_control_port(server, honest, caplog, data):
    with socket.create_connection(split_address(local(server[0]))) as stranger:
        stranger.settimeout(WAIT_S)
        send_and_end(stranger, data)
        assert is_closed_by_server(stranger)
    wait_for_log(caplog, "a control connection without a hello")
    check_unharmed(server, honest)


def test_a_plain_client(server, honest, caplog):
    with zmq.Context() as context, context.socket(zmq.DEALER) as stranger:
        stranger.linger = 0
        stranger.connect(f"tcp://{local(server[0])}")
        stranger.send_multipart([(1).to_bytes(8, "little"), *encode(Message("change", {}))])
        wait_for_log(caplog, "a control connection without a hello")
    check_unharmed(server, honest)


def test_a_client_with_another_secret(server, honest, loop, caplog):
    other = Secret(make_secret(), "elsewhere")
    peer, handler = connect(loop, local(server[0]), secret=other)
    wait_for_log(caplog, "The secret used here is from elsewhere; this process keeps trying.")
    wait_for_log(caplog, "a control connection without a hello")
    assert peer.state is PeerState.CONNECTING
    with pytest.raises(UnavailableError, match="another secret"):
        peer.call(Message("change", {}))
    assert handler.events.empty()
    check_unharmed(server, honest)


def test_a_client_that_knows_the_servers_public_key_only(server, honest, caplog):
    with zmq.Context() as context, context.socket(zmq.DEALER) as stranger:
        secure_client(stranger, SECRET, "127.0.0.1")
        stranger.curve_publickey, stranger.curve_secretkey = zmq.curve_keypair()
        stranger.connect(f"tcp://{local(server[0])}")
        stranger.send_multipart([(1).to_bytes(8, "little"), *encode(Message("change", {}))])
        wait_for_log(caplog, "refused 127.0.0.1: a client with another key")
    check_unharmed(server, honest)


def raw_client(context, address):
    """Return a socket that is let in but speaks for itself."""
    stranger = context.socket(zmq.DEALER)
    secure_client(stranger, SECRET, "127.0.0.1")
    stranger.rcvtimeo = int(1000 * WAIT_S)
    stranger.connect(f"tcp://{address}")
    return stranger


def number(value):
    return value.to_bytes(8, "little")


HELLO = encode(Message("hello", {"role": "worker", "incarnation": 1, "client": "raw"}))


def test_messages_without_a_hello(server, honest):
    with zmq.Context() as context, raw_client(context, local(server[0])) as stranger:
        stranger.send_multipart([number(1), *encode(Message("change", {}))])
        assert b"has not said hello" in stranger.recv_multipart()[1]
    check_unharmed(server, honest)


@pytest.mark.parametrize(
    "frames",
    [
        [],
        [b""],
        [b"123"],
        [number(2)],
        [number(2), b"garbage"],
        [number(2), b"\x80\x04\x95pickle"],
        [number(2), *encode(Message("change", {}, (torch.ones(3),)))[:-1]],
        [number(2), encode(Message("change", {}, (torch.ones(3),)))[0], bytes(11)],
        [number(2), *encode(Message("change", {})), b"more"],
    ],
    ids=str,
)
def test_malformed_messages_of_a_client(server, honest, caplog, frames):
    with zmq.Context() as context, raw_client(context, local(server[0])) as stranger:
        stranger.send_multipart([number(1), *HELLO])
        assert b"welcome" in stranger.recv_multipart()[1]
        if frames:
            stranger.send_multipart(frames)
            assert b"error" in stranger.recv_multipart()[1]
            wait_for_log(caplog, "a malformed message")
    check_unharmed(server, honest)


def test_a_replayed_control_message(server, honest, caplog):
    with zmq.Context() as context, raw_client(context, local(server[0])) as stranger:
        stranger.send_multipart([number(1), *HELLO])
        assert b"welcome" in stranger.recv_multipart()[1]
        again = [number(5), *encode(Message("honest", {}))]
        stranger.send_multipart(again)
        assert b"echo" in stranger.recv_multipart()[1]
        for frames in (again, [number(4), *again[1:]], [number(1), *HELLO]):
            stranger.send_multipart(frames)
            assert b"error" in stranger.recv_multipart()[1]
        wait_for_log(caplog, "message 5 again")
    assert server[1].messages == ["honest"]
    check_unharmed(server, honest)


def test_an_oversized_control_message(loop, caplog):
    with serving(limits=Limits(max_control_bytes=10_000)) as server:
        honest, _ = connected(loop, server[0].address)
        with zmq.Context() as context, raw_client(context, server[0].address) as stranger:
            stranger.send_multipart([number(1), *HELLO])
            assert b"welcome" in stranger.recv_multipart()[1]
            stranger.send_multipart([number(2), *encode(Message("change", {})), bytes(20_000)])
            wait_until(lambda: server[1].events.qsize() == 3)  # two were admitted, and one was lost
        with zmq.Context() as context, raw_client(context, server[0].address) as stranger:
            stranger.send_multipart([number(1), *HELLO])
            assert b"welcome" in stranger.recv_multipart()[1]
            stranger.send_multipart([number(2), *encode(Message("change", {}, (), (bytes(6_000),) * 2))])
            assert b"at most 10,000 are allowed" in stranger.recv_multipart()[1]
        wait_for_log(caplog, "a malformed message")
        check_unharmed(server, honest)


# --- the tensor port


def tensor_stream(peer):
    host, _ = split_address(peer.address)
    return socket.create_connection((host, peer.connection["tensors"]["port"]), timeout=WAIT_S)


def send_and_end(stream, data):
    with contextlib.suppress(OSError):  # the server may have closed it already
        stream.sendall(data)
        stream.shutdown(socket.SHUT_WR)


def is_closed_by_server(stream):
    """Read to the end."""
    stream.settimeout(WAIT_S)
    with contextlib.suppress(ConnectionError):
        while stream.recv(1000):
            pass
    return True


@pytest.mark.parametrize("family", ["tcp", "unix"])
@pytest.mark.parametrize("data", [os.urandom(1000), bytes(64), b"", b"GET / HTTP/1.1\r\n\r\n"], ids=len)
def test_garbage_at_the_tensor_port(server, honest, caplog, data, family):
    if family == "tcp":
        stranger = tensor_stream(honest)
    else:
        stranger = socket.socket(socket.AF_UNIX)
        stranger.connect("\0" + honest.connection["tensors"]["unix"])
    with stranger:
        send_and_end(stranger, data)
        assert is_closed_by_server(stranger)
    wait_for_log(caplog, "a tensor connection without a session's greeting")
    check_unharmed(server, honest)


def test_a_greeting_without_the_sessions_key(server, honest, caplog):
    for session, key in ((honest.connection["session"], bytes(32)), ("00" * 16, bytes(32))):
        with tensor_stream(honest) as stranger, pytest.raises(ConnectionError):
            greet_server(stranger, session, key)
    wait_for_log(caplog, "no greeting of a client that is connected")
    check_unharmed(server, honest)


def test_a_server_without_the_sessions_key(honest):
    """A client does not talk to whoever has taken the port over."""
    key = bytes.fromhex(honest.connection["key"])
    with socket.create_server(("127.0.0.1", 0)) as impostor:
        honest.connection["tensors"].update(unix=None, port=impostor.getsockname()[1])
        client = socket.create_connection(impostor.getsockname())
        accepted, _ = impostor.accept()
        with client, accepted:
            accepted.sendall(b"tsTensr1" + bytes(16) + bytes(32))
            with pytest.raises(ConnectionError, match="another server"):
                greet_server(client, honest.connection["session"], key)
        with socket.create_connection(impostor.getsockname()) as client, impostor.accept()[0] as accepted:
            accepted.sendall(b"220 smtp.example.org ESMTP ready")
            with pytest.raises(ConnectionError, match="another program"):
                greet_server(client, honest.connection["session"], key)


@pytest.fixture
def stream(honest):
    """A tensor connection past the greeting, with its seal."""
    with tensor_stream(honest) as stream:
        seal, _ = greet_server(stream, honest.connection["session"], bytes.fromhex(honest.connection["key"]))
        yield stream, seal


def sealed(seal, message):
    header, *rest = encode(message)
    return seal.close(header, sum(map(len, rest))) + header + b"".join(rest)


def served(stream):
    """Read one reply without tensors."""
    prefix = stream.recv(Seal.num_bytes, socket.MSG_WAITALL)
    header_bytes, _ = Seal(b"").sizes(prefix, Limits())
    return stream.recv(header_bytes, socket.MSG_WAITALL)


LOGGED = "a damaged, forged or replayed tensor message"


def test_a_replayed_tensor_message(server, honest, stream, caplog):
    stream, seal = stream
    message = sealed(seal, Message("honest", {"a": 1}))
    stream.sendall(message)
    assert b"echo" in served(stream)
    stream.sendall(message)
    assert is_closed_by_server(stream)
    wait_for_log(caplog, "message 1 again, after message 1: a replay")
    assert server[1].messages == ["honest"]
    check_unharmed(server, honest)


def test_a_message_recorded_on_another_connection(server, honest, stream, caplog):
    stream, seal = stream
    message = sealed(seal, Message("change", {}))
    with tensor_stream(honest) as other:
        greet_server(other, honest.connection["session"], bytes.fromhex(honest.connection["key"]))
        other.sendall(message)
        assert is_closed_by_server(other)
    wait_for_log(caplog, "did not send")
    check_unharmed(server, honest)


@pytest.mark.parametrize("position", [0, 3, 8, 12, 20, 30, 36, 40, 60])
def test_an_altered_message(server, honest, stream, caplog, position):
    stream, seal = stream
    message = bytearray(sealed(seal, Message("change", {}, (torch.ones(3),))))
    message[position] ^= 1
    send_and_end(stream, message)
    assert is_closed_by_server(stream)
    wait_for_log(caplog, LOGGED)
    check_unharmed(server, honest)


def test_a_forged_message(server, honest, stream, caplog):
    stream, _ = stream
    stream.sendall(sealed(Seal(bytes(32)), Message("change", {})))
    assert is_closed_by_server(stream)
    wait_for_log(caplog, LOGGED)
    check_unharmed(server, honest)


@pytest.mark.parametrize("num_bytes", [1, 30, 40, 60, -1])
def test_a_truncated_message(server, honest, stream, caplog, num_bytes):
    stream, seal = stream
    send_and_end(stream, sealed(seal, Message("change", {}, (torch.ones(20_000),)))[:num_bytes])
    assert is_closed_by_server(stream)
    wait_for_log(caplog, "a truncated one")
    check_unharmed(server, honest)


@pytest.mark.parametrize(
    "sizes", [(100, 1 << 62), (1 << 31, 0), (100, (64 << 30) + 1)], ids=["tensors", "header", "just over"]
)
def test_an_oversized_message(server, honest, stream, caplog, sizes):
    """It is refused by its sizes alone: no memory is allocated for it."""
    stream, _ = stream
    stream.sendall(struct.pack("<QIQ", 1, *sizes) + bytes(16))
    assert is_closed_by_server(stream)
    wait_for_log(caplog, "at most 68,719,476,736 and 16,777,216 are allowed")
    check_unharmed(server, honest)


def test_sizes_that_differ_from_the_headers(server, honest, stream, caplog):
    stream, seal = stream
    header, _ = encode(Message("change", {}, (torch.ones(3),)))
    stream.sendall(seal.close(header, 4) + header + bytes(12))
    assert is_closed_by_server(stream)
    wait_for_log(caplog, "the sizes before the header are not those in it")
    check_unharmed(server, honest)


def test_a_malformed_header_with_a_good_seal(server, honest, stream, caplog):
    stream, seal = stream
    header = b'{"kind":"change","fields":{},"tensors":[["float32",[-1]]],"blobs":[]}'
    stream.sendall(seal.close(header, 0) + header)
    assert is_closed_by_server(stream)
    wait_for_log(caplog, LOGGED)
    check_unharmed(server, honest)


def test_blobs_on_a_tensor_connection(server, honest, stream, caplog):
    stream, seal = stream
    header, blob = encode(Message("change", {}, (), (b"code",)))
    stream.sendall(seal.close(header, 4) + header + blob)
    assert is_closed_by_server(stream)
    wait_for_log(caplog, "blobs on a tensor connection")
    check_unharmed(server, honest)


def test_the_greeting_has_a_deadline(server, honest, caplog, monkeypatch):
    monkeypatch.setattr("torchstrategy.ps.transport.gatekeeper._TIMEOUT_S", 0.2)
    with tensor_stream(honest) as stranger:
        for _ in range(30):  # a byte now and then does not extend it
            try:
                stranger.sendall(b"x")
                stranger.settimeout(0.05)
                if not stranger.recv(1000):
                    break
            except TimeoutError:
                continue
            except ConnectionError:
                break
        else:
            pytest.fail("still served")
    wait_for_log(caplog, "no greeting within 0.2 s")
    check_unharmed(server, honest)


def test_too_many_strangers(server, honest, caplog):
    strangers = [tensor_stream(honest) for _ in range(70)]
    try:
        wait_for_log(caplog, "too many connections that have not greeted")
    finally:
        for stranger in strangers:
            stranger.close()
    wait_for_log(caplog, "a tensor connection without a session's greeting")
    wait_until(lambda: not server[0]._tensors._door._strangers)
    check_unharmed(server, honest)


def test_the_encrypted_port_takes_no_strangers(server, honest, caplog):
    with channel_to(honest, unix=None, port=None) as channel:
        port = split_address(channel._wire._socket.last_endpoint.decode()[len("tcp://") :])[1]
        with socket.create_connection(("127.0.0.1", port)) as stranger:
            stranger.sendall(os.urandom(1000))
            assert is_closed_by_server(stranger)
        with zmq.Context() as context, context.socket(zmq.PAIR) as stranger:
            stranger.linger = 0
            stranger.connect(f"tcp://127.0.0.1:{port}")
            stranger.send(b"change")
            assert channel.call(Message("honest", {"a": 1})).fields == {"a": 1}
    check_unharmed(server, honest)


# --- addresses


def test_other_addresses_need_a_secret(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    monkeypatch.delenv("TORCHSTRATEGY_SECRET", raising=False)
    monkeypatch.delenv("TORCHSTRATEGY_SECRET_FILE", raising=False)
    for address in ("0.0.0.0:0", "*:0", "[::]:0", "192.0.2.1:0"):
        with pytest.raises(ValueError, match="No secret is configured"):
            Listener(address, None)
    Listener("127.0.0.1:0", None)


def test_plain_tensors_are_for_this_host_only_unless_asked_for(loop):
    for options, has_port in (({}, False), ({"encrypt_tensors": False}, True)):
        with serving("0.0.0.0:0", **options) as (listener, _):
            peer, _ = connected(loop, local(listener))
            assert (peer.connection["tensors"]["port"] is not None) == has_port
            peer.connection["tensors"]["unix"] = None  # as if on another host
            channel = TensorChannel(peer)
            assert channel.kind == ("tcp" if has_port else "curve")
            channel.close()


# --- the log


def test_refusals_are_counted_not_repeated(caplog, monkeypatch):
    now = [100.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    log = RefusalLog("The server")
    for attempt in range(1000):
        log.add("10.0.0.1", "garbage", f"attempt {attempt}")
    log.add("10.0.0.2", "garbage")
    assert caplog.messages == [
        "The server refused 10.0.0.1: garbage (attempt 0)",
        "The server refused 10.0.0.2: garbage",
    ]
    now[0] += 61
    log.add("10.0.0.1", "garbage")
    assert caplog.messages[2:] == [
        "The server refused 999 more such messages or connections.",
        "The server refused 10.0.0.1: garbage",
    ]
    for host in range(1000):
        log.add(f"10.0.1.{host}", "garbage")
    assert len(caplog.messages) < 100
