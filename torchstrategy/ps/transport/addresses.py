"""Addresses of the form ``host:port``."""

from __future__ import annotations

import ipaddress
import socket

__all__ = ["endpoint", "is_loopback", "join_address", "needs_ipv6", "resolve", "split_address"]

_MAX_PORT = 65535


def split_address(address: str) -> tuple[str, int]:
    """Return host and port.

    Args:
        address: ``"host:port"``, ``"1.2.3.4:port"`` or ``"[::1]:port"``.

    Raises:
        ValueError: it is something else.
    """
    host, colon, port = address.rpartition(":")
    host = host[1:-1] if host.startswith("[") and host.endswith("]") else host
    if not colon or not host or not port.isascii() or not port.isdecimal() or int(port) > _MAX_PORT:
        raise ValueError(f"An address must look like 'host:port'. Received: {address!r}")
    return host, int(port)


def join_address(host: str, port: int) -> str:
    """Return ``"host:port"``."""
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


def resolve(host: str) -> list[str]:
    """Return a host's IP addresses, IPv4 first: both ends of a connection must choose the same for ``localhost``.

    Raises:
        OSError: the name can't be resolved.
    """
    if host == "*":
        return ["0.0.0.0"]
    infos = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    found = dict.fromkeys(str(info[4][0]).partition("%")[0] for info in infos)
    return sorted(found, key=lambda ip: ":" in ip)


def needs_ipv6(host: str) -> bool:
    """Say whether a host has no IPv4 address; not so if it is not known yet."""
    try:
        return all(":" in ip for ip in resolve(host))
    except OSError:
        return False
