"""What ZeroMQ says of a socket's connections."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Any, NamedTuple

from torchstrategy.ps.transport.packages import zmq

__all__ = ["Event", "Monitor", "failure"]

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


def failure(event: Event) -> str:
    """Return why a handshake has failed, in words."""
    if event.kind == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
        return "it has another secret"
    if event.kind == zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL:
        return "it has another secret, or does not speak CURVE"
    return "it was closed during the handshake"
