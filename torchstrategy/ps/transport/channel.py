"""A client's tensor connection to one server."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import weakref
from typing import Any

from torchstrategy.base import addresses
from torchstrategy.errors import UnavailableError
from torchstrategy.ps.states import PeerState
from torchstrategy.ps.transport.gatekeeper import greet_server, seals, secure_client
from torchstrategy.ps.transport.messages import BufferPool, Message, MessageError, raise_error
from torchstrategy.ps.transport.peer import Peer
from torchstrategy.ps.transport.secret import NONCE_BYTES
from torchstrategy.ps.transport.sockets import Monitor, close_in_child, failures, keep_alive, zmq
from torchstrategy.ps.transport.wires import CurveWire, Into, StreamWire, Wire

__all__ = ["TensorChannel"]

_CONNECT_S = 5.0


class TensorChannel:
    """Requests with tensors, answered in order; not made on the control loop's thread.

    ``call`` is for any thread. With several channels, ``send`` to all and then ``receive`` from all: the servers work
    at the same time. One request of a channel may be unanswered.

    Args:
        peer: a server that is ready. When it is lost so is the channel: make another one.

    Raises:
        UnavailableError: the server is not ready, or does not take the connection.
    """

    def __init__(self, peer: Peer) -> None:
        self.peer = peer
        self._lock = threading.Lock()
        self._is_unanswered = False
        self._reason: str | None = None
        self._process = os.getpid()
        if peer.state is not PeerState.READY:
            raise peer.unavailable()
        #: ``"unix"``, ``"tcp"`` (both plain) or ``"curve"`` (encrypted).
        self.kind = ""
        try:
            self._wire = self._connect(dict(peer.connection))
        except OSError as error:
            raise UnavailableError(f"No tensor connection to {peer.name}: {error}.") from error
        try:
            peer.add_channel(self)
        except UnavailableError:
            self._wire.close()
            raise
        weakref.finalize(self, self._wire.close).atexit = False
        close_in_child(self)

    def send(self, message: Message) -> None:
        """Send a request; when this returns, its tensors may be written to.

        Raises:
            UnavailableError: the server is lost.
            RuntimeError: the last request's reply was not received.
            TypeError: the message has blobs, which travel by ``peer.call``, or can't be sent otherwise.
            ValueError: it is larger than allowed.
        """
        self._check()
        if self._is_unanswered:
            raise RuntimeError("The last request's reply must be received before the next one is sent.")
        try:
            self._wire.send(message)
            self._is_unanswered = True
        except ConnectionError as error:
            raise self._lost(error) from error
        except (TypeError, ValueError):  # nothing of it was sent
            raise
        except BaseException:  # Ctrl-C: the server would take the next request for the rest of this one
            self.fail("a request was interrupted while it was sent")
            raise

    def receive(self, timeout_seconds: float | None = None, into: Into | None = None) -> Message:
        """Wait for the reply to what was sent.

        Args:
            timeout_seconds: how long; ``None`` is for ever, as long as the server is not lost.
            into: which memory takes the reply's tensors, see ``Wire.receive``.

        Raises:
            UnavailableError: the server is lost.
            DeadlineExceededError: nothing came in time; it may be received later.
            RuntimeError: no request is unanswered.
            Exception: what the server's reply tells.
        """
        self._check()
        if not self._is_unanswered:
            raise RuntimeError("There is nothing to receive: no request was sent.")
        try:
            self._wire.wait(timeout_seconds)  # Ctrl-C leaves the reply to be received later
        except ConnectionError as error:
            raise self._lost(error) from error
        try:
            self._is_unanswered = False
            reply = self._wire.receive(into)
        except (ConnectionError, MessageError) as error:
            raise self._lost(error) from error
        except BaseException:  # the rest, or the next reply, would be waited for, or taken for another one
            self.fail("a reply was interrupted while it was received")
            raise
        if reply.kind == "error":
            raise_error(reply)
        return reply

    def call(self, message: Message, timeout_seconds: float | None = None) -> Message:
        """Send a request and wait for its reply; from any thread. See ``send`` and ``receive``."""
        with self._lock:
            self.send(message)
            return self.receive(timeout_seconds)

    def discard(self) -> None:
        """Take the reply to a request for which nobody waits any more."""
        with contextlib.suppress(Exception):
            self.receive()

    def close(self) -> None:
        """Close the connection; not while another thread uses it."""
        self._reason = self._reason or "this process has closed the channel"
        self._wire.close()

    def fail(self, reason: str) -> None:
        """End all waiting because the server is lost; from any thread."""
        self._reason = self._reason or reason
        self._wire.shut()

    def release(self) -> None:
        """Close the descriptors in a forked child."""
        self._reason = "the process was forked, and its connections belong to its parent"
        self._wire.release()

    def _check(self) -> None:
        if self._reason is not None:
            raise self._lost(None)

    def _lost(self, error: Exception | None) -> UnavailableError:
        self.fail(str(error))
        return UnavailableError(f"The tensor connection to {self.peer.name} is lost: {self._reason}.")

    # --- connecting

    def _connect(self, connection: dict[str, Any]) -> Wire:
        tensors, session = connection["tensors"], str(connection["session"])
        key = bytes.fromhex(connection["key"])
        stream = self._open_stream(tensors)
        if stream is None:
            return self._open_encrypted(key)
        try:
            seal_out, seal_in = greet_server(stream, session, key)
        except BaseException:
            stream.close()
            raise
        return StreamWire(stream, seal_out, seal_in, self.peer.limits, BufferPool())

    def _open_stream(self, tensors: dict[str, Any]) -> socket.socket | None:
        if tensors["unix"] and hasattr(socket, "AF_UNIX"):
            stream = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            with contextlib.suppress(OSError):  # another host, or network name space
                stream.connect("\0" + tensors["unix"])
                self.kind = "unix"
                return stream
            stream.close()
        if not tensors["port"]:
            return None
        host, _ = addresses.split_address(self.peer.address)
        stream = socket.create_connection((host, int(tensors["port"])), timeout=_CONNECT_S)
        stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        keep_alive(stream)
        self.kind = "tcp"
        return stream

    def _open_encrypted(self, key: bytes) -> Wire:
        port = int(self.peer.call(Message("open_tensors", {})).fields["port"])
        host, _ = addresses.split_address(self.peer.address)
        seal_out, seal_in = seals(key, bytes(NONCE_BYTES), port.to_bytes(NONCE_BYTES, "little"))
        zmq_socket = self.peer.loop.make_socket(zmq.PAIR)
        ends = Monitor(zmq_socket, zmq.EVENT_CLOSED | zmq.EVENT_DISCONNECTED | failures())
        wire = CurveWire(zmq_socket, seal_out, seal_in, self.peer.limits, ends)
        try:
            secure_client(zmq_socket, self.peer.secret, host)
            keep_alive(zmq_socket)
            zmq_socket.maxmsgsize = self.peer.limits.max_message_bytes
            zmq_socket.connect_timeout = int(1000 * _CONNECT_S)
            zmq_socket.connect(addresses.endpoint(host, port))
        except BaseException:
            wire.shut()
            raise
        self.kind = "curve"
        return wire
