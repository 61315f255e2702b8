"""A loop, workers and a backend without threads, processes or time: a test says what happens next."""

from __future__ import annotations

import heapq
import itertools
from collections import deque

from torchstrategy.errors import UnavailableError
from torchstrategy.ps.coordinator.closures import Closure
from torchstrategy.ps.coordinator.cluster import Cluster
from torchstrategy.ps.coordinator.per_worker import RemoteValue
from torchstrategy.ps.results import encode_error, encode_result
from torchstrategy.ps.states import PeerState
from torchstrategy.ps.transport.messages import Message


class FakeLoop:
    def __init__(self):
        self.calls = deque()
        self.timers = []
        self.now = 0.0
        self.is_closed = False
        self._numbers = itertools.count()

    def call_soon(self, fn):
        if self.is_closed:
            raise RuntimeError("The control loop is closed.")
        self.calls.append(fn)

    def call_later(self, seconds, fn):
        heapq.heappush(self.timers, (self.now + seconds, next(self._numbers), fn))

    def run(self):
        while self.calls:
            self.calls.popleft()()

    def advance(self, seconds):
        """Let time pass for timers."""
        self.run()
        end = self.now + seconds
        while self.timers and self.timers[0][0] <= end:
            self.now, _, fn = heapq.heappop(self.timers)
            fn()
            self.run()
        self.now = end


class FakePeer:
    """A worker's connection: requests pile up in ``open`` until the test answers them."""

    def __init__(self, loop, handler):
        self.loop = loop
        self.handler = handler
        self.state = PeerState.CONNECTING
        self.reason = "nothing has answered yet"
        handler.attach(self)
        self.open = []
        self.seen = []
        self.max_bytes = 1000

    def request(self, message, callback):
        if sum(map(len, message.blobs)) > self.max_bytes:
            raise ValueError("too large")
        self.seen.append(message)
        if self.state is not PeerState.READY:
            self.loop.call_soon(lambda: callback(UnavailableError("not connected")))
            return
        self.open.append((message, callback))

    def connect(self, prepare=True):
        self.state = PeerState.READY
        self.handler.ready(self, {"server": "one"})
        self.loop.run()
        if prepare:
            self.answer("configure", Message("ok", {}))

    def lose(self, reason="connection closed"):
        self.close(PeerState.LOST, reason)
        self.handler.lost(self, reason)
        self.loop.run()

    def close(self, state=PeerState.CLOSED, reason="this process has closed the connection"):
        self.state, self.reason = state, reason
        requests, self.open = self.open, []
        for _, callback in requests:
            callback(UnavailableError(reason))

    def answer(self, kind, reply, number=None):
        """Answer the oldest open request of a kind, or that of one closure."""
        for entry in self.open:
            message, callback = entry
            if message.kind == kind and (number is None or message.fields.get("closure") == number):
                self.open.remove(entry)
                callback(reply)
                self.loop.run()
                return message
        raise AssertionError(f"no open {kind} request for {number}: {[m.kind for m, _ in self.open]}")

    def done(self, value=None, number=None):
        return self.answer("run", encode_result(value), number)

    def fail(self, error, number=None, ps=None):
        return self.answer("run", Message("failed", {**encode_error(error), "ps": ps}), number)

    def kinds(self):
        return [message.kind for message, _ in self.open]

    def running(self):
        return [message.fields["closure"] for message, _ in self.open if message.kind == "run"]


class FakeBackend:
    def __init__(self):
        self.lost = {}
        self.away = set()
        self.asked = []
        self.absorbed = []
        self.dropped = set()
        self.is_closed = False

    def configuration(self, index):
        return Message("configure", {"task": ["worker", index]})

    def unneeded(self, keys):
        return [key for key in keys if key in self.dropped]

    def absorb(self, reply):
        self.absorbed.append(reply)

    def lost_ps(self, index):
        if index is None:
            return next(iter(self.lost.values()), None)
        return self.lost.get(index)

    def is_ps_away(self, index):
        return bool(self.away) if index is None else index in self.away

    def ask_ps(self, index):
        self.asked.append(index)


class FakeCluster:
    """A ``Cluster`` on a fake loop, its peers, and what a user does."""

    def __init__(self, num_workers=2, connect=True, **options):
        self.loop = FakeLoop()
        self.backend = FakeBackend()
        addresses = [f"127.0.0.1:{index}" for index in range(num_workers)]
        self.cluster = Cluster(self.backend, addresses, self.loop.call_soon, self.loop.call_later, **options)
        self.queue = self.cluster.queue
        self.peers = [FakePeer(self.loop, worker) for worker in self.cluster.workers]
        self._numbers = itertools.count()
        if connect:
            for peer in self.peers:
                peer.connect()

    def schedule(self, name="fn", definitions=(), resources=(), blob=b""):
        number = next(self._numbers)
        result = RemoteValue(name, self.cluster.idle)
        definitions = [definition(key) if isinstance(key, str) else key for key in definitions]
        closure = Closure(number, name, name, definitions, blob, result, resources=resources)
        self.cluster.submit(closure)
        self.loop.run()
        return result

    def schedule_many(self, count):
        return [self.schedule() for _ in range(count)]

    def is_settled(self, result):
        return result._is_settled

    def running(self):
        return [peer.running() for peer in self.peers]

    def all_running(self):
        return sorted(number for peer in self.peers for number in peer.running())


def definition(key, replaces=()):
    return Message("define", {"key": key, "replaces": list(replaces)})


def error_reply(error):
    return Message("error", encode_error(error))
