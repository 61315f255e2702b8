import os
import socket

import pytest

from torchstrategy.ps.transport.sockets import close_sockets

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs descriptors as on Unix")


def is_open(descriptor):
    try:
        os.fstat(descriptor)
    except OSError:
        return False
    return True


def test_only_the_sockets_that_are_meant_are_closed(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        client = socket.create_connection(("127.0.0.1", port))
        accepted, _ = server.accept()
        other, another = socket.socketpair()
        with open(tmp_path / "file", "w") as file:
            meant = [client.detach(), accepted.detach()]
            left = [other.fileno(), file.fileno(), server.fileno()]
            try:
                close_sockets(dict.fromkeys([*meant, *left[:2]], port) | {server.fileno(): port + 1})
                assert [is_open(descriptor) for descriptor in meant] == [False, False]
                assert [is_open(descriptor) for descriptor in left] == [True, True, True]
                close_sockets({meant[0]: port})  # again
                close_sockets({server.fileno(): port})
                assert not is_open(server.detach())
            finally:
                other.close()
                another.close()
