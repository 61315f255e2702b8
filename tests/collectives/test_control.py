"""The control plane: routing between hosts, lost and silent ranks, strangers."""

import contextlib
import os
import signal
import socket
import threading
import time
from datetime import timedelta

import pytest
from torch.distributed import HashStore

from torchstrategy.collectives import connections, control, notices
from torchstrategy.collectives.control import ControlPlane

LAYOUTS = [(0, 0), (0, 1), (0, 0, 0), (0, 0, 1, 1), (0, 1, 0, 1, 2), (0, 1, 2, 3)]


@pytest.fixture(params=["pairs", 1, 2])
def shape(request, monkeypatch):
    """How ranks are connected: leaders in pairs, or all in a tree of so many children."""
    if request.param != "pairs":
        monkeypatch.setattr(notices, "MAX_MESH_SIZE", 1)
        monkeypatch.setattr(notices, "_NUM_CHILDREN", request.param)
    return request.param


class Node:
    """A rank's plane, and what it heard."""

    def __init__(self, store, rank, hosts, timeout_s=20.0):
        self.rank = rank
        self.heard = []
        self.lost = []
        self.back = []
        self.num_told = 0
        self.plane = ControlPlane(
            store,
            rank,
            hosts,
            "127.0.0.1",
            on_message=self.hear,
            on_lost=lambda rank, *, closed: self.lost.append((rank, closed)),
            on_back=self.back.append,
            timeout_s=timeout_s,
        )
        self.is_dead = False

    def hear(self, by, message):
        if message["kind"] == "told":
            self.num_told = message["body"]
        else:
            self.heard += [(sender, message["kind"], message["body"]) for sender in notices.ranks_of(by)]

    def die(self):
        """Close the connections without a word, as the kernel does for a process that dies."""
        self.is_dead = True
        # In the plane's own thread; it would read connections that another one closes, and tell of them over the rest.
        self.plane._part = lambda: None
        self.plane._stop = True
        self.plane._wake()
        self.plane._thread.join()


@pytest.fixture
def connect():
    """Make planes for a layout of hosts, each in a thread, as they wait for each other."""
    nodes = []

    def connect_all(hosts):
        store = HashStore()
        threads = [
            threading.Thread(target=lambda rank=rank: nodes.append(Node(store, rank, hosts)))
            for rank in range(len(hosts))
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(timeout=30)
        return sorted(nodes, key=lambda node: node.rank)

    yield connect_all
    for node in nodes:
        if not node.is_dead:
            node.plane.close()


def until(condition, seconds=20.0):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not come to that"
        time.sleep(0.01)


@pytest.mark.parametrize("hosts", LAYOUTS)
def test_a_message_to_all_reaches_each_rank_once(shape, connect, hosts):
    nodes = connect(hosts)
    for node in nodes:
        assert node.plane.post("hello", node.rank * 10) == 1
    everyone = [(rank, "hello", rank * 10) for rank in range(len(hosts))]
    until(lambda: all(len(node.heard) >= len(hosts) - 1 for node in nodes))
    time.sleep(0.05)
    for node in nodes:
        assert sorted(node.heard) == [message for message in everyone if message[0] != node.rank]
    until(lambda: all(node.num_told == 1 for node in nodes))


@pytest.mark.parametrize("hosts", LAYOUTS)
@pytest.mark.parametrize("gone", [0, 1, -1])
def test_a_rank_whose_connections_close_is_lost_to_all(shape, connect, hosts, gone):
    nodes = connect(hosts)
    dead = nodes.pop(gone)
    dead.die()
    survivors = nodes
    if shape == "pairs":
        is_leader = dead.rank == hosts.index(hosts[dead.rank])
        survivors = [node for node in nodes if hosts[node.rank] != hosts[dead.rank] or not is_leader]
    until(lambda: all((dead.rank, True) in node.lost for node in survivors))
    assert all({rank for rank, _ in node.lost} == {dead.rank} for node in survivors)


def test_a_rank_that_leaves_is_not_lost(connect):
    nodes = connect((0, 0, 1))
    nodes.pop(1).plane.close()
    until(lambda: all((1, "left", None) in node.heard for node in nodes))
    time.sleep(0.1)
    assert [node.lost for node in nodes] == [[], []]


def test_a_rank_that_is_slow_to_leave_is_not_lost(connect, monkeypatch):
    monkeypatch.setenv("TORCHSTRATEGY_HEARTBEAT_S", "0.5")
    nodes = connect((0, 0))
    leaving = nodes.pop(1).plane
    post = leaving.post

    def post_late(kind, how):
        time.sleep(0.3)  # the thread, which looks around several times meanwhile, must not end before
        post(kind, how)

    leaving.post = post_late
    leaving.close()
    until(lambda: not nodes[0].plane.is_connected)
    assert nodes[0].lost == []
    assert (1, "left", None) in nodes[0].heard


@pytest.mark.parametrize("how", ["goes on", "dies"])
def test_a_rank_knows_when_all_know_what_it_has_said(shape, connect, how):
    nodes = connect((0, 0, 1, 2))
    last, blocked, reached = nodes[3].plane, threading.Event(), threading.Event()
    last._find_silent = lambda now: (reached.set(), blocked.wait(30))
    last._wake()
    assert reached.wait(30)
    nodes[1].plane.post("hello")
    until(lambda: all(nodes[rank].heard for rank in (0, 2)))
    time.sleep(0.1)
    assert nodes[1].num_told == 0
    if how == "dies":
        for peer in last._peers.values():
            peer.connection.shutdown(socket.SHUT_RDWR)
    else:
        blocked.set()
    until(lambda: nodes[1].num_told == 1)
    blocked.set()


def test_a_rank_does_not_spin_while_another_reads_nothing(connect):
    nodes = connect((0, 0))
    first, second = nodes[0].plane, nodes[1].plane
    blocked, reached = threading.Event(), threading.Event()
    second._find_silent = lambda now: (reached.set(), blocked.wait(30))
    second._wake()
    assert reached.wait(30)
    for number in range(40):
        first.post("long", [number, "x" * 900_000])
    until(lambda: first._peers[1].unsent)
    first.post("last")
    time.sleep(0.1)
    turns, turn = [], first._turn
    first._turn = lambda timeout_s: (turns.append(1), turn(timeout_s))
    first._wake()
    time.sleep(0.3)
    blocked.set()
    assert len(turns) < 50
    until(lambda: nodes[1].heard and nodes[1].heard[-1][1] == "last")


def say(pending, by, kind, body=None, own=None):
    return pending.put({"by": by, "kind": kind, "body": body, "own": own})


def test_equal_messages_go_together_and_overtake_none_of_the_same_rank_and_no_loss():
    link = notices._Link()
    assert [say(link, 0b001, "failed", own="of 0"), say(link, 0b010, "failed", own="of 1")] == [1, 1]
    assert [say(link, 0b010, "left"), say(link, 0b001, "left"), say(link, 0b010, "failed")] == [2, 2, 3]
    assert [say(link, 0b100, "lost"), say(link, 0b1000, "failed")] == [4, 5]
    assert [(one["by"], one["kind"], one["own"]) for one in link.pending] == [
        (0b0011, "failed", "of 0"),
        (0b0011, "left", None),
        (0b0010, "failed", None),
        (0b0100, "lost", None),
        (0b1000, "failed", None),
    ]


@pytest.mark.parametrize("kind", [{"by": "0"}, {"by": "-1"}, {"by": "8"}, {"by": "x"}, {}])
def test_a_message_of_nobody_is_none(kind):
    of_first = notices.Notices(notices.Ways(0, (0, 0, 0)), lambda number: None)
    with pytest.raises((ValueError, LookupError)):
        of_first.take({"kind": "left", "body": None, **kind}, 1)


@pytest.mark.parametrize("hosts", [[rank // 8 for rank in range(240)], [0] * 40, [0] * 8 + [1] * 8])
def test_there_is_one_way_between_two_ranks_of_many(hosts):
    ways = [notices.Ways(rank, hosts) for rank in range(len(hosts))]
    assert max(len(way.calls) + len(way.answers) for way in ways) <= 17
    for way in ways:
        assert all(way.rank in ways[other].answers for other in way.calls)
        assert all(way.rank in ways[other].calls for other in way.answers)
    assert sum(len(way.calls) for way in ways) == len(hosts) - 1
    for one, other in [(0, 1), (3, len(hosts) - 1), (9, 10)]:
        relays = ways[one].relays(other)
        assert relays == ways[other].relays(one)
        path = way_between(ways, one, other)
        assert relays == set(path[1:-1])


def way_between(ways, one, other):
    """Return the ranks on the way, found by trying all."""
    before, now = {one: None}, [one]
    while other not in before:
        now = [(rank, n) for rank in now for n in (*ways[rank].calls, *ways[rank].answers) if n not in before]
        before.update((n, rank) for rank, n in now)
        now = [n for _, n in now]
    path = [other]
    while before[path[-1]] is not None:
        path.append(before[path[-1]])
    return path


@pytest.mark.parametrize("hosts", LAYOUTS)
def test_all_leave_at_once(shape, connect, hosts):
    nodes = connect(hosts)
    threads = [threading.Thread(target=node.plane.close) for node in nodes]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not any(node.plane._thread.is_alive() for node in nodes)
    assert [node.lost for node in nodes] == [[]] * len(hosts)


def test_a_silent_rank_of_another_host_is_lost_and_may_come_back(shape, connect, monkeypatch):
    monkeypatch.setattr(control.Pulse, "start", lambda connections, interval_s: None)  # or its process has been killed
    monkeypatch.setenv("TORCHSTRATEGY_HEARTBEAT_S", "0.5")
    nodes = connect((0, 0, 1))
    stopped = nodes[2].plane
    blocked = threading.Event()
    stopped._find_silent = lambda now: blocked.wait(30)  # its thread serves nobody
    try:
        until(lambda: all((2, False) in node.lost for node in nodes[:2]))
    finally:
        blocked.set()
        del stopped._find_silent
    until(lambda: all(node.back == [2] for node in nodes[:2]))


def test_a_busy_process_of_another_host_is_not_taken_for_a_stopped_one(connect, monkeypatch):
    monkeypatch.setenv("TORCHSTRATEGY_HEARTBEAT_S", "0.5")
    nodes = connect((0, 0, 1))
    busy, blocked = nodes[2].plane, threading.Event()
    busy._find_silent = lambda now: blocked.wait(30)
    time.sleep(2.0)  # four times the deadline
    assert [node.lost for node in nodes[:2]] == [[], []]
    blocked.set()
    del busy._find_silent
    busy._pulse._process.kill()  # nor is one whose process that beats is killed, while its thread runs
    time.sleep(1.0)
    assert [node.lost for node in nodes[:2]] == [[], []]


def test_who_waits_for_word_of_a_loss_is_connected_until_it_comes(connect):
    """Else a rank that notices first that the only other one's link broke would not learn that it has died."""
    one, other = connect((0, 0))
    connected = []
    one.plane._on_lost = lambda rank, *, closed: connected.append(one.plane.is_connected)
    other.die()
    until(lambda: not one.plane.is_connected)
    assert connected == [True]


@pytest.mark.parametrize("how", ["closed", "silent"])
def test_a_loss_is_passed_on_before_what_follows_from_it_here(connect, monkeypatch, how):
    """The leader's program may end at once; who heard of that first would take the leader for the cause."""
    if how == "silent":
        monkeypatch.setenv("TORCHSTRATEGY_HEARTBEAT_S", "0.5")
    leader, other, lost = connect((0, 0, 1))
    order, blocked = [], threading.Event()
    leader.plane._on_lost = lambda rank, *, closed: leader.plane.post("leaves")
    other.plane._on_lost = lambda rank, *, closed: order.append((rank, closed))
    other.plane._on_message = lambda by, message: order.append(message["kind"])
    if how == "closed":
        lost.die()
    else:
        lost.plane._find_silent = lambda now: blocked.wait(30)
        lost.plane._pulse._process.kill()
    until(lambda: len(order) == 2)
    blocked.set()
    assert order == [(2, how == "closed"), "leaves"]


def test_a_busy_process_of_this_host_is_not_taken_for_a_stopped_one(connect, monkeypatch):
    monkeypatch.setenv("TORCHSTRATEGY_HEARTBEAT_S", "0.2")
    nodes = connect((0, 0))
    busy = nodes[1].plane
    blocked = threading.Event()
    busy._find_silent = lambda now: blocked.wait(30)
    time.sleep(1.0)  # five times the deadline, but the process (this one) is running
    blocked.set()
    assert nodes[0].lost == []


def test_strangers_are_refused(connect, caplog):
    store, hosts = HashStore(), (0, 0)
    result = []
    leader = threading.Thread(target=lambda: result.append(Node(store, 0, hosts)))
    leader.start()
    host, port = store.get("address/0").decode().split()
    with socket.create_connection((host, int(port))) as stranger:
        assert len(stranger.recv(16)) == 16
        stranger.sendall(b"\x10\x00\x00\x00" + b'{"rank":1,"pid":')
        stranger.shutdown(socket.SHUT_WR)
        assert stranger.recv(16) == b""
    with socket.create_connection((host, int(port))) as stranger:
        stranger.recv(16)
        forged = b'{"rank":1,"pid":1,"mac":"00"}'
        stranger.sendall(len(forged).to_bytes(4, "little") + forged)
        assert stranger.recv(16) == b""
    with socket.create_connection((host, int(port))) as stranger:
        stranger.recv(16)
        stranger.sendall(b"\xff\xff\xff\xff")
        assert stranger.recv(16) == b""
    for text in [b'{"rank":Infinity,"pid":1,"mac":"00"}', b"[" * 100_000]:
        with socket.create_connection((host, int(port))) as stranger:
            stranger.recv(16)
            stranger.sendall(len(text).to_bytes(4, "little") + text)
            with contextlib.suppress(ConnectionResetError):  # what is too long is not read
                assert stranger.recv(16) == b""
    member = Node(store, 1, hosts)
    leader.join(timeout=20)
    member.plane.post("hello")
    until(lambda: result[0].heard == [(1, "hello", None)])
    assert sum("Refused a connection" in record.message for record in caplog.records) == 5
    member.plane.close()
    result[0].plane.close()


def test_a_stranger_cannot_hold_up_the_job(monkeypatch):
    monkeypatch.setattr(connections, "_GREETING_S", 0.3)
    store, hosts, nodes = HashStore(), (0, 0), []
    threads = [threading.Thread(target=lambda rank=rank: nodes.append(Node(store, rank, hosts))) for rank in (0, 1)]
    threads[0].start()
    host, port = store.get("address/0").decode().split()
    with socket.create_connection((host, int(port))) as stranger:
        stranger.recv(16)
        stranger.sendall((1000).to_bytes(4, "little"))
        threads[1].start()
        with contextlib.suppress(OSError):
            for _ in range(1000):  # a minute
                stranger.sendall(b" ")
                time.sleep(0.06)
                if len(nodes) == 2:
                    break
    for thread in threads:
        thread.join(timeout=20)
    assert sorted(node.rank for node in nodes) == [0, 1]
    for node in nodes:
        node.plane.close()


def test_a_leader_that_cannot_be_reached_is_named():
    store = HashStore()
    store.set("key", "key")
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    store.set("address/0", f"127.0.0.1 {port}")
    with pytest.raises(ConnectionError, match=f"Rank 0 can't be reached at 127.0.0.1, port {port}"):
        Node(store, 1, (0, 0), timeout_s=2)


def test_a_leader_that_publishes_nothing_is_named():
    store = HashStore()
    store.set("key", "key")
    store.set_timeout(timedelta(seconds=0.2))
    with pytest.raises(TimeoutError, match="Rank 0 did not say how to reach it"):
        Node(store, 1, (0, 0))


def test_a_rank_that_never_connects_is_named():
    with pytest.raises(TimeoutError, match=r"Rank 1, 2 did not connect within 0.2 s"):
        Node(HashStore(), 0, (0, 0, 0), timeout_s=0.2)


def test_a_message_that_is_too_long_is_refused_by_the_receiver(connect, caplog):
    nodes = connect((0, 1))
    peer = next(iter(nodes[0].plane._peers.values()))
    peer.connection.send((1 << 30).to_bytes(4, "little"))
    until(lambda: nodes[1].lost == [(0, True)])
    assert any("sent something that is no message" in record.message for record in caplog.records)


def test_a_forked_child_does_not_keep_the_connections(connect):
    nodes = connect((0, 0))
    pid = os.fork()
    if pid == 0:
        try:
            time.sleep(30)
        finally:
            os._exit(0)
    try:
        nodes.pop(1).die()
        until(lambda: nodes[0].lost == [(1, True)], seconds=10)
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
