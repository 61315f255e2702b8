"""The two ends of one connection of the control plane, and its messages: JSON behind four bytes of length."""

from __future__ import annotations

import json
import socket
import time
from pathlib import Path
from typing import Any

__all__ = ["Message", "Peer", "frame", "is_stopped", "lost_record", "read_exactly", "read_frame"]

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
