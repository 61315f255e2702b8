"""Which clients a server has, and which coordinator it works for.

A coordinator has an incarnation, a number that grows with each one, and its workers carry its number. The first hello
with a larger number takes the server over; all that older sessions still send is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from torchstrategy.base.log import logger
from torchstrategy.ps.transport.client_session import Service, Session
from torchstrategy.ps.transport.limits import RefusalLog
from torchstrategy.ps.transport.messages import FencedError, Message, RefusedError, error_message
from torchstrategy.ps.transport.sockets import remote_end
from torchstrategy.ps.transport.tensor_server import TensorServer

__all__ = ["Admission"]

_MAX_INCARNATION = 1 << 63


class _Connection:
    def __init__(self, descriptor: int) -> None:
        self.host = str((remote_end(descriptor) or ("an unknown host",))[0])
        self.is_open = True
        self.identity: bytes | None = None


class _Hello(NamedTuple):
    identity: bytes
    message: Message
    host: str


class Admission:
    """The clients of one server; for the thread of its control connections, ``find_key`` for any.

    Args:
        service: what admits them.
        incarnation: of the server process.
        post: sends a message to an identity, with a number.
        tensors: where they get tensor connections.
        refusals: where strangers are logged.
    """

    def __init__(
        self,
        service: Service,
        incarnation: str,
        post: Callable[[bytes, int, Message], None],
        tensors: TensorServer,
        refusals: RefusalLog,
    ) -> None:
        self._service = service
        self._incarnation = incarnation
        self._post = post
        self._tensors = tensors
        self._refusals = refusals
        self._newest: int | None = None
        self._is_superseded = False
        self._connections: dict[int, _Connection] = {}
        self._sessions: dict[bytes, Session] = {}
        self._ended: list[Session] = []
        self._waiting: list[_Hello] = []

    def find(self, identity: bytes) -> Session | None:
        """Return the session of a control connection."""
        return self._sessions.get(identity)

    def sessions(self) -> list[Session]:
        """Return all sessions."""
        return list(self._sessions.values())

    def _all(self) -> list[Session]:
        return [*self._sessions.values(), *self._ended]

    # --- connections

    def connected(self, descriptor: int) -> None:
        """Note a new connection."""
        self._connections[descriptor] = _Connection(descriptor)

    def disconnected(self, descriptor: int, reason: str) -> None:
        """Note that a connection has ended, and why if it was refused."""
        connection = self._connections.pop(descriptor, None)
        if connection is None:
            return
        connection.is_open = False
        if connection.identity is None:
            self._refusals.add(
                connection.host, "a control connection without a hello", reason or "it brought no handshake"
            )
        else:
            self._drop(connection.identity, "its connection was closed")

    def _drop(self, identity: bytes, reason: str) -> None:
        self._waiting = [hello for hello in self._waiting if hello.identity != identity]
        session = self._sessions.pop(identity, None)
        if session is None:
            return
        session.shut(reason)
        self._ended.append(session)
        self._tensors.forget(session)
        try:
            self._service.lost(session)
        except Exception:  # noqa: BLE001 - the other clients are still served
            logger.exception("The service has failed at the loss of %r.", session)

    # --- hellos

    def hello(self, identity: bytes, message: Message, descriptor: int, host: str) -> None:
        """Take a hello, to be answered at once or when calls of older sessions have ended.

        Raises:
            RefusedError: it is not complete, or comes twice.
            FencedError: a newer coordinator has the server.
        """
        incarnation = _checked(message.fields)
        if identity in self._sessions or any(waiting.identity == identity for waiting in self._waiting):
            raise RefusedError("This connection has said hello before.")
        connection = self._connections.get(descriptor)
        if connection is None:
            return  # closed meanwhile
        if connection.identity is not None:  # the descriptor was used again before its end was seen
            self._drop(connection.identity, "its connection was closed")
        connection.identity = identity
        if self._newest is None:
            self._newest = self._service.coordinator
        if self._newest is not None and incarnation < self._newest:
            self._refuse_old(incarnation, host)
        if self._newest is None or incarnation > self._newest:
            self._supersede(incarnation)
        self._drop_client(message.fields["client"])  # now, so that what it still runs there has ended before it goes on
        self._waiting.append(_Hello(identity, message, host))

    def _drop_client(self, client: str) -> None:
        for identity, session in self._sessions.copy().items():
            if session.hello["client"] == client:
                self._drop(identity, "its client has connected anew")

    def go_on(self) -> None:
        """Answer the hellos that wait, unless calls of older sessions still run."""
        self._ended = [session for session in self._ended if session.is_busy]
        if not self._waiting or any(session.is_busy and not session.is_valid for session in self._all()):
            return
        waiting, self._waiting = self._waiting, []
        for hello in waiting:
            try:
                self._admit(hello)
            except Exception as error:  # noqa: BLE001 - the client is told
                self._post(hello.identity, hello.message.number, error_message(error))

    def _refuse_old(self, incarnation: int, host: str) -> None:
        text = f"A newer coordinator (incarnation {self._newest}) has this server; this is {incarnation}."
        self._refusals.add(host, "an older coordinator, or one of its workers", text)
        raise FencedError(text)

    def _supersede(self, incarnation: int) -> None:
        for session in self.sessions():
            session.invalidate(f"A newer coordinator (incarnation {incarnation}) has taken over this server.")
            self._post(session.identity, 0, error_message(FencedError(session.reason)))  # it may wait for an answer
        self._is_superseded = self._is_superseded or self._newest is not None
        self._newest = incarnation

    def _admit(self, hello: _Hello) -> None:
        fields = hello.message.fields
        if int(fields["incarnation"]) != self._newest:
            self._refuse_old(int(fields["incarnation"]), hello.host)
        if self._is_superseded:
            self._service.superseded(int(fields["incarnation"]))
            self._is_superseded = False
        self._drop_client(fields["client"])
        session = Session(fields, hello.identity, hello.host, self._post)
        session.count(hello.message.number)
        welcome = {**self._service.admit(fields), "server": self._incarnation}
        self._sessions[hello.identity] = session
        self._tensors.remember(session)
        private = {"session": session.id, "key": session.key.hex(), "tensors": self._tensors.describe()}
        self._post(
            hello.identity, hello.message.number, Message("welcome", {"welcome": welcome, "connection": private})
        )


def _checked(hello: Mapping[str, Any]) -> int:
    """Return the incarnation that a hello carries."""
    incarnation = hello.get("incarnation")
    if not isinstance(incarnation, int) or isinstance(incarnation, bool) or not 0 <= incarnation < _MAX_INCARNATION:
        raise RefusedError(f"A hello needs the coordinator's incarnation, an integer. Received: {incarnation!r:.80}")
    if not isinstance(hello.get("role"), str) or not isinstance(hello.get("client"), str):
        raise RefusedError("A hello needs a role and a client, both strings.")
    return incarnation
