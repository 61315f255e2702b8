"""Small messages between all ranks, over TCP connections of the library's own.

The calling thread itself writes and reads. A gloo collective of this size hands over to other threads: 370 µs instead
of 40 between two busy processes on two cores.

Up to 16 ranks are connected in pairs, and a message takes one hop. With more, a rank writes to its host's first rank,
the hosts' first ranks write to rank 0, and the answer comes back the same way: four hops, but few connections.
"""

from __future__ import annotations

import functools
import secrets
import socket
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from torch.distributed import Store  # type: ignore[attr-defined]

from torchstrategy.base.labels import label
from torchstrategy.collectives.connections import BACKLOG, Ask, Check, lookup_name
from torchstrategy.collectives.joining import Channel, connect_ranks

__all__ = ["MAX_BODY_BYTES", "MAX_MESH_SIZE", "RecordMesh", "RecordTree", "Records", "connect_records"]

#: More ranks than this are connected as a tree.
MAX_MESH_SIZE = 16
#: The longest body. A longer one in a header is damage, and must not make this rank allocate it.
MAX_BODY_BYTES = 1 << 28

_HEADER_BYTES = 8
# What a rank sends before it reads; far below what the sockets buffer.
_FIRST_BYTES = 24 << 10
_KEY_BYTES = 32

Finish = Callable[[Check], list[bytes]]


class Records(Protocol):
    """The connections of one process to the others of its group."""

    rank: int

    def exchange(self, body: bytes, check: Check) -> list[bytes]:
        """Give every rank every rank's body.

        Args:
            body: this rank's.
            check: called while waiting; may raise to end the wait, after which the connections can't be used.

        Returns:
            The bodies in the order of ranks.

        Raises:
            ValueError: the body is longer than ``MAX_BODY_BYTES``.
            ConnectionError: another rank has closed its connection, or sends garbage.
        """

    def start(self, body: bytes, check: Check) -> Finish:
        """Send a body, and receive those of the others when they are needed.

        Args:
            body: this rank's.
            check: as for ``exchange``.

        Returns:
            A function that takes a ``check`` and returns the bodies in the order of ranks. It must be called once,
            before anything else is exchanged.

        Raises:
            ValueError: the body is longer than ``MAX_BODY_BYTES``.
            ConnectionError: another rank has closed its connection.
        """


def connect_records(
    store: Store,
    address: str,
    rank: int,
    size: int,
    hosts: Sequence[int],
    timeout_s: float,
    check: Check,
    ask: Ask = lambda call: call(),
) -> Records:
    """Connect the ranks of a group.

    Args:
        store: where the ranks find one another; with a prefix of this group's own.
        address: this process's address, which the others can reach.
        rank: this process's id.
        size: number of processes.
        hosts: for each rank the number of its host.
        timeout_s: seconds in which all connections must be there.
        check: called while waiting; may raise to end the wait.
        ask: makes a call that asks the store.

    Returns:
        The connections.

    Raises:
        OSError: another process can't be reached.
    """
    if size <= MAX_MESH_SIZE:
        others = range(rank), range(rank + 1, size)
        return RecordMesh(_connect(store, address, rank, *others, timeout_s, check, ask), rank)
    leader, children = _place_in_tree(rank, hosts)
    parents = [] if rank == leader == 0 else [0 if rank == leader else leader]
    channels = _connect(store, address, rank, parents, children, timeout_s, check, ask)
    return RecordTree(channels, rank, size, hosts)


class RecordMesh:
    """A connection between each pair of ranks.

    Args:
        channels: to each other rank.
        rank: this process's id.
    """

    def __init__(self, channels: Mapping[int, Channel], rank: int) -> None:
        self.rank = rank
        self._channels = dict(sorted(channels.items()))
        weakref.finalize(self, _close_all, self._channels).atexit = False

    def exchange(self, body: bytes, check: Check) -> list[bytes]:
        """Give every rank every rank's body, see ``Records``."""
        return self.start(body, check)(check)

    def start(self, body: bytes, check: Check) -> Finish:
        """Send a body now and receive later, see ``Records``."""
        message = _header(body) + body[:_FIRST_BYTES]
        for channel in self._channels.values():
            channel.send(message, check)
        return functools.partial(self._receive, body)

    def _receive(self, body: bytes, check: Check) -> list[bytes]:
        size = len(self._channels) + 1
        lengths = [len(body)] * size
        bodies = [body] * size
        for other, channel in self._channels.items():
            with label("wait", "for rank", other):
                lengths[other] = _receive_length(channel, other, check)
            bodies[other] = channel.receive(min(lengths[other], _FIRST_BYTES), check)
        # The ends of long bodies follow rank by rank, so that the others read while one writes.
        for sender in [rank for rank, length in enumerate(lengths) if length > _FIRST_BYTES]:
            if sender == self.rank:
                for channel in self._channels.values():
                    channel.send(memoryview(body)[_FIRST_BYTES:], check)
            else:
                bodies[sender] += self._channels[sender].receive(lengths[sender] - _FIRST_BYTES, check)
        return bodies


class RecordTree:
    """Connections from each rank to its host's first rank, and from these to rank 0.

    Args:
        channels: to this rank's parent and children.
        rank: this process's id.
        size: number of processes.
        hosts: for each rank the number of its host.
    """

    def __init__(self, channels: Mapping[int, Channel], rank: int, size: int, hosts: Sequence[int]) -> None:
        self.rank = rank
        self._size = size
        self._channels = dict(channels)
        _, self._children = _place_in_tree(rank, hosts)
        self._parent = next((other for other in channels if other not in self._children), None)
        # What each child brings: its own body and those of its children, in this order.
        self._brings = {child: [child, *(_place_in_tree(child, hosts)[1])] for child in self._children}
        self._order = [rank, *(member for child in self._children for member in self._brings[child])]
        weakref.finalize(self, _close_all, self._channels).atexit = False

    def exchange(self, body: bytes, check: Check) -> list[bytes]:
        """Give every rank every rank's body, see ``Records``."""
        _header(body)
        bodies = {self.rank: body}
        for child in self._children:
            brought = _receive_bundle(self._channels[child], child, len(self._brings[child]), check)
            bodies |= zip(self._brings[child], brought, strict=True)
        if self._parent is None:
            everything = [bodies[rank] for rank in range(self._size)]
        else:
            parent = self._channels[self._parent]
            parent.send(_bundle([bodies[rank] for rank in self._order]), check)
            everything = _receive_bundle(parent, self._parent, self._size, check)
        if self._children:
            bundle = _bundle(everything)
            for child in self._children:
                self._channels[child].send(bundle, check)
        return everything

    def start(self, body: bytes, check: Check) -> Finish:
        """Exchange at once, because others wait for what this rank passes on; see ``Records``."""
        bodies = self.exchange(body, check)
        return lambda _: bodies


def _place_in_tree(rank: int, hosts: Sequence[int]) -> tuple[int, list[int]]:
    """Return the first rank of a rank's host, and the ranks whose parent this rank is."""
    leader = hosts.index(hosts[rank])
    members = [other for other, host in enumerate(hosts) if host == hosts[rank] and other != leader]
    if rank != leader:
        return leader, []
    if rank == 0:
        members += [first for first in dict.fromkeys(hosts.index(host) for host in hosts) if first != 0]
    return leader, members


def _connect(
    store: Store,
    address: str,
    rank: int,
    calls: Sequence[int],
    answers: Sequence[int],
    timeout_s: float,
    check: Check,
    ask: Ask,
) -> dict[int, Channel]:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.create_server((address, 0), family=family, backlog=BACKLOG) as listener:
        port = listener.getsockname()[1]

        def introduce() -> tuple[bytes, dict[int, str]]:
            if rank == 0:
                store.set("key", secrets.token_hex(_KEY_BYTES // 2))
            store.set(f"address/{rank}", f"{address} {port}")
            return store.get("key"), {other: store.get(f"address/{other}").decode() for other in calls}

        key, addresses = ask(introduce)
        callers = {other: functools.partial(_call, theirs) for other, theirs in addresses.items()}
        channels = connect_ranks(listener, rank, callers, answers, key, timeout_s, check)
    for channel in channels.values():
        channel.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return channels


def _call(address: str, timeout_s: float) -> socket.socket:
    host, port = address.split()
    return socket.create_connection((lookup_name(host), int(port)), timeout=timeout_s)


def _header(body: bytes) -> bytes:
    if len(body) > MAX_BODY_BYTES:
        raise ValueError(
            f"This rank wants to send {len(body):,} bytes to the others in one message; at most {MAX_BODY_BYTES:,} "
            "are allowed. Send large data as tensors."
        )
    return len(body).to_bytes(_HEADER_BYTES, "little")


def _receive_length(channel: Channel, sender: int, check: Check) -> int:
    length = int.from_bytes(channel.receive(_HEADER_BYTES, check), "little")
    if length > MAX_BODY_BYTES:
        raise ConnectionError(f"rank {sender} announces a message of {length:,} bytes: the connection is damaged")
    return length


def _bundle(bodies: Sequence[bytes]) -> bytes:
    """Return several bodies as one message: their lengths, then themselves."""
    return b"".join([*(len(body).to_bytes(_HEADER_BYTES, "little") for body in bodies), *bodies])


def _receive_bundle(channel: Channel, sender: int, count: int, check: Check) -> list[bytes]:
    lengths = [_receive_length(channel, sender, check) for _ in range(count)]
    return [channel.receive(length, check) for length in lengths]


def _close_all(channels: Mapping[int, Channel]) -> None:
    for channel in channels.values():
        channel.close()
