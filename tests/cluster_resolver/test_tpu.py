import importlib.machinery
import sys
from types import SimpleNamespace

import pytest

import torchstrategy as ts

TPU = ts.cluster_resolver.TPUClusterResolver


def test_local():
    resolver = TPU("local", environ={})
    assert not resolver.cluster_spec()
    assert (resolver.master(), resolver.get_master(), resolver.environment) == ("", "", "")
    assert (resolver.task_type, resolver.task_id, resolver.get_job_name()) == ("worker", 0, "worker")
    assert resolver.num_accelerators() == {"TPU": 0}
    with pytest.raises(ts.errors.UnimplementedError, match=r"pip install 'torchstrategy\[tpu\]'"):
        resolver.get_tpu_system_metadata()


@pytest.mark.parametrize("tpu", [None, ""])
def test_no_tpu(tpu):
    with pytest.raises(ValueError, match="Please provide a TPU Name to connect to"):
        TPU(tpu, environ={})


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
    with pytest.raises(ImportError, match=r"pip install 'torchstrategy\[gce\]'"):
        TPU("mine", "z", "p", environ={})


@pytest.fixture
def runtime(monkeypatch):
    """A runtime of torch_xla with 4 of 8 TPU devices on this host."""
    found = SimpleNamespace(
        device_type=lambda: "TPU", addressable_runtime_device_count=lambda: 4, global_runtime_device_count=lambda: 8
    )
    package = SimpleNamespace(__spec__=importlib.machinery.ModuleSpec("torch_xla", None), runtime=found)
    monkeypatch.setitem(sys.modules, "torch_xla", package)
    monkeypatch.setitem(sys.modules, "torch_xla.runtime", found)
    return found


def test_devices_of_this_host(runtime):
    resolver = TPU.connect("local")
    assert resolver.num_accelerators("worker", 3) == {"TPU": 4}
    metadata = resolver.get_tpu_system_metadata()
    assert metadata[:4] == (8, 2, 4, None)
    assert metadata.devices[-1] == "/job:localhost/replica:0/task:0/device:TPU:3"


def test_connect_without_tpu(runtime):
    runtime.device_type = lambda: "CPU"
    with pytest.raises(ts.errors.NotFoundError, match="PJRT_DEVICE"):
        TPU.connect("local")
