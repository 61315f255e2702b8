"""Connections between the processes of a group: greetings with its key, sending, waiting; and control messages."""

from __future__ import annotations

import contextlib
import errno
import hmac
import json
import secrets
import selectors
import socket
import time
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

from torchstrategy.base.addresses import BACKLOG
from torchstrategy.base.log import logger
from torchstrategy.collectives.notices import Message

__all__ = [
    "BACKLOG",
    "Ask",
    "Check",
    "Door",
    "Peer",
    "frame",
    "is_stopped",
    "lookup_name",
    "read_hello",
    "say",
    "signed_call",
    "signed_door",
]

_HEADER_BYTES = 4
_MAX_BYTES = 1 << 20
_MAX_GREETING_BYTES = 1 << 10
_NONCE_BYTES = 16
_GREETING_S = 5.0
_MOST_CALLERS = 128
_AT_ONCE = 16  # those who were let in earlier are read in between
_NO_FILES_S = 0.05
_MOST_SAID = 10


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
        #: The second connection of a leader, over which nothing but beats come.
        self.pulse: socket.socket | None = None
        self._pid = pid
        self.received = bytearray()
        self.unsent = bytearray()
        #: Until when what is to be said is gathered.
        self.gathers_until = 0.0
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

    def beats(self) -> bool:
        """Read the second connection; return whether it is still there."""
        try:
            return self.pulse is not None and bool(self.pulse.recv(1 << 12))
        except BlockingIOError:
            return True
        except OSError:
            return False

    def drop_pulse(self) -> None:
        """Close the second connection."""
        if self.pulse is not None:
            self.pulse.close()
        self.pulse = None

    def close(self) -> None:
        """Close the connections."""
        self.connection.close()
        self.drop_pulse()

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


def _read_frame(connection: socket.socket) -> Message:
    """Read one message from a socket with a time limit, as in ``_read_exactly``.

    Raises:
        ValueError: it is no message of this library, or too long.
        OSError: the connection ended.
    """
    length = _length(_read_exactly(connection, _HEADER_BYTES))
    message = json.loads(_read_exactly(connection, length))
    if not isinstance(message, dict):
        raise ValueError("no message of this library")
    return message


def _read_exactly(connection: socket.socket, size: int) -> bytes:
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


class Door:
    """Where the processes of a group connect: lets in those whose greeting is right, however many strangers come.

    Greetings are read side by side, each within seconds, and only so many callers at a time are listened to: the one
    that has waited longest makes room. So one that says nothing, or drips, keeps nobody waiting.

    Args:
        listener: the listening socket; it is closed with the door.
        check: gets a caller, what it was sent first, and all it has said so far. Returns how many bytes it should still
            send, 0 when the greeting is complete and right; raises anything for a stranger.
        first: makes what a caller is sent first.
    """

    def __init__(
        self,
        listener: socket.socket,
        check: Callable[[socket.socket, bytes, bytes], int],
        first: Callable[[], bytes] = bytes,
    ) -> None:
        self._listener = listener
        self._check = check
        self._first = first
        self._callers: dict[socket.socket, tuple[float, bytes, bytearray]] = {}  # the first one came first
        self._watched: set[socket.socket] = set()
        self._num_refused = 0
        self._selector = selectors.DefaultSelector()
        listener.settimeout(0)
        self._selector.register(listener, selectors.EVENT_READ)

    def watch(self, connection: socket.socket) -> None:
        """Let ``wait`` return this connection, too, when it can be read, until it is closed by ``forget``."""
        self._watched.add(connection)
        self._selector.register(connection, selectors.EVENT_READ)

    def forget(self, connection: socket.socket) -> None:
        """Close a connection that is watched."""
        self._watched.discard(connection)
        self._selector.unregister(connection)
        connection.close()

    def wait(self, timeout_s: float) -> list[tuple[socket.socket, bytes | None]]:
        """Wait at most so long.

        Returns:
            The connections of those who were let in, with their greeting, and those that are watched and can be read,
            with ``None``; at once when there are any.
        """
        deadline = time.monotonic() + timeout_s
        while True:
            found: list[tuple[socket.socket, bytes | None]] = []
            now = time.monotonic()
            ends = [end for end, _, _ in self._callers.values()]
            for key, _ in self._selector.select(max(0.0, min([deadline, *ends[:1]]) - now)):
                connection: Any = key.fileobj
                if connection is self._listener:
                    self._admit()
                elif connection in self._watched:
                    found.append((connection, None))
                elif connection in self._callers and (greeting := self._listen(connection)) is not None:
                    found.append((connection, greeting))
            now = time.monotonic()
            for connection in [one for one, (end, _, _) in self._callers.items() if end < now]:
                self._refuse(connection, "no greeting in time")
            if found or now >= deadline:
                return found

    def close(self) -> None:
        """Let nobody in any more; those who were let in or are watched keep their connections."""
        for connection in [self._listener, *self._callers]:
            connection.close()
        self._callers.clear()
        self._selector.close()

    def __enter__(self) -> Door:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _admit(self) -> None:
        for _ in range(_AT_ONCE):
            try:
                connection = self._listener.accept()[0]
            except BlockingIOError:
                return
            except OSError as error:
                if error.errno not in (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM):  # the caller has gone
                    continue
                self._refuse(next(iter(self._callers)), str(error)) if self._callers else time.sleep(_NO_FILES_S)
                return
            connection.settimeout(0)
            first = self._first()
            if len(self._callers) >= _MOST_CALLERS:
                self._refuse(next(iter(self._callers)), "too many callers")
            self._callers[connection] = time.monotonic() + _GREETING_S, first, bytearray()
            self._selector.register(connection, selectors.EVENT_READ)
            say(connection, first)

    def _listen(self, connection: socket.socket) -> bytes | None:
        """Read on; return the greeting when it is complete."""
        _, first, said = self._callers[connection]
        try:
            missing = self._check(connection, first, bytes(said))
            part = connection.recv(missing)
            if not part:
                raise ConnectionError("connection closed by peer")
            said += part
            if self._check(connection, first, bytes(said)):
                return None
        except BlockingIOError:
            return None
        except Exception as error:  # noqa: BLE001 - whatever a stranger sends, the job goes on
            self._refuse(connection, str(error))
            return None
        del self._callers[connection]
        self._selector.unregister(connection)
        return bytes(said)

    def _refuse(self, connection: socket.socket, why: str) -> None:
        self._num_refused += 1
        if self._num_refused <= _MOST_SAID:
            logger.warning("Refused a connection to a process of this job (of which %d are told): %s.", _MOST_SAID, why)
        del self._callers[connection]
        self._selector.unregister(connection)
        connection.close()


def say(connection: socket.socket, what: bytes | Message) -> None:
    """Send what fits the connection's memory; one that is closed is found so when it is read."""
    with contextlib.suppress(OSError):
        connection.send(what if isinstance(what, bytes) else frame(what))


def signed_call(
    address: str, key: bytes, timeout_s: float, hello: Message, farewell: Message | None = None
) -> tuple[socket.socket, Message]:
    """Connect to a ``signed_door``.

    Args:
        address: host and port, with a space between.
        key: the group's secret.
        timeout_s: seconds for each step.
        hello: what this process says of itself, with its ``rank``.
        farewell: what it says if no answer comes.

    Returns:
        The connection, and the other end's answer.

    Raises:
        OSError: nobody answers there.
        ValueError: the answer is no message of this library.
    """
    host, port = address.split()
    with contextlib.ExitStack() as on_error:
        connection = on_error.enter_context(socket.create_connection((lookup_name(host), int(port)), timeout=timeout_s))
        nonce = _read_exactly(connection, _NONCE_BYTES)
        connection.sendall(frame({**hello, "mac": _mac(key, nonce, hello)}))
        on_error.callback(say, connection, farewell or {})
        answer = _read_frame(connection)
        on_error.pop_all()
    return connection, answer


def signed_door(listener: socket.socket, key: bytes, expected: Collection[int]) -> Door:
    """Return a door that lets in the processes of a group.

    Args:
        listener: the listening socket.
        key: the group's secret. It is not sent: callers sign what each of them was sent first.
        expected: the ranks that may come.
    """

    def check(_: socket.socket, nonce: bytes, said: bytes) -> int:
        rest = _HEADER_BYTES - len(said)
        if rest <= 0:
            length = _length(said)
            if length > _MAX_GREETING_BYTES:
                raise ValueError(f"a greeting of {length} bytes")
            rest += length
        if rest == 0:
            hello = read_hello(said)
            mac = str(hello.pop("mac"))
            if int(hello["rank"]) not in expected or not hmac.compare_digest(mac, _mac(key, nonce, hello)):
                raise ValueError("not a process of this job")
        return rest

    return Door(listener, check, lambda: secrets.token_bytes(_NONCE_BYTES))


def read_hello(said: bytes | None) -> Message:
    """Return the message that is a greeting."""
    return dict(json.loads((said or b"")[_HEADER_BYTES:]))


def _mac(key: bytes, nonce: bytes, hello: Message) -> str:
    return hmac.new(key, nonce + json.dumps(hello, sort_keys=True).encode(), "sha256").hexdigest()


Check = Callable[[], None]
#: Makes a call, and may raise to end the wait for it.
Ask = Callable[[Callable[[], Any]], Any]


def lookup_name(host: str) -> Any:
    """Return a host's name or address as ``socket`` should look it up.

    Python imports a module with tables of Unicode to encode text, 0.4 MB of each process, even if it is an address.
    """
    return host.encode() if host.isascii() else host
