import inspect
import signal
import socket
import threading
import time
from types import SimpleNamespace

import pytest

import torchstrategy as ts
from tests.clusters import new_cluster
from torchstrategy.ps.transport.control_loop import ControlLoop
from torchstrategy.ps.transport.messages import Message

WAIT_S = 20


class Client:
    """A coordinator's connection to one server."""

    def __init__(self, loop, address, incarnation=1, role="coordinator"):
        self.is_ready = threading.Event()
        self.is_lost = threading.Event()
        self.refusal = None
        self.peer = loop.connect(address, {"role": role, "incarnation": incarnation}, self)

    def ready(self, peer, welcome):
        self.welcome = welcome
        self.is_ready.set()

    def lost(self, peer, reason):
        self.is_lost.set()

    def refused(self, peer, reason):
        self.refusal = reason
        self.is_ready.set()

    def message(self, peer, message):
        raise AssertionError(message)


@pytest.fixture
def loop():
    loop = ControlLoop()
    yield loop
    loop.close()


@pytest.fixture
def serve():
    servers = []

    def start(*args, **kwargs):
        servers.append(ts.Server(*args, **kwargs))
        return servers[-1]

    yield start
    for server in servers:
        server.stop()


def is_listening(server):
    host, _, port = server.target.partition("://")[2].rpartition(":")
    try:
        socket.create_connection((host, int(port)), timeout=5).close()
    except OSError:
        return False
    return True


@pytest.mark.parametrize(("job", "role"), [("ps", "worker"), ("worker", "coordinator"), ("chief", "coordinator")])
def test_each_job_is_served(serve, loop, job, role):
    cluster = new_cluster(["ps", "worker", "chief"])
    server = serve(cluster, job, 0, protocol="grpc")
    assert server.target == f"zmq://{cluster[job][0]}"
    client = Client(loop, cluster[job][0], role=role)
    assert client.is_ready.wait(WAIT_S)
    assert client.refusal is None
    if job != "ps":
        assert client.peer.call(Message("ping", {}), WAIT_S).kind == "ok"


def test_a_worker_takes_no_workers(serve, loop):
    cluster = new_cluster(["worker"])
    serve(cluster)
    client = Client(loop, cluster["worker"][0], role="worker")
    assert client.is_ready.wait(WAIT_S)
    assert "works for coordinators only" in client.refusal


@pytest.mark.timeout(30)
def test_join_notices_a_signal_that_another_thread_got(serve):
    server = serve(new_cluster(["worker"]))

    def get_signal():
        time.sleep(0.1)
        signal.pthread_kill(threading.get_ident(), signal.SIGUSR1)

    before = signal.signal(signal.SIGUSR1, signal.default_int_handler)
    try:
        thread = threading.Thread(target=get_signal)
        thread.start()
        with pytest.raises(KeyboardInterrupt):
            server.join()
        thread.join()
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_it_starts_and_stops(serve):
    cluster = new_cluster(["worker"])
    server = serve(cluster, start=False)
    assert not is_listening(server)
    server.start()
    server.start()
    assert is_listening(server)
    joined = threading.Thread(target=server.join)
    joined.start()
    server.stop()
    server.stop()
    joined.join(WAIT_S)
    assert not joined.is_alive()
    server.join()
    assert not is_listening(server)
    with pytest.raises(RuntimeError, match="was stopped"):
        server.start()
    assert is_listening(serve(cluster))  # the address is free again


def test_connections_end_with_it(serve, loop):
    cluster = new_cluster(["worker"])
    server = serve(cluster)
    client = Client(loop, cluster["worker"][0])
    assert client.is_ready.wait(WAIT_S)
    server.stop()
    assert client.is_lost.wait(WAIT_S)


def test_a_newer_coordinator_takes_over(serve, loop, caplog):
    caplog.set_level("INFO", "torchstrategy")
    cluster = new_cluster(["worker"])
    serve(cluster)
    old = Client(loop, cluster["worker"][0], incarnation=1)
    assert old.is_ready.wait(WAIT_S)
    new = Client(loop, cluster["worker"][0], incarnation=2)
    assert new.is_ready.wait(WAIT_S)
    with pytest.raises(ts.errors.UnavailableError, match="newer coordinator"):
        old.peer.call(Message("ping", {}), WAIT_S)
    assert new.peer.call(Message("ping", {}), WAIT_S).kind == "ok"
    assert "/job:worker/task:0 now works for a newer coordinator" in caplog.text


def test_an_address_in_use(serve):
    cluster = new_cluster(["worker"])
    with socket.create_server(("127.0.0.1", int(cluster["worker"][0].rpartition(":")[2]))):
        before = threading.active_count()
        with pytest.raises(OSError, match="in use"):
            serve(cluster)
        assert threading.active_count() <= before


def test_a_server_that_is_forgotten_stops():
    server = ts.Server(new_cluster(["worker"]))
    target = SimpleNamespace(target=server.target)
    assert is_listening(target)
    del server
    assert not is_listening(target)


def test_other_hosts_need_a_secret(monkeypatch):
    monkeypatch.delenv("TORCHSTRATEGY_SECRET", raising=False)
    monkeypatch.delenv("TORCHSTRATEGY_SECRET_FILE", raising=False)
    with pytest.raises(ValueError, match="No secret is configured"):
        ts.Server({"worker": ["0.0.0.0:0"]})


@pytest.mark.parametrize(
    ("config", "error", "message"),
    [
        ({"num_threads": 3}, ValueError, r"\['checkpoint_dir', 'encrypt_tensors', .*\]. Received: 'num_threads'"),
        ({"checkpoint_dir": 3}, TypeError, "'checkpoint_dir' must be a path. Received: 3"),
        ({"checkpoint_dir": ""}, ValueError, "'checkpoint_dir' must be a path. Received: ''"),
        ({"checkpoint_dir": "a", "save_checkpoints_secs": 0}, ValueError, "a positive number. Received: 0"),
        ({"save_checkpoints_secs": 5.0}, ValueError, "is for servers that have a 'checkpoint_dir'"),
        ({"num_tensor_threads": 0}, ValueError, "a positive integer. Received: 0"),
        ({"num_tensor_threads": True}, TypeError, "a positive integer"),
        ({"encrypt_tensors": 1}, TypeError, "a bool. Received: 1"),
        (SimpleNamespace(intra_op_parallelism_threads=1), TypeError, "config must be a dictionary"),
    ],
)
def test_settings_are_checked(config, error, message):
    with pytest.raises(error, match=message):
        ts.Server({"worker": ["localhost:0"]}, config=config)


def test_settings_and_definition_are_kept(serve):
    config = {"num_tensor_threads": 2, "encrypt_tensors": False}
    server = serve({"ps": ["localhost:0"]}, config=config)
    assert server.server_def == ts.train.ServerDef(
        ts.train.ClusterSpec({"ps": ["localhost:0"]}), "ps", 0, "zmq", config
    )
    assert is_listening(serve(server.server_def))
    assert "/job:ps/task:0 at zmq://localhost:" in repr(server)


@pytest.mark.parametrize("address", ["localhost", "localhost:x", "localhost:99999", ":1"])
def test_malformed_addresses(address):
    with pytest.raises(ValueError, match="address"):
        ts.Server({"worker": [address]})


def test_local_servers_are_independent():
    servers = [ts.Server.create_local_server() for _ in range(2)]
    try:
        assert len({server.target for server in servers}) == 2
        assert all(map(is_listening, servers))
    finally:
        for server in servers:
            server.stop()
    assert not is_listening(ts.Server.create_local_server(start=False))


def test_the_signature_is_that_of_tf():
    names = "server_or_cluster_def, job_name=None, task_index=None, protocol=None, config=None, start=True"
    parameters = list(inspect.signature(ts.Server).parameters.values())
    assert ", ".join(str(parameter.replace(annotation=parameter.empty)) for parameter in parameters) == names
