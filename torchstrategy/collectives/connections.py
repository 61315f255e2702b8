"""Connections between the processes of a group: a greeting with the group's key, sending, and waiting with a check."""

from __future__ import annotations

import contextlib
import hmac
import socket
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

__all__ = ["Ask", "Channel", "Check", "connect_ranks", "lookup_name"]

Check = Callable[[], None]
#: Makes a call, and may raise to end the wait for it.
Ask = Callable[[Callable[[], Any]], Any]

_POLL_S = 0.5
_READ_BYTES = 1 << 16
_MOST_READ_BYTES = 1 << 22  # `recv` allocates what it is asked for
_RANK_BYTES = 8


def lookup_name(host: str) -> Any:
    """Return a host's name or address as ``socket`` should look it up.

    Python imports a module with tables of Unicode to encode text, 0.4 MB of each process, even if it is an address.
    """
    return host.encode() if host.isascii() else host


class Channel:
    """One connection to another rank.

    Args:
        connection: a connected stream socket, which the channel takes over.
    """

    def __init__(self, connection: socket.socket) -> None:
        connection.settimeout(_POLL_S)
        self.socket = connection
        self._pending = bytearray()  # the other rank may be one message ahead

    def send(self, message: bytes | memoryview, check: Check) -> None:
        """Send a message.

        Args:
            message: the bytes.
            check: called while waiting; may raise to end the wait, after which the channel can't be used.

        Raises:
            ConnectionError: the other rank has closed the connection.
        """
        rest = memoryview(message)
        while rest:
            with contextlib.suppress(TimeoutError):
                rest = rest[self.socket.send(rest) :]
                continue
            check()

    def receive(self, size: int, check: Check) -> bytes:
        """Return the next ``size`` bytes; arguments and errors as in ``send``."""
        while len(self._pending) < size:
            self._read(min(max(_READ_BYTES, size - len(self._pending)), _MOST_READ_BYTES), check)
        if len(self._pending) == size:
            message, self._pending = bytes(self._pending), bytearray()
        else:
            message = bytes(self._pending[:size])
            del self._pending[:size]
        return message

    def close(self) -> None:
        """Close the connection."""
        self.socket.close()

    def _read(self, size: int, check: Check) -> None:
        while True:
            part = None
            with contextlib.suppress(TimeoutError):
                part = self.socket.recv(size)
            if part is None:
                check()
                continue
            if not part:
                raise ConnectionError("connection closed by peer")
            self._pending += part
            return


def connect_ranks(
    listener: socket.socket,
    rank: int,
    calls: Mapping[int, Callable[[float], socket.socket]],
    answers: Iterable[int],
    key: bytes,
    timeout_s: float,
    check: Check,
) -> dict[int, Channel]:
    """Connect to some ranks and wait for others to connect.

    Args:
        listener: where this rank is reached.
        rank: this process's id.
        calls: for each rank to connect to, what does it within the given seconds.
        answers: the ranks that will connect to this one.
        key: the group's secret, without which a connection is turned away.
        timeout_s: seconds in which all connections must be there.
        check: called while waiting; may raise to end the wait.

    Returns:
        The channels by rank.

    Raises:
        OSError: a rank can't be reached, or did not connect in time.
    """
    deadline = time.monotonic() + timeout_s
    channels: dict[int, Channel] = {}
    missing = set(answers)
    try:
        for other, call in calls.items():
            try:
                channels[other] = Channel(call(max(0.1, deadline - time.monotonic())))
            except OSError as error:
                raise ConnectionError(f"rank {rank} can't connect to rank {other}: {error}") from error
            channels[other].send(key + rank.to_bytes(_RANK_BYTES, "little"), check)
        listener.settimeout(_POLL_S)
        while missing:
            check()
            if time.monotonic() > deadline:
                absent = ", ".join(map(str, sorted(missing)))
                raise TimeoutError(f"rank {absent} did not connect to rank {rank} within {timeout_s:g} s")
            try:
                channel = Channel(listener.accept()[0])
            except TimeoutError:
                continue
            other = _greeted(channel, key)
            if other in missing:
                missing.remove(other)
                channels[other] = channel
            else:
                channel.close()
    except BaseException:
        for channel in channels.values():
            channel.close()
        raise
    return channels


def _greeted(channel: Channel, key: bytes) -> int:
    """Return which rank is calling; -1 for a stranger."""
    try:
        hello = channel.receive(len(key) + _RANK_BYTES, _give_up)
    except OSError:
        return -1
    return int.from_bytes(hello[len(key) :], "little") if hmac.compare_digest(hello[: len(key)], key) else -1


def _give_up() -> None:
    raise TimeoutError("no greeting in time")
