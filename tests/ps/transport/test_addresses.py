import pytest

from torchstrategy.ps.transport.addresses import endpoint, is_loopback, join_address, resolve, split_address


@pytest.mark.parametrize(
    ("address", "host", "port"),
    [("a.b:1", "a.b", 1), ("127.0.0.1:65535", "127.0.0.1", 65535), ("[::1]:0", "::1", 0), ("*:80", "*", 80)],
)
def test_split_and_join(address, host, port):
    assert split_address(address) == (host, port)
    assert join_address(host, port) == address
    assert endpoint(host, port) == f"tcp://{address}"


@pytest.mark.parametrize("address", ["a", "a:", ":1", "a:b", "a:-1", "a:65536", "a:\u0661", "", "a:1.0"])
def test_what_is_no_address(address):
    with pytest.raises(ValueError, match="must look like 'host:port'"):
        split_address(address)


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
