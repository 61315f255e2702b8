"""ZeroMQ's sockets: what it says of their connections, how a wait is woken, and the packages that are needed.

A forked child closes them. Otherwise it would keep them open after its parent has died, and
a dead server's port in use.
"""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import struct
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple, Protocol

from torchstrategy.base import how_to_install

__all__ = [
    "Event",
    "Monitor",
    "Waker",
    "close_in_child",
    "close_sockets",
    "cloudpickle",
    "failure",
    "failures",
    "is_refused",
    "keep_alive",
    "remote_end",
    "require",
    "z85",
    "zmq",
]

zmq: Any
z85: Any
cloudpickle: Any

try:
    import zmq
    from zmq.utils import z85
except ImportError:  # pragma: no cover - depends on what is installed
    zmq = z85 = None
try:
    import cloudpickle  # type: ignore[no-redef]
except ImportError:  # pragma: no cover - depends on what is installed
    cloudpickle = None


def require() -> None:
    """Check that the optional packages are there.

    Raises:
        ImportError: one is missing, or this pyzmq can't encrypt.
    """
    missing = [name for name, module in (("pyzmq", zmq), ("cloudpickle", cloudpickle)) if module is None]
    if missing:
        raise ImportError(
            f"Parameter servers need {' and '.join(missing)}, which can't be imported here: {how_to_install('ps')}"
        )
    if not zmq.has("curve"):
        raise ImportError(
            "This build of pyzmq has no CURVE encryption, without which no connection is made. Install one that has "
            "it: pip install --force-reinstall 'pyzmq>=26'"
        )


class Waker:
    """A pair of connected sockets: one is waited for, writing to the other ends the wait."""

    def __init__(self) -> None:
        self.socket, self._other = socket.socketpair()
        for connection in (self.socket, self._other):
            connection.settimeout(0)

    def wake(self) -> None:
        """End the wait, or the next one; from any thread."""
        with contextlib.suppress(OSError):  # full: the wait is about to end anyway; closed: nobody waits
            self._other.send(b"x")

    def clear(self) -> None:
        """Wait again the next time."""
        with contextlib.suppress(BlockingIOError):
            self.socket.recv(4096)

    def close(self) -> None:
        """Close both sockets."""
        self.socket.close()
        self._other.close()


class Forkable(Protocol):
    """What holds connections."""

    def release(self) -> None:
        """Close this process's descriptors, without telling the other ends anything."""


_owners: weakref.WeakSet[Forkable] = weakref.WeakSet()


def close_in_child(owner: Forkable) -> None:
    """Call the owner's ``release`` in each forked child, as long as the owner lives."""
    _owners.add(owner)


def close_sockets(ports: Mapping[int, int]) -> None:
    """Close sockets that ZeroMQ has opened.

    Args:
        ports: by descriptor the port of either end, by which it is known: the number may stand for something else by
            now, which is left alone.
    """
    for descriptor, port in dict(ports).items():
        with contextlib.suppress(OSError):  # closed, or no socket
            found = socket.socket(fileno=descriptor)
            if port in (_port(found.getsockname), _port(found.getpeername)):
                found.close()
            else:
                found.detach()


def remote_end(descriptor: int) -> tuple[Any, ...] | None:
    """Return the address of a TCP connection's other end, ``None`` if it is closed again."""
    with contextlib.suppress(OSError):
        connection = socket.socket(fileno=descriptor)
        try:
            name = connection.getpeername()
            return name if isinstance(name, tuple) else None
        finally:
            connection.detach()
    return None


_KEEPALIVE_S, _KEEPALIVE_PAUSE_S, _KEEPALIVE_TRIES = 10, 5, 3


def keep_alive(connection: Any) -> None:
    """Let the kernel look whether a connection of tensors stands, on which nothing may travel for long.

    The control connection's heartbeats say nothing of it: a firewall forgets connections that are silent, one by one.

    Args:
        connection: a TCP socket, or one of ZeroMQ that is not connected yet.
    """
    if isinstance(connection, socket.socket):
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        if hasattr(socket, "TCP_KEEPIDLE"):  # not on macOS, which has its own times
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _KEEPALIVE_S)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, _KEEPALIVE_PAUSE_S)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, _KEEPALIVE_TRIES)
    else:
        connection.tcp_keepalive = 1
        connection.tcp_keepalive_idle = _KEEPALIVE_S
        connection.tcp_keepalive_intvl = _KEEPALIVE_PAUSE_S
        connection.tcp_keepalive_cnt = _KEEPALIVE_TRIES


_PROBE_S = 0.1


def is_refused(address: tuple[Any, ...]) -> bool:
    """Say whether a host answers that nothing listens at an address; no answer within a moment says nothing.

    Args:
        address: as ``remote_end`` returns it, so that no name is looked up.
    """
    family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
    with contextlib.suppress(OSError), socket.socket(family) as connection:
        connection.settimeout(_PROBE_S)
        return connection.connect_ex(address) == errno.ECONNREFUSED
    return False  # out of descriptors


def _port(name: Callable[[], object]) -> int:
    with contextlib.suppress(OSError):
        found = name()
        return int(found[1]) if isinstance(found, tuple) else -1
    return -1


def _release_in_child() -> None:
    for owner in list(_owners):
        owner.release()


if hasattr(os, "register_at_fork"):  # not on Windows, which can't fork
    os.register_at_fork(after_in_child=_release_in_child)


_EVENT = struct.Struct("=HI")


class Event(NamedTuple):
    """One event.

    Args:
        kind: one of ZeroMQ's ``EVENT_*``.
        value: a descriptor for accepted, connected, listening and disconnected ones; for failed ones the reason.
    """

    kind: int
    value: int


class Monitor:
    """The events of one socket; for the socket's thread.

    Args:
        monitored: the socket.
        kinds: ZeroMQ's ``EVENT_*`` to see.
    """

    def __init__(self, monitored: Any, kinds: int) -> None:
        self._monitored = monitored
        self.socket = monitored.get_monitor_socket(kinds)

    def events(self) -> Iterator[Event]:
        """Yield what has happened since the last call."""
        while True:
            try:
                frames = self.socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            yield Event(*_EVENT.unpack_from(frames[0]))

    def close(self) -> None:
        """See no more events."""
        self._monitored.disable_monitor()
        self.socket.close(linger=0)


def failures() -> int:
    """Return the kinds of events of handshakes that have failed."""
    kinds = zmq.EVENT_HANDSHAKE_FAILED_AUTH | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    return int(kinds | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL)


def failure(event: Event) -> str:
    """Return why a handshake has failed, in words."""
    if event.kind == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
        return "it has another secret"
    if event.kind == zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL:
        return "it has another secret, or does not speak CURVE"
    return "it was closed during the handshake"
