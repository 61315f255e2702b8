"""Who gets through a server's CURVE handshake: only who has the key that is derived from the cluster's secret."""

from __future__ import annotations

import hmac
from typing import Any

from torchstrategy.base import addresses
from torchstrategy.ps.transport.limits import RefusalLog
from torchstrategy.ps.transport.packages import z85, zmq
from torchstrategy.ps.transport.secret import Secret

__all__ = ["DOMAIN", "Gatekeeper", "secure_client", "secure_server"]

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
