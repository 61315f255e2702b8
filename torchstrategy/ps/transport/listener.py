"""A server's connections: one encrypted control connection for each client, and its tensor connections.

One thread serves all control connections. Each tensor connection has a thread, and a bounded number of their requests
is worked on at once.
"""

from __future__ import annotations

import contextlib
import errno
import secrets
import threading
from collections import deque
from typing import Any

from torchstrategy.base import addresses
from torchstrategy.base.job import heartbeat_seconds
from torchstrategy.base.log import logger
from torchstrategy.ps.transport.admission import Admission
from torchstrategy.ps.transport.client_session import Service, Session
from torchstrategy.ps.transport.gatekeeper import Gatekeeper, secure_server
from torchstrategy.ps.transport.limits import Limits, RefusalLog
from torchstrategy.ps.transport.messages import (
    Message,
    MessageError,
    check_size,
    decode,
    encode,
    error_message,
)
from torchstrategy.ps.transport.secret import Secret, find_secret
from torchstrategy.ps.transport.sockets import (
    Monitor,
    Waker,
    close_in_child,
    close_sockets,
    failure,
    failures,
    require,
    zmq,
)
from torchstrategy.ps.transport.tensor_server import TensorServer

__all__ = ["Listener"]

NUMBER_BYTES = 8
_JOIN_S = 5.0
_MAX_BATCH = 64


class Listener:
    """Serves clients at one address.

    Args:
        address: ``"host:port"``; port 0 takes a free one, and a host that this machine's interfaces don't have, such as
            the name of a service in front of it, means all interfaces.
        service: what the clients are served.
        secret: the cluster's; ``None`` finds it, see ``find_secret``.
        encrypt_tensors: ``False`` leaves tensors between hosts plain.
        num_tensor_threads: how many tensor requests are worked on at once.
        limits: what a message may have at most; ``None`` asks the environment.
        heartbeat_s: seconds of silence after which a client is lost; ``None`` asks the environment.

    Raises:
        ValueError: the address is malformed, or reachable from other hosts without a configured secret.
        ImportError: pyzmq is not installed.
    """

    def __init__(
        self,
        address: str,
        service: Service,
        *,
        secret: Secret | None = None,
        encrypt_tensors: bool = True,
        num_tensor_threads: int = 4,
        limits: Limits | None = None,
        heartbeat_s: float | None = None,
    ) -> None:
        require()
        self.incarnation = secrets.token_hex(8)
        self._host, self._port = addresses.split_address(address, "a server", least_port=0)
        self._is_loopback = addresses.is_loopback(self._host)
        #: The cluster's.
        self.secret = find_secret(self._is_loopback) if secret is None else secret
        self._service = service
        self._limits = limits or Limits.from_environment()
        self._control_limits = self._limits.of_control()
        self._heartbeat_s = heartbeat_seconds() if heartbeat_s is None else heartbeat_s
        self._refusals = RefusalLog(f"The server at {address}")
        self._outbox: deque[tuple[bytes, int, Message]] = deque()
        self._is_open = self._is_stopping = False
        self._thread: threading.Thread | None = None
        self._ports: dict[int, int] = {}  # of connections and the listening socket, by descriptor
        self._tensors = TensorServer(
            service,
            self.secret,
            self._refusals,
            self._limits,
            num_threads=num_tensor_threads,
            is_plain=self._is_loopback or not encrypt_tensors,
            wake=lambda: self._waker.wake(),
        )
        self._admission = Admission(service, self.incarnation, self._post, self._tensors, self._refusals)

    @property
    def address(self) -> str:
        """Where clients reach this server, with the port that it has taken."""
        return addresses.join_address(self._host, self._port)

    def open(self) -> None:
        """Take the address; clients that come wait for ``start``.

        Raises:
            OSError: the address can't be taken.
        """
        if self._thread is not None:
            raise RuntimeError("This listener was started before; make another one.")
        self._waker = Waker()
        self._context = zmq.Context()  # one I/O thread: events of several would not come in order
        self._gatekeeper = Gatekeeper(self._context, self.secret, self._refusals)
        self._router = self._context.socket(zmq.ROUTER)
        self._monitor = Monitor(self._router, _event_kinds())
        try:
            ip = self._bind()
            self._tensors.open(ip, num_io_threads=1 if self._is_loopback else 4)
        except BaseException:
            self._close_sockets()
            raise
        self._see_events()  # that it listens, which a child forked right now must know
        close_in_child(self)
        self._is_open = True

    def start(self) -> None:
        """Begin to serve.

        Raises:
            OSError: the address can't be taken.
        """
        if not self._is_open:
            self.open()
        self._thread = threading.Thread(target=self._serve, name="torchstrategy-listener", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Close all connections and end the threads; requests that are worked on get some seconds."""
        if self._thread is None:
            self._close_unstarted()
        if self._thread is None or self._is_stopping:
            return
        self._is_stopping = True
        self._waker.wake()
        if threading.current_thread() is not self._thread:
            self._thread.join(_JOIN_S)

    def _close_unstarted(self) -> None:
        if self._is_open:
            self._is_open = False
            self._tensors.close()
            self._close_sockets()

    def release(self) -> None:
        """Close the descriptors in a forked child."""
        close_sockets(self._ports)
        self._tensors.release()
        self._waker.close()

    # --- the thread of the control connections

    def _configure(self, ip: str) -> None:
        router, heartbeat_ms = self._router, 1000 * self._heartbeat_s
        secure_server(router, self.secret, ip)
        router.maxmsgsize = self._limits.max_control_bytes
        router.rcvhwm = 0
        router.router_mandatory = True
        router.heartbeat_ivl = max(1, int(heartbeat_ms / 4))
        router.heartbeat_timeout = max(1, int(heartbeat_ms * 3 / 4))

    def _bind(self) -> str:
        ip = addresses.resolve(self._host)[0]
        self._configure(ip)
        try:
            try:
                self._router.bind(addresses.endpoint(ip, self._port))
            except zmq.ZMQError as error:
                if error.errno != errno.EADDRNOTAVAIL or self._is_loopback:
                    raise
                ip = "::" if ":" in ip else "0.0.0.0"
                self._router.bind(addresses.endpoint(ip, self._port))
        except zmq.ZMQError as error:
            raise OSError(error.errno, f"{self.address} can't be listened at: {error}") from error
        self._port = int(self._router.last_endpoint.decode().rstrip("\0").rpartition(":")[2])
        return ip

    def _serve(self) -> None:
        poller = zmq.Poller()
        gatekeepers = self._gatekeeper, self._tensors.gatekeeper
        for source in (self._router, self._monitor.socket, self._waker.socket, *(who.socket for who in gatekeepers)):
            poller.register(source, zmq.POLLIN)
        try:
            while not self._is_stopping:
                ready = dict(poller.poll())
                if self._waker.socket.fileno() in ready:
                    self._waker.clear()
                for gatekeeper in gatekeepers:
                    if gatekeeper.socket in ready:
                        gatekeeper.answer()
                if self._monitor.socket in ready:
                    self._see_events()
                if self._router in ready:
                    self._read()
                self._admission.go_on()
                self._write()
        except Exception:  # noqa: BLE001 - logged; the clients see the connections close
            if not self._is_stopping:
                logger.exception("The server at %s has failed and serves no one any more.", self.address)
        finally:
            self._shut_down()

    def _shut_down(self) -> None:
        self._is_stopping = True
        self._write()  # what was answered
        for session in self._admission.sessions():
            session.shut("the server has stopped")
        self._tensors.close()
        self._close_sockets()

    def _close_sockets(self) -> None:
        self._monitor.close()
        self._router.close(linger=200)
        self._gatekeeper.close()
        self._waker.close()
        self._context.term()

    def _see_events(self) -> None:
        reason = ""
        for event in self._monitor.events():
            if event.kind == zmq.EVENT_LISTENING:
                self._ports[event.value] = self._port
            elif event.kind == zmq.EVENT_ACCEPTED:
                self._ports[event.value] = self._port
                self._admission.connected(event.value)
            elif event.kind == zmq.EVENT_DISCONNECTED:
                self._ports.pop(event.value, None)
                self._admission.disconnected(event.value, reason)
            else:
                reason = failure(event)

    def _read(self) -> None:
        for _ in range(_MAX_BATCH):
            try:
                frames = self._router.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return
            self._take(frames)

    def _take(self, frames: list[Any]) -> None:
        identity = bytes(frames[0].buffer)
        session = self._admission.find(identity)
        host = session.host if session else frames[0].get("Peer-Address") if len(frames) < 2 else _host(frames[1])
        number = 0
        try:
            if len(frames) < 3 or len(frames[1].buffer) != NUMBER_BYTES:
                raise MessageError("a truncated message")
            number = int.from_bytes(frames[1].buffer, "little")
            message = decode([frame.buffer for frame in frames[2:]], self._control_limits)._replace(number=number)
            reply = self._answer(session, identity, message, frames[1], host)
        except MessageError as error:
            self._refusals.add(host, "a malformed message", str(error))
            reply = error_message(error)
        except Exception as error:  # noqa: BLE001 - the client is told
            reply = error_message(error)
        if reply is not None:
            self._post(identity, number, reply)

    def _answer(
        self, session: Session | None, identity: bytes, message: Message, frame: Any, host: str
    ) -> Message | None:
        if message.kind == "hello":
            self._see_events()  # so that the connection it came by is known
            self._admission.hello(identity, message, frame.get(zmq.SRCFD), host)
            return None
        if session is None:
            return Message("stranger", {"message": "This connection has not said hello."})
        if not session.is_valid:
            self._refusals.add(host, "a message of an older coordinator, or one of its workers", repr(session))
            session.check()
        session.count(message.number)
        if message.kind == "open_tensors":
            return Message("opened", {"port": self._tensors.open_encrypted(session)})
        return self._service.control(session, message)

    # --- sending, from any thread

    def _post(self, identity: bytes, number: int, message: Message) -> None:
        self._outbox.append((identity, number, message))
        if threading.current_thread() is not self._thread:
            self._waker.wake()

    def _write(self) -> None:
        while self._outbox:
            identity, number, message = self._outbox.popleft()
            try:
                frames = encode(message)
                check_size(message.kind, frames, self._control_limits)
            except (TypeError, ValueError) as error:
                frames = encode(error_message(error))
            with contextlib.suppress(zmq.ZMQError):  # the client is gone
                self._router.send_multipart([identity, number.to_bytes(NUMBER_BYTES, "little"), *frames], zmq.NOBLOCK)


def _host(frame: Any) -> str:
    with contextlib.suppress(zmq.ZMQError):
        return str(frame.get("Peer-Address"))
    return "an unknown host"


def _event_kinds() -> int:
    return int(zmq.EVENT_LISTENING | zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED | failures())
