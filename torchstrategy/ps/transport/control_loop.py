"""A client process's control connections: one thread for all of them."""

from __future__ import annotations

import atexit
import os
import secrets
import threading
import weakref
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

from torchstrategy.base import addresses
from torchstrategy.base.job import heartbeat_seconds
from torchstrategy.base.log import logger
from torchstrategy.ps.transport.limits import Limits
from torchstrategy.ps.transport.peer import Handler, Peer
from torchstrategy.ps.transport.secret import Secret, find_secret
from torchstrategy.ps.transport.sockets import Waker, close_in_child, require, zmq

__all__ = ["ControlLoop", "Peer"]

_JOIN_S = 5.0


class ControlLoop:
    """Connects to servers, and keeps at it.

    Handlers and callbacks run on the loop's thread and must be quick. In a forked child the loop is closed.

    Raises:
        ImportError: pyzmq is not installed.
    """

    def __init__(self) -> None:
        require()
        self._client = secrets.token_hex(8)
        self._context = zmq.Context()
        self._poller = zmq.Poller()
        self._calls: deque[Callable[[], object]] = deque()
        self._peers: dict[Any, Peer] = {}  # by the ZeroMQ sockets of each
        self._all_peers: set[Peer] = set()
        self._process = os.getpid()
        self._is_closed = False
        self._waker = Waker()
        self._poller.register(self._waker.socket, zmq.POLLIN)
        self._thread = threading.Thread(target=self._run, name="torchstrategy-control-loop", daemon=True)
        self._thread.start()
        _loops.add(self)
        close_in_child(self)

    def connect(
        self,
        address: str,
        hello: Mapping[str, Any],
        handler: Handler,
        *,
        secret: Secret | None = None,
        limits: Limits | None = None,
        heartbeat_seconds: float | None = None,
        name: str = "",
    ) -> Peer:
        """Connect to a server, for ever: what becomes of it the handler is told.

        Args:
            address: ``"host:port"``; it need not be there yet.
            hello: what the server is told: at least ``"role"``, a string, and ``"incarnation"``, the coordinator's.
            handler: is told of connections and losses.
            secret: the cluster's; ``None`` finds it, see ``find_secret``.
            limits: what a message may have at most; ``None`` asks the environment.
            heartbeat_seconds: of silence after which the server is lost; ``None`` asks the environment.
            name: of the server's task, for messages.

        Returns:
            The peer, which is not ready yet.

        Raises:
            ValueError: the address is malformed, or there is no secret for it.
        """
        addresses.split_address(address, "a server")
        if secret is None:
            secret = find_secret(addresses.are_loopback([address]))
        peer = Peer(
            self,
            address,
            {**hello, "client": f"{self._client}-{secrets.token_hex(4)}"},
            handler,
            secret,
            limits or Limits.from_environment(),
            _heartbeat(heartbeat_seconds),
            f"{name} at {address}" if name else f"the server at {address}",
        )
        self.call_soon(lambda: self._add(peer))
        return peer

    def call_soon(self, fn: Callable[[], object]) -> None:
        """Call a function on the loop's thread; from any thread.

        Raises:
            RuntimeError: the loop is closed.
        """
        if self._is_closed:
            raise RuntimeError("The control loop is closed.")
        self._calls.append(fn)
        if not self.is_current:
            self._waker.wake()

    @property
    def is_closed(self) -> bool:
        """Whether the connections are closed, or will be at once."""
        return self._is_closed

    @property
    def is_current(self) -> bool:
        """Whether the caller runs on the loop's thread."""
        return threading.current_thread() is self._thread

    def close(self) -> None:
        """Close all connections, fail all requests and end the thread."""
        if self._is_closed or os.getpid() != self._process:
            return
        self._is_closed = True
        self._waker.wake()
        if not self.is_current:
            self._thread.join(_JOIN_S)

    def release(self) -> None:
        """Close the descriptors in a forked child."""
        self._is_closed = True
        for peer in list(self._all_peers):
            peer.release()
        self._waker.close()

    # --- for peers, on the loop's thread

    def make_socket(self, kind: int) -> Any:
        """Return a new ZeroMQ socket of the loop's context; from any thread."""
        return self._context.socket(kind)

    def watch(self, peer: Peer, *zmq_sockets: Any) -> None:
        """Call the peer's ``read`` when one of the sockets has something."""
        for zmq_socket in zmq_sockets:
            self._poller.register(zmq_socket, zmq.POLLIN)
            self._peers[zmq_socket] = peer

    def unwatch(self, *zmq_sockets: Any) -> None:
        """Watch sockets no more, before they are closed."""
        for zmq_socket in zmq_sockets:
            self._poller.unregister(zmq_socket)
            del self._peers[zmq_socket]

    def forget(self, peer: Peer) -> None:
        """Keep a closed peer no more."""
        self._all_peers.discard(peer)

    def _add(self, peer: Peer) -> None:
        self._all_peers.add(peer)
        peer.open()

    def _run(self) -> None:
        while not self._is_closed:
            ready = dict(self._poller.poll())
            if self._waker.socket.fileno() in ready:
                self._waker.clear()
            for peer in dict.fromkeys(self._peers[source] for source in ready if source in self._peers):
                _guarded(peer.read)
            while self._calls:
                _guarded(self._calls.popleft())
        for peer in list(self._all_peers):
            _guarded(peer.shut)
        while self._calls:  # requests that came too late are told so
            _guarded(self._calls.popleft())
        self._context.term()  # tensor channels close their sockets by themselves, now that their peers are shut
        self._waker.close()


def _guarded(fn: Callable[[], object]) -> None:
    try:
        fn()
    except Exception:  # noqa: BLE001 - of one peer only
        logger.exception("The control loop goes on after an error.")


def _heartbeat(seconds: float | None) -> float:
    return heartbeat_seconds() if seconds is None else seconds


_loops: weakref.WeakSet[ControlLoop] = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    for loop in list(_loops):
        loop.close()
