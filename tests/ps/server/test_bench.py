"""A worker's connections to parameter servers that run in this process."""

import threading
import time

import pytest
import torch

import torchstrategy as ts
from tests.clusters import new_cluster
from torchstrategy.errors import UnavailableError
from torchstrategy.ps.client import ParameterClient
from torchstrategy.ps.layout import Placer
from torchstrategy.ps.server import worker_service as bench_module
from torchstrategy.ps.server.worker_service import WorkerBench

WAIT_S = 20


class Cluster:
    def __init__(self):
        self.cluster = new_cluster(["ps", "ps", "worker"])
        self.servers = [ts.Server(self.cluster, "ps", index) for index in range(2)]
        self.bench = WorkerBench(0)

    def fields(self, **changes):
        return {
            "cluster": self.cluster,
            "incarnation": 5,
            "ps": self.cluster["ps"],
            "ps_incarnations": [server._listener.incarnation for server in self.servers],
            **changes,
        }

    def client(self, **changes):
        self.bench.configure(self.fields(**changes))
        client = ParameterClient(self.bench._links)
        placer = Placer(2)
        self.specs = [placer.place(number, f"v{number}", (2,), torch.float32, True) for number in range(2)]
        for spec in self.specs:
            client.create(spec, torch.ones(2))
        return client


@pytest.fixture
def cluster():
    cluster = Cluster()
    yield cluster
    cluster.bench.close()
    for server in cluster.servers:
        server.stop()


def test_it_connects_to_all_servers(cluster):
    client = cluster.client()
    assert [spec.parts[0].ps for spec in cluster.specs] == [0, 1]
    pulled = client.pull(cluster.specs, {})
    assert [pulled[number][1].tolist() for number in (0, 1)] == [[1, 1], [1, 1]]


def test_a_restarted_server_is_another_one(cluster):
    with pytest.raises(UnavailableError, match=r"/job:ps/task:1 at .* was restarted") as caught:
        cluster.bench.configure(cluster.fields(ps_incarnations=[cluster.servers[0]._listener.incarnation, "other"]))
    assert cluster.bench.failed_ps(caught.value) == 1


def test_a_server_that_is_not_there(cluster, monkeypatch):
    monkeypatch.setattr(bench_module, "_CONNECT_S", 0.3)
    cluster.servers[0].stop()
    with pytest.raises(UnavailableError, match="/job:ps/task:0 at") as caught:
        cluster.bench.configure(cluster.fields())
    assert cluster.bench.failed_ps(caught.value) == 0


def test_a_server_that_works_for_a_newer_coordinator(cluster):
    newer = WorkerBench(0)
    newer.configure(cluster.fields(incarnation=6))
    with pytest.raises(UnavailableError, match="refuses this process: A newer coordinator") as caught:
        cluster.bench.configure(cluster.fields())
    assert cluster.bench.failed_ps(caught.value) == 0
    newer.close()


def test_a_lost_server_is_named(cluster):
    client = cluster.client()
    cluster.servers[1].stop()
    client.pull(cluster.specs[:1], {})
    with pytest.raises(UnavailableError) as caught:
        client.pull(cluster.specs, {})
    assert cluster.bench.failed_ps(caught.value) == 1
    assert cluster.bench.failed_ps(ValueError("x")) is None
    assert cluster.bench.failed_ps(UnavailableError("something else")) is None
    error = KeyError("of the program")
    error.__context__ = caught.value
    assert cluster.bench.failed_ps(error) == 1
    client.pull(cluster.specs[:1], {})  # the other one goes on


def test_a_broken_channel_is_made_anew(cluster):
    client = cluster.client()
    cluster.bench._links[0]._channel.fail("broken by the test")
    assert client.pull(cluster.specs[:1], {})[0][1].tolist() == [1, 1]


def test_a_connection_that_is_made_again_is_waited_for(cluster, monkeypatch):
    monkeypatch.setattr(bench_module, "_MAX_RECONNECT_S", WAIT_S)
    client = cluster.client(ps_grace_s=60.0)
    link = cluster.bench._links[0]
    is_open = threading.Event()
    reopen = link.peer.open

    def open_later():
        threading.Timer(0.5, lambda: link.peer.loop.call_soon(lambda: (is_open.set(), reopen()))).start()

    link.peer.open = open_later
    link.peer.loop.call_soon(lambda: link.peer._lose("by the test"))
    deadline = time.monotonic() + WAIT_S
    while link.failure is None:
        assert time.monotonic() < deadline
    assert client.pull(cluster.specs[:1], {})[0][1].tolist() == [1, 1]
    assert is_open.is_set()


def test_closing_ends_what_waits(cluster):
    client = cluster.client()
    failures = []
    is_busy = threading.Event()

    def pull_for_ever():
        try:
            while True:
                client.pull(cluster.specs, {})
                is_busy.set()
        except UnavailableError as error:
            failures.append(error)

    thread = threading.Thread(target=pull_for_ever)
    thread.start()
    assert is_busy.wait(WAIT_S)
    cluster.bench.close()
    thread.join(WAIT_S)
    assert len(failures) == 1


def test_closing_ends_the_wait_for_a_server(cluster):
    cluster.servers[0].stop()
    timer = threading.Timer(0.2, cluster.bench.close)
    timer.start()
    began = time.monotonic()
    with pytest.raises(UnavailableError, match="/job:ps/task:0"):
        cluster.bench.configure(cluster.fields())
    assert time.monotonic() - began < bench_module._CONNECT_S
