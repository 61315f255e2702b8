import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time

import pytest
import torch

import torchstrategy as ts
from tests.clusters import LAUNCHER_VARIABLES, new_cluster
from torchstrategy.cli import main
from torchstrategy.ps.server.server import Server
from torchstrategy.ps.transport.control_loop import ControlLoop
from torchstrategy.ps.transport.messages import Message

WAIT_S = 60


class Watcher:
    """A coordinator's connection to a server."""

    def __init__(self):
        self.is_ready = threading.Event()
        self.is_lost = threading.Event()

    def ready(self, peer, welcome):
        self.is_ready.set()

    def lost(self, peer, reason):
        self.is_lost.set()

    def refused(self, peer, reason):
        raise AssertionError(reason)

    def message(self, peer, message):
        raise AssertionError(message)


@contextlib.contextmanager
def started(arguments, **environment):
    """Run the command in a process of its own."""
    environ = {name: value for name, value in os.environ.items() if name not in LAUNCHER_VARIABLES}
    program = subprocess.Popen(
        [sys.executable, "-m", "torchstrategy", "server", *arguments],
        env={**environ, **environment},
        stderr=subprocess.PIPE,
        text=True,
    )
    with program:
        try:
            yield program
        finally:
            program.kill()


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_it_serves_until_a_signal(number):
    cluster = new_cluster(["ps", "worker"])
    task = {"type": "worker", "index": 0}
    loop, watcher = ControlLoop(), Watcher()
    with started([], TF_CONFIG=json.dumps({"cluster": cluster, "task": task})) as program:
        peer = loop.connect(cluster["worker"][0], {"role": "coordinator", "incarnation": 1}, watcher)
        assert watcher.is_ready.wait(WAIT_S)
        assert peer.call(Message("ping", {}), WAIT_S).kind == "ok"
        program.send_signal(number)
        assert program.wait(WAIT_S) == 0
        assert watcher.is_lost.wait(WAIT_S)
        output = program.stderr.read()
    loop.close()
    assert f"Started server with target: zmq://{cluster['worker'][0]} (/job:worker/task:0)" in output
    assert "Traceback" not in output


def compute_for_ever(path):
    path.touch()
    x = torch.ones(300, 300)
    while True:
        x = x @ x / x.norm()


@pytest.mark.slow
def test_it_ends_while_a_function_runs(tmp_path):
    cluster = new_cluster(["ps", "worker"])
    ps = ts.Server(cluster, "ps", 0)
    path = tmp_path / "running"
    with started(["--cluster", json.dumps(cluster), "--job=worker"]) as program:
        strategy = ts.ParameterServerStrategy(ts.cluster_resolver.SimpleClusterResolver(ts.train.ClusterSpec(cluster)))
        ts.coordinator.ClusterCoordinator(strategy).schedule(compute_for_ever, args=(path,))
        deadline = time.monotonic() + WAIT_S
        while not path.exists() and time.monotonic() < deadline:
            time.sleep(0.01)
        program.send_signal(signal.SIGTERM)
        assert program.wait(WAIT_S) == 0
        assert "stops while a function runs" in program.stderr.read()
        strategy.close()
    ps.stop()


@pytest.fixture
def servers(monkeypatch):
    """The servers that the command starts here; they don't serve."""
    made = []

    class Recorded(Server):
        def __init__(self, cluster, job_name, task_index, *, config):
            super().__init__(cluster, job_name, task_index, config=config, start=False)
            made.append(self.server_def)

        def join(self):
            raise KeyboardInterrupt

    monkeypatch.setattr("torchstrategy.cli.serve.Server", Recorded)
    before = signal.getsignal(signal.SIGTERM)
    for name in LAUNCHER_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    yield made
    signal.signal(signal.SIGTERM, before)


JOBS = {"ps": ["localhost:2221"], "worker": ["localhost:2222", "localhost:2223"]}
TF_CONFIG = json.dumps({"cluster": {**JOBS, "chief": ["localhost:2220"]}, "task": {"type": "worker", "index": 1}})


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ([], ("worker", 1)),
        (["--job=ps", "--task=0"], ("ps", 0)),
        (["--task=0"], ("worker", 0)),
        (["--ps=localhost:2221", "--worker=localhost:2222,localhost:2223", "--job=worker", "--task=1"], ("worker", 1)),
        (["--ps=localhost:2221", "--worker", " localhost:2222, localhost:2223", "--job=ps"], ("ps", 0)),
        (["--worker=localhost:2222"], ("worker", 0)),
        (["--cluster", json.dumps(JOBS), "--job=worker", "--task=1"], ("worker", 1)),
        (["--cluster", '{"worker": {"3": "localhost:2223"}}'], ("worker", 3)),
    ],
)
def test_the_task_is_found(servers, monkeypatch, arguments, expected):
    monkeypatch.setenv("TF_CONFIG", TF_CONFIG)
    assert main(["server", *arguments]) == 0
    (definition,) = servers
    assert (definition.job_name, definition.task_index) == expected
    assert definition.address in [*JOBS["ps"], *JOBS["worker"]]
    assert definition.default_session_config == {"encrypt_tensors": True}


def test_options_of_the_server(servers, caplog):
    caplog.set_level("INFO", "torchstrategy")
    assert main(["server", "--worker=localhost:2222", "--no-encrypt-tensors"]) == 0
    assert servers[0].default_session_config == {"encrypt_tensors": False}
    assert "The server was told to end." in caplog.text


@pytest.mark.parametrize(
    ("arguments", "tf_config", "message"),
    [
        ([], None, "There is no cluster to be a server of. Set TF_CONFIG"),
        ([], '{"cluster": {"worker": []', "TF_CONFIG is not JSON"),
        (["--ps=localhost:1", "--worker=localhost:2"], None, "Must specify an explicit job_name"),
        (["--worker=localhost:1,localhost:2"], None, "Must specify an explicit task_index"),
        (["--worker=localhost:1", "--cluster", '{"worker": ["localhost:1"]}'], None, "not both"),
        (["--job=chief", "--task=0"], TF_CONFIG, "start your program itself as chief 0"),
        (["--worker=localhost"], None, "host:port"),
        (["--job=worker", "--task=2"], TF_CONFIG, "Task 2 was not defined in job 'worker'"),
    ],
)
def test_mistakes(servers, monkeypatch, capsys, arguments, tf_config, message):
    if tf_config is not None:
        monkeypatch.setenv("TF_CONFIG", tf_config)
    assert main(["server", *arguments]) in (1, 2)
    assert message in capsys.readouterr().err
    assert servers == []


@pytest.mark.parametrize("cluster", ["worker", "[]", "{}", '{"worker": "localhost:1"}'])
def test_a_cluster_must_be_json(capsys, cluster):
    with pytest.raises(SystemExit, match="2"):
        main(["server", "--cluster", cluster])
    assert 'expected JSON such as {"ps"' in capsys.readouterr().err


def test_an_address_in_use(capsys, monkeypatch):
    before = signal.getsignal(signal.SIGTERM)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        assert main(["server", f"--worker=127.0.0.1:{taken.getsockname()[1]}"]) == 1
    assert "in use" in capsys.readouterr().err
    signal.signal(signal.SIGTERM, before)
