"""The process behind ``Network``: it makes the hosts, and carries their packets until its parent ends.

It runs as a script and knows the standard library only, so that it starts in milliseconds. Each host is an unnamed
network namespace with one TUN device, whose other end is a file of this process. So the kernel removes everything when
the last process in it ends, and slowing a link down needs no kernel module.
"""

from __future__ import annotations

import contextlib
import ctypes
import heapq
import json
import os
import random
import select
import signal
import socket
import struct
import sys
import time
from collections import deque
from typing import Any

with contextlib.suppress(ImportError):  # not on Windows, where `Network` refuses to start this
    import fcntl

__all__: list[str] = []  # a script

_CLONE_NEWNET = 0x40000000
_CLONE_NEWUSER = 0x10000000
_TUNSETIFF = 0x400454CA
_IFF_TUN_WITHOUT_HEADER = 0x1001
_SIOCSIFFLAGS, _SIOCSIFADDR, _SIOCSIFNETMASK = 0x8914, 0x8916, 0x891C
_IFF_UP_AND_RUNNING = 0x41
# As many as a Linux router queues by default.
_QUEUE_PACKETS = 1000
_PACKET_BYTES = 65536
_PACKETS_A_TURN = 64
_END_S = 5.0


def _address_of(host: int) -> str:
    return f"10.77.0.{host + 1}"


class _Direction:
    """One direction of a host's link: a queue before a line of a given speed."""

    def __init__(self) -> None:
        self.delay_s = 0.0
        self.bytes_per_s = 0.0
        self.loss = 0.0
        self._free_at = 0.0
        self._ends: deque[float] = deque()

    def arrival(self, start: float, size: int, chance: random.Random) -> float | None:
        """Return when a packet that comes to the queue at ``start`` is through, ``None`` if it is lost."""
        if self.loss and chance.random() < self.loss:
            return None
        if self.bytes_per_s:
            while self._ends and self._ends[0] <= start:
                self._ends.popleft()
            if len(self._ends) >= _QUEUE_PACKETS:
                return None
            start = self._free_at = max(start, self._free_at) + size / self.bytes_per_s
            self._ends.append(start)
        return start + self.delay_s


class _Wire:
    """Carries packets between the hosts."""

    def __init__(self, devices: list[int], control: socket.socket) -> None:
        self._devices = devices
        self._control = control
        self._host_of = {socket.inet_aton(_address_of(host)): host for host in range(len(devices))}
        self._up = [_Direction() for _ in devices]
        self._down = [_Direction() for _ in devices]
        self._cut = [False] * len(devices)
        self._counts = [{"packets": 0, "bytes": 0, "lost": 0} for _ in devices]
        self._on_the_way: list[tuple[float, int, int, int, bytes]] = []
        self._chance = random.Random(0)
        self._number = 0

    def carry(self) -> None:
        """Carry packets and obey the parent, until it closes its end of the control socket."""
        sources = {device: host for host, device in enumerate(self._devices)}
        files = [self._control.fileno(), *self._devices]
        while True:
            wait_s = max(0.0, self._on_the_way[0][0] - time.monotonic()) if self._on_the_way else None
            for file in select.select(files, [], [], wait_s)[0]:
                if file in sources:
                    self._read(sources[file])
                elif not self._obey():
                    return
            while self._on_the_way and self._on_the_way[0][0] <= time.monotonic():
                self._deliver(*heapq.heappop(self._on_the_way)[2:])

    def _obey(self) -> bool:
        message = self._control.recv(_PACKET_BYTES)
        if not message:
            return False
        order = json.loads(message)
        host = order.pop("host")
        if "cut" in order:
            self._cut[host] = order["cut"]
        elif order:
            for direction in (self._up[host], self._down[host]):
                vars(direction).update(order)
        self._control.send(json.dumps(self._counts[host]).encode())
        return True

    def _read(self, source: int) -> None:
        for _ in range(_PACKETS_A_TURN):
            try:
                packet = os.read(self._devices[source], _PACKET_BYTES)
            except OSError:  # nothing more, or the device is down
                return
            target = self._host_of.get(packet[16:20]) if packet[0] >> 4 == 4 else None
            if target is not None:
                self._send(source, target, packet)

    def _send(self, source: int, target: int, packet: bytes) -> None:
        now = arrival = time.monotonic()
        for direction in (self._up[source], self._down[target]):
            through = direction.arrival(arrival, len(packet), self._chance)
            if through is None:
                self._counts[source]["lost"] += 1
                return
            arrival = through
        if arrival <= now:
            self._deliver(source, target, packet)
        else:
            self._number += 1  # packets of one instant keep their order
            heapq.heappush(self._on_the_way, (arrival, self._number, source, target, packet))

    def _deliver(self, source: int, target: int, packet: bytes) -> None:
        counts = self._counts[source]
        try:
            if not self._cut[source] and not self._cut[target]:
                os.write(self._devices[target], packet)
                counts["packets"] += 1
                counts["bytes"] += len(packet)
                return
        except OSError:  # the target's queue is full
            pass
        counts["lost"] += 1


def _make_hosts(number: int) -> tuple[list[int], list[int]]:
    """Return the TUN devices and the namespaces as files."""
    devices, namespaces = [], []
    for host in range(number):
        _unshare(_CLONE_NEWNET)
        device = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
        fcntl.ioctl(device, _TUNSETIFF, struct.pack("16sH22x", b"tun0", _IFF_TUN_WITHOUT_HEADER))
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
            _configure(any_socket, b"lo", _SIOCSIFFLAGS, struct.pack("H", _IFF_UP_AND_RUNNING))
            _configure(any_socket, b"tun0", _SIOCSIFADDR, _sockaddr(_address_of(host)))
            _configure(any_socket, b"tun0", _SIOCSIFNETMASK, _sockaddr("255.255.0.0"))
            _configure(any_socket, b"tun0", _SIOCSIFFLAGS, struct.pack("H", _IFF_UP_AND_RUNNING))
        devices.append(device)
        namespaces.append(os.open("/proc/self/ns/net", os.O_RDONLY))
    return devices, namespaces


def _configure(any_socket: socket.socket, interface: bytes, request: int, value: bytes) -> None:
    fcntl.ioctl(any_socket, request, struct.pack("16s24s", interface, value))


def _sockaddr(address: str) -> bytes:
    return struct.pack("HH4s", socket.AF_INET, 0, socket.inet_aton(address))


def _unshare(flags: int) -> None:
    libc: Any = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(flags) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"a namespace can't be made: {os.strerror(number)}")


def _become_privileged() -> list[int]:
    """Enter a user namespace in which an ordinary user may make networks; return it as a file, if it was needed."""
    try:
        _unshare(_CLONE_NEWNET)
    except PermissionError:
        user, group = os.geteuid(), os.getegid()
        _unshare(_CLONE_NEWUSER)
        for name, text in (("setgroups", "deny"), ("uid_map", f"{user} {user} 1"), ("gid_map", f"{group} {group} 1")):
            with open(f"/proc/self/{name}", "w", encoding="ascii") as file:
                file.write(text)
        return [os.open("/proc/self/ns/user", os.O_RDONLY)]
    return []


def _end_processes(namespaces: list[int]) -> None:
    """End whatever still runs in the namespaces, this process excepted."""
    ours = {os.fstat(namespace).st_ino for namespace in namespaces}
    deadline = time.monotonic() + _END_S
    while (found := [process for process in _processes() if _namespace(process) in ours]) and (
        time.monotonic() < deadline
    ):
        for process in found:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        time.sleep(0.01)


def _processes() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdigit() and int(name) != os.getpid()]


def _namespace(process: int) -> int | None:
    try:
        return os.stat(f"/proc/{process}/ns/net").st_ino
    except OSError:  # it has ended, or belongs to somebody else
        return None


def _main(control: socket.socket, number: int) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent says when to end
    try:
        users = _become_privileged()
        devices, namespaces = _make_hosts(number)
    except OSError as error:
        control.send(json.dumps({"error": str(error)}).encode())
        return
    addresses = [_address_of(host) for host in range(number)]
    socket.send_fds(control, [json.dumps({"addresses": addresses}).encode()], [*namespaces, *users])
    try:
        _Wire(devices, control).carry()
    finally:
        _end_processes(namespaces)


if __name__ == "__main__":
    _main(socket.socket(fileno=int(sys.argv[1])), int(sys.argv[2]))
