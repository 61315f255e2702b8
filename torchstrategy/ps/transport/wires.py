"""The two kinds of tensor connections: a plain stream within a host, ZeroMQ with CURVE between hosts.

Streams are sockets of the library's own. Measured on two cores of one host, 40 MB there and back: 22 ms over a Unix
socket, 31 over TCP, 57 to 67 with pyzmq, whose I/O threads touch everything once more and whose every large message
is fresh memory.
"""

from __future__ import annotations

import contextlib
import selectors
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

from torch import Tensor

from torchstrategy.errors import DeadlineExceededError
from torchstrategy.ps.transport.limits import Limits
from torchstrategy.ps.transport.messages import (
    BufferPool,
    Header,
    Message,
    MessageError,
    check_size,
    decode,
    encode,
    parse_header,
    put_together,
    tensor_bytes,
)
from torchstrategy.ps.transport.secret import Seal
from torchstrategy.ps.transport.sockets import Monitor, Waker, zmq

__all__ = ["CurveWire", "Into", "StreamWire", "Wire", "read_exactly"]

_CLOSE = "close_channel"  # the kind of the message that ends a ZeroMQ connection
_CLOSE_LINGER_MS = 1000
_SMALL_BYTES = 64 << 10  # read at once; tensors of larger messages get memory of their own
_MAX_BUFFERS = 512  # of one system call; IOV_MAX is 1024
# Windows has neither.
_Selector: type[selectors.BaseSelector] = getattr(selectors, "PollSelector", selectors.SelectSelector)
_TAKES_SEVERAL = hasattr(socket.socket, "sendmsg")


Into = Callable[[Header], Sequence["Tensor | None"]]


class Wire(Protocol):
    """A tensor connection, at one end; one thread sends and one receives at a time."""

    def send(self, message: Message) -> None:
        """Send a message; when this returns, its tensors are no longer needed.

        Raises:
            ConnectionError: the connection is closed.
            TypeError: the message has blobs, or what ``encode`` can't take.
        """

    def wait(self, timeout_seconds: float | None = None) -> None:
        """Wait until something has come, or the connection is closed, and take nothing of it.

        Args:
            timeout_seconds: how long; ``None`` is for ever.

        Raises:
            ConnectionError: the connection is closed.
            DeadlineExceededError: nothing came in time; it may still come.
        """

    def receive(self, into: Into | None = None) -> Message:
        """Wait for the next message and take it; after an exception in the middle nothing more can be received.

        Args:
            into: called with the header; returns for each tensor the contiguous one of its shape and dtype that is to
                take its content, or ``None`` for new memory.

        Raises:
            ConnectionError: the connection is closed.
            MessageError: what came is no message of the other end; nothing more can be received.
        """

    def shut(self) -> None:
        """Make every ``send`` and ``receive`` end, those that wait in other threads too."""

    def close(self) -> None:
        """Free the connection; not while another thread uses it."""

    def release(self) -> None:
        """Close the descriptors in a forked child."""


class StreamWire:
    """A stream socket.

    Args:
        connection: connected and blocking; the wire takes it over.
        seal_out: of what is sent.
        seal_in: of what arrives.
        limits: what a message may have at most.
        pool: where large tensors' memory comes from.
    """

    def __init__(
        self, connection: socket.socket, seal_out: Seal, seal_in: Seal, limits: Limits, pool: BufferPool
    ) -> None:
        connection.settimeout(None)
        self.socket = connection
        self._is_shut = False
        self._seal_out = seal_out
        self._seal_in = seal_in
        self._limits = limits
        self._pool = pool

    def send(self, message: Message) -> None:
        """Send a message, see ``Wire``."""
        header, *tensors = _encode(message, self._limits)
        prefix = self._seal_out.close(header, sum(map(len, tensors)))
        _send_all(self.socket, [prefix + header, *(tensor for tensor in tensors if len(tensor))])

    def wait(self, timeout_seconds: float | None = None) -> None:
        """Wait until something has come, see ``Wire``."""
        with _Selector() as selector:
            selector.register(self.socket, selectors.EVENT_READ)
            if not selector.select(timeout_seconds):
                raise DeadlineExceededError(f"Nothing came within {timeout_seconds:g} s.")

    def receive(self, into: Into | None = None) -> Message:
        """Wait for the next message, see ``Wire``."""
        try:
            prefix = read_exactly(self.socket, Seal.num_bytes)
        except _BrokenOffError as error:
            raise self._truncated(error) from error
        try:
            return self._receive_rest(prefix, into)
        except ConnectionError as error:
            raise self._truncated(error) from error

    def _receive_rest(self, prefix: memoryview, into: Into | None) -> Message:
        header_bytes, tensor_bytes = self._seal_in.sizes(prefix, self._limits)
        is_small = header_bytes + tensor_bytes <= _SMALL_BYTES
        data = read_exactly(self.socket, header_bytes + tensor_bytes if is_small else header_bytes)
        self._seal_in.open(prefix, data[:header_bytes])
        header = _without_blobs(parse_header(data[:header_bytes], self._limits))
        if sum(tensor.num_bytes for tensor in header.tensors) != tensor_bytes:
            raise MessageError("the sizes before the header are not those in it")
        if is_small:
            return _moved(put_together(header, data[header_bytes:]), header, into)
        given = [None] * len(header.tensors) if into is None else into(header)
        tensors = tuple(
            self._pool.empty(to.num_bytes).view(to.dtype).view(to.shape) if own is None else own
            for own, to in zip(given, header.tensors, strict=True)
        )
        _read_into(self.socket, tensors)
        return Message(header.kind, header.fields, tensors)

    def shut(self) -> None:
        """End all waiting, see ``Wire``."""
        self._is_shut = True
        with contextlib.suppress(OSError):
            self.socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Free the connection, see ``Wire``."""
        self.socket.close()

    def release(self) -> None:
        """Close the descriptor in a forked child."""
        self.socket.close()

    def _truncated(self, error: Exception) -> Exception:
        return (
            ConnectionError("the connection is closed") if self._is_shut else MessageError(f"a truncated one: {error}")
        )


class CurveWire:
    """A ZeroMQ socket with exactly one other end.

    Args:
        zmq_socket: of type PAIR, connected or bound; the wire takes it over.
        seal_out: of what is sent.
        seal_in: of what arrives.
        limits: what a message may have at most.
        ends: of the end that connects, which has an event as soon as the connection has ended or could not be made.
            ZeroMQ makes another one then, and what was on its way would be waited for in vain.
    """

    def __init__(
        self, zmq_socket: Any, seal_out: Seal, seal_in: Seal, limits: Limits, ends: Monitor | None = None
    ) -> None:
        self._socket = zmq_socket
        self._seal_out = seal_out
        self._seal_in = seal_in
        self._limits = limits
        self._linger_ms = 0
        self._waker = Waker()
        self._is_shut = False
        self._lock = threading.Lock()  # a ZeroMQ socket is for one thread at a time
        self._poller = zmq.Poller()
        self._poller.register(zmq_socket, zmq.POLLIN)
        self._poller.register(self._waker.socket, zmq.POLLIN)
        self._ends = ends
        if ends is not None:
            self._poller.register(ends.socket, zmq.POLLIN)

    def send(self, message: Message) -> None:
        """Send a message, see ``Wire``."""
        header, *tensors = _encode(message, self._limits)
        with self._use():
            self._check_events()
            prefix = self._seal_out.close(header, sum(map(len, tensors)))
            try:
                self._socket.send_multipart([prefix + header, *tensors], zmq.NOBLOCK)  # copies
            except zmq.Again as error:  # without a limit of the queue this means: nobody is connected any more
                raise ConnectionError("the other end has closed the connection") from error

    def wait(self, timeout_seconds: float | None = None) -> None:
        """Wait until something has come, see ``Wire``."""
        with self._use():
            self._wait(timeout_seconds)

    def receive(self, into: Into | None = None) -> Message:
        """Wait for the next message, see ``Wire``."""
        with self._use():
            self._wait(None)
            first, *tensors = self._socket.recv_multipart(copy=False)
        data = memoryview(first.buffer)
        prefix, header = data[: Seal.num_bytes], data[Seal.num_bytes :]
        header_bytes, _ = self._seal_in.sizes(prefix, self._limits)
        if header_bytes != len(header):
            raise MessageError("a truncated message")
        self._seal_in.open(prefix, header)
        parsed = _without_blobs(parse_header(header, self._limits))
        message = decode([header, *(tensor.buffer for tensor in tensors)], self._limits)
        if message.kind == _CLOSE:
            raise ConnectionError("the other end has closed the connection")
        return _moved(message, parsed, into)

    def shut(self) -> None:
        """End all waiting, see ``Wire``."""
        self._is_shut = True
        self._waker.wake()
        self._close_unused()

    def close(self) -> None:
        """Free the connection, see ``Wire``, and tell the other end."""
        with contextlib.suppress(ConnectionError):
            self.send(Message(_CLOSE, {}))
            self._linger_ms = _CLOSE_LINGER_MS
        self.shut()

    @contextlib.contextmanager
    def _use(self) -> Iterator[None]:
        """Use the socket, which is for one thread at a time, and close it afterwards if it was shut meanwhile."""
        try:
            with self._lock:
                self._check()
                yield
        finally:
            if self._is_shut:  # asked after the lock was released, so that one of the two closes it
                self._close_unused()

    def _close_unused(self) -> None:
        # Who finds the lock taken leaves it to the thread that has it: a context can't end before its sockets.
        if self._lock.acquire(blocking=False):
            try:
                if self._ends is not None and not self._socket.closed:
                    self._ends.close()
                self._socket.close(self._linger_ms)
                self._waker.close()
            finally:
                self._lock.release()

    def release(self) -> None:
        """Close the descriptors in a forked child; ZeroMQ's own are of the context that the child never uses."""
        self._is_shut = True
        self._waker.close()

    def _check(self) -> None:
        if self._is_shut:
            raise ConnectionError("the connection is closed")

    def _wait(self, timeout_seconds: float | None) -> None:
        ready = dict(self._poller.poll(None if timeout_seconds is None else 1000 * timeout_seconds))
        self._check()
        if not ready:
            raise DeadlineExceededError(f"Nothing came within {timeout_seconds:g} s.")
        if self._socket not in ready:
            self._check_events()

    def _check_events(self) -> None:
        if self._ends is not None and any(True for _ in self._ends.events()):
            raise ConnectionError("it has ended, or could not be made")


class _BrokenOffError(ConnectionError):
    """The stream has ended after some bytes of what was read."""


def read_exactly(connection: socket.socket, num_bytes: int) -> memoryview:
    """Read as many bytes from a stream.

    Raises:
        ConnectionError: the stream ends before.
    """
    data = memoryview(bytearray(num_bytes))
    _read_buffers(connection, [data])
    return data


def _encode(message: Message, limits: Limits) -> list[Any]:
    if message.blobs:
        raise TypeError(
            f"A message of kind {message.kind!r} with blobs was given to a tensor connection, which may be plain. "
            "Blobs travel on the control connection: use the peer's call()."
        )
    frames = encode(message)
    check_size(message.kind, frames, limits)
    return frames


def _without_blobs(header: Header) -> Header:
    if header.blob_sizes:
        raise MessageError("blobs on a tensor connection")
    return header


def _moved(message: Message, header: Header, into: Into | None) -> Message:
    """Return a message whose tensors are where ``into`` wants them."""
    if into is None:
        return message
    pairs = zip(into(header), message.tensors, strict=True)
    return message._replace(tensors=tuple(tensor if own is None else own.copy_(tensor) for own, tensor in pairs))


def _send_all(connection: socket.socket, buffers: Sequence[bytes | memoryview]) -> None:
    rest = [memoryview(buffer) for buffer in buffers]
    while rest:
        try:
            sent = connection.sendmsg(rest[:_MAX_BUFFERS]) if _TAKES_SEVERAL else connection.send(rest[0])
        except OSError as error:
            raise ConnectionError(f"the connection is closed: {error}") from error
        rest = _after(rest, sent)


def _read_into(connection: socket.socket, tensors: Sequence[Tensor]) -> None:
    _read_buffers(connection, [tensor_bytes(tensor) for tensor in tensors])


def _read_buffers(connection: socket.socket, buffers: Sequence[memoryview]) -> None:
    rest = [buffer for buffer in buffers if len(buffer)]
    closed: type[ConnectionError] = ConnectionError
    while rest:
        try:
            if len(rest) == 1 or not _TAKES_SEVERAL:
                received = connection.recv_into(rest[0], 0, socket.MSG_WAITALL)
            else:
                received = connection.recvmsg_into(rest[:_MAX_BUFFERS], 0, socket.MSG_WAITALL)[0]
        except OSError as error:
            raise closed(f"the connection is closed: {error}") from error
        if not received:
            raise closed("the other end has closed the connection")
        rest = _after(rest, received)
        closed = _BrokenOffError


def _after(buffers: list[memoryview], num_bytes: int) -> list[memoryview]:
    """Return what is left of buffers after their first bytes."""
    for position, buffer in enumerate(buffers):
        if num_bytes < len(buffer):
            return [buffer[num_bytes:], *buffers[position + 1 :]]
        num_bytes -= len(buffer)
    return []
