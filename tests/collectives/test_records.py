"""Small messages between all ranks, with a thread for each rank."""

import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from torch.distributed import HashStore

from tests.collectives.groups import exchange_bodies, no_check
from torchstrategy.collectives import records
from torchstrategy.collectives.connections import lookup_name
from torchstrategy.collectives.records import RecordMesh, RecordTree, by_rank, connect_records


def connect_all(size, hosts=None, before=lambda store: None):
    store = HashStore()
    hosts = hosts or [0] * size
    with ThreadPoolExecutor(size) as threads:

        def start(rank):
            return threads.submit(connect_records, store, "127.0.0.1", rank, size, hosts, 20.0, no_check)

        first = start(0)
        before(store)  # rank 0 is listening and waits for the others
        return [future.result() for future in [first, *map(start, range(1, size))]]


def close(connected):
    for one in connected:
        for channel in one._channels.values():
            channel.close()


@pytest.fixture
def meshes():
    made = connect_all(3)
    yield made
    close(made)


@pytest.fixture(scope="module")
def trees():
    made = connect_all(20, [0, 0, 1, 1, 1, 2, 0, 3, 3, 2] * 2)  # hosts' ranks need not be neighbours
    yield made
    close(made)


def exchange(connected, bodies):
    with ThreadPoolExecutor(len(connected)) as threads:
        futures = [threads.submit(exchange_bodies, *pair) for pair in zip(connected, bodies, strict=True)]
        return [future.result(timeout=20) for future in futures]


@pytest.mark.parametrize("lengths", [(0, 1, 5), (24 << 10, (24 << 10) + 1, 0), (3_000_000, 10, 2_000_000)])
def test_bodies_of_any_length_arrive_in_the_order_of_ranks(meshes, lengths):
    for _ in range(3):
        bodies = [bytes([65 + rank]) * length for rank, length in enumerate(lengths)]
        assert exchange(meshes, bodies) == [bodies] * 3


def test_ranks_may_be_a_message_ahead(meshes):
    rounds = 200
    with ThreadPoolExecutor(3) as threads:

        def run(rank):
            return [exchange_bodies(meshes[rank], b"%d,%d" % (rank, i)) for i in range(rounds)]

        for found in threads.map(run, range(3)):
            assert found == [[b"%d,%d" % (rank, i) for rank in range(3)] for i in range(rounds)]


@pytest.mark.parametrize("length", [3, 40_000])
@pytest.mark.parametrize("kind", ["meshes", "trees"])
def test_what_was_started_is_received_later(kind, length, request):
    connected = request.getfixturevalue(kind)
    bodies = [b"%d" % (rank % 10) * length for rank in range(len(connected))]
    with ThreadPoolExecutor(len(connected)) as threads:
        started = list(threads.map(lambda one, body: one.start(body, no_check), connected, bodies))
        assert list(threads.map(lambda finish: by_rank(finish(no_check)), started)) == [bodies] * len(connected)
    assert exchange(connected, bodies) == [bodies] * len(connected)


@pytest.mark.parametrize("length", [0, 7, 40_000])
def test_a_tree_of_many_ranks_gives_the_same(trees, length):
    assert all(isinstance(tree, RecordTree) for tree in trees)
    for i in range(3):
        bodies = [b"%d-%d" % (rank, i) * (length + rank) for rank in range(20)]
        assert exchange(trees, bodies) == [bodies] * 20


def test_ranks_of_a_tree_have_few_connections(trees):
    # Rank 0: five ranks of its host and three other hosts. Rank 7: two more of its host, and rank 0.
    assert [len(trees[rank]._channels) for rank in (0, 1, 2, 5, 7, 8)] == [8, 1, 6, 4, 4, 1]
    assert sum(len(tree._channels) for tree in trees) == 2 * 19


@pytest.mark.parametrize("per_host", [1, 8, 4096])
def test_no_rank_of_a_large_tree_has_many_connections_or_is_far_away(per_host):
    tree = records.Tree([rank // per_host for rank in range(4096)])
    assert max(map(len, tree.children)) <= 16
    depths = [0] * 4096
    for rank in tree.order[1:]:
        depths[rank] = depths[tree.parents[rank]] + 1
    assert max(depths) <= 5
    assert sorted(tree.order) == list(range(4096))
    for rank in (0, 1, 8, 77):
        start, stop = tree.span(rank)
        below = set(tree.order[start:stop])
        assert below == {rank, *(other for other in range(4096) if tree.parents[other] in below)}


def message_bytes(connected, bodies, unite):
    """Exchange; return what every rank receives, if all receive the same, and how many bytes each rank has sent."""
    sent = [0] * len(connected)

    def run(rank):
        for channel in connected[rank]._channels.values():
            send = type(channel).send.__get__(channel)

            def counted(message, check, send=send):
                sent[rank] += len(message)
                send(message, check)

            channel.send = counted
        return connected[rank].start(bodies[rank], no_check, unite)(no_check)

    with ThreadPoolExecutor(len(connected)) as threads:
        first, *others = threads.map(run, range(len(connected)))
    assert all(other == first for other in others)
    for one in connected:
        for channel in one._channels.values():
            del channel.send
    return first, sent


def test_equal_bodies_travel_once_and_different_ones_say_who_has_brought_them(trees):
    groups, sent = message_bytes(trees, [b"x" * 1000] * 20, None)
    assert groups == [(b"x" * 1000, range(20))]
    assert sent[0] < 1100 * len(trees[0]._channels)
    groups, sent = message_bytes(trees, [b"x" * 1000 if rank != 8 else b"y" * 1000 for rank in range(20)], None)
    assert [(body[:1], list(ranks)) for body, ranks in groups] == [
        (b"x", [rank for rank in range(20) if rank != 8]),
        (b"y", [8]),
    ]
    assert sent[0] < 2200 * len(trees[0]._channels)


@pytest.mark.parametrize("kind", ["meshes", "trees"])
def test_the_ends_of_bodies_with_equal_first_lines_are_united(kind, request):
    connected = request.getfixturevalue(kind)
    size = len(connected)

    def add(one, other):
        return b"%d" % (int(one) + int(other))

    groups, _ = message_bytes(connected, [b"head\n%d" % rank for rank in range(size)], add)
    assert [(body, list(ranks)) for body, ranks in groups] == [(b"head\n%d" % sum(range(size)), list(range(size)))]
    groups, _ = message_bytes(connected, [b"%s\n%d" % (b"b" if rank == 1 else b"a", rank) for rank in range(size)], add)
    others = [rank for rank in range(size) if rank != 1]
    assert [(body, list(ranks)) for body, ranks in groups] == [(b"a\n%d" % sum(others), others), (b"b\n1", [1])]


@pytest.mark.parametrize(
    "table", [b"no json", b"[[1,0,1]]", b"[[1,5,6],[1,5,6]]", b"[[-1,5,6]]", b"[[1,0,99999999999]]"]
)
def test_a_damaged_table_is_refused_before_anything_is_allocated(table, monkeypatch):
    monkeypatch.setattr(records, "MAX_MESH_SIZE", 1)
    made = connect_all(2)
    made[1]._channels[0].send(len(table).to_bytes(8, "little") + table, no_check)
    with pytest.raises(ConnectionError, match="rank 1 sends a message without a table"):
        exchange_bodies(made[0], b"x")
    close(made)


def test_up_to_16_ranks_are_connected_in_pairs(monkeypatch):
    monkeypatch.setattr(records, "MAX_MESH_SIZE", 3)
    for size, kind in ((3, RecordMesh), (4, RecordTree)):
        made = connect_all(size)
        assert all(type(one) is kind for one in made)
        close(made)


@pytest.mark.parametrize("hosts", [[0, 0, 0, 0], [0, 1, 2, 3], [0, 0, 1, 1]], ids=["one", "each", "two"])
def test_trees_of_all_shapes(hosts, monkeypatch):
    monkeypatch.setattr(records, "MAX_MESH_SIZE", 1)
    made = connect_all(4, hosts)
    assert exchange(made, [b"a", b"b", b"c", b"d"]) == [[b"a", b"b", b"c", b"d"]] * 4
    close(made)


def test_a_closed_connection_is_an_error(meshes):
    close(meshes[1:])
    with pytest.raises(ConnectionError):
        exchange_bodies(meshes[0], b"x")


def test_the_check_ends_the_wait(meshes):
    calls = []

    def check():
        calls.append(threading.get_ident())
        raise KeyError("enough")

    with pytest.raises(KeyError):
        meshes[0].start(b"x", check)(check)
    assert len(calls) == 1


def test_the_check_ends_the_wait_for_connections():
    store = HashStore()

    def check():
        if time.monotonic() > start + 1:
            raise KeyError("enough")

    start = time.monotonic()
    with pytest.raises(KeyError):
        connect_records(store, "127.0.0.1", 0, 2, [0, 0], 20.0, check)


def test_who_did_not_connect_is_named():
    with pytest.raises(TimeoutError, match=r"rank 1, 2 did not connect to rank 0 within 0\.2 s"):
        connect_records(HashStore(), "127.0.0.1", 0, 3, [0] * 3, 0.2, no_check)


def test_who_can_not_be_reached_is_named():
    store = HashStore()
    with socket.create_server(("127.0.0.1", 0)) as server:
        store.set("address/0", f"127.0.0.1 {server.getsockname()[1]}")
    store.set("key", "0" * 32)
    with pytest.raises(ConnectionError, match="rank 1 can't connect to rank 0"):
        connect_records(store, "127.0.0.1", 1, 2, [0, 0], 5.0, no_check)


def test_a_damaged_length_is_refused_before_anything_is_allocated(meshes):
    meshes[1]._channels[0].send((1 << 62).to_bytes(8, "little"), no_check)
    with pytest.raises(ConnectionError, match="rank 1 announces a message of 4,611,686,018,427,387,904 bytes"):
        exchange_bodies(meshes[0], b"x")


def test_a_body_that_is_too_long_is_refused_where_it_comes_from(meshes, monkeypatch):
    monkeypatch.setattr(records, "MAX_BODY_BYTES", 10)
    with pytest.raises(ValueError, match=r"wants to send 11 bytes .* at most 10"):
        exchange_bodies(meshes[0], b"12345678901")


@pytest.mark.parametrize("greeting", [b"0" * 32 + (1).to_bytes(8, "little"), b"short"], ids=["wrong key", "too short"])
def test_strangers_are_turned_away(greeting):
    def intrude(store):
        host, port = store.get("address/0").decode().split()
        with socket.create_connection((host, int(port)), timeout=30) as stranger:
            stranger.sendall(greeting)
            assert stranger.recv(1) == b""

    meshes = connect_all(2, before=intrude)
    assert exchange(meshes, [b"a", b"b"]) == [[b"a", b"b"]] * 2
    close(meshes)


def test_a_stranger_with_the_key_but_a_foreign_rank_is_turned_away():
    def intrude(store):
        host, port = store.get("address/0").decode().split()
        with socket.create_connection((host, int(port)), timeout=30) as stranger:
            stranger.sendall(store.get("key") + (7).to_bytes(8, "little"))
            assert stranger.recv(1) == b""

    close(connect_all(2, before=intrude))


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "worker-0.example", "b\u00fccher.example"])
def test_hosts_are_looked_up_by_their_names(host):
    name = lookup_name(host)
    assert name == (host if "\u00fc" in host else host.encode())
    if host[0] in "1:":
        assert socket.getaddrinfo(name, 1) == socket.getaddrinfo(host, 1)
