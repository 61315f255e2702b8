"""The job's control plane: short messages between all processes, and who of them is still there.

Every process holds TCP connections to a few others (``Ways`` in ``notices.py``). A thread serves them, so that a
process answers while its program computes or waits; messages are JSON. A process that dies closes its connections, one
that is stopped or cut off stops sending heartbeats; those that are connected to it tell the others.

Processes of two hosts have a second connection, over which a process of its own beats while native code keeps the
thread from running (``Pulse``). TCP's own keepalive would not do: the kernel answers for a stopped process, too.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import selectors
import socket
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NoReturn, Protocol

from torch.distributed import DistStoreError, Store  # type: ignore[attr-defined]

from torchstrategy.base.job import Pulse, heartbeat_seconds
from torchstrategy.base.log import logger
from torchstrategy.collectives.connections import (
    BACKLOG,
    Peer,
    frame,
    read_hello,
    signed_call,
    signed_door,
)
from torchstrategy.collectives.notices import Message, Notices, Ways, lost_record, ranks_of

__all__ = ["ControlPlane"]

_FLUSH_S = 1.0
# What comes so soon after something was sent to a rank waits, to go together.
_TOGETHER_S = 0.01


class _OnLost(Protocol):
    def __call__(self, rank: int, *, closed: bool) -> None: ...


class ControlPlane:
    """One process's connections; made by all processes of a job together.

    Args:
        store: where ranks to which others connect publish their addresses; with a prefix of its own. It is not needed
            afterwards.
        rank: this process's id.
        hosts: for each rank the number of its host.
        address: this process's address, as the others can reach it.
        on_message: called in the plane's thread with a message and by whom it is, a number whose bits are ranks. One of
            kind ``"told"`` by this rank says how many of its messages all others know.
        on_lost: called in the plane's thread with a rank and whether its connection closed; else it is silent.
        on_back: called there with a rank that was silent and is heard again.
        timeout_s: seconds in which all connections must be there.

    Raises:
        OSError: another process can't be reached.
    """

    def __init__(
        self,
        store: Store,
        rank: int,
        hosts: Sequence[int],
        address: str,
        *,
        on_message: Callable[[int, Message], None],
        on_lost: _OnLost,
        on_back: Callable[[int], None],
        timeout_s: float,
    ) -> None:
        self._rank = rank
        self._hosts = hosts
        self._ways = Ways(rank, hosts)
        self._notices = Notices(self._ways, lambda number: on_message(1 << rank, {"kind": "told", "body": number}))
        self._on_message = on_message
        self._on_lost = on_lost
        self._on_back = on_back
        self._heartbeat_s = heartbeat_seconds()
        self._peers: dict[int, Peer] = {}
        self._pulse: Pulse | None = None
        self._left: set[int] = set()
        self._outbox: deque[Message] = deque()
        self._num_posted = 0
        self._posting = threading.RLock()  # a signal's handler may post, too
        self._selector = selectors.DefaultSelector()
        self._wake_in, self._wake_out = socket.socketpair()
        self._stop = False
        for connection in (self._wake_in, self._wake_out):
            connection.settimeout(0)
        self._selector.register(self._wake_in, selectors.EVENT_READ)
        try:
            self._connect(store, address, timeout_s)
        except BaseException:
            self.release()
            self._selector.close()
            raise
        pulses = [peer.pulse for peer in self._peers.values() if peer.pulse is not None]
        self._pulse = Pulse.start(pulses, self._heartbeat_s / 4)
        _planes.add(self)
        self._thread = threading.Thread(target=self._serve, name="torchstrategy-control", daemon=True)
        self._thread.start()

    def post(self, kind: str, body: Any = None, own: Any = None) -> int:
        """Send a message to all others.

        Args:
            kind: what kind of message it is.
            body: anything JSON can hold, at most a megabyte with the rest. Ranks' messages of equal kind and body are
                united.
            own: what goes with it; of messages that are united only the first one's arrives.

        Returns:
            The number of this rank's messages with it.
        """
        with self._posting:
            self._num_posted += 1
            self._outbox.append({"by": 1 << self._rank, "kind": kind, "body": body, "own": own})
            self._wake()
            return self._num_posted

    @property
    def is_connected(self) -> bool:
        """Whether this process can hear others."""
        return bool(self._peers) and self._thread.is_alive()

    def relays(self, other: int) -> set[int]:
        """Return the ranks that pass on messages between this one and another."""
        return self._ways.relays(other)

    def close(self, how: str | None = None) -> None:
        """Say that this process leaves, and how, and close the connections."""
        self.post("left", how)  # before the thread may end
        self._stop = True
        self._wake()
        if threading.current_thread() is not self._thread:
            self._thread.join(timeout=2 * _FLUSH_S)

    def _wake(self) -> None:
        with contextlib.suppress(OSError):  # full: the thread is about to wake up anyway
            self._wake_out.send(b"x")

    # --- connecting

    def _connect(self, store: Store, address: str, timeout_s: float) -> None:
        if self._rank == 0:
            store.set("key", secrets.token_hex(32))
        key = _wait_for(store, "key", 0)
        expected = self._ways.answers
        with contextlib.ExitStack() as stack:
            if expected:
                family = socket.AF_INET6 if ":" in address else socket.AF_INET
                listener = stack.enter_context(socket.create_server((address, 0), family=family, backlog=BACKLOG))
                store.set(f"address/{self._rank}", f"{address} {listener.getsockname()[1]}")
            for other in self._ways.calls:
                self._call(other, store, key, timeout_s)
            if expected:
                deadline = time.monotonic() + timeout_s
                door = stack.enter_context(signed_door(listener, key, expected))
                while missing := [other for other in expected if not self._is_welcome(other)]:
                    remaining = deadline - time.monotonic()
                    if remaining <= 0:
                        self._give_up(missing, f"did not connect within {timeout_s:g} s")
                    for connection, hello in door.wait(remaining):
                        self._welcome(connection, read_hello(hello))

    def _is_welcome(self, other: int) -> bool:
        peer = self._peers.get(other)
        return peer is not None and (self._is_here(other) or peer.pulse is not None)

    def _is_here(self, other: int) -> bool:
        return self._hosts[other] == self._hosts[self._rank]

    def _give_up(self, missing: Sequence[int], how: str) -> NoReturn:
        """Tell the ranks that are connected whom this one waited for; else they would take this one for the culprit."""
        names = ", ".join(map(str, missing))
        own = lost_record(names, how)
        message = frame({"by": f"{1 << self._rank:x}", "kind": "failed", "body": [0, -1, -1], "own": own})
        for peer in self._peers.values():
            with contextlib.suppress(OSError):
                peer.connection.send(message)
        raise TimeoutError(f"Rank {names} {how}.")

    def _call(self, other: int, store: Store, key: bytes, timeout_s: float) -> None:
        address = _wait_for(store, f"address/{other}", other).decode()
        hello = {"rank": self._rank, "pid": os.getpid(), "is_pulse": False}
        try:
            connection, answer = signed_call(address, key, timeout_s, hello)
            self._add(other, connection, int(answer["pid"]))
            if not self._is_here(other):
                self._feel(other, signed_call(address, key, timeout_s, {**hello, "is_pulse": True})[0])
        except (OSError, ValueError, LookupError, TypeError) as error:
            where = address.replace(" ", ", port ")
            raise ConnectionError(f"Rank {other} can't be reached at {where}: {error}") from error

    def _welcome(self, connection: socket.socket, hello: Message) -> None:
        """Take a connection that a rank has made; one more than it should is closed."""
        other = hello["rank"]
        peer = self._peers.get(other)
        with contextlib.suppress(OSError):  # reading will find it closed
            connection.send(frame({"pid": os.getpid()}))
        if peer is None and not hello["is_pulse"]:
            self._add(other, connection, int(hello["pid"]))
        elif peer is not None and hello["is_pulse"] and peer.pulse is None:
            self._feel(other, connection)
        else:
            connection.close()

    def _add(self, other: int, connection: socket.socket, pid: int) -> None:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.settimeout(0)
        self._peers[other] = peer = Peer(other, connection, pid if self._is_here(other) else None)
        self._selector.register(connection, selectors.EVENT_READ, peer)

    def _feel(self, other: int, pulse: socket.socket) -> None:
        pulse.settimeout(0)
        self._peers[other].pulse = pulse
        self._selector.register(pulse, selectors.EVENT_READ, self._peers[other])

    # --- the thread

    def _serve(self) -> None:
        try:
            woken = beaten = time.monotonic()
            while not self._stop:
                if time.monotonic() - beaten > self._heartbeat_s / 4:
                    beaten = time.monotonic()
                    for peer in self._peers.values():
                        peer.unsent += frame({"kind": "beat"})
                self._turn(self._heartbeat_s / 8)
                now = time.monotonic()
                if now - woken > self._heartbeat_s / 2:  # this process itself slept: nobody else is to blame
                    for peer in self._peers.values():
                        peer.heard_at = now
                woken = now
                self._find_silent(now)
            self._part()
        except Exception:  # noqa: BLE001 - whatever it is, the program should know that nobody watches
            logger.exception("The control plane of this process has ended; failures of other ranks may go unnoticed.")
        finally:
            self.release()
            self._selector.close()

    def _part(self) -> None:
        """Send what is to be sent, and wait until the others have read it.

        A connection that is closed while something comes in is reset, and what is under way gets lost.
        """
        deadline = time.monotonic() + _FLUSH_S
        ended: set[int] = set()
        while self._peers and time.monotonic() < deadline:
            for peer in self._peers.values():
                is_said = not self._outbox and not peer.unsent and not self._notices.has_for(peer.rank)
                if is_said and peer.rank not in ended:
                    ended.add(peer.rank)
                    with contextlib.suppress(OSError):
                        peer.connection.shutdown(socket.SHUT_WR)  # the other end closes, too
            self._turn(0.05)

    def _turn(self, timeout_s: float) -> None:
        now = time.monotonic()
        peers = [peer for peer in self._peers.values() if not peer.unsent]
        gathering = [peer.gathers_until - now for peer in peers if self._notices.has_for(peer.rank)]
        for key, events in self._selector.select(0 if self._outbox else max(0.0, min([timeout_s, *gathering]))):
            if key.fileobj is self._wake_in:
                self._wake_in.recv(4096)
                continue
            peer: Peer = key.data
            if peer.rank not in self._peers:
                continue
            if key.fileobj is peer.pulse:
                if peer.beats():
                    self._heard(peer)
                else:  # the other process is about to be found dead
                    self._selector.unregister(key.fileobj)
                    peer.drop_pulse()
            elif events & selectors.EVENT_READ:
                self._read(peer)
            if events & selectors.EVENT_WRITE and peer.rank in self._peers:
                self._write(peer)
        while self._outbox:
            self._notices.post(self._outbox.popleft())
        self._flush()

    def _flush(self) -> None:
        """Send what is to be said, but for what is gathered to go together."""
        now = time.monotonic()
        for peer in list(self._peers.values()):
            if now >= peer.gathers_until and not peer.unsent and self._notices.has_for(peer.rank):
                peer.gathers_until = now + _TOGETHER_S
                peer.unsent += b"".join(map(frame, self._notices.messages_for(peer.rank)))
            if peer.unsent:
                self._write(peer)

    def _read(self, peer: Peer) -> None:
        try:
            data = peer.connection.recv(1 << 16)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._closed(peer)
            return
        self._heard(peer)
        peer.received += data
        try:
            for message in peer.messages():
                self._take(message, peer)
        except (ValueError, LookupError, TypeError) as error:
            logger.error("Rank %d sent something that is no message: %s", peer.rank, error)
            self._closed(peer)

    def _heard(self, peer: Peer) -> None:
        peer.heard_at = time.monotonic()
        if peer.is_silent:
            peer.is_silent = False
            self._on_back(peer.rank)
            self.post("back", peer.rank)

    def _take(self, message: Message, peer: Peer) -> None:
        kind = message["kind"]
        if kind == "beat" or not self._notices.take(message, peer.rank):
            return
        if kind == "left":
            self._left.update(ranks_of(message["by"]))
        if kind == "lost":
            rank, closed = message["body"]
            if rank not in self._left:
                self._on_lost(rank, closed=closed)
        elif kind == "back":
            self._on_back(message["body"])
        else:
            self._on_message(message["by"], message)

    def _write(self, peer: Peer) -> None:
        try:
            del peer.unsent[: peer.connection.send(peer.unsent)]
        except BlockingIOError:
            pass
        except OSError:
            peer.unsent.clear()  # reading will find it closed
        writes = selectors.EVENT_WRITE if peer.unsent else 0
        self._selector.modify(peer.connection, selectors.EVENT_READ | writes, peer)

    def _closed(self, peer: Peer) -> None:
        for connection in (peer.connection, peer.pulse):
            if connection is not None:
                self._selector.unregister(connection)
        peer.close()
        self._notices.drop(peer.rank)
        if peer.rank not in self._left and not self._stop:
            self.post("lost", [peer.rank, True])  # first: this process's program may leave as soon as it knows
            self._on_lost(peer.rank, closed=True)
        self._peers.pop(peer.rank, None)  # last: who waits for word of it waits while there is a peer

    def _find_silent(self, now: float) -> None:
        for peer in self._peers.values():
            if not peer.is_silent and now - peer.heard_at > self._heartbeat_s and peer.may_be_stopped():
                peer.is_silent = True
                self.post("lost", [peer.rank, False])
                self._on_lost(peer.rank, closed=False)

    def release(self) -> None:
        """Close this process's ends of the connections, as a forked child must, too."""
        _planes.discard(self)
        for end in (self._wake_in.close, self._wake_out.close, *(peer.close for peer in self._peers.values())):
            end()
        if self._pulse is not None:
            self._pulse.end()


_planes: weakref.WeakSet[ControlPlane] = weakref.WeakSet()


def _release_in_child() -> None:
    # A forked child, such as a loader's worker, would keep the connections open after its parent has died.
    for plane in list(_planes):
        plane.release()


if hasattr(os, "register_at_fork"):  # not on Windows, which can't fork
    os.register_at_fork(after_in_child=_release_in_child)


def _wait_for(store: Store, name: str, rank: int) -> bytes:
    """Return what a rank writes into the store."""
    try:
        return store.get(name)
    except DistStoreError:
        raise TimeoutError(f"Rank {rank} did not say how to reach it.") from None
