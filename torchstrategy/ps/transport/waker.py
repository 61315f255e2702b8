"""Waking a thread that waits for sockets."""

from __future__ import annotations

import contextlib
import socket

__all__ = ["Waker"]


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
