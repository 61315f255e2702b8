"""Addresses of the form ``host:port``."""

from __future__ import annotations

__all__ = ["format_address", "split_address"]


def split_address(address: str, what: str) -> tuple[str, int]:
    """Return host and port of an address.

    Args:
        address: ``"host:port"``; an IPv6 host stands in brackets: ``"[::1]:2222"``.
        what: what the address belongs to, for the message.

    Raises:
        ValueError: the port is missing or not a number from 1 to 65535, or the host is missing.

    Example:
        >>> from torchstrategy.cluster_resolver.address import split_address
        >>> split_address("[::1]:2222", "worker 0")
        ('::1', 2222)
    """
    host, colon, port = address.rpartition(":")
    bracketed = host.startswith("[") and host.endswith("]")
    if (
        not colon
        or not host.strip("[]")
        or not (port.isascii() and port.isdigit() and 0 < int(port) < 65536)
        or ((":" in host or "/" in host) and not bracketed)
    ):
        raise ValueError(
            f"The address of {what} must be host:port with a port from 1 to 65535, such as 'host1:2222' or "
            f"'[::1]:2222', because the processes meet there. Received: {address!r}"
        )
    return host.strip("[]") if bracketed else host, int(port)


def format_address(host: str, port: int) -> str:
    """Return ``host:port``, with brackets around an IPv6 host."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
