"""How both ends of a plain tensor connection show that they belong to one session.

The server sends a nonce, the client its session, a nonce and a proof, the server a proof. The key that both need has
travelled on the encrypted control connection only.
"""

from __future__ import annotations

import hmac
import secrets
import socket
import time
from collections.abc import Callable

from torchstrategy.ps.transport.secret import NONCE_BYTES, Seal, derive, proof

__all__ = ["greet_client", "greet_server", "seals"]

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
