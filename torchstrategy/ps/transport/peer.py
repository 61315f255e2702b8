"""One server, as a client sees it."""

from __future__ import annotations

import contextlib
import itertools
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any, Protocol

from torchstrategy.base import addresses
from torchstrategy.base.log import logger
from torchstrategy.errors import DeadlineExceededError, UnavailableError
from torchstrategy.ps.states import PeerState, follow
from torchstrategy.ps.transport.gatekeeper import secure_client
from torchstrategy.ps.transport.limits import Limits
from torchstrategy.ps.transport.messages import Message, MessageError, check_size, decode, encode, raise_error
from torchstrategy.ps.transport.secret import Secret
from torchstrategy.ps.transport.sockets import Monitor, close_sockets, failure, failures, is_refused, remote_end, zmq

__all__ = ["Callback", "Handler", "Peer"]

Callback = Callable[[Message | Exception], object]

_NUMBER_BYTES = 8
_RETRY_MS = 50
_MAX_RETRY_MS = 1000
#: For how long a lost server's host must say that nothing listens there: it says so for a moment, too, while a firewall
#: or a container's network is set up anew.
_GONE_AFTER_S = 2.0
#: Handshakes in a row that must fail before a server is said to have another secret.
_NUM_CUT = 4


class Handler(Protocol):
    """What is told of a peer, on the loop's thread."""

    def ready(self, peer: Peer, welcome: dict[str, Any]) -> None:
        """The server was (re)connected and has admitted this client; ``welcome["server"]`` is its incarnation."""

    def lost(self, peer: Peer, reason: str) -> None:
        """The server was ready and is gone; ``ready`` follows when it is back."""

    def refused(self, peer: Peer, reason: str) -> None:
        """The server does not admit this client, for good."""

    def message(self, peer: Peer, message: Message) -> None:
        """A message that answers no request that waits."""


class _Losable(Protocol):
    def fail(self, reason: str) -> None: ...

    def release(self) -> None: ...


class Loop(Protocol):
    """What a peer needs of the loop that it belongs to."""

    @property
    def is_current(self) -> bool:
        """Whether the caller runs on the loop's thread."""

    def call_soon(self, fn: Callable[[], object]) -> None:
        """Call a function on the loop's thread."""

    def make_socket(self, kind: int) -> Any:
        """Return a new socket."""

    def watch(self, peer: Peer, *zmq_sockets: Any) -> None:
        """Call the peer's ``read`` when one of the sockets has something."""

    def unwatch(self, *zmq_sockets: Any) -> None:
        """Watch sockets no more."""

    def forget(self, peer: Peer) -> None:
        """Keep a closed peer no more."""


class Peer:
    """A server; made by ``ControlLoop.connect``."""

    def __init__(
        self,
        loop: Loop,
        address: str,
        hello: dict[str, Any],
        handler: Handler,
        secret: Secret,
        limits: Limits,
        heartbeat_s: float,
        name: str,
    ) -> None:
        self.loop = loop
        self.secret = secret
        self.limits = limits
        self._limits = limits.of_control()
        self.name = name
        #: ``"host:port"``.
        self.address = address
        #: Why it is not ready, in words.
        self.reason = "nothing has answered yet"
        #: Whether it was lost and its host says all the time that nothing listens there: its process has ended.
        self.is_gone = False
        self._refused_since: float | None = None
        #: What tensor channels need, from the last welcome.
        self.connection: dict[str, Any] = {}
        self._host, self._port = addresses.split_address(address, "a server")
        self._hello = hello
        self._handler = handler
        self._heartbeat_s = heartbeat_s
        self._state = PeerState.CONNECTING
        self._numbers = itertools.count(1)
        self._hello_number = 0
        self._waiting: dict[int, Callback] = {}
        self._socket: Any = None
        self._monitor: Any = None
        self._descriptors: dict[int, int] = {}
        self._end_point: tuple[Any, ...] | None = None  # of the last connection
        self._has_warned = False
        self._num_cut = 0
        self._lock = threading.Lock()
        self._order = threading.Lock()  # numbers are sent in the order of their size, or the server sees a replay
        self._channels: weakref.WeakSet[_Losable] = weakref.WeakSet()

    def __repr__(self) -> str:
        return f"<{self.name}, {self._state.value}>"

    @property
    def state(self) -> PeerState:
        """What the connection is."""
        return self._state

    def request(self, message: Message, callback: Callback) -> int:
        """Send a message; from any thread.

        Args:
            message: the message.
            callback: gets the reply, of whatever kind, or an ``UnavailableError`` if the server is or gets lost; on
                the loop's thread.

        Returns:
            The message's number.

        Raises:
            TypeError: the message can't be sent.
            ValueError: it is larger than allowed.
        """
        frames = encode(message)
        check_size(message.kind, frames, self._limits)
        with self._order:
            number = next(self._numbers)
            with contextlib.suppress(RuntimeError):
                self.loop.call_soon(lambda: self._send(frames, callback, number))
                return number
        callback(UnavailableError(f"{self.name} can't be asked: the connections of this process are closed."))
        return number

    def call(self, message: Message, timeout_seconds: float | None = None) -> Message:
        """Send a message and wait for the reply; not on the loop's thread.

        Args:
            message: the message.
            timeout_seconds: how long to wait; ``None`` is for ever, as long as the server is not lost.

        Raises:
            UnavailableError: the server is or gets lost.
            DeadlineExceededError: it has not answered in time.
            Exception: what the server's reply tells.
        """
        if self.loop.is_current:
            raise RuntimeError("call() would wait for its own thread: use request() on the control loop's thread.")
        replies: list[Message | Exception] = []
        is_there = threading.Event()

        def take(reply: Message | Exception) -> None:
            replies.append(reply)
            is_there.set()

        number = self.request(message, take)
        if not is_there.wait(timeout_seconds):
            self._waiting.pop(number, None)
            raise DeadlineExceededError(
                f"{self.name} has not answered a message of kind {message.kind!r} within {timeout_seconds:g} s."
            )
        reply = replies[0]
        if isinstance(reply, Exception):
            raise reply
        if reply.kind == "error":
            raise_error(reply)
        return reply

    def close(self) -> None:
        """Close the connection; from any thread. Requests that wait get an ``UnavailableError``."""
        with contextlib.suppress(RuntimeError):
            self.loop.call_soon(self.shut)

    def add_channel(self, channel: _Losable) -> None:
        """Tell a tensor channel when the server is lost.

        Raises:
            UnavailableError: it is not ready.
        """
        with self._lock:
            if self._state is not PeerState.READY:
                raise self.unavailable()
            self._channels.add(channel)

    def unavailable(self) -> UnavailableError:
        """Return the error that says that, and why, the server is not ready."""
        return UnavailableError(f"{self.name[0].upper()}{self.name[1:]} is not available: {self.reason}.")

    def release(self) -> None:
        """Close the descriptors in a forked child."""
        if self._state is not PeerState.CLOSED:
            self._state = follow(self._state, PeerState.CLOSED)
        close_sockets(self._descriptors)
        for channel in list(self._channels):
            channel.release()

    # --- on the loop's thread

    def open(self) -> None:
        """Begin to connect."""
        self._socket = self.loop.make_socket(zmq.DEALER)
        secure_client(self._socket, self.secret, self._host)
        heartbeat_ms = 1000 * self._heartbeat_s
        self._socket.heartbeat_ivl = max(1, int(heartbeat_ms / 4))
        self._socket.heartbeat_timeout = max(1, int(heartbeat_ms * 3 / 4))
        self._socket.maxmsgsize = self.limits.max_control_bytes
        self._socket.rcvhwm = 0
        self._socket.reconnect_ivl = _RETRY_MS
        self._socket.reconnect_ivl_max = _MAX_RETRY_MS
        self._monitor = Monitor(self._socket, _event_kinds())
        self._hello_number = 0
        self.loop.watch(self, self._socket, self._monitor.socket)
        self._socket.connect(addresses.endpoint(self._host, self._port))

    def read(self) -> None:
        """Take what has come."""
        self._read_messages()
        if self._socket is not None:
            self._see_events()

    def shut(self) -> None:
        """Close the connection for good."""
        if self._state is not PeerState.CLOSED:
            self._end(PeerState.CLOSED, "this process has closed the connection")
            self.loop.forget(self)

    def _read_messages(self) -> None:
        while self._socket is not None:
            try:
                frames = self._socket.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return
            self._take([frame.buffer for frame in frames])

    def _see_events(self) -> None:
        for event in list(self._monitor.events()):
            if event.kind == zmq.EVENT_CONNECTED:
                self._descriptors[event.value] = self._port
                end = remote_end(event.value)
                if end is not None and end[1] == self._port:  # else the descriptor stands for another one by now
                    self._end_point = end
                self.reason = "the connection was made but not answered yet"
                self._refused_since = None
            elif event.kind == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                with self._order:
                    self._hello_number = next(self._numbers)
                self._put(self._hello_number, encode(Message("hello", self._hello)))
            elif event.kind == zmq.EVENT_DISCONNECTED:
                self._descriptors.pop(event.value, None)
                self._read_messages()  # what was answered before the end counts
                if self._socket is not None:
                    self._disconnected()
                return
            elif event.kind == zmq.EVENT_CLOSED:
                self.reason = "nothing listens there, or it can't be reached"
                if self._state is PeerState.LOST and self._end_point is not None and not self.is_gone:
                    self._probe(self._end_point)
            else:
                self._not_trusted(failure(event))

    def _probe(self, end_point: tuple[Any, ...]) -> None:
        now = time.monotonic()
        self._refused_since = (self._refused_since or now) if is_refused(end_point) else None
        self.is_gone = self._refused_since is not None and now - self._refused_since >= _GONE_AFTER_S

    def _disconnected(self) -> None:
        if self._state is PeerState.READY:
            self._lose("its connection was closed, or it was silent for too long")
        elif self._hello_number:  # the welcome will not come any more
            self._close_socket()
            self.open()
        else:  # ZeroMQ tries again
            self._not_trusted("it has another secret, or is no server of torchstrategy")

    def _not_trusted(self, reason: str) -> None:
        self._num_cut += 1
        if self._num_cut < _NUM_CUT:  # a server that has just been killed, or begins, does the same
            self.reason = "the connection was closed before it was answered"
            return
        self.reason = f"it does not trust this process: {reason}"
        if not self._has_warned:
            self._has_warned = True
            logger.warning(
                "Connected to %s, but %s. The secret used here is from %s; this process keeps trying.",
                self.name, self.reason, self.secret.source,
            )  # fmt: skip

    def _lose(self, reason: str) -> None:
        self._end(PeerState.LOST, reason)
        _tell(self._handler.lost, self, reason)
        if self._state is PeerState.LOST:
            self.open()

    def _end(self, state: PeerState, reason: str) -> None:
        with self._lock:
            self._state = follow(self._state, state)
            self.reason = reason
            channels = list(self._channels)
            self._channels.clear()
        self._close_socket()
        for channel in channels:
            channel.fail(reason)
        waiting, self._waiting = self._waiting, {}
        for callback in waiting.values():
            _tell(callback, self.unavailable())

    def _close_socket(self) -> None:
        if self._socket is None:
            return
        self.loop.unwatch(self._socket, self._monitor.socket)
        self._monitor.close()
        self._socket.close(linger=0)
        self._socket = self._monitor = None
        self._descriptors.clear()

    def _send(self, frames: list[Any], callback: Callback, number: int) -> None:
        if self._state is not PeerState.READY:
            _tell(callback, self.unavailable())
            return
        self._waiting[number] = callback
        self._put(number, frames)

    def _put(self, number: int, frames: list[Any]) -> None:
        self._socket.send_multipart([number.to_bytes(_NUMBER_BYTES, "little"), *frames])  # copies

    def _take(self, frames: list[Any]) -> None:
        try:
            if len(frames) < 2 or len(frames[0]) != _NUMBER_BYTES:
                raise MessageError("a truncated message")
            number = int.from_bytes(frames[0], "little")
            message = decode(frames[1:], self._limits)._replace(number=number)
        except MessageError as error:
            logger.warning("Dropped a message of %s: %s", self.name, error)
            return
        if number == self._hello_number and self._state is not PeerState.READY:
            self._welcomed(message)
        elif number == 0 and message.kind == "error":
            self._refused(message)
        elif message.kind == "stranger" and self._state is PeerState.READY:
            self._lose("its connection was closed")  # and made anew by ZeroMQ, before this thread saw its end
        elif (callback := self._waiting.pop(number, None)) is not None:
            _tell(callback, message)
        else:
            _tell(self._handler.message, self, message)

    def _welcomed(self, message: Message) -> None:
        if message.kind == "welcome":
            self.connection = message.fields["connection"]
            with self._lock:
                self._state = follow(self._state, PeerState.READY)
            self._has_warned = self.is_gone = False
            self._num_cut = 0
            _tell(self._handler.ready, self, message.fields["welcome"])
        else:
            self._refused(message)

    def _refused(self, message: Message) -> None:
        reason = str(message.fields.get("message"))
        self._end(PeerState.REFUSED, reason)
        _tell(self._handler.refused, self, reason)


def _tell(callback: Callable[..., object], *what: object) -> None:
    try:
        callback(*what)
    except Exception:  # noqa: BLE001 - the other replies still have their callbacks, and the connection goes on
        logger.exception("A callback of the control loop has failed.")


def _event_kinds() -> int:
    connection = zmq.EVENT_CONNECTED | zmq.EVENT_CLOSED | zmq.EVENT_DISCONNECTED
    return int(connection | zmq.EVENT_HANDSHAKE_SUCCEEDED | failures())
