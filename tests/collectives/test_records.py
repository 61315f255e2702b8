"""The mesh of small messages, with a thread for each rank."""

import socket
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from torch.distributed import HashStore

from torchstrategy.collectives.records import RecordMesh


def make_meshes(size, before=lambda store: None):
    store = HashStore()
    with ThreadPoolExecutor(size) as threads:
        first = threads.submit(RecordMesh, store, "127.0.0.1", 0, size, 20.0)
        before(store)  # rank 0 is listening and waits for the others
        others = [threads.submit(RecordMesh, store, "127.0.0.1", rank, size, 20.0) for rank in range(1, size)]
        return [future.result() for future in (first, *others)]


def close(meshes):
    for mesh in meshes:
        for connection in mesh._sockets.values():
            connection.close()


@pytest.fixture
def meshes():
    made = make_meshes(3)
    yield made
    close(made)


def exchange(meshes, bodies):
    with ThreadPoolExecutor(len(meshes)) as threads:
        futures = [threads.submit(mesh.exchange, body, lambda: None) for mesh, body in zip(meshes, bodies, strict=True)]
        return [future.result(timeout=20) for future in futures]


@pytest.mark.parametrize("lengths", [(0, 1, 5), (4096, 4097, 0), (3_000_000, 10, 2_000_000)])
def test_bodies_of_any_length_arrive_in_the_order_of_ranks(meshes, lengths):
    for _ in range(3):
        bodies = [bytes([65 + rank]) * length for rank, length in enumerate(lengths)]
        assert exchange(meshes, bodies) == [bodies] * 3


def test_a_closed_connection_is_an_error(meshes):
    close(meshes[1:])
    with pytest.raises(ConnectionError):
        meshes[0].exchange(b"x", lambda: None)


def test_the_check_ends_the_wait(meshes):
    calls = []

    def check():
        calls.append(threading.get_ident())
        raise KeyError("enough")

    with pytest.raises(KeyError):
        meshes[0].exchange(b"x", check)
    assert len(calls) == 1


def test_strangers_are_turned_away():
    def intrude(store):
        host, port = store.get("address/0").decode().split()
        with socket.create_connection((host, int(port)), timeout=5) as stranger:
            stranger.sendall(b"0" * 32 + (1).to_bytes(8, "little"))
            assert stranger.recv(1) == b""

    meshes = make_meshes(2, intrude)
    assert exchange(meshes, [b"a", b"b"]) == [[b"a", b"b"]] * 2
    close(meshes)
