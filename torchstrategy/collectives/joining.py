"""How the ranks of a job come together: who is there while they gather, and the channels between them."""

from __future__ import annotations

import contextlib
import functools
import hmac
import json
import os
import secrets
import selectors
import socket
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping

from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]

from torchstrategy import patches
from torchstrategy.base.log import logger, name_error
from torchstrategy.collectives.connections import (
    BACKLOG,
    Check,
    Door,
    Peer,
    read_hello,
    say,
    signed_call,
    signed_door,
)
from torchstrategy.collectives.notices import Message, lost_record
from torchstrategy.errors import DeadlineExceededError

__all__ = [
    "DIFFERS",
    "ENDED",
    "Channel",
    "Roll",
    "connect_ranks",
    "end_of",
    "lost_connection",
    "report_end",
    "store_of_job",
]

_CALL_S = 5.0
_MOST_TOLD = 10_000
_LOOK_S = 0.5
_ASK_AGAIN_S = 0.02
_DIED = "has died while the job was starting (process {pid} on {host}: its connection closed)"
#: What a rank that has ended, and one that differs from the first, adds to the count of those that have arrived.
ENDED, DIFFERS = 1 << 20, 1 << 40


def store_of_job(store: Store, attempt: int) -> Store:
    """Return the part of a store in which the ranks of an attempt gather."""
    return PrefixStore(f"torchstrategy/{attempt}/job", store)


def report_end(own: Store, rank: int, how: str) -> None:
    """Let those that wait for a rank know that it has ended, as its launcher sees it.

    Args:
        own: the job's part of the store.
        rank: the rank.
        how: as a part of a sentence.
    """
    own.compare_set("ended", "", json.dumps(lost_record(rank, how)))  # the first one is the cause
    own.add("arrived", ENDED)


def end_of(own: Store, num_arrived: int) -> Message | None:
    """Return what ``report_end`` has noted; ``None`` if there is nothing.

    Args:
        own: the job's part of the store.
        num_arrived: the count of those that have arrived, which tells it without another request.
    """
    return dict(json.loads(own.get("ended"))) if num_arrived % DIFFERS >= ENDED else None


class Roll:
    """Who is there while the ranks of a job gather, seen from one of them.

    The first one that comes keeps the roll. Each other one connects to it and stays connected until it has joined the
    control plane; if its connection closes before, it has died, and all are told. A rank that can't reach the keeper
    goes on without.

    Args:
        rank: this process's id.
        size: number of processes.
    """

    def __init__(self, rank: int, size: int) -> None:
        self._rank = rank
        self._others = set(range(size)) - {rank}
        self._changed = threading.Condition()
        self._failure: Message | None = None
        self._is_over = False
        self._keeps = False
        self._members: dict[socket.socket, tuple[Peer, Message]] = {}  # of the keeper
        self._connection: socket.socket | None = None  # of another one
        self._thread: threading.Thread | None = None
        self._wakers: tuple[socket.socket, socket.socket] | None = None

    @property
    def failure(self) -> Message | None:
        """The first rank that has died or failed, as in ``lost_record``."""
        return self._failure

    def wait_for_failure(self, seconds: float) -> Message | None:
        """Return the first failure, giving it a moment to arrive."""
        with self._changed:
            self._changed.wait_for(lambda: self._failure is not None, seconds)
        return self._failure

    def join(self, own: Store, address: str) -> None:
        """Be there from now on.

        Args:
            own: the job's part of the store.
            address: this process's address, as the others can reach it.
        """
        self._wakers = socket.socketpair()
        hello = {"rank": self._rank, "pid": os.getpid(), "host": socket.gethostname()}
        if own.add("roll", 1) == 1:
            patches.allow_files()  # for a connection to each rank
            family = socket.AF_INET6 if ":" in address else socket.AF_INET
            listener = socket.create_server((address, 0), family=family, backlog=BACKLOG)
            key = secrets.token_hex(32)
            own.set("roll/keeper", json.dumps([f"{address} {listener.getsockname()[1]}", key, hello]))
            self._keeps = True
            run = functools.partial(self._keep, listener, key.encode())
        else:
            run = functools.partial(self._stay, own, hello)
        self._thread = threading.Thread(target=run, args=self._wakers, name="torchstrategy-roll", daemon=True)
        self._thread.start()

    def tell(self, failure: Message) -> None:
        """Let all others know of a failure, of this rank or of one that can't tell of it."""
        self._learn(failure)
        self._wake()

    def fail(self, error: BaseException) -> None:
        """Let all others know that this rank does not join."""
        text = name_error(error)[:_MOST_TOLD]
        record = {**lost_record(self._rank, text), "operation": "joining the job"}
        self.tell({**record, "is_deadline": isinstance(error, DeadlineExceededError)})

    def leave(self) -> None:
        """Leave the roll; the one who keeps it does so when all have left."""
        self._is_over = True
        self._wake()
        if self._thread is not None and (not self._keeps or self._failure is not None):
            self._thread.join(timeout=1.0)  # what it has to say is said

    def _wake(self) -> None:
        if self._wakers is not None:
            with contextlib.suppress(OSError):  # the thread has ended
                self._wakers[1].send(b"x")

    def _learn(self, failure: Message | None) -> None:
        with self._changed:
            if failure is not None and self._failure is None:
                self._failure = failure
                self._changed.notify_all()

    # --- in the thread of the one who keeps the roll

    def _keep(self, listener: socket.socket, key: bytes, woken: socket.socket, waker: socket.socket) -> None:
        told = None
        with woken, waker, signed_door(listener, key, self._others) as door:
            door.watch(woken)
            while not self._is_over or (self._members and told is None):
                for connection, greeting in door.wait(_LOOK_S):
                    if greeting is not None:
                        hello = read_hello(greeting)
                        self._members[connection] = Peer(int(hello["rank"]), connection, None), hello
                        say(connection, {"gone": told})
                        door.watch(connection)
                    elif connection is woken:
                        woken.recv(1 << 12)
                    elif not self._hear(connection, *self._members[connection]):
                        del self._members[connection]
                        door.forget(connection)
                if told is None and self._failure is not None:
                    told = self._failure
                    for connection in self._members:
                        say(connection, {"gone": told})
            for connection in self._members:
                connection.close()

    # --- in the thread of another one

    def _stay(self, own: Store, hello: Message, woken: socket.socket, waker: socket.socket) -> None:
        with woken, waker:
            try:
                address, key, keeper = json.loads(_get_soon(own, "roll/keeper"))
                connection, answer = signed_call(address, key.encode(), _CALL_S, hello, {"left": True})
            except (OSError, ValueError, RuntimeError) as error:
                logger.debug("Nobody will be told if this process dies before all have met: %s", error)
                return
            self._learn(answer.get("gone"))
            self._connection = connection
            with connection:
                self._hear_keeper(connection, keeper, woken)

    def _hear_keeper(self, connection: socket.socket, keeper: Message, woken: socket.socket) -> None:
        told = None
        peer = Peer(int(keeper["rank"]), connection, None)
        is_connected = True
        with selectors.DefaultSelector() as selector:
            for one in (connection, woken):
                selector.register(one, selectors.EVENT_READ)
            while is_connected and not self._is_over:
                for ready, _ in selector.select():
                    if ready.fileobj is connection:
                        is_connected = self._hear(connection, peer, keeper)
                    else:
                        woken.recv(1 << 12)
                if told is None and self._failure is not None:
                    told = self._failure
                    say(connection, {"gone": told})
        say(connection, {"left": True})

    def _hear(self, connection: socket.socket, peer: Peer, hello: Message) -> bool:
        """Read what another one says; return whether it is still there."""
        try:
            data = connection.recv(1 << 16)
            peer.received += data
            messages = peer.messages()
        except (OSError, ValueError):
            data, messages = b"", []
        for message in messages:
            if message.get("left"):
                return False
            self._learn(message.get("gone"))
        if not data:
            self._learn(lost_record(peer.rank, _DIED.format(**hello)))
        return bool(data)


def _get_soon(own: Store, name: str) -> bytes:
    """Return what is about to be written. The store's client would let nobody else ask while it waits."""
    deadline = time.monotonic() + _CALL_S
    while not own.check([name]):
        if time.monotonic() > deadline:
            raise TimeoutError(f"{name} is not there")
        time.sleep(_ASK_AGAIN_S)
    return bytes(own.get(name))


_POLL_S = 0.5
_READ_BYTES = 1 << 16
_MOST_READ_BYTES = 1 << 22  # `recv` allocates what it is asked for
_RANK_BYTES = 8


class Channel:
    """One connection to another rank.

    Args:
        connection: a connected stream socket, which the channel takes over.
        rank: the other end's.
    """

    def __init__(self, connection: socket.socket, rank: int) -> None:
        connection.settimeout(_POLL_S)
        self.socket = connection
        self._rank = rank
        self._pending = bytearray()  # the other rank may be one message ahead

    def send(self, message: bytes | memoryview, check: Check) -> None:
        """Send a message.

        Args:
            message: the bytes.
            check: called while waiting; may raise to end the wait, after which the channel can't be used.

        Raises:
            ConnectionError: the connection is broken, or the other rank has closed it.
        """
        rest = memoryview(message)
        while rest:
            try:
                rest = rest[self.socket.send(rest) :]
                continue
            except TimeoutError:
                pass
            except OSError as error:
                raise lost_connection(self._rank, error) from None
            check()

    def receive(self, size: int, check: Check) -> bytes:
        """Return the next ``size`` bytes; arguments and errors as in ``send``."""
        while len(self._pending) < size:
            self._read(min(max(_READ_BYTES, size - len(self._pending)), _MOST_READ_BYTES), check)
        if len(self._pending) == size:
            message, self._pending = bytes(self._pending), bytearray()
        else:
            message = bytes(self._pending[:size])
            del self._pending[:size]
        return message

    def close(self) -> None:
        """Close the connection."""
        self.socket.close()

    def _read(self, size: int, check: Check) -> None:
        while True:
            try:
                part = self.socket.recv(size)
            except TimeoutError:
                part = None
            except OSError as error:
                raise lost_connection(self._rank, error) from None
            if part is None:
                check()
                continue
            if not part:
                raise lost_connection(self._rank)
            self._pending += part
            return


def lost_connection(rank: int, reason: object = "closed by the other end") -> ConnectionError:
    """Return the error of a connection to a rank that broke.

    Args:
        rank: the other end's.
        reason: what the system says.
    """
    return ConnectionError(f"the connection to rank {rank} broke: {reason}")


def connect_ranks(
    listener: socket.socket,
    rank: int,
    calls: Mapping[int, Callable[[float], socket.socket]],
    answers: Iterable[int],
    key: bytes,
    timeout_s: float,
    check: Check,
) -> dict[int, Channel]:
    """Connect to some ranks and wait for others to connect.

    Args:
        listener: where this rank is reached.
        rank: this process's id.
        calls: for each rank to connect to, what does it within the given seconds.
        answers: the ranks that will connect to this one.
        key: the group's secret, without which a connection is turned away.
        timeout_s: seconds in which all connections must be there.
        check: called while waiting; may raise to end the wait.

    Returns:
        The channels by rank.

    Raises:
        OSError: a rank can't be reached, or did not connect in time.
    """
    deadline = time.monotonic() + timeout_s
    channels: dict[int, Channel] = {}
    missing = set(answers)
    try:
        for other, call in calls.items():
            try:
                channels[other] = Channel(call(max(0.1, deadline - time.monotonic())), other)
            except OSError as error:
                raise ConnectionError(f"rank {rank} can't connect to rank {other}: {error}") from error
            channels[other].send(key + rank.to_bytes(_RANK_BYTES, "little"), check)
        with Door(listener, functools.partial(_rest_of_key, key, missing)) as door:
            while missing:
                check()
                if time.monotonic() > deadline:
                    absent = ", ".join(map(str, sorted(missing)))
                    raise TimeoutError(f"rank {absent} did not connect to rank {rank} within {timeout_s:g} s")
                for connection, greeting in door.wait(_POLL_S):
                    other = int.from_bytes((greeting or b"")[len(key) :], "little")
                    channels[other] = Channel(connection, other)
                    missing.discard(other)
    except BaseException:
        for channel in channels.values():
            channel.close()
        raise
    return channels


def _rest_of_key(key: bytes, missing: Collection[int], _: socket.socket, first: bytes, said: bytes) -> int:
    """Return how many bytes of a greeting, the key and a rank, are missing; see ``Door``."""
    del first
    rest = len(key) + _RANK_BYTES - len(said)
    if rest == 0:
        is_right = hmac.compare_digest(said[: len(key)], key)
        if not is_right or int.from_bytes(said[len(key) :], "little") not in missing:
            raise ValueError("not a process of this group")
    return rest
