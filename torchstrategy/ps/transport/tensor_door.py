"""Where a server takes plain tensor connections: a Unix socket, or a TCP port if that may be plain."""

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

from torchstrategy.ps.transport.greeting import greet_client
from torchstrategy.ps.transport.limits import RefusalLog
from torchstrategy.ps.transport.secret import Seal
from torchstrategy.ps.transport.waker import Waker

__all__ = ["TensorDoor"]

_MAX_STRANGERS = 64
_JOIN_S = 2.0
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
        self._thread.join(_JOIN_S)
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
        if connection.family != socket.AF_UNIX:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._serve(session, connection, seal_out, seal_in)


def _shut(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)
