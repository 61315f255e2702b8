"""Small messages between all ranks, with a thread for each rank."""

import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from torch.distributed import HashStore

from torchstrategy.collectives import records
from torchstrategy.collectives.connections import lookup_name
from torchstrategy.collectives.records import RecordMesh, RecordTree, connect_records


def no_check():
    return None


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
        futures = [threads.submit(one.exchange, body, no_check) for one, body in zip(connected, bodies, strict=True)]
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
            return [meshes[rank].exchange(b"%d,%d" % (rank, i), no_check) for i in range(rounds)]

        for found in threads.map(run, range(3)):
            assert found == [[b"%d,%d" % (rank, i) for rank in range(3)] for i in range(rounds)]


@pytest.mark.parametrize("length", [3, 40_000])
@pytest.mark.parametrize("kind", ["meshes", "trees"])
def test_what_was_started_is_received_later(kind, length, request):
    connected = request.getfixturevalue(kind)
    bodies = [b"%d" % (rank % 10) * length for rank in range(len(connected))]
    with ThreadPoolExecutor(len(connected)) as threads:
        started = list(threads.map(lambda one, body: one.start(body, no_check), connected, bodies))
        assert list(threads.map(lambda finish: finish(no_check), started)) == [bodies] * len(connected)
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
        meshes[0].exchange(b"x", no_check)


def test_the_check_ends_the_wait(meshes):
    calls = []

    def check():
        calls.append(threading.get_ident())
        raise KeyError("enough")

    with pytest.raises(KeyError):
        meshes[0].exchange(b"x", check)
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
        meshes[0].exchange(b"x", no_check)


def test_a_body_that_is_too_long_is_refused_where_it_comes_from(meshes, monkeypatch):
    monkeypatch.setattr(records, "MAX_BODY_BYTES", 10)
    with pytest.raises(ValueError, match=r"wants to send 11 bytes .* at most 10"):
        meshes[0].exchange(b"12345678901", no_check)


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
