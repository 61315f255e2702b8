from types import SimpleNamespace

import pytest
import torch

import torchstrategy as ts
from torchstrategy import config
from torchstrategy.base import devices
from torchstrategy.xla import system

TPU = ts.cluster_resolver.TPUClusterResolver


@pytest.fixture
def two_gpus(monkeypatch):
    for module in (config, devices):
        monkeypatch.setattr(module, "visible_devices", lambda: ["cuda:0", "cuda:1", "cpu:0"])


@pytest.fixture
def no_gpu(monkeypatch):
    for module in (config, devices):
        monkeypatch.setattr(module, "visible_devices", lambda: ["cpu:0"])


@pytest.mark.usefixtures("two_gpus")
def test_all_devices():
    physical = ts.config.list_physical_devices()
    assert [tuple(device) for device in physical] == [
        ("/physical_device:CPU:0", "CPU"),
        ("/physical_device:GPU:0", "GPU"),
        ("/physical_device:GPU:1", "GPU"),
    ]
    logical = ts.config.list_logical_devices()
    assert [device.name for device in logical] == ["/device:CPU:0", "/device:GPU:0", "/device:GPU:1"]
    assert [device.device_type for device in logical] == ["CPU", "GPU", "GPU"]


@pytest.mark.usefixtures("two_gpus")
@pytest.mark.parametrize("kind", ["GPU", "gpu", "Gpu"])
def test_type_in_any_letter_case(kind):
    assert len(ts.config.list_physical_devices(kind)) == 2
    assert len(ts.config.list_logical_devices(device_type=kind)) == 2


@pytest.mark.usefixtures("no_gpu")
def test_types_that_are_not_there():
    for kind in ("GPU", "TPU", "abacus", ""):
        assert ts.config.list_physical_devices(kind) == ts.config.list_logical_devices(kind) == []
    assert len(ts.config.list_physical_devices("cpu")) == 1


def test_other_accelerators(monkeypatch):
    monkeypatch.setattr(config, "visible_devices", lambda: ["xpu:0", "cpu:0"])
    assert ts.config.list_physical_devices("xpu")[0].name == "/physical_device:XPU:0"


def test_type_must_be_a_string():
    with pytest.raises(TypeError, match="device_type must be a string"):
        ts.config.list_physical_devices(3)


def guide_strategy():
    if ts.config.list_physical_devices("gpu"):
        return ts.MirroredStrategy()
    return ts.get_strategy()


@pytest.mark.usefixtures("no_gpu")
def test_guide_snippet_on_a_cpu_host():
    strategy = guide_strategy()
    assert strategy is ts.get_strategy()
    with strategy.scope():
        model = torch.nn.Linear(2, 1)
    assert strategy.run(model, args=(torch.ones(3, 2),)).shape == (3, 1)


@pytest.mark.usefixtures("two_gpus")
def test_guide_snippet_with_gpus(monkeypatch):
    made = []
    monkeypatch.setattr(ts, "MirroredStrategy", lambda: made.append(devices.local_devices(None)))
    guide_strategy()
    assert made == [(torch.device("cuda", 0), torch.device("cuda", 1))]


@pytest.mark.usefixtures("two_gpus")
def test_strategies_take_the_names_of_logical_devices():
    names = [device.name for device in ts.config.list_logical_devices("GPU")]
    assert devices.local_devices(names) == (torch.device("cuda", 0), torch.device("cuda", 1))


def test_connect_to_cluster():
    spec = ts.cluster_resolver.ClusterSpec({"worker": ["a:1"]})
    for cluster in (spec, ts.cluster_resolver.SimpleClusterResolver(spec), TPU("local")):
        assert ts.config.experimental_connect_to_cluster(cluster) is None
    with pytest.raises(ts.errors.UnimplementedError, match="from another machine"):
        ts.config.experimental_connect_to_cluster(TPU("grpc://10.0.0.2"))
    with pytest.raises(TypeError, match=r"must be a `ClusterSpec` or a `ClusterResolver`\. Received: dict"):
        ts.config.experimental_connect_to_cluster({"worker": ["a:1"]})


@pytest.mark.usefixtures("no_gpu")
def test_tpu_devices_are_there_once_initialised(monkeypatch):
    assert ts.config.list_logical_devices("TPU") == []
    monkeypatch.setattr(system, "_current", SimpleNamespace(runtime=SimpleNamespace(num_local_devices=2)))
    assert [device.name for device in ts.config.list_logical_devices("tpu")] == ["/device:TPU:0", "/device:TPU:1"]
    assert len(ts.config.list_physical_devices()) == 3
