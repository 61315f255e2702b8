import os
import signal
import subprocess
import sys
import time

import pytest

from tests.testing.networks import SEND, SERVE, network_or_skip
from torchstrategy.testing.network import Network


@pytest.fixture
def network():
    with network_or_skip(2) as network:
        yield network


def transfer(network, num_bytes):
    """Send bytes from host 1 to host 0; return the seconds until the first answer."""
    address = network.address(0)
    server = network.run(0, [sys.executable, "-c", SERVE, address], stdout=subprocess.PIPE, text=True)
    with server:
        assert server.stdout.readline() == "ready\n"
        command = [sys.executable, "-c", SEND, address, str(num_bytes)]
        with network.run(1, command, stdout=subprocess.PIPE, text=True) as client:
            seconds = float(client.communicate(timeout=60)[0])
        assert server.stdout.readline() == f"{num_bytes}\n"
    return seconds


def output_of(network, host, source, **options):
    with network.run(host, [sys.executable, "-c", source], stdout=subprocess.PIPE, text=True, **options) as process:
        return process.communicate(timeout=60)[0].strip()


def is_running(pid):
    """Say whether a process is there; one that has ended and waits for its parent is not."""
    try:
        with open(f"/proc/{pid}/stat", encoding="ascii") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def ended(pids, seconds=30):
    deadline = time.monotonic() + seconds
    while any(map(is_running, pids)) and time.monotonic() < deadline:
        time.sleep(0.02)
    return not any(map(is_running, pids))


def test_hosts_reach_each_other_and_nothing_else(network):
    assert [network.address(host) for host in range(2)] == ["10.77.0.1", "10.77.0.2"]
    transfer(network, 100_000)
    assert network.traffic(1).bytes > 100_000
    assert network.traffic(1).lost == network.traffic(0).lost == 0
    source = "import socket; print(socket.socket().connect_ex(('8.8.8.8', 53)) != 0, sorted(socket.if_nameindex()))"
    assert output_of(network, 0, source) == "True [(1, 'lo'), (2, 'tun0')]"


def test_networks_with_equal_addresses_do_not_meet(network):
    with network_or_skip(2) as other:
        assert other.address(0) == network.address(0)
        transfer(network, 1000)
        assert network.traffic(1).packets > 0
        assert other.traffic(1).packets == 0


def test_a_link_can_be_slow_and_lossy(network):
    network.shape(1, delay_ms=40)
    assert transfer(network, 1000) >= 0.08  # there and back
    network.shape(1, rate_mbit=8, loss_percent=5)
    before = network.traffic(1)
    assert transfer(network, 400_000) > 0.01
    after = network.traffic(1)
    assert after.lost > before.lost
    assert after.bytes - before.bytes > 400_000
    network.shape(1)
    transfer(network, 1000)
    assert network.traffic(1).lost == after.lost


def test_a_rate_is_kept(network):
    network.shape(0, rate_mbit=4)
    start = time.monotonic()
    transfer(network, 500_000)
    assert time.monotonic() - start >= 0.9  # 4 megabits at 4 megabits a second


def test_a_cut_link_swallows_packets_until_it_is_restored(network):
    address = network.address(0)
    with network.run(0, [sys.executable, "-c", SERVE, address], stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout.readline() == "ready\n"
        network.cut(0)
        command = [sys.executable, "-c", SEND, address, "1000"]
        with network.run(1, command, stdout=subprocess.PIPE, text=True) as client:
            with pytest.raises(subprocess.TimeoutExpired):
                client.wait(timeout=0.5)
            assert network.traffic(1).lost >= 1
            network.restore(0)
            assert float(client.communicate(timeout=60)[0]) > 0
        assert server.stdout.readline() == "1000\n"


def test_a_program_gets_its_environment(network):
    source = "import os; print(os.environ['WHO'])"
    assert output_of(network, 1, source, env={"WHO": "worker 1"}) == "worker 1"


def test_closing_ends_everything_on_the_hosts(network):
    process = network.run(1, ["sh", "-c", "sleep 1000 & echo $!; sleep 1000"], stdout=subprocess.PIPE, text=True)
    with process:
        grandchild = int(process.stdout.readline())
        assert is_running(grandchild)
        files = set(os.listdir("/proc/self/fd"))
        network.close()
        assert process.returncode == -signal.SIGKILL
    assert ended([grandchild])
    assert len(os.listdir("/proc/self/fd")) < len(files)
    network.close()
    with pytest.raises(RuntimeError, match="closed"):
        network.cut(0)


OWNER = """
import sys, time
from torchstrategy.testing.network import Network
with Network(2) as network:
    process = network.run(1, ["sleep", "1000"])
    print(process.pid, network._wire.pid, flush=True)
    time.sleep(1000)
"""


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_nothing_is_left_when_the_program_is_interrupted(number):
    network_or_skip(1).close()
    owner = subprocess.Popen(
        [sys.executable, "-c", OWNER], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    with owner:
        pids = [int(pid) for pid in owner.stdout.readline().split()]
        assert all(map(is_running, pids))
        owner.send_signal(number)
        owner.wait(timeout=60)
    assert ended(pids)


def test_bad_arguments(network):
    with pytest.raises(ValueError, match="between 1 and 100"):
        Network(0)
    with pytest.raises(ValueError, match="hosts 0 to 1"):
        network.cut(2)
    for wrong in ({"delay_ms": -1}, {"rate_mbit": 0}, {"loss_percent": 101}):
        with pytest.raises(ValueError, match="Received"):
            network.shape(0, **wrong)
    transfer(network, 10)


def test_the_reason_is_given_where_networks_are_not_possible(monkeypatch):
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(RuntimeError, match="can't be made on this machine: its process ended"):
        Network(1)
