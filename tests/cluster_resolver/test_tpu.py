import json
import sys
from types import SimpleNamespace

import pytest

import torchstrategy as ts
from torchstrategy.cluster_resolver import tpu

TPU = ts.cluster_resolver.TPUClusterResolver


def test_local():
    resolver = TPU("local", environ={})
    assert not resolver.cluster_spec()
    assert (resolver.master(), resolver.get_master(), resolver.environment) == ("", "", "")
    assert (resolver.task_type, resolver.task_id, resolver.get_job_name()) == ("worker", 0, "worker")
    assert resolver.num_accelerators() == {"TPU": 0}
    with pytest.raises(ts.errors.UnimplementedError, match=r"pip install 'torch-xla\[tpu\]=="):
        resolver.get_tpu_system_metadata()


@pytest.mark.parametrize("name", [None, ""])
def test_no_tpu(name):
    with pytest.raises(ValueError, match="Please provide a TPU Name to connect to"):
        TPU(name, environ={})


@pytest.mark.parametrize(
    "environ", [{"KUBE_GOOGLE_CLOUD_TPU_ENDPOINTS": "grpc://a:1,grpc://b", "TPU_NAME": "local"}, {"TPU_NAME": "a:1, b"}]
)
def test_from_the_environment(environ):
    resolver = TPU(environ=environ)
    assert resolver.cluster_spec().as_dict() == {"worker": ["a:1", "b:8470"]}
    assert (resolver.master(), resolver.master("worker", 1)) == ("grpc://a:1", "grpc://b:8470")
    assert resolver.get_coordination_service_leader() == "/job:worker/task:0"
    for ask in (resolver.num_accelerators, resolver.get_tpu_system_metadata):
        with pytest.raises(ts.errors.UnimplementedError, match="from another machine"):
            ask()


def test_a_coordinator_needs_an_address():
    with pytest.raises(ValueError, match="pass coordinator_address"):
        TPU("a:1", coordinator_name="coordinator", environ={})


class Service:
    """Answers as Google's client of ``tpu`` does."""

    def __init__(self, node):
        self.node = node

    def projects(self):
        return self

    locations = nodes = projects

    def get(self, *, name):
        assert name == "projects/p/locations/z/nodes/mine"
        return SimpleNamespace(execute=lambda: self.node)


def test_by_name():
    endpoints = [{"ipAddress": "10.0.0.2", "port": 8470}, {"ipAddress": "10.0.0.3", "port": "8471"}]
    resolver = TPU("mine", "z", "p", service=Service({"state": "READY", "networkEndpoints": endpoints}), environ={})
    assert resolver.cluster_spec().as_dict() == {"worker": ["10.0.0.2:8470", "10.0.0.3:8471"]}
    older = TPU("mine", "z", "p", service=Service({"state": "READY", **endpoints[0]}), environ={})
    assert older.cluster_spec().as_dict() == {"worker": ["10.0.0.2:8470"]}
    with pytest.raises(RuntimeError, match="'mine' is not yet ready; state: 'CREATING'"):
        TPU("mine", "z", "p", service=Service({"state": "CREATING"}), environ={}).cluster_spec()
    with pytest.raises(ValueError, match="pass its zone and project"):
        TPU("mine", "z", environ={})


def test_by_name_without_the_client(monkeypatch):
    monkeypatch.setitem(sys.modules, "googleapiclient", None)
    monkeypatch.setitem(sys.modules, "googleapiclient.discovery", None)
    with pytest.raises(ImportError, match=r"pip install 'google-api-python-client>="):
        TPU("mine", "z", "p", environ={})


@pytest.fixture
def runtime(monkeypatch):
    """A runtime with 4 of 8 TPU devices on this host, and what the system was initialised with."""
    found = SimpleNamespace(is_requested=True, count_devices=lambda: (8, 4), initialized=[])
    monkeypatch.setattr(tpu, "is_installed", lambda: True)
    monkeypatch.setattr(tpu, "get_runtime", lambda: found)
    monkeypatch.setattr(tpu.system, "initialize", lambda **options: found.initialized.append(options))
    return found


def test_devices_of_this_host(runtime):
    resolver = TPU("local")
    assert resolver.num_accelerators("worker", 3) == {"TPU": 4}
    metadata = resolver.get_tpu_system_metadata()
    assert metadata[:4] == (8, 2, 4, None)
    assert metadata.devices[-1] == "/job:localhost/replica:0/task:0/device:TPU:3"


def test_devices_that_nobody_asked_for_do_not_count(runtime):
    runtime.is_requested = False
    assert TPU("local").num_accelerators() == {"TPU": 0}
    with pytest.raises(ts.errors.UnimplementedError, match="PJRT_DEVICE=TPU"):
        TPU("local").get_tpu_system_metadata()


def test_connect_initialises(runtime, monkeypatch):
    monkeypatch.setattr(tpu.os, "environ", {})
    assert TPU.connect("local").num_accelerators() == {"TPU": 4}
    assert runtime.initialized == [{"spmd": True, "cache_path": None}]


def test_a_process_alone_drives_all_devices(runtime):
    for environ in ({}, {"TF_CONFIG": tf_config(["a:1"], 0)}):
        tpu.initialize_system(TPU("local"), environ={**environ, "TORCHSTRATEGY_XLA_CACHE": "/cache"})
    assert runtime.initialized == [{"spmd": True, "cache_path": "/cache"}] * 2
    tpu.initialize_system(TPU("local"), "mine", environ={"TORCHSTRATEGY_XLA_CACHE": "/cache"})
    assert runtime.initialized[-1]["cache_path"] == "mine"


def tf_config(workers, index):
    return json.dumps({"cluster": {"worker": workers}, "task": {"type": "worker", "index": index}})


def test_a_process_of_a_job_drives_one_device(runtime):
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    torchrun = dict(zip(names, ("6", "8", "2", "4", "host", "2222"), strict=True))
    tpu.initialize_system(TPU("local"), environ=torchrun)
    expected = {"spmd": False, "local_rank": 2, "local_size": 4, "num_processes": 8, "cache_path": None}
    assert runtime.initialized == [expected]
    workers = [f"{host}:{port}" for host in "ab" for port in range(1, 5)]
    tpu.initialize_system(TPU("local"), environ={"TF_CONFIG": tf_config(workers, 6)})
    assert runtime.initialized == [expected] * 2


@pytest.mark.parametrize("call", [tpu.initialize_system, lambda resolver: TPU.connect("grpc://10.0.0.2")])
def test_another_machine_cannot_be_initialised(call):
    with pytest.raises(ts.errors.UnimplementedError, match="initialize_tpu_system can't reach a TPU from another"):
        call(TPU("grpc://10.0.0.2", environ={}))
