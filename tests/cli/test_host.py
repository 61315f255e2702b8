import socket

from tests.clusters import free_ports
from torchstrategy.cli.host import Host, num_usable_cores, parse_driver_version


def test_this_host():
    host = Host()
    assert host.name == socket.gethostname()
    assert len(host.interfaces) > 0
    assert host.num_cores == num_usable_cores() >= 1


def test_addresses():
    host = Host(environ={})
    assert "127.0.0.1" in host.addresses_of("localhost")
    assert host.is_own("127.0.0.1")
    assert not host.is_own("192.0.2.1")  # for documentation, nobody's


def test_ports():
    host = Host(environ={})
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert not host.can_listen("127.0.0.1", port)
        assert host.port_states([("127.0.0.1", port), ("127.0.0.1", free_ports(1)[0])]) == ["open", "refused"]
    assert host.can_listen("127.0.0.1", port)


def test_the_older_driver_s_version():
    text = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.104.05  Sat Aug 19 01:15:15 UTC 2023\nGCC version:"
    assert parse_driver_version(text) == "535.104.05"
    assert parse_driver_version("") == "unknown"
