"""The job's control plane: short messages between all processes, and who of them is still there.

The first rank of each host is its leader. Every process holds one TCP connection to its leader, and leaders one to
each other. A thread serves them, so that a process answers while its program computes or waits; messages are JSON. A
process that dies closes its connection, one that is stopped or cut off stops sending heartbeats.

A leader has a second connection to each other one, over which a process of its own beats while native code keeps the
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
    Message,
    Peer,
    frame,
    lost_record,
    read_hello,
    signed_call,
    signed_door,
)

__all__ = ["ControlPlane"]

_FLUSH_S = 1.0


class _OnLost(Protocol):
    def __call__(self, rank: int, *, closed: bool) -> None: ...


class ControlPlane:
    """One process's connections; made by all processes of a job together.

    Args:
        store: where leaders publish their addresses; with a prefix of its own. It is not needed afterwards.
        rank: this process's id.
        hosts: for each rank the number of its host.
        address: this process's address, as the others can reach it.
        on_message: called in the plane's thread with another rank's message.
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
        self._on_message = on_message
        self._on_lost = on_lost
        self._on_back = on_back
        self._heartbeat_s = heartbeat_seconds()
        self._leaders = [hosts.index(host) for host in sorted(set(hosts))]
        self._peers: dict[int, Peer] = {}
        self._pulse: Pulse | None = None
        self._left: set[int] = set()
        self._outbox: deque[Message] = deque()
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

    def post(self, kind: str, body: Any = None, to: int | None = None) -> None:
        """Send a message to one rank, or to all others.

        Args:
            kind: what kind of message it is.
            body: anything JSON can hold, at most a megabyte.
            to: the rank; ``None`` for all.
        """
        self._outbox.append({"from": self._rank, "to": to, "kind": kind, "body": body})
        self._wake()

    @property
    def is_connected(self) -> bool:
        """Whether this process can hear others."""
        return bool(self._peers) and self._thread.is_alive()

    def relays(self, other: int) -> set[int]:
        """Return the ranks that pass on messages between this one and another."""
        leaders = {self._hosts.index(self._hosts[rank]) for rank in (self._rank, other)}
        return leaders - {self._rank, other}

    def close(self) -> None:
        """Say that this process leaves, and close the connections."""
        self.post("left")  # before the thread may end
        self._stop = True
        self._wake()
        if threading.current_thread() is not self._thread:
            self._thread.join(timeout=2 * _FLUSH_S)

    def _wake(self) -> None:
        with contextlib.suppress(OSError):  # full: the thread is about to wake up anyway
            self._wake_out.send(b"x")

    # --- connecting

    def _connect(self, store: Store, address: str, timeout_s: float) -> None:
        leader = self._hosts.index(self._hosts[self._rank])
        if self._rank == 0:
            store.set("key", secrets.token_hex(32))
        key = _wait_for(store, "key", 0)
        if leader != self._rank:
            self._call(leader, store, key, timeout_s)
            return
        above = [other for other in self._leaders if other > self._rank]
        expected = {*above, *(r for r, host in enumerate(self._hosts) if host == self._hosts[leader])} - {leader}
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        with socket.create_server((address, 0), family=family, backlog=BACKLOG) as listener:
            store.set(f"address/{self._rank}", f"{address} {listener.getsockname()[1]}")
            for other in self._leaders[: self._leaders.index(leader)]:
                self._call(other, store, key, timeout_s)
            deadline = time.monotonic() + timeout_s
            with signed_door(listener, key, expected) as door:
                while missing := [
                    r for r in expected if r not in self._peers or (r in above and not self._peers[r].pulse)
                ]:
                    remaining = deadline - time.monotonic()
                    if remaining <= 0:
                        self._give_up(sorted(missing), f"did not connect within {timeout_s:g} s")
                    for connection, hello in door.wait(remaining):
                        self._welcome(connection, read_hello(hello))

    def _give_up(self, missing: Sequence[int], how: str) -> NoReturn:
        """Tell the ranks that are connected whom this one waited for; else they would take this one for the culprit."""
        names = ", ".join(map(str, missing))
        message = frame({"from": self._rank, "to": None, "kind": "failed", "body": [0, lost_record(names, how)]})
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
            if self._rank in self._leaders:
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
        is_here = self._hosts[other] == self._hosts[self._rank]
        peer = Peer(other, connection, pid if is_here else None)
        self._peers[other] = peer
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
                    self._outbox.append({"from": self._rank, "to": self._rank, "kind": "beat"})
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
                if not self._outbox and not peer.unsent and peer.rank not in ended:
                    ended.add(peer.rank)
                    with contextlib.suppress(OSError):
                        peer.connection.shutdown(socket.SHUT_WR)  # the other end closes, too
            self._turn(0.05)

    def _turn(self, timeout_s: float) -> None:
        for key, events in self._selector.select(0 if self._outbox else timeout_s):
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
            self._send(self._outbox.popleft(), None)

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
            self._tell("back", peer.rank)

    def _take(self, message: Message, peer: Peer) -> None:
        kind, sender, to = message["kind"], message["from"], message["to"]
        if kind == "beat":
            return
        self._send(message, peer)
        if to not in (None, self._rank):
            return
        if kind == "left":
            self._left.add(sender)
        if kind == "lost":
            rank, closed = message["body"]
            if rank not in self._left:
                self._on_lost(rank, closed=closed)
        elif kind == "back":
            self._on_back(message["body"])
        else:
            self._on_message(sender, message)

    def _send(self, message: Message, source: Peer | None) -> None:
        """Pass a message on: from this host to all, from another host's leader to this host only."""
        if message["kind"] == "beat":
            targets = list(self._peers.values())
        else:
            here = self._hosts[self._rank]
            is_from_here = source is None or self._hosts[source.rank] == here
            targets = [
                peer
                for peer in self._peers.values()
                if peer is not source
                and (is_from_here or self._hosts[peer.rank] == here)
                and self._leads_to(peer, message["to"])
            ]
        if targets:
            data = frame(message)
            for peer in targets:
                peer.unsent += data
                self._write(peer)

    def _leads_to(self, peer: Peer, to: int | None) -> bool:
        if to is None or peer.rank == to or self._rank not in self._leaders:
            return True
        return self._hosts[to] != self._hosts[self._rank] and self._hosts[peer.rank] == self._hosts[to]

    def _write(self, peer: Peer) -> None:
        try:
            del peer.unsent[: peer.connection.send(peer.unsent)]
        except BlockingIOError:
            pass
        except OSError:
            peer.unsent.clear()  # reading will find it closed
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if peer.unsent else 0)
        self._selector.modify(peer.connection, events, peer)

    def _closed(self, peer: Peer) -> None:
        for connection in (peer.connection, peer.pulse):
            if connection is not None:
                self._selector.unregister(connection)
        peer.close()
        self._peers.pop(peer.rank, None)
        if peer.rank not in self._left and not self._stop:
            self._tell("lost", [peer.rank, True])  # first: this process's program may leave as soon as it knows
            self._on_lost(peer.rank, closed=True)

    def _find_silent(self, now: float) -> None:
        for peer in self._peers.values():
            if not peer.is_silent and now - peer.heard_at > self._heartbeat_s and peer.may_be_stopped():
                peer.is_silent = True
                self._tell("lost", [peer.rank, False])
                self._on_lost(peer.rank, closed=False)

    def _tell(self, kind: str, body: Any) -> None:
        self._outbox.append({"from": self._rank, "to": None, "kind": kind, "body": body})

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
