"""What a server knows of one client's connection."""

from __future__ import annotations

import secrets
import threading
from collections.abc import Callable
from typing import Any, Protocol

from torchstrategy.ps.transport.messages import FencedError, Message, MessageError
from torchstrategy.ps.transport.secret import KEY_BYTES
from torchstrategy.ps.transport.wires import Wire

__all__ = ["Service", "Session"]

SESSION_ID_BYTES = 16


class Session:
    """One client, from the hello that was admitted until its connection is lost.

    Args:
        hello: what the client said of itself.
        identity: of its control connection.
        host: where it is, for messages.
        send: takes identity, message number and message, from any thread.
    """

    def __init__(
        self, hello: dict[str, Any], identity: bytes, host: str, send: Callable[[bytes, int, Message], None]
    ) -> None:
        self.id = secrets.token_hex(SESSION_ID_BYTES)
        self.key = secrets.token_bytes(KEY_BYTES)
        self.hello = hello
        self.role = str(hello["role"])
        self.incarnation = int(hello["incarnation"])
        self.identity = identity
        self.host = host
        self._send = send
        self._lock = threading.Lock()
        self._reason: str | None = None
        self._is_shut = False
        self._number = 0
        self._num_running = 0
        self._wires: set[Wire] = set()

    def __repr__(self) -> str:
        return f"<session of the {self.role} at {self.host}, incarnation {self.incarnation}>"

    @property
    def is_valid(self) -> bool:
        """Whether the client may still change anything."""
        return self._reason is None

    @property
    def reason(self) -> str:
        """Why the session is no longer valid."""
        return self._reason or ""

    @property
    def is_busy(self) -> bool:
        """Whether a tensor request is being worked on."""
        return self._num_running > 0

    def reply(self, number: int, message: Message) -> None:
        """Answer a control message, from any thread; nothing happens if the client is gone."""
        self._send(self.identity, number, message)

    def invalidate(self, reason: str) -> None:
        """Refuse all that the client still sends.

        Args:
            reason: what it is told.
        """
        with self._lock:
            self._reason = self._reason or reason

    def count(self, number: int) -> None:
        """Note a control message's number; for the control thread.

        Raises:
            MessageError: the message, or a later one, has arrived before.
        """
        if number <= self._number:
            raise MessageError(f"message {number} again, after message {self._number}: a replay")
        self._number = number

    def check(self) -> None:
        """Check that the session is valid.

        Raises:
            FencedError: it is not.
        """
        if self._reason is not None:
            raise FencedError(self._reason)

    def begin(self) -> None:
        """Begin to work on a tensor request.

        Raises:
            FencedError: the session is no longer valid.
        """
        with self._lock:
            self.check()
            self._num_running += 1

    def end(self) -> None:
        """Say that the work on a tensor request has ended."""
        with self._lock:
            self._num_running -= 1

    def add(self, wire: Wire) -> None:
        """Take up a tensor connection, to be shut with the session."""
        with self._lock:
            self._wires.add(wire)
            is_late = self._is_shut
        if is_late:
            wire.shut()

    def remove(self, wire: Wire) -> None:
        """Forget a tensor connection."""
        with self._lock:
            self._wires.discard(wire)

    def shut(self, reason: str) -> None:
        """Invalidate the session and end its tensor connections."""
        self.invalidate(reason)
        with self._lock:
            self._is_shut = True
            wires = list(self._wires)
        for wire in wires:
            wire.shut()

    def release(self) -> None:
        """Close the tensor connections' descriptors in a forked child."""
        for wire in list(self._wires):
            wire.release()


class Service(Protocol):
    """What a listener serves. An exception becomes an error reply."""

    @property
    def coordinator(self) -> int | None:
        """Incarnation of the coordinator whose things it has, also before that has connected to this process."""

    def superseded(self, incarnation: int) -> None:
        """Drop the state of all older coordinators: a newer one is about to be admitted. None of their calls runs."""

    def admit(self, hello: dict[str, Any]) -> dict[str, Any]:
        """Return what a new client shall know, or raise ``RefusedError``; on the control thread."""

    def control(self, session: Session, message: Message) -> Message | None:
        """Answer quickly, or later by ``session.reply(message.number, ...)``; on the control thread."""

    def tensor(self, session: Session, message: Message) -> Message:
        """Answer; on one of several threads. The reply's tensors are let go of once they have been sent."""

    def lost(self, session: Session) -> None:
        """A client is gone; on the control thread."""
