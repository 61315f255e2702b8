import socket
import sys

import pytest

from torchstrategy.base.addresses import (
    ReservedPorts,
    are_loopback,
    endpoint,
    is_loopback,
    join_address,
    resolve,
    split_address,
)


@pytest.mark.parametrize("host", ["host1", "10.0.0.1", "::1", "fe80::1%eth0", "a-b.c", "*"])
def test_there_and_back(host):
    assert split_address(join_address(host, 2222), "worker 0") == (host, 2222)
    assert endpoint(host, 2222) == f"tcp://{join_address(host, 2222)}"


@pytest.mark.parametrize(
    "address", ["host1", "host1:", ":2222", "", "host1:port", "host1:0", "host1:65536", "host1:-1", "::1:2222", "[]:1",
                "grpc://host1:2222", "host1:²", "a:\u0661", "a:1.0"]
)  # fmt: skip
def test_bad_addresses(address):
    with pytest.raises(ValueError, match=r"address of worker 0 must be host:port.*Received"):
        split_address(address, "worker 0")


def test_the_system_may_choose_a_port():
    assert split_address("[::1]:0", least_port=0) == ("::1", 0)
    with pytest.raises(ValueError, match="from 0 to 65535"):
        split_address("[::1]:-1", least_port=0)


@pytest.mark.parametrize(
    ("host", "answer"),
    [
        ("127.0.0.1", True),
        ("127.1.2.3", True),
        ("::1", True),
        ("localhost", True),
        ("0.0.0.0", False),
        ("*", False),
        ("::", False),
        ("192.0.2.1", False),
        ("2001:db8::1", False),
    ],
)
def test_loopback(host, answer):
    assert is_loopback(host) is answer


def test_ipv4_comes_first(monkeypatch):
    infos = [(0, 0, 0, "", (ip, 0)) for ip in ("::1", "127.0.0.1", "::1")]
    monkeypatch.setattr("socket.getaddrinfo", lambda *_, **__: infos)
    assert resolve("localhost") == ["127.0.0.1", "::1"]


def test_reserved_ports_are_different_and_can_be_listened_at():
    with ReservedPorts(20) as ports:
        assert len(set(ports.numbers)) == 20
        with socket.create_server(("127.0.0.1", ports.numbers[0])) as server:
            socket.create_connection(server.getsockname()).close()


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere one of two sockets must not have the same port")
def test_nobody_else_gets_a_reserved_port():
    with ReservedPorts(1) as ports, socket.socket() as other, pytest.raises(OSError, match="in use"):
        other.bind(("127.0.0.1", ports.numbers[0]))
    with socket.socket() as other:
        other.bind(("127.0.0.1", ports.numbers[0]))


def test_a_host_that_is_not_known_yet_is_another_one(monkeypatch, caplog):
    def getaddrinfo(host, *_, **__):
        if host == "later":
            raise socket.gaierror(-2, "Name or service not known")
        return [(None, None, None, "", ("127.0.0.1", 0))]

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    assert are_loopback(["here:1", "here:2"])
    assert not are_loopback(["here:1", "later:2"])
    assert "The host 'later' is not known here: Name or service not known. It may come later." in caplog.text
    with pytest.raises(OSError, match="The host 'later' is not known here"):
        is_loopback("later")
