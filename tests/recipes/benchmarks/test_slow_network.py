"""Hosts of one machine on a slow network: what reaches whom, how fast, and that nothing of it stays."""

import contextlib
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from slow_network import Link, SlowNetwork

BENCHMARKS = Path(__file__).parents[3] / "recipes" / "benchmarks"
PING = """
import socket, sys, time
is_server, address, num_bytes = sys.argv[1] == "server", sys.argv[2], int(sys.argv[3])
if is_server:
    connection, _ = socket.create_server((address, 5000)).accept()
else:
    for _ in range(200):
        try:
            connection = socket.create_connection((address, 5000))
            break
        except OSError:
            time.sleep(0.05)
connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
times = []
for _ in range(5):
    start = time.perf_counter()
    if is_server:
        connection.sendall(connection.recv(1))
    else:
        connection.sendall(b"x")
        connection.recv(1)
    times.append(time.perf_counter() - start)
start = time.perf_counter()
if is_server:
    while num_bytes > 0:
        num_bytes -= len(connection.recv(1 << 20))
    connection.sendall(b"x")
else:
    connection.sendall(bytes(num_bytes))
    connection.recv(1)
    print(min(times), time.perf_counter() - start)
"""


@contextlib.contextmanager
def network(link):
    """Give a network of two hosts, or skip where the machine has none."""
    with contextlib.ExitStack() as stack:
        try:
            entered = stack.enter_context(SlowNetwork(2, link))
        except RuntimeError as error:
            pytest.skip(str(error))
        yield entered


def send(slow_network, num_bytes):
    """Send something from host 1 to host 0; return the seconds there and back of a byte, and those of all."""
    command = [sys.executable, "-c", PING]
    arguments = [slow_network.addresses[0], str(num_bytes)]
    with subprocess.Popen([*slow_network.command(0), *command, "server", *arguments]) as server:
        client = subprocess.run(
            [*slow_network.command(1), *command, "client", *arguments], capture_output=True, text=True, timeout=50
        )
        assert client.returncode == 0, client.stderr
        assert server.wait(10) == 0
    return tuple(map(float, client.stdout.split()))


def test_a_link_takes_no_less_than_its_delay_and_rate_say():
    with network(Link(mbit=40, delay_ms=20)) as slow_network:
        there_and_back, seconds = send(slow_network, 1_000_000)
        assert there_and_back > 0.04
        assert seconds > 0.9 * 1e6 * 8 / 40e6 + 0.04  # the first bytes pass at once
        assert 1_000_000 < slow_network.num_bytes < 1_500_000
        slow_network.change(Link(mbit=4000, delay_ms=0))
        assert min(send(slow_network, 1000)[0] for _ in range(3)) < 0.04  # this machine may be busy once


def test_networks_with_the_same_addresses_do_not_meet():
    with network(Link(1000, 0)) as first, network(Link(1000, 0)) as second:
        assert first.addresses == second.addresses
        send(first, 1000)
        assert second.num_bytes == 0 < first.num_bytes


def test_nothing_stays_of_a_killed_program():
    with network(Link(1000, 0)):
        pass  # or skip
    code = (
        "import sys, time\n"
        f"sys.path.insert(0, {str(BENCHMARKS)!r})\n"
        "from slow_network import Link, SlowNetwork\n"
        "with SlowNetwork(2, Link(1000, 0)) as network:\n"
        "    print(*[network.command(host)[2] for host in range(2)], flush=True)\n"
        "    time.sleep(60)\n"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as process:
        namespaces = [Path(f"/proc/{pid}/ns/net") for pid in process.stdout.readline().split()]
        assert len({os.readlink(path) for path in namespaces}) == 2
        process.kill()
    deadline = time.monotonic() + 20
    while any(path.exists() for path in namespaces):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_what_the_kernel_refuses_is_an_error_that_says_why():
    with network(Link(1000, 0)) as slow_network, pytest.raises(RuntimeError, match=r"a link of 1e-07 Mbit/s: tc qdisc"):
        slow_network.change(Link(1e-7, 0))


@pytest.mark.parametrize(("mbit", "delay_ms"), [(0, 1), (-1, 1), (1, -1)])
def test_impossible_links_are_refused(mbit, delay_ms):
    with pytest.raises(ValueError, match="positive number of mbit"):
        Link(mbit, delay_ms)
