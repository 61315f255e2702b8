"""Hosts of their own on one machine, and links between them that a test can cut, delay, slow down or make lossy."""

from __future__ import annotations

import ctypes
import json
import os
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

__all__ = ["Host", "Network", "Traffic"]

_WIRE = Path(__file__).with_name("wire.py")
_START_S = 30.0
_ANSWER_BYTES = 65536


class Traffic(NamedTuple):
    """What a host has sent to the other hosts.

    Args:
        packets: packets that arrived.
        bytes: their sizes, with IP headers, in bytes.
        lost: packets that did not arrive.
    """

    packets: int
    bytes: int
    lost: int


class Host(NamedTuple):
    """Where to enter a host; can be pickled.

    Args:
        network: path of its network namespace.
        user: path of the user namespace to which that belongs; ``None`` means this process's.
    """

    network: str
    user: str | None

    def enter(self) -> None:
        """Move the calling thread, and the threads and processes that it starts from then on, to the host.

        Raises:
            OSError: the process may not, or the network is closed. Without root's rights a process can enter only as
                long as it has a single thread.
        """
        libc: Any = ctypes.CDLL(None, use_errno=True)
        for path in filter(None, (self.user, self.network)):
            file = os.open(path, os.O_RDONLY)
            try:
                if libc.setns(file, 0) != 0:
                    number = ctypes.get_errno()
                    raise OSError(number, f"can't enter the host at {path}: {os.strerror(number)}")
            finally:
                os.close(file)


class Network:
    """Hosts with addresses of their own, joined by links that can be made worse.

    A host is a Linux network namespace: its processes share files and memory with everybody, but have their own
    loopback interface, ports and address, and reach nothing but the other hosts. Networks don't see one another, so
    tests with equal addresses run at the same time. The packets go through a process of the network's own, about 1.5
    Gbit/s in all, which needs neither ``tc`` nor kernel modules. When the network is closed, or the program that made
    it ends in whatever way, every process on the hosts is killed and the kernel removes the rest.

    Making one needs Linux and root's rights, or user namespaces and a ``/dev/net/tun`` that everyone may open.

    Args:
        num_hosts: number of hosts, at most 100.

    Raises:
        ValueError: ``num_hosts`` is not between 1 and 100.
        RuntimeError: this machine does not let the program make networks; the message says why.

    Example:
        ::

            with Network(2) as network:
                network.shape(1, delay_ms=20, rate_mbit=50, loss_percent=1)
                server = network.run(0, [sys.executable, "server.py", network.address(0)])
                client = network.run(1, [sys.executable, "client.py", network.address(0)])
                client.wait(timeout=60)
                network.cut(1)
    """

    def __init__(self, num_hosts: int) -> None:
        if not 1 <= num_hosts <= 100:
            raise ValueError(f"num_hosts must be between 1 and 100. Received: {num_hosts}")
        if not sys.platform.startswith("linux"):
            raise RuntimeError(f"A network of hosts needs Linux's namespaces. This is {sys.platform}.")
        self.num_hosts = num_hosts
        self._processes: list[subprocess.Popen[Any]] = []
        self._files: list[int] = []
        self._control, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._control.settimeout(_START_S)
        with there:
            # In a session of its own: Ctrl-C must reach this process first.
            command = [sys.executable, "-I", "-S", str(_WIRE), str(there.fileno()), str(num_hosts)]
            self._wire = subprocess.Popen(
                command, pass_fds=[there.fileno()], stdin=subprocess.DEVNULL, start_new_session=True
            )
        try:
            answer, self._files, _, _ = socket.recv_fds(self._control, _ANSWER_BYTES, num_hosts + 1)
            if not answer or "error" in (facts := json.loads(answer)):
                reason = facts["error"] if answer else "its process ended"
                raise RuntimeError(f"A network of hosts can't be made on this machine: {reason}")
            self._addresses: list[str] = facts["addresses"]
        except BaseException:
            self.close()
            raise

    def address(self, host: int) -> str:
        """Return the address of a host, such as ``"10.77.0.1"``."""
        self._check(host)
        return self._addresses[host]

    def host(self, host: int) -> Host:
        """Return where a process can enter a host by itself."""
        self._check(host)
        paths = [f"/proc/{os.getpid()}/fd/{file}" for file in self._files]
        return Host(paths[host], paths[self.num_hosts] if len(paths) > self.num_hosts else None)

    def run(
        self, host: int, argv: Sequence[str], env: Mapping[str, str] | None = None, **options: Any
    ) -> subprocess.Popen[Any]:
        """Start a program on a host.

        Args:
            host: number of the host.
            argv: the program and its arguments.
            env: its environment variables; ``None`` means this process's.
            **options: of ``subprocess.Popen``.

        Returns:
            The process; it is killed, at the latest, when the network is closed.
        """
        where = self.host(host)
        enter = ["nsenter", f"--net={where.network}"]
        if where.user:
            enter += [f"--user={where.user}", "--preserve-credentials"]
        process = subprocess.Popen([*enter, "--", *argv], env=env, **options)
        self._processes.append(process)
        return process

    def cut(self, host: int) -> None:
        """Let no packet leave or reach a host any more; nobody is told, as when somebody unplugs a cable."""
        self._order(host, cut=True)

    def restore(self, host: int) -> None:
        """Undo ``cut``; connections go on if their programs have not given up."""
        self._order(host, cut=False)

    def shape(
        self, host: int, *, delay_ms: float = 0.0, rate_mbit: float | None = None, loss_percent: float = 0.0
    ) -> None:
        """Make the link of a host worse from now on, in both directions; what is not given is as good as it gets.

        A packet goes through the links of two hosts, its sender's and its receiver's.

        Args:
            host: number of the host.
            delay_ms: milliseconds that a packet takes, in each direction.
            rate_mbit: megabits (10^6 bits) a second, in each direction, with a queue of 1000 packets before the link;
                ``None`` means no limit.
            loss_percent: how many of a hundred packets are lost, chosen at random.

        Raises:
            ValueError: a number is negative, the rate is 0, or more than all packets would be lost.
        """
        if delay_ms < 0 or not 0 <= loss_percent <= 100 or (rate_mbit is not None and rate_mbit <= 0):
            raise ValueError(
                "delay_ms must not be negative, rate_mbit must be above 0, and loss_percent between 0 and 100. "
                f"Received: delay_ms={delay_ms}, rate_mbit={rate_mbit}, loss_percent={loss_percent}"
            )
        bytes_per_s = 0.0 if rate_mbit is None else rate_mbit * 1e6 / 8
        self._order(host, delay_s=delay_ms / 1e3, bytes_per_s=bytes_per_s, loss=loss_percent / 100)

    def traffic(self, host: int) -> Traffic:
        """Return what a host has sent so far."""
        return Traffic(**self._order(host))

    def close(self) -> None:
        """End every process on the hosts and remove the network."""
        self._control.close()
        try:
            self._wire.wait(_START_S)
        finally:
            self._wire.kill()
            for process in self._processes:
                process.kill()
                process.wait()
            while self._files:
                os.close(self._files.pop())

    def __enter__(self) -> Network:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _order(self, host: int, **order: float) -> Any:
        self._check(host)
        self._control.send(json.dumps({"host": host, **order}).encode())
        return json.loads(self._control.recv(_ANSWER_BYTES))

    def _check(self, host: int) -> None:
        if not self._files:
            raise RuntimeError("The network is closed.")
        if not 0 <= host < self.num_hosts:
            raise ValueError(f"The network has the hosts 0 to {self.num_hosts - 1}. Received: {host}")
