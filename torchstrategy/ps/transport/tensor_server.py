"""A server's tensor connections: how they are accepted, and the work on their requests."""

from __future__ import annotations

import contextlib
import secrets
import select
import selectors
import socket
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

from torchstrategy.base import addresses
from torchstrategy.ps.transport.client_session import Service, Session
from torchstrategy.ps.transport.gatekeeper import Gatekeeper, greet_client, seals, secure_server
from torchstrategy.ps.transport.limits import Limits, RefusalLog
from torchstrategy.ps.transport.messages import BufferPool, FencedError, Message, MessageError, error_message
from torchstrategy.ps.transport.secret import NONCE_BYTES, Seal, Secret
from torchstrategy.ps.transport.sockets import Waker, zmq
from torchstrategy.ps.transport.wires import CurveWire, StreamWire, Wire

__all__ = ["TensorServer"]

_MAX_STRANGERS = 64
_DOOR_JOIN_S = 2.0
_BACKLOG = 128
_PAUSE_S = 0.1


class TensorDoor:
    """Accepts connections, each greeted and then served on a thread of its own.

    Args:
        host: the IP address of the TCP port; ``None`` for none.
        find_key: returns the key of the session with an id.
        serve: called with session id, connection and seals of what is sent and received, on the connection's thread;
            it closes the connection.
        refusals: where strangers are logged.
    """

    #: Whether this platform has Unix sockets without a file.
    has_unix = sys.platform == "linux"

    def __init__(
        self,
        host: str | None,
        find_key: Callable[[str], bytes | None],
        serve: Callable[[str, socket.socket, Seal, Seal], None],
        refusals: RefusalLog,
    ) -> None:
        self._find_key = find_key
        self._serve = serve
        self._refusals = refusals
        self._lock = threading.Lock()
        self._strangers: set[socket.socket] = set()
        self._threads: set[threading.Thread] = set()
        self._is_open = True
        self._waker = Waker()
        #: Name of the Unix socket, in Linux's abstract name space: no file is left behind, and only processes of this
        #: host can reach it. Any user may connect, and is a stranger without the session's key.
        self.unix_name: str | None = None
        self.port: int | None = None
        self._listeners: list[socket.socket] = []
        if self.has_unix:
            self.unix_name = f"torchstrategy-{secrets.token_hex(16)}"
            listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            self._listeners.append(listener)
            listener.bind("\0" + self.unix_name)
            listener.listen(_BACKLOG)
        if host is not None:
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            self._listeners.append(socket.create_server((host, 0), family=family, backlog=_BACKLOG))
            self.port = int(self._listeners[-1].getsockname()[1])
        self._thread = threading.Thread(target=self._accept, name="torchstrategy-tensor-door", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Take no more connections and forget those that were not greeted yet; those served go on."""
        self._is_open = False
        self._waker.wake()
        self._thread.join(_DOOR_JOIN_S)
        with self._lock:
            for connection in self._strangers:
                _shut(connection)
        self.release()

    def join(self, deadline: float) -> None:
        """Wait for the connections' threads until a time of the monotonic clock."""
        with self._lock:
            threads = list(self._threads)
        for thread in threads:
            thread.join(max(0.0, deadline - time.monotonic()))

    def release(self) -> None:
        """Close the descriptors of who listens; in a forked child, too."""
        for listener in self._listeners:
            listener.close()
        self._waker.close()

    def _accept(self) -> None:
        with selectors.DefaultSelector() as selector:
            for listener in (*self._listeners, self._waker.socket):
                selector.register(listener, selectors.EVENT_READ)
            while self._is_open:
                for key, _ in selector.select():
                    if key.fileobj is not self._waker.socket and self._is_open:
                        self._take(key.fileobj)  # type: ignore[arg-type]

    def _take(self, listener: socket.socket) -> None:
        try:
            connection, address = listener.accept()
        except OSError as error:  # gone again, or out of descriptors
            self._refusals.add("a connection", "it could not be accepted", str(error))
            select.select([self._waker.socket], [], [], _PAUSE_S)  # out of descriptors, this would spin
            return
        host = str(address[0]) if isinstance(address, tuple) else "a process of this host"
        with self._lock:
            is_full = len(self._strangers) >= _MAX_STRANGERS
            if not is_full:
                self._strangers.add(connection)
        if is_full:
            connection.close()
            self._refusals.add(host, "too many connections that have not greeted")
            return
        thread = threading.Thread(
            target=self._handle, args=(connection, host), name="torchstrategy-tensors", daemon=True
        )
        with self._lock:
            self._threads.add(thread)
        thread.start()

    def _handle(self, connection: socket.socket, host: str) -> None:
        try:
            self._greet_and_serve(connection, host)
        finally:
            with self._lock:
                self._threads.discard(threading.current_thread())

    def _greet_and_serve(self, connection: socket.socket, host: str) -> None:
        try:
            session, seal_out, seal_in = greet_client(connection, self._find_key)
        except ConnectionError as error:
            connection.close()
            if self._is_open:
                self._refusals.add(host, "a tensor connection without a session's greeting", str(error))
            return
        finally:
            with self._lock:
                self._strangers.discard(connection)
        if connection.family in (socket.AF_INET, socket.AF_INET6):
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._serve(session, connection, seal_out, seal_in)


def _shut(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)


_JOIN_S = 3.0


class TensorServer:
    """Serves tensor requests, each connection on its own thread.

    Args:
        service: what the clients are served.
        secret: the cluster's.
        refusals: where strangers and damage are logged.
        limits: what a message may have at most.
        num_threads: how many requests are worked on at once.
        is_plain: whether TCP connections are plain.
        wake: makes the control thread look again, after the last call of a superseded session.
    """

    def __init__(
        self,
        service: Service,
        secret: Secret,
        refusals: RefusalLog,
        limits: Limits,
        *,
        num_threads: int,
        is_plain: bool,
        wake: Callable[[], None],
    ) -> None:
        if num_threads < 1:
            raise ValueError(f"num_tensor_threads must be positive. Received: {num_threads}")
        self._service = service
        self._secret = secret
        self._refusals = refusals
        self._limits = limits
        self._is_plain = is_plain
        self._wake = wake
        self._at_once = threading.BoundedSemaphore(num_threads)
        self._pool = BufferPool()
        self._sessions: dict[str, Session] = {}
        self._threads: set[threading.Thread] = set()
        self._door: TensorDoor | None = None

    def open(self, ip: str, num_io_threads: int) -> None:
        """Begin to take connections.

        Args:
            ip: the address that the server listens at.
            num_io_threads: how many threads encrypt.
        """
        self._ip = ip
        self._context = zmq.Context(num_io_threads)
        #: For the control thread to ask.
        self.gatekeeper = Gatekeeper(self._context, self._secret, self._refusals)
        needs_port = self._is_plain and not (addresses.is_loopback(ip) and TensorDoor.has_unix)
        try:
            self._door = TensorDoor(ip if needs_port else None, self._find_key, self._serve_stream, self._refusals)
        except BaseException:
            self._close_context()
            raise

    def close(self) -> None:
        """Take no more connections, and wait a bounded time for the threads of those whose sessions were shut."""
        if self._door is not None:
            deadline = time.monotonic() + _JOIN_S
            self._door.close()
            self._door.join(deadline)
            for thread in list(self._threads):
                thread.join(max(0.0, deadline - time.monotonic()))
            self._close_context()

    def _close_context(self) -> None:
        self.gatekeeper.close()
        if not self._threads:  # else a service's call hangs, and waiting for its socket would, too
            self._context.term()

    def release(self) -> None:
        """Close the descriptors in a forked child."""
        if self._door is not None:
            self._door.release()
        for session in list(self._sessions.values()):
            session.release()

    def describe(self) -> dict[str, Any]:
        """Return how clients get a tensor connection."""
        door = self._door
        return {"unix": door and door.unix_name, "port": door and door.port, "is_plain": self._is_plain}

    def remember(self, session: Session) -> None:
        """Let a session's client make tensor connections."""
        self._sessions[session.id] = session

    def forget(self, session: Session) -> None:
        """Let it make none any more."""
        self._sessions.pop(session.id, None)

    def open_encrypted(self, session: Session) -> int:
        """Return a port where the session's client, and only one, is served under CURVE."""
        zmq_socket = self._context.socket(zmq.PAIR)
        try:
            secure_server(zmq_socket, self._secret, self._ip)
            zmq_socket.maxmsgsize = self._limits.max_message_bytes
            port = int(zmq_socket.bind_to_random_port(addresses.endpoint(self._ip, "*").rpartition(":")[0]))
            no_nonce = bytes(NONCE_BYTES)  # CURVE has its own
            seal_in, seal_out = seals(session.key, no_nonce, port.to_bytes(NONCE_BYTES, "little"))
            wire = CurveWire(zmq_socket, seal_out, seal_in, self._limits)
        except BaseException:
            zmq_socket.close(linger=0)
            raise
        thread = threading.Thread(target=self._serve, args=(session, wire), name="torchstrategy-tensors", daemon=True)
        self._threads.add(thread)
        thread.start()
        return port

    def _find_key(self, session_id: str) -> bytes | None:
        session = self._sessions.get(session_id)
        return None if session is None else session.key

    def _serve_stream(self, session_id: str, connection: socket.socket, seal_out: Seal, seal_in: Seal) -> None:
        wire = StreamWire(connection, seal_out, seal_in, self._limits, self._pool)
        session = self._sessions.get(session_id)
        if session is None:
            wire.close()
        else:
            self._serve(session, wire)

    def _serve(self, session: Session, wire: Wire) -> None:
        try:
            session.add(wire)
            while True:
                # No name holds a request or reply while the next one is waited for: the service counts on it.
                _send(wire, self._answer(session, wire.receive()))
        except ConnectionError:
            pass
        except MessageError as error:
            self._refusals.add(session.host, "a damaged, forged or replayed tensor message", str(error))
        except Exception as error:  # noqa: BLE001 - of this connection only
            self._refusals.add(session.host, "the rest of a tensor connection", f"{type(error).__name__}: {error}")
        finally:
            session.remove(wire)
            wire.close()
            self._threads.discard(threading.current_thread())

    def _answer(self, session: Session, message: Message) -> Message:
        try:
            session.begin()
        except FencedError as error:
            self._refusals.add(session.host, "a tensor message of an older coordinator, or one of its workers")
            return error_message(error)
        try:
            with self._at_once:
                return self._service.tensor(session, message)
        except Exception as error:  # noqa: BLE001 - the client is told
            return error_message(error)
        finally:
            session.end()
            if not session.is_valid:
                self._wake()


def _send(wire: Wire, reply: Message) -> None:
    try:
        wire.send(reply)
    except (TypeError, ValueError) as error:  # nothing of it was sent
        wire.send(error_message(error))
