import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch

import torchstrategy as ts
from torchstrategy.ps.transport.control_loop import ControlLoop
from torchstrategy.ps.transport.messages import Message

WAIT_S = 30


class Client:
    def __init__(self, loop, address):
        self.is_ready = threading.Event()
        self.peer = loop.connect(address, {"role": "coordinator", "incarnation": time.time_ns()}, self)

    def ready(self, peer, welcome):
        self.is_ready.set()

    def lost(self, peer, reason):
        self.is_ready.clear()

    def refused(self, peer, reason):
        raise AssertionError(reason)

    def message(self, peer, message):
        raise AssertionError(message)


@pytest.fixture
def client_of():
    loop = ControlLoop()

    def connect(cluster, job, index):
        client = Client(loop, cluster.cluster_spec.task_address(job, index))
        assert client.is_ready.wait(WAIT_S)
        return client

    yield connect
    loop.close()


def exists(pid):
    """Say whether a process runs; one that has ended but was not waited for does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def wait_until(condition):
    deadline = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_servers_are_there_and_are_kept(local_cluster, client_of):
    cluster = local_cluster(2, 1)
    assert cluster.tasks == [("ps", 0), ("worker", 0), ("worker", 1)]
    pids = [cluster.pid(*task) for task in cluster.tasks]
    assert len({*pids, os.getpid()}) == 4
    assert client_of(cluster, "worker", 1).peer.call(Message("ping", {}), WAIT_S).kind == "ok"
    assert local_cluster(2, 1) is cluster
    assert [cluster.pid(*task) for task in cluster.tasks] == pids
    assert "Started server with target: zmq://127.0.0.1:" in cluster.log("ps", 0)


def test_what_a_coordinator_needs(local_cluster):
    cluster = local_cluster(2, 1)
    spec = cluster.cluster_spec.as_dict()
    assert {job: len(tasks) for job, tasks in spec.items()} == {"chief": 1, "ps": 1, "worker": 2}
    assert json.loads(cluster.tf_config()) == {"cluster": spec, "task": {"type": "chief", "index": 0}}
    assert json.loads(cluster.tf_config("worker", 1))["task"] == {"type": "worker", "index": 1}
    resolver = cluster.resolver()
    assert (resolver.task_type, resolver.task_id) == ("chief", 0)
    assert resolver.cluster_spec() == cluster.cluster_spec


def test_a_killed_server_comes_back_at_its_address(local_cluster, client_of):
    cluster = local_cluster(2, 1)
    client = client_of(cluster, "worker", 0)
    before = cluster.pid("worker", 0)
    cluster.kill("worker", 0)
    assert not cluster.is_alive("worker", 0)
    wait_until(lambda: not client.is_ready.is_set())
    cluster.restart("worker", 0)
    assert cluster.is_alive("worker", 0)
    assert cluster.pid("worker", 0) != before
    assert client.is_ready.wait(WAIT_S)
    cluster.kill("worker", 1)
    assert local_cluster(2, 1).is_alive("worker", 1)


def test_a_stopped_server_says_nothing(local_cluster, client_of):
    cluster = local_cluster(2, 1)
    client = client_of(cluster, "worker", 0)
    cluster.stop_signal("worker", 0)
    threads = list(Path(f"/proc/{cluster.pid('worker', 0)}/task").glob("*/stat"))
    assert all(") T " in thread.read_text() for thread in threads)
    with pytest.raises(ts.errors.DeadlineExceededError):
        client.peer.call(Message("ping", {}), 0.2)
    assert cluster.is_alive("worker", 0)
    cluster.cont("worker", 0)
    assert client.peer.call(Message("ping", {}), WAIT_S).kind == "ok"
    cluster.stop_signal("worker", 0)
    local_cluster(2, 1)
    assert client.peer.call(Message("ping", {}), WAIT_S).kind == "ok"


@pytest.mark.parametrize(("variable", "expected"), [("3", 3), ("2,1", 2), ("", 1), ("many", 1)])
def test_servers_have_as_many_threads_as_the_variable_says(variable, expected, monkeypatch):
    with ts.testing.LocalCluster(1, environment={"OMP_NUM_THREADS": variable}) as cluster:
        strategy = ts.ParameterServerStrategy(cluster.resolver())
        coordinator = ts.coordinator.ClusterCoordinator(strategy)
        assert coordinator.schedule(torch.get_num_threads).fetch() == expected
        strategy.close()


def test_the_end_leaves_nothing():
    with ts.testing.LocalCluster(1, environment={"TORCHSTRATEGY_HEARTBEAT_S": "2"}) as cluster:
        pids = [cluster.pid(*task) for task in cluster.tasks]
        cluster.stop_signal("worker", 0)
        assert all(map(exists, pids))
    assert not any(map(exists, pids))
    for job in ("chief", "ps", "worker"):
        host, port = cluster.cluster_spec.task_address(job, 0).split(":")
        socket.create_server((host, int(port))).close()
    cluster.close()
    with pytest.raises(RuntimeError, match="was closed"):
        cluster.start()


@pytest.mark.parametrize("how", ["at the end", "by an error", "by an error that was fetched"])
def test_leaving_it_warns_of_nothing(caplog, how):
    is_left = contextlib.nullcontext() if how == "at the end" else pytest.raises(ValueError, match="base 10")
    with is_left, ts.testing.LocalCluster(num_workers=1) as cluster:
        strategy = ts.ParameterServerStrategy(cluster.resolver())
        with strategy.scope():
            variable = ts.Variable(torch.zeros(3))

        def add():
            variable.assign_add(torch.ones(3))

        coordinator = ts.coordinator.ClusterCoordinator(strategy)
        coordinator.schedule(add)
        coordinator.join()
        assert variable.tolist() == [1.0] * 3
        if how != "at the end":
            number = coordinator.schedule(int, args=("x",))
            coordinator.fetch(number) if "fetched" in how else coordinator.join()
    time.sleep(0.2)  # for what would be noticed
    assert [record.getMessage() for record in caplog.records if record.levelname == "WARNING"] == []


PROGRAM = """
import os, sys, time
import torchstrategy as ts

cluster = ts.testing.LocalCluster(1, 1).start()  # without a guard: servers do not run the program
cluster.stop_signal("ps", 0)
print(*(cluster.pid(*task) for task in cluster.tasks), flush=True)
if sys.argv[1] == "wait":
    time.sleep(600)
if sys.argv[1] == "fail":
    raise RuntimeError("injected")
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize(
    "end", [pytest.param("end", marks=pytest.mark.slow), pytest.param("fail", marks=pytest.mark.slow), "wait"]
)
def test_servers_end_with_the_program(tmp_path, end):
    path = tmp_path / "program.py"
    path.write_text(PROGRAM)
    with subprocess.Popen([sys.executable, str(path), end], stdout=subprocess.PIPE, text=True) as program:
        try:
            pids = program.stdout.readline().split()
            assert len(pids) == 2
            if end == "wait":
                os.kill(program.pid, signal.SIGKILL)
            assert program.wait(WAIT_S) == {"end": 0, "fail": 1, "wait": -signal.SIGKILL}[end]
            wait_until(lambda: not any(map(exists, pids)))
        finally:
            program.kill()


def test_a_server_that_does_not_start_says_why():
    cluster = ts.testing.LocalCluster(1, config={"num_tensor_threads": 0})
    with pytest.raises(RuntimeError, match=r"did not start\. It printed:[\s\S]*'num_tensor_threads' must be"), cluster:
        pass


def test_a_server_that_ends_while_it_is_asked_to_keeps_no_other_one_from_ending(monkeypatch):
    kill = os.kill

    def kill_one_that_has_ended(pid, number):
        if number == signal.SIGCONT:
            raise ProcessLookupError
        kill(pid, number)

    with ts.testing.LocalCluster(1) as cluster:
        pids = [cluster.pid(*task) for task in cluster.tasks]
        monkeypatch.setattr(os, "kill", kill_one_that_has_ended)
    monkeypatch.undo()
    assert not any(map(exists, pids))


@pytest.mark.parametrize(("num_workers", "num_ps"), [(0, 1), (1, 0)])
def test_numbers_are_checked(num_workers, num_ps):
    with pytest.raises(ValueError, match="at least 1 worker and 1 ps"):
        ts.testing.LocalCluster(num_workers, num_ps)


def test_unknown_tasks(local_cluster):
    with pytest.raises(ValueError, match=r"No server of worker 7 was started\. The cluster has"):
        local_cluster(2, 1).kill("worker", 7)
