"""Small messages between all ranks, over TCP connections of the library's own.

The calling thread itself writes and reads. A gloo collective of this size hands over to other threads: 370 µs instead
of 40 between two busy processes on two cores.

Up to 16 ranks are connected in pairs, and a message takes one hop. More are a tree, in which each rank has at most 16
children: what it knows of its own part of the tree goes up, and what rank 0 then knows of all comes down. Equal bodies
travel once, with the ranks that have brought them: a message is as long for a thousand ranks as for two while they do
the same. What differs between them all the same can be united on the way.
"""

from __future__ import annotations

import functools
import json
import secrets
import socket
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Protocol, TypeAlias

from torch.distributed import Store  # type: ignore[attr-defined]

from torchstrategy.base.labels import label
from torchstrategy.collectives.connections import BACKLOG, Ask, Check, lookup_name
from torchstrategy.collectives.joining import Channel, connect_ranks
from torchstrategy.collectives.notices import MAX_MESH_SIZE, Tree

__all__ = [
    "MAX_BODY_BYTES",
    "MAX_MESH_SIZE",
    "Group",
    "RecordMesh",
    "RecordTree",
    "Records",
    "Unite",
    "by_rank",
    "connect_records",
]

#: The longest body. A longer one in a header is damage, and must not make this rank allocate it.
MAX_BODY_BYTES = 1 << 28

_HEADER_BYTES = 8
# What a rank sends before it reads; far below what the sockets buffer.
_FIRST_BYTES = 24 << 10
_KEY_BYTES = 32

#: A body, and the ranks that have brought it.
Group: TypeAlias = tuple[bytes, Sequence[int]]
#: Makes one of the ends of two bodies, behind their first line break, whose first lines are equal.
Unite: TypeAlias = Callable[[bytes, bytes], bytes]
Finish: TypeAlias = Callable[[Check], list[Group]]


class Records(Protocol):
    """The connections of one process to the others of its group."""

    rank: int

    def start(self, body: bytes, check: Check, unite: Unite | None = None) -> Finish:
        """Send a body, and receive those of the others when they are needed.

        Args:
            body: this rank's.
            check: called while waiting; may raise to end the wait, after which the connections can't be used.
            unite: makes one body of those that have equal first lines, in the same order on all ranks.

        Returns:
            A function that takes a ``check`` and returns the bodies and who has brought them, in the order of the first
            ranks. It must be called once, before anything else is started.

        Raises:
            ValueError: the body is longer than ``MAX_BODY_BYTES``.
            ConnectionError: another rank has closed its connection, or sends garbage.
        """


def by_rank(groups: Sequence[Group]) -> list[bytes]:
    """Return the bodies of all groups in the order of ranks."""
    if len(groups) == 1:
        return [groups[0][0]] * len(groups[0][1])
    bodies = {rank: body for body, ranks in groups for rank in ranks}
    return [bodies[rank] for rank in range(len(bodies))]


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
    tree = Tree(hosts)
    parent = tree.parents[rank]
    channels = _connect(
        store, address, rank, [] if parent is None else [parent], tree.children[rank], timeout_s, check, ask
    )
    return RecordTree(channels, rank, tree)


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

    def start(self, body: bytes, check: Check, unite: Unite | None = None) -> Finish:
        """Send a body now and receive later, see ``Records``."""
        message = _header(body) + body[:_FIRST_BYTES]
        for channel in self._channels.values():
            channel.send(message, check)
        return functools.partial(self._finish, body, unite)

    def _finish(self, body: bytes, unite: Unite | None, check: Check) -> list[Group]:
        bodies = self._receive(body, check)
        if unite is None:
            is_one = bodies.count(body) == len(bodies)
            return [(body, range(len(bodies)))] if is_one else [(one, [rank]) for rank, one in enumerate(bodies)]
        found = _Found(unite)
        for rank, one in enumerate(bodies):
            found.add(one, (rank, rank + 1))
        return [(one, _members(spans)) for one, spans in found.bodies()]

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
    """Connections from each rank to its parent in a tree, and to its children.

    Args:
        channels: to this rank's parent and children.
        rank: this process's id.
        tree: of all ranks.
    """

    def __init__(self, channels: Mapping[int, Channel], rank: int, tree: Tree) -> None:
        self.rank = rank
        self._channels = dict(channels)
        self._tree = tree
        self._parent = tree.parents[rank]
        self._children = tree.children[rank]
        weakref.finalize(self, _close_all, self._channels).atexit = False

    def start(self, body: bytes, check: Check, unite: Unite | None = None) -> Finish:
        """Send a body now if no other rank's goes with it, and receive later; see ``Records``."""
        _header(body)  # which checks its length
        if not self._children:
            self._send_up(self._found_here(body, unite), check)
        return functools.partial(self._finish, body, unite)

    def _finish(self, body: bytes, unite: Unite | None, check: Check) -> list[Group]:
        found = _Found(unite)
        if self._children:
            found = self._found_here(body, unite)
            for child in self._children:
                with label("wait", "for rank", child):
                    _receive_bundle(self._channels[child], child, self._tree.span(child), found, check)
            self._send_up(found, check)
        if self._parent is not None:
            found = _Found(None)  # everything is united
            with label("wait", "for rank", self._parent):
                _receive_bundle(self._channels[self._parent], self._parent, self._tree.span(0), found, check)
        bodies = list(found.bodies())
        bundle = _bundle(bodies)
        for child in reversed(self._children):  # other hosts first, from where it may have far to go
            self._channels[child].send(bundle, check)
        size = len(self._tree.order)
        if len(bodies) == 1:
            return [(bodies[0][0], range(size))]
        order = self._tree.order
        groups = [(one, sorted(order[place] for place in _members(spans))) for one, spans in bodies]
        return sorted(groups, key=lambda group: group[1][0])

    def _found_here(self, body: bytes, unite: Unite | None) -> _Found:
        found = _Found(unite)
        place = self._tree.places[self.rank]
        found.add(body, (place, place + 1))
        return found

    def _send_up(self, found: _Found, check: Check) -> None:
        if self._parent is not None:
            self._channels[self._parent].send(_bundle(list(found.bodies())), check)


class _Found:
    """Distinct bodies, each with the bounds of the ranges of places that have brought it.

    Args:
        unite: makes one of two bodies whose first lines are equal; ``None`` if they must be equal as a whole.
    """

    def __init__(self, unite: Unite | None) -> None:
        self._unite = unite
        self._found: dict[bytes, tuple[bytes, list[int]]] = {}

    def add(self, body: bytes, spans: Sequence[int]) -> None:
        """Add a body; places rise from call to call."""
        key, rest = body, b""
        if self._unite is not None:
            key, _, rest = body.partition(b"\n")
        known = self._found.get(key)
        if known is None:
            self._found[key] = rest, list(spans)
            return
        own, bounds = known
        if bounds[-1] == spans[0]:
            bounds[-1:] = spans[1:]
        else:
            bounds += spans
        if self._unite is not None:
            self._found[key] = self._unite(own, rest), bounds

    def bodies(self) -> Iterable[tuple[bytes, list[int]]]:
        """Return the bodies and the bounds."""
        for key, (rest, bounds) in self._found.items():
            yield (key if self._unite is None else b"\n".join((key, rest))), bounds


def _members(bounds: Sequence[int]) -> list[int]:
    """Return the places in ranges, given their bounds."""
    return [place for i in range(0, len(bounds), 2) for place in range(bounds[i], bounds[i + 1])]


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


def _bundle(bodies: Sequence[tuple[bytes, list[int]]]) -> bytes:
    """Return several bodies as one message: how long each is and where it comes from, then the bodies."""
    table = json.dumps([[len(body), *bounds] for body, bounds in bodies], separators=(",", ":")).encode()
    return b"".join([_header(table), table, *(body for body, _ in bodies)])


def _receive_bundle(channel: Channel, sender: int, span: tuple[int, int], found: _Found, check: Check) -> None:
    """Add to what was found what a rank sends of the places in a range."""
    table = channel.receive(_receive_length(channel, sender, check), check)
    try:
        rows = [[int(number) for number in row] for row in json.loads(table)]
        edges = [span[0], *sorted(edge for _, *bounds in rows for edge in bounds), span[1]]
        is_right = edges[::2] == edges[1::2] and all(0 <= row[0] <= MAX_BODY_BYTES for row in rows)
    except (ValueError, TypeError, LookupError):
        is_right = False
    if not is_right:
        raise ConnectionError(f"rank {sender} sends a message without a table of its parts: the connection is damaged")
    for length, *bounds in rows:
        found.add(channel.receive(length, check), bounds)


def _close_all(channels: Mapping[int, Channel]) -> None:
    for channel in channels.values():
        channel.close()
