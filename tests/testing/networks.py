"""Networks of several hosts for tests, and what runs on their hosts."""

import pytest

from torchstrategy.testing.network import Network

SERVE = """
import socket, sys
with socket.create_server((sys.argv[1], 5000)) as server:
    print("ready", flush=True)
    connection, _ = server.accept()
    connection.settimeout(30)
    received = 0
    while part := connection.recv(1 << 16):
        if received == 0:
            connection.sendall(b"!")
        received += len(part)
    print(received, flush=True)
"""
SEND = """
import socket, sys, time
with socket.create_connection((sys.argv[1], 5000), timeout=30) as connection:
    start = time.monotonic()
    connection.sendall(bytes(int(sys.argv[2])))
    connection.shutdown(socket.SHUT_WR)
    connection.recv(1)
    print(time.monotonic() - start, flush=True)
"""


def network_or_skip(num_hosts):
    try:
        return Network(num_hosts)
    except RuntimeError as error:
        pytest.skip(str(error))
