"""How ranks of a large job are connected, and how what one has to say reaches all: once, and equal things together.

A notice goes over each connection once. One that must wait, because something has just been sent there, is united with
an equal one of other ranks: a failure that all ranks have is as short to tell as that of one. A rank acknowledges a
notice when all behind it have done so, so that whoever has said something learns that all know it, and not from each.
"""

from __future__ import annotations

import functools
import operator
from collections import defaultdict, deque
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

from torchstrategy.base.names import alike, named_ranks

__all__ = [
    "CUT_OFF",
    "MAX_MESH_SIZE",
    "UNMET",
    "Answers",
    "Failures",
    "Message",
    "Notices",
    "Tree",
    "Ways",
    "describe",
    "describe_places",
    "lost_record",
    "ranks_of",
]

Message = dict[str, Any]

#: More ranks than this are connected as a tree.
MAX_MESH_SIZE = 16
#: Children of a rank in the tree, on its host and, if it is its host's first rank, on others: fewer make the tree
#: deeper, more let a rank read and write more messages.
_NUM_CHILDREN = 8
_MOST_COMPARED = 16
_MOST_QUESTIONS = 4
#: Where a rank is that can't say it.
CUT_OFF = "can't be asked: a rank between this one and it, which passes messages on, does not answer"
#: What a rank that waits says where another one has ended by itself.
UNMET = "can't complete {}: all ranks must make this call equally often, not only inside `if strategy.is_chief:`"


class Tree:
    """Who is whose parent: hosts' first ranks form a tree, and below each one the other ranks of its host.

    Args:
        hosts: for each rank the number of its host; rank 0 is on the first one.
    """

    def __init__(self, hosts: Sequence[int]) -> None:
        members: dict[int, list[int]] = {}
        for rank, host in enumerate(hosts):
            members.setdefault(host, []).append(rank)
        self.parents: list[int | None] = [None] * len(hosts)
        #: For each rank those on its host, then those that lead other hosts.
        self.children: list[list[int]] = [[] for _ in hosts]
        for ranks in [*members.values(), [ranks[0] for ranks in members.values()]]:
            for place, rank in enumerate(ranks[1:]):
                parent = ranks[place // _NUM_CHILDREN]
                self.parents[rank] = parent
                self.children[parent].append(rank)
        #: The ranks as they are visited: the ranks below one follow it.
        self.order: list[int] = []
        below = [0]
        while below:
            self.order.append(below.pop())
            below += reversed(self.children[self.order[-1]])
        self.places = {rank: place for place, rank in enumerate(self.order)}
        self.sizes = [1] * len(hosts)
        for rank in reversed(self.order):
            parent_of_rank = self.parents[rank]
            if parent_of_rank is not None:
                self.sizes[parent_of_rank] += self.sizes[rank]

    def span(self, rank: int) -> tuple[int, int]:
        """Return the places in ``order`` of a rank and of those below it, as a range's bounds."""
        place = self.places[rank]
        return place, place + self.sizes[rank]

    def above(self, rank: int) -> list[int]:
        """Return a rank, its parent, and so on up to rank 0."""
        found = [rank]
        while (parent := self.parents[found[-1]]) is not None:
            found.append(parent)
        return found


class Ways:
    """Whom a rank connects to, and over whom it reaches the others; there is one way to each.

    Up to 16 ranks the first one of each host is its leader: the others connect to it, and leaders in pairs. More are
    the tree of records.

    Args:
        rank: this process's id.
        hosts: for each rank the number of its host.
    """

    def __init__(self, rank: int, hosts: Sequence[int]) -> None:
        self.rank, self.hosts = rank, hosts
        self._tree = Tree(hosts) if len(hosts) > MAX_MESH_SIZE else None
        #: The ranks to which this one connects, and those that connect to it.
        self.calls: list[int] = []
        self.answers: list[int] = []
        if self._tree is not None:
            self.calls, self.answers = self._tree.above(rank)[1:2], self._tree.children[rank]
            return
        leaders = [hosts.index(host) for host in sorted(set(hosts))]
        leader = hosts.index(hosts[rank])
        if rank != leader:
            self.calls = [leader]
            return
        self.calls = [other for other in leaders if other < rank]
        members = {other for other, host in enumerate(hosts) if host == hosts[rank]}
        self.answers = sorted({*members, *(other for other in leaders if other > rank)} - {rank})

    def pass_on(self, source: int | None, neighbour: int) -> bool:
        """Say whether this rank sends something on to a neighbour; ``None`` as its source is this rank itself."""
        if neighbour == source:
            return False
        here = self.hosts[self.rank]
        return self._tree is not None or source is None or here in (self.hosts[source], self.hosts[neighbour])

    def relays(self, other: int) -> set[int]:
        """Return the ranks that pass on what this one and another say."""
        if self._tree is None:
            ways = {self.hosts.index(self.hosts[rank]) for rank in (self.rank, other)}
        else:
            one, two = self._tree.above(self.rank), self._tree.above(other)
            both = [rank for rank in one if rank in two]
            ways = {*one, *two} - set(both[1:])
        return ways - {self.rank, other}


class _Link:
    """What goes to a neighbour, and what came from it."""

    def __init__(self) -> None:
        self.pending: list[Message] = []
        self.num_put = self.num_known = 0  # there
        self.owed: deque[list[tuple[_Link, int]]] = deque()  # of what came: which links must have got how far
        self.num_done = self.num_said = 0  # of what came
        self.is_open = True

    def put(self, message: Message) -> int:
        """Let a notice wait; return its number among those that have gone there, or will.

        It may be united with an equal one before it, but never so that it overtakes something of the same rank, or a
        loss, from which it may follow.
        """
        for place in range(1, min(len(self.pending), _MOST_COMPARED) + 1):
            other = self.pending[-place]
            if other["kind"] == message["kind"] and other["body"] == message["body"]:
                other["by"] |= message["by"]
                return self.num_put - place + 1
            if other["by"] & message["by"] or other["kind"] == "lost":
                break
        self.pending.append(dict(message))
        self.num_put += 1
        return self.num_put

    def advance(self) -> int:
        """Return how much of what came from here is known to all behind this rank."""
        while self.owed and all(link.num_known >= number or not link.is_open for link, number in self.owed[0]):
            self.owed.popleft()
            self.num_done += 1
        return self.num_done


class Notices:
    """What one rank passes on; it neither waits nor sends.

    A notice has a ``kind`` and a ``body``, which are equal in those that are united, ``by`` whom it is, a number whose
    bits are ranks, and ``own``, which is kept of the first.

    Args:
        ways: of this rank.
        on_told: called when more of what this rank has said is known to all, with how many notices of it are.
    """

    def __init__(self, ways: Ways, on_told: Callable[[int], None]) -> None:
        self._ways = ways
        self._on_told = on_told
        self._links = {neighbour: _Link() for neighbour in (*ways.calls, *ways.answers)}
        self._self = _Link()

    def post(self, message: Message) -> None:
        """Say something."""
        self._spread(message, None, self._self)

    def take(self, message: Message, source: int) -> bool:
        """Take what a neighbour sends, and pass it on; return whether it is a notice.

        Raises:
            ValueError, LookupError, TypeError: it is no message.
        """
        link = self._links[source]
        if message["kind"] == "known":
            link.num_known = max(link.num_known, min(int(message["body"]), link.num_put))
            self._look()
            return False
        message["by"] = by = int(message["by"], 16)
        if not 0 < by < 1 << len(self._ways.hosts):
            raise ValueError(f"of ranks that there are not: {by:x}")
        self._spread(message, source, link)
        return True

    def drop(self, neighbour: int) -> None:
        """Expect nothing more of a neighbour, and of those behind it."""
        link = self._links[neighbour]
        link.is_open = False
        link.pending.clear()
        self._look()

    def has_for(self, neighbour: int) -> bool:
        """Say whether there is something to be sent to a neighbour."""
        link = self._links[neighbour]
        return bool(link.pending) or link.advance() > link.num_said

    def messages_for(self, neighbour: int) -> list[Message]:
        """Return what is to be sent to a neighbour now."""
        link = self._links[neighbour]
        messages = [{**message, "by": f"{message['by']:x}"} for message in link.pending]
        link.pending.clear()
        if link.advance() > link.num_said:
            link.num_said = link.num_done
            messages.append({"kind": "known", "body": link.num_done})
        return messages

    def _spread(self, message: Message, source: int | None, link: _Link) -> None:
        link.owed.append([
            (other, other.put(message))
            for neighbour, other in self._links.items()
            if other.is_open and self._ways.pass_on(source, neighbour)
        ])  # fmt: skip
        self._look()

    def _look(self) -> None:
        before = self._self.num_done
        if self._self.advance() > before:
            self._on_told(self._self.num_done)


class Failures:
    """Who has failed and who knew of it, by rounds: each ends with a failure that all ranks had at the same point.

    Args:
        size: number of ranks.
    """

    def __init__(self, size: int) -> None:
        self.round = 0
        self._everyone = (1 << size) - 1
        # By round: who has failed with how many collectives begun and got through; who knew with how many begun.
        self._failed: defaultdict[int, dict[tuple[int, int], int]] = defaultdict(dict)
        self._aware: defaultdict[int, dict[int, int]] = defaultdict(dict)
        self._firsts: dict[int, Message] = {}

    def note(self, by: int, round_: int, record: Message) -> None:
        """Note that ranks have failed where the one has that a record is of."""
        if round_ >= self.round:
            _add(self._failed[round_], (record["num_collectives"], record["num_passed"]), by)
            self._firsts.setdefault(round_, record)

    def note_aware(self, by: int, round_: int, num_collectives: int) -> bool:
        """Note that ranks had begun so many collectives when they knew of a failure; return whether that is new."""
        return round_ >= self.round and _add(self._aware[round_], num_collectives, by)

    @property
    def first(self) -> Message | None:
        """The first failure of this round."""
        return self._firsts.get(self.round)

    @property
    def least_passed(self) -> float:
        """How many collectives the failed ranks have all got through."""
        return min((num_passed for _, num_passed in self._failed[self.round]), default=float("inf"))

    def begun_by(self, rank: int) -> int | None:
        """Return how many collectives a rank had begun when it failed; ``None`` if it has not."""
        return next((begun for (begun, _), by in self._failed[self.round].items() if by >> rank & 1), None)

    def are_of_all(self) -> bool:
        """Say whether all ranks have failed."""
        return _union(self._failed[self.round].values()) == self._everyone

    def is_any_past(self, num_collectives: int) -> bool:
        """Say whether a rank that has not failed has begun more collectives."""
        aware = self._aware[self.round]
        past = _union(by for count, by in aware.items() if count > num_collectives)
        return bool(past & ~_union(self._failed[self.round].values()))  # who has failed, too, may wait there

    def end_round(self) -> bool:
        """Begin the next round if all ranks have failed at the same point; return whether they have."""
        if not self.are_of_all() or len({begun for begun, _ in self._failed[self.round]}) > 1:
            return False
        for noted in (self._failed, self._aware):
            del noted[self.round]
        self._firsts.pop(self.round, None)
        self.round += 1
        return True


class Answers:
    """What ranks have answered to questions, which have numbers; of some questions only.

    Args:
        size: number of ranks.
    """

    def __init__(self, size: int) -> None:
        self._everyone = (1 << size) - 1
        self._found: defaultdict[int, dict[str, int]] = defaultdict(dict)

    def add(self, by: int, number: int, text: str) -> None:
        """Note that ranks have given an answer to a question."""
        _add(self._found[number], text, by)
        for old in [other for other in self._found if other <= number - _MOST_QUESTIONS]:
            del self._found[old]

    def missing(self, number: int) -> list[int]:
        """Return the ranks without an answer to a question or a later one."""
        given = _union(by for n, texts in self._found.items() if n >= number for by in texts.values())
        return ranks_of(self._everyone & ~given)

    def since(self, number: int) -> dict[int, str]:
        """Return for each rank its latest answer to a question or a later one."""
        found = [texts for n, texts in sorted(self._found.items()) if n >= number]
        return {rank: text for texts in found for text, by in texts.items() for rank in ranks_of(by)}


def _add(found: dict[Any, int], key: Any, by: int) -> bool:
    """Add ranks to those that are noted; return whether any is new."""
    before = found.get(key, 0)
    found[key] = before | by
    return found[key] != before


def _union(masks: Iterable[int]) -> int:
    return functools.reduce(operator.or_, masks, 0)


def ranks_of(by: int) -> list[int]:
    """Return the ranks whose bits are set."""
    return [rank for rank, bit in enumerate(reversed(f"{by:b}")) if bit == "1"]


def lost_record(rank: int | str, how: str) -> dict[str, Any]:
    """Return what is known of the failure of a rank that can't tell of it; without an operation.

    Args:
        rank: its id, or several as a text.
        how: what happened to it, as a part of a sentence.
    """
    return {"rank": rank, "replica": None, "operation": None, "error": how, "num_collectives": -1, "num_passed": -1}


def describe(record: Message) -> str:
    """Return one sentence for a failure record."""
    if record["operation"] is None:
        return f"Rank {record['rank']} {record['error']}."
    replica = "" if record["replica"] is None else f" (replica {record['replica']})"
    how = "gave up" if record.get("is_deadline") else "failed"
    return f"Rank {record['rank']}{replica} {how} in {record['operation']}: {record['error']}"


def describe_places(lines: Sequence[list[str]], own: int, culprits: Collection[int] = ()) -> tuple[str, list[int]]:
    """Return what is known of all ranks as a text, and who has arrived where one of them waits.

    Args:
        lines: for each rank where it is, or that it does not answer, and the lines of its stack.
        own: the rank that waits.
        culprits: whom the text should begin with; else those that have left or do not answer.
    """
    named = culprits or [r for r, line in enumerate(lines) if line[0].startswith(("has", "does"))]
    gone = "".join(f"Rank {r} {lines[r][0]}. " for r in sorted(named))
    here = _without_site(lines[own][0])
    arrived = [rank for rank, (place, *_) in enumerate(lines) if _without_site(place) == here]
    not_known = [rank for rank, (place, *_) in enumerate(lines) if place == CUT_OFF]
    others = set(range(len(lines))).difference(arrived, not_known)
    count = ""
    if here.startswith("in "):
        count = f"Arrived: {named_ranks(arrived)}. Not arrived: {named_ranks(sorted(others))}. "
        count += f"Not known: {named_ranks(not_known)}. " if not_known else ""
    rows = []
    for ranks, (place, *stack) in alike(lines):
        rows += [f"  {named_ranks(ranks)}: {place}", *(f"    {frame}" for frame in stack if ranks[0] in others)]
    return "\n".join([f"{gone}{count}Where each rank is:", *rows]), arrived


def _without_site(place: str) -> str:
    return place.rpartition(" at ")[0]
