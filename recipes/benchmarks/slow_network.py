"""Hosts that exist on one machine only, joined by a network whose rate and delay can be chosen.

Each host is a network namespace. Its only way out is a TUN device, where the kernel's token bucket limits the rate;
the program that made the network reads the packets there, and writes them to the device of the host that they are for
when their time has come. Namespaces and devices belong to processes and open files instead of names: they are gone when
the program is, even if it was killed, and any number of networks can exist at once.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import select
import shutil
import socket
import struct
import subprocess
import sys
import threading
import time
from collections import deque
from contextlib import ExitStack
from dataclasses import dataclass

import checks

DEVICE = "slow0"
_NETWORK = "10.0.0.0/24"
MOST_HOSTS = 254  # that this has addresses for
MASTER_PORT = 29500  # on the first host, where nothing else can have it
_TUN = "/dev/net/tun"
# Numbers of Linux' if_tun.h. Before each packet there is a header of 10 bytes, with which the kernel hands over 16 KiB
# at a time, as it does to a network card that cuts packets itself.
_TUNSETIFF, _TUNSETOFFLOAD = 0x400454CA, 0x400454D0
_IFF_TUN, _IFF_NO_PI, _IFF_VNET_HDR = 0x0001, 0x1000, 0x4000
_TUN_F_CSUM, _TUN_F_TSO4 = 0x01, 0x02
_HEADER, _LARGEST = 10, 16384
# What Linux does by default. BBR would hold on to the delay of the link before for ten seconds.
_CONGESTION_CONTROL = "cubic"
_BURST_S = 0.00025  # what passes at once after a rest, at least 32 KiB


@dataclass(frozen=True)
class Link:
    """What a host can send, and how long that is on its way.

    Args:
        mbit: 10^6 bits a second.
        delay_ms: one way.

    Raises:
        ValueError: the rate is not positive, or the delay negative.
    """

    mbit: float
    delay_ms: float

    def __post_init__(self) -> None:
        are_numbers = checks.is_number(self.mbit) and checks.is_number(self.delay_ms)
        if not (are_numbers and self.mbit > 0 and self.delay_ms >= 0):
            raise ValueError(f"A link has a positive number of mbit and a delay_ms from 0. Received: {self!r}")

    def __str__(self) -> str:
        return f"{self.mbit:g} Mbit/s, {self.delay_ms:g} ms"


class SlowNetwork:
    """Some hosts and the network between them, while the block lasts; ``num_bytes`` counts what has been carried.

    Args:
        num_hosts: from 2 to 254.
        link: of each host.

    Raises:
        ValueError: there are too few hosts or too many.
        RuntimeError: on entering: the machine or its rights do not allow it.
    """

    def __init__(self, num_hosts: int, link: Link) -> None:
        if not 2 <= num_hosts <= MOST_HOSTS:
            raise ValueError(f"A slow network has from 2 to {MOST_HOSTS} hosts. Received: {num_hosts}")
        self.addresses = [f"10.0.0.{host + 1}" for host in range(num_hosts)]
        self._link = link
        self.num_bytes = 0
        self._hosts: list[_Host] = []
        self._stack = ExitStack()

    def __enter__(self) -> SlowNetwork:
        missing = [name for name in ("unshare", "nsenter", "ip", "tc") if shutil.which(name) is None]
        missing += [] if os.path.exists(_TUN) else [_TUN]
        if missing:
            raise RuntimeError(
                f"A slow network needs Linux, util-linux and iproute2. Missing here: {', '.join(missing)}"
            )
        with ExitStack() as stack:
            self._hosts = [stack.enter_context(_Host(address)) for address in self.addresses]
            self.change(self._link)
            told, tell = socket.socketpair()
            thread = threading.Thread(target=self._forward, args=(told,), name="slow-network", daemon=True)
            thread.start()
            for ended in (told.close, thread.join, tell.close):  # called in reverse
                stack.callback(ended)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def change(self, link: Link) -> None:
        """Give all hosts another link, while they run.

        Args:
            link: the new one.

        Raises:
            RuntimeError: the kernel refuses it.
        """
        for host in self._hosts:
            host.limit(link.mbit)
        self._link = link

    def command(self, host: int) -> list[str]:
        """Return what goes before a command that is to run on a host.

        Args:
            host: its number, from 0.
        """
        return self._hosts[host].command

    def environ(self, rank: int) -> dict[str, str]:
        """Return the environment variables with which torchrun would start the only process of a host.

        Args:
            rank: number of the host.
        """
        job = {"MASTER_ADDR": self.addresses[0], "MASTER_PORT": MASTER_PORT, "WORLD_SIZE": len(self.addresses)}
        own = {"RANK": rank, "GROUP_RANK": rank, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1}
        names = {"GLOO_SOCKET_IFNAME": DEVICE, "TORCHELASTIC_RUN_ID": "slow_network"}
        return {name: str(value) for name, value in {**job, **own, **names}.items()}

    def _forward(self, told: socket.socket) -> None:
        """Carry packets until the other end of a socket is closed."""
        with contextlib.suppress(PermissionError):  # a packet is late if it waits for a core
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), -10)
        devices = [host.device for host in self._hosts]
        number = {socket.inet_aton(address): host for host, address in enumerate(self.addresses)}
        on_the_way: list[deque[tuple[float, bytes]]] = [deque() for _ in devices]
        while True:
            now = time.perf_counter()
            due = [packets[0][0] - now for packets in on_the_way if packets]
            ready, _, _ = select.select([*devices, told], [], [], max(0.0, min(due)) if due else None)
            if told in ready:
                return
            arrival = time.perf_counter() + 1e-3 * self._link.delay_ms
            for device in ready:
                packet = os.read(device, 1 << 17)
                host = number.get(packet[_HEADER + 16 : _HEADER + 20])  # where IPv4 has the destination
                if host is not None and packet[_HEADER] >> 4 == 4:
                    on_the_way[host].append((arrival, packet))
                    self.num_bytes += len(packet) - _HEADER
            now = time.perf_counter()
            for device, packets in zip(devices, on_the_way, strict=True):
                while packets and packets[0][0] <= now:
                    with contextlib.suppress(OSError):  # what a host does not take is lost, as elsewhere
                        os.write(device, packets.popleft()[1])


class _Host:
    """A network namespace with its device, kept by a process that ends with this one."""

    def __init__(self, address: str) -> None:
        own, theirs = socket.socketpair()
        # Without root, an own user namespace gives the rights over an own network.
        rights = [] if os.geteuid() == 0 else ["--user", "--map-root-user"]
        program = [sys.executable, __file__, str(theirs.fileno()), address]
        self._process = subprocess.Popen(
            ["unshare", "--net", *rights, *program],
            pass_fds=[theirs.fileno()],
            stderr=subprocess.PIPE,
            start_new_session=True,  # Ctrl-C is for the one that made the network
            text=True,
        )
        theirs.close()
        self._socket = own
        enter = [] if os.geteuid() == 0 else ["--user", "--preserve-credentials"]
        self.command = ["nsenter", "--target", str(self._process.pid), "--net", *enter]
        self.device = -1

    def __enter__(self) -> _Host:
        try:
            _, devices, _, _ = socket.recv_fds(self._socket, 1, 1)
        except ConnectionError:
            devices = []
        if not devices:
            needs = "A slow network needs root, or the right to make user namespaces and network devices"
            error = RuntimeError(f"{needs}: {self._last_words()}")
            self.__exit__()
            raise error
        self.device = devices[0]
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()
        self._process.wait()
        self._process.stderr.close()
        if self.device >= 0:
            os.close(self.device)

    def limit(self, mbit: float) -> None:
        burst = max(2 * _LARGEST, int(mbit * 1e6 / 8 * _BURST_S))
        self._socket.sendall(f"{int(mbit * 1e6)}bit burst {burst} latency 400ms\n".encode())
        if self._socket.recv(1) != b"y":
            raise RuntimeError(f"The kernel refuses a link of {mbit:g} Mbit/s: {self._last_words()}")

    def _last_words(self) -> str:
        """Return the last line that the process has printed before it ended."""
        lines = self._process.stderr.read().strip().splitlines()
        return lines[-1] if lines else "no reason given"


def keep_host(connection: socket.socket, address: str) -> None:
    """Give this process's network namespace its device and address, and then the rates that it is told of."""
    device = os.open(_TUN, os.O_RDWR)
    flags = _IFF_TUN | _IFF_NO_PI | _IFF_VNET_HDR
    fcntl.ioctl(device, _TUNSETIFF, struct.pack("16sH22x", DEVICE.encode(), flags))
    fcntl.ioctl(device, _TUNSETOFFLOAD, _TUN_F_CSUM | _TUN_F_TSO4)
    set_up = ["link set dev lo up", f"address add {address}/32 dev {DEVICE}"]
    set_up += [f"link set dev {DEVICE} mtu 1500 gso_max_size {_LARGEST} txqueuelen 10000", f"link set dev {DEVICE} up"]
    set_up += [f"route replace {_NETWORK} dev {DEVICE} congctl {_CONGESTION_CONTROL}"]
    for line in set_up:
        run("ip", *line.split())
    socket.send_fds(connection, [b"y"], [device])
    os.close(device)
    for limit in connection.makefile():
        run("tc", "qdisc", "replace", "dev", DEVICE, "root", "tbf", "rate", *limit.split())
        connection.sendall(b"y")


def run(*command: str) -> None:
    """Run a command; if it fails, end with what it says."""
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        reason = done.stderr.strip().partition("\n")[0] or f"exit status {done.returncode}"
        raise SystemExit(f"{' '.join(command)}: {reason}")


if __name__ == "__main__":
    with socket.socket(fileno=int(sys.argv[1])) as its_maker:
        keep_host(its_maker, sys.argv[2])
