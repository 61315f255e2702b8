"""Connections between the processes of a group: a greeting with its key, sending, waiting; and control messages."""

from __future__ import annotations

import contextlib
import hmac
import json
import socket
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

__all__ = [
    "Ask",
    "Channel",
    "Check",
    "Message",
    "Peer",
    "connect_ranks",
    "frame",
    "is_stopped",
    "lookup_name",
    "lost_record",
    "read_exactly",
    "read_frame",
]

_HEADER_BYTES = 4
_MAX_BYTES = 1 << 20

Message = dict[str, Any]


class Peer:
    """One connection.

    Args:
        rank: the other end's.
        connection: the socket.
        pid: the other end's process id if it is on this host.
    """

    def __init__(self, rank: int, connection: socket.socket, pid: int | None) -> None:
        self.rank = rank
        self.connection = connection
        self._pid = pid
        self.received = bytearray()
        self.unsent = bytearray()
        self.heard_at = time.monotonic()
        self.is_silent = False

    def messages(self) -> list[Message]:
        """Take the complete messages out of what was received.

        Raises:
            ValueError: it is no message, or too long.
        """
        found = []
        while len(self.received) >= _HEADER_BYTES:
            end = _HEADER_BYTES + _length(self.received)
            if len(self.received) < end:
                break
            found.append(json.loads(self.received[_HEADER_BYTES:end]))
            del self.received[:end]
        return found

    def may_be_stopped(self) -> bool:
        """Say whether silence means that the process can't run; one on this host may just be busy in native code."""
        if self._pid is None:
            return True
        try:
            return is_stopped(Path(f"/proc/{self._pid}/stat"))
        except OSError:
            return True


def is_stopped(stat: Path) -> bool:
    """Say whether a process or a thread can't run.

    Args:
        stat: its file of that name under ``/proc``.

    Raises:
        OSError: it is gone, or there is no such file.
    """
    return stat.read_text().rpartition(")")[2].split()[0] in "TtZX"


def lost_record(rank: int | str, how: str) -> dict[str, Any]:
    """Return what is known of the failure of a rank that can't tell of it; without an operation.

    Args:
        rank: its id, or several as a text.
        how: what happened to it, as a part of a sentence.
    """
    return {"rank": rank, "replica": None, "operation": None, "error": how, "num_collectives": -1, "num_passed": -1}


def frame(message: Message) -> bytes:
    """Return a message as it travels.

    Raises:
        ValueError: it is longer than a megabyte.
    """
    body = json.dumps(message, separators=(",", ":")).encode()
    if len(body) > _MAX_BYTES:
        raise ValueError(f"A control message may have {_MAX_BYTES} bytes. Received: {len(body)}")
    return len(body).to_bytes(_HEADER_BYTES, "little") + body


def _length(data: bytes | bytearray) -> int:
    length = int.from_bytes(data[:_HEADER_BYTES], "little")
    if length > _MAX_BYTES:
        raise ValueError(f"a message of {length} bytes, more than {_MAX_BYTES}")
    return length


def read_frame(connection: socket.socket) -> Message:
    """Read one message from a socket with a time limit, as in ``read_exactly``.

    Raises:
        ValueError: it is no message of this library, or too long.
        OSError: the connection ended.
    """
    length = _length(read_exactly(connection, _HEADER_BYTES))
    message = json.loads(read_exactly(connection, length))
    if not isinstance(message, dict):
        raise ValueError("no message of this library")
    return message


def read_exactly(connection: socket.socket, size: int) -> bytes:
    """Read so many bytes from a socket; its time limit is for all of them, and for what is read next.

    Raises:
        OSError: the connection ended, or the time is up.
    """
    deadline = time.monotonic() + (connection.gettimeout() or 0.0)
    data = b""
    while len(data) < size:
        part = connection.recv(size - len(data))
        if not part:
            raise ConnectionError("connection closed by peer")
        data += part
        remaining = deadline - time.monotonic()
        if remaining <= 0:
            raise TimeoutError("timed out")
        connection.settimeout(remaining)
    return data


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
