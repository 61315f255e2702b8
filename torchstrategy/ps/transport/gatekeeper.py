"""Who gets through a server's CURVE handshake: only who has the key that is derived from the cluster's secret.

The server sends a nonce, the client its session, a nonce and a proof, the server a proof. The key that both need has
travelled on the encrypted control connection only.
"""

from __future__ import annotations

import hmac
import secrets
import socket
import time
from collections.abc import Callable
from typing import Any

from torchstrategy.base import addresses
from torchstrategy.ps.transport.limits import RefusalLog
from torchstrategy.ps.transport.secret import NONCE_BYTES, Seal, Secret, derive, proof
from torchstrategy.ps.transport.sockets import z85, zmq

__all__ = ["Gatekeeper", "greet_client", "greet_server", "seals", "secure_client", "secure_server"]

_MAGIC = b"tsTensr1"
_ID_BYTES = 16
_PROOF_BYTES = 32
_TIMEOUT_S = 10.0


def greet_client(connection: socket.socket, find_key: Callable[[str], bytes | None]) -> tuple[str, Seal, Seal]:
    """Find out whose connection a server has accepted.

    Args:
        connection: the connection.
        find_key: returns the key of the session with this id; ``None`` if there is none.

    Returns:
        The session's id, and the seals of what is sent and received.

    Raises:
        ConnectionError: it is nobody's.
    """
    deadline = time.monotonic() + _TIMEOUT_S
    ours = secrets.token_bytes(NONCE_BYTES)
    connection.settimeout(_TIMEOUT_S)
    try:
        connection.sendall(_MAGIC + ours)
        hello = _read_by(connection, _ID_BYTES + NONCE_BYTES + _PROOF_BYTES, deadline)
        session, theirs, shown = hello[:_ID_BYTES], hello[_ID_BYTES:-_PROOF_BYTES], hello[-_PROOF_BYTES:]
        key = find_key(session.hex())
        if key is None or not hmac.compare_digest(shown, proof(key, "client", session, ours, theirs)):
            raise ConnectionError("no greeting of a client that is connected")
        connection.sendall(proof(key, "server", session, ours, theirs))
    except TimeoutError as error:
        raise ConnectionError(f"no greeting within {_TIMEOUT_S:g} s") from error
    except ConnectionError:
        raise
    except OSError as error:
        raise ConnectionError(str(error)) from error
    seal_in, seal_out = seals(key, ours, theirs)
    return session.hex(), seal_out, seal_in


def greet_server(connection: socket.socket, session: str, key: bytes) -> tuple[Seal, Seal]:
    """Show a server whose connection this is, and check that it is the server.

    Args:
        connection: just connected.
        session: the session's id.
        key: its key.

    Returns:
        The seals of what is sent and received.

    Raises:
        ConnectionError: the other end is not the session's server, or has refused.
    """
    deadline = time.monotonic() + _TIMEOUT_S
    try:
        hello = _read_by(connection, len(_MAGIC) + NONCE_BYTES, deadline)
        if hello[: len(_MAGIC)] != _MAGIC:
            raise ConnectionError("another program listens there")
        theirs, ours = hello[len(_MAGIC) :], secrets.token_bytes(NONCE_BYTES)
        who = bytes.fromhex(session)
        connection.sendall(who + ours + proof(key, "client", who, theirs, ours))
        shown = _read_by(connection, _PROOF_BYTES, deadline)
    except OSError as error:
        raise ConnectionError(f"the tensor connection was refused: {error}") from error
    if not hmac.compare_digest(shown, proof(key, "server", who, theirs, ours)):
        raise ConnectionError("another server listens there")
    return seals(key, theirs, ours)


def seals(key: bytes, server_nonce: bytes, client_nonce: bytes) -> tuple[Seal, Seal]:
    """Return the seals of what the client sends, and of what the server sends."""
    nonces = (server_nonce, client_nonce)
    return Seal(derive(key, "client to server", *nonces)), Seal(derive(key, "server to client", *nonces))


def _read_by(connection: socket.socket, num_bytes: int, deadline: float) -> bytes:
    data = b""
    while len(data) < num_bytes:
        remaining = deadline - time.monotonic()
        if remaining <= 0:
            raise TimeoutError(f"nothing within {_TIMEOUT_S:g} s")
        connection.settimeout(remaining)
        part = connection.recv(num_bytes - len(data))
        if not part:
            raise ConnectionError("closed before the greeting was complete")
        data += part
    return data


DOMAIN = b"torchstrategy"
_VERSION = b"1.0"
_HANDSHAKE_MS = 10_000


class Gatekeeper:
    """Answers ZeroMQ's questions (ZAP, RFC 27) in one context; for one thread.

    Args:
        context: ZeroMQ's.
        secret: the cluster's.
        refusals: where strangers are logged.
    """

    def __init__(self, context: Any, secret: Secret, refusals: RefusalLog) -> None:
        self._allowed = z85.decode(secret.key_pair("client")[0])
        self._refusals = refusals
        self.socket = context.socket(zmq.REP)
        self.socket.linger = 0
        self.socket.bind("inproc://zeromq.zap.01")

    def close(self) -> None:
        """Let no one in any more."""
        self.socket.close(linger=0)

    def answer(self) -> None:
        """Answer all questions that are there."""
        while True:
            try:
                question = self.socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            version, request, domain, host, _, mechanism, *credentials = question
            is_allowed = (
                (version, domain, mechanism) == (_VERSION, DOMAIN, b"CURVE")
                and len(credentials) == 1
                and hmac.compare_digest(credentials[0], self._allowed)
            )
            if not is_allowed:
                self._refusals.add(host.decode(errors="replace"), "a client with another key")
            status, text = (b"200", b"") if is_allowed else (b"400", b"another key")
            self.socket.send_multipart([_VERSION, request, status, text, b"", b""])


def secure_server(zmq_socket: Any, secret: Secret, ip: str) -> None:
    """Make a socket, before it is bound, talk to clients with the secret only."""
    zmq_socket.curve_server = True
    zmq_socket.curve_secretkey = secret.key_pair("server")[1]
    zmq_socket.zap_domain = DOMAIN
    zmq_socket.ipv6 = ":" in ip  # then IPv4 addresses are shown in IPv6 form
    _set_common(zmq_socket)


def secure_client(zmq_socket: Any, secret: Secret, host: str) -> None:
    """Make a socket, before it is connected, talk to servers with the secret only."""
    zmq_socket.curve_serverkey = secret.key_pair("server")[0]
    zmq_socket.curve_publickey, zmq_socket.curve_secretkey = secret.key_pair("client")
    zmq_socket.ipv6 = addresses.needs_ipv6(host)
    _set_common(zmq_socket)


def _set_common(zmq_socket: Any) -> None:
    zmq_socket.linger = 0
    zmq_socket.handshake_ivl = _HANDSHAKE_MS
    zmq_socket.sndhwm = 0  # the queue is bounded above, by who waits for replies
