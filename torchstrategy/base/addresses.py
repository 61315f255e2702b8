"""Addresses of the form ``host:port``, what a host's name stands for, and ports that nobody uses."""

from __future__ import annotations

import contextlib
import ipaddress
import socket
import sys
import weakref
from collections.abc import Iterable
from types import TracebackType

from torchstrategy.base.log import logger

__all__ = [
    "BACKLOG",
    "ReservedPorts",
    "are_loopback",
    "endpoint",
    "is_loopback",
    "join_address",
    "listen_at",
    "needs_ipv6",
    "resolve",
    "split_address",
]

#: Of listeners: all ranks come at once, and strangers may fill it while this process does something else.
BACKLOG = 4096
_MAX_PORT = 65535


def split_address(address: str, what: str = "a task", *, least_port: int = 1) -> tuple[str, int]:
    """Return host and port of an address.

    Args:
        address: ``"host:port"``; an IPv6 host stands in brackets: ``"[::1]:2222"``.
        what: what the address belongs to, for the message.
        least_port: 0 where the system may choose the port.

    Raises:
        ValueError: the port is missing or out of range, or the host is missing.

    Example:
        >>> from torchstrategy.base.addresses import split_address
        >>> split_address("[::1]:2222", "worker 0")
        ('::1', 2222)
    """
    host, colon, port = address.rpartition(":")
    is_bracketed = host.startswith("[") and host.endswith("]")
    if (
        not colon
        or not host.strip("[]")
        or not (port.isascii() and port.isdigit() and least_port <= int(port) <= _MAX_PORT)
        or ((":" in host or "/" in host) and not is_bracketed)
    ):
        raise ValueError(
            f"The address of {what} must be host:port with a port from {least_port} to {_MAX_PORT}, such as "
            f"'host1:2222' or '[::1]:2222', because the processes meet there. Received: {address!r}"
        )
    return host.strip("[]") if is_bracketed else host, int(port)


def join_address(host: str, port: int) -> str:
    """Return ``host:port``, with brackets around an IPv6 host."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def endpoint(host: str, port: int | str) -> str:
    """Return ZeroMQ's name of an address."""
    return f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"


def is_loopback(host: str) -> bool:
    """Say whether only processes of this host can reach an address.

    Raises:
        OSError: the name can't be resolved.
    """
    return all(ipaddress.ip_address(ip).is_loopback for ip in resolve(host))


def are_loopback(addresses: Iterable[str]) -> bool:
    """Say whether only processes of this host can reach these; a host that is not known yet is another one."""
    try:
        return all(is_loopback(split_address(address)[0]) for address in addresses)
    except OSError as error:
        logger.warning("%s. It may come later.", error)
        return False


def resolve(host: str) -> list[str]:
    """Return a host's IP addresses, IPv4 first: both ends of a connection must choose the same for ``localhost``.

    Raises:
        OSError: the name can't be resolved.
    """
    if host == "*":
        return ["0.0.0.0"]
    try:
        infos = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except socket.gaierror as error:
        raise OSError(error.errno, f"The host {host!r} is not known here: {error.strerror}") from error
    found = dict.fromkeys(str(info[4][0]).partition("%")[0] for info in infos)
    return sorted(found, key=lambda ip: ":" in ip)


def needs_ipv6(host: str) -> bool:
    """Say whether a host has no IPv4 address; not so if it is not known yet."""
    try:
        return all(":" in ip for ip in resolve(host))
    except OSError:
        return False


def listen_at(host: str, port: int) -> int | None:
    """Return the descriptor of a socket that listens at an address alone, for torch's store, whose own listens at all.

    Args:
        host: an IP address.
        port: a port; 0 takes a free one.

    Returns:
        The descriptor. ``None`` leaves it to torch: the user's process group may have the port already, or the host is
        a name, by which other hosts may know another address of this one.
    """
    try:
        address = ipaddress.ip_address("127.0.0.1" if host == "localhost" else host)
        if address.is_unspecified:
            return None
        with socket.socket(socket.AF_INET6 if address.version == 6 else socket.AF_INET, socket.SOCK_STREAM) as listener:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind((str(address), port))
            listener.listen(BACKLOG)
            return listener.detach()
    except (OSError, ValueError):
        return None


class ReservedPorts:
    """Different ports that nothing uses, for processes that are about to start.

    On Linux they stay reserved until they are closed: of two sockets with one port one may listen, and the system gives
    the port to nobody who asks for any. A server must set ``SO_REUSEADDR``, as those of torch, ZeroMQ and Python do.
    Elsewhere another process may take a port before it is used.

    Args:
        number: how many.
        host: of which of this host's addresses; empty for all.

    Example:
        >>> from torchstrategy.base.addresses import ReservedPorts
        >>> with ReservedPorts(2) as ports:
        ...     first, second = ports.numbers
        >>> first != second
        True
    """

    def __init__(self, number: int, host: str = "127.0.0.1") -> None:
        held = contextlib.ExitStack()
        with contextlib.ExitStack() as stack:
            probes = [stack.enter_context(socket.socket()) for _ in range(number)]
            for probe in probes:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind((host, 0))
            self.numbers = tuple(int(probe.getsockname()[1]) for probe in probes)
            if sys.platform == "linux":
                held = stack.pop_all()
        self._end = weakref.finalize(self, held.close)

    def close(self) -> None:
        """Let others have the ports."""
        self._end()

    def __enter__(self) -> ReservedPorts:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
