import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from torchstrategy.base import devices


@pytest.mark.parametrize(
    "name", ["cpu:1", "/cpu:1", "CPU:1", "device:CPU:1", "/job:worker/replica:0/task:3/device:CPU:1"]
)
def test_names_of_one_device(name):
    assert devices.canonical_device(name) == torch.device("cpu", 1)
    assert devices.canonical_device(torch.device("cpu", 1)) == torch.device("cpu", 1)


@pytest.mark.parametrize("name", ["/gpu:1", "GPU:1", "cuda:1", "/device:GPU:1"])
def test_gpu_names(name, monkeypatch):
    monkeypatch.setattr(devices, "visible_devices", lambda: ["cuda:0", "cuda:1", "cpu:0"])
    assert devices.canonical_device(name) == torch.device("cuda", 1)
    with pytest.raises(ValueError, match="Visible devices: cuda:0, cuda:1, cpu:0"):
        devices.canonical_device("/gpu:2")


def test_all_visible_gpus_by_default(monkeypatch):
    monkeypatch.setattr(devices, "visible_devices", lambda: ["cuda:0", "cuda:1", "cpu:0"])
    assert devices.local_devices(None) == (torch.device("cuda", 0), torch.device("cuda", 1))


def test_labels():
    assert devices.tensor_device(torch.device("cpu", 3)) == torch.device("cpu")
    assert devices.tensor_device(torch.device("cuda", 3)) == torch.device("cuda", 3)
    assert devices.full_device_name(torch.device("cuda", 1)) == "/job:localhost/replica:0/task:0/device:GPU:1"


def test_placement():
    placement = devices.Placement(6, 2, (torch.device("cpu", 0), torch.device("cpu", 1)))
    assert list(placement.local_replica_ids) == [2, 3]


@pytest.fixture
def accelerator(monkeypatch):
    """A kind of device that the table does not know: ``torch.privateuseone``, with streams."""
    module = SimpleNamespace(Stream=object, stream=object, current_stream=object)
    monkeypatch.setattr(torch, "privateuseone", module, raising=False)
    monkeypatch.setattr(devices, "accelerator_type", lambda: "privateuseone")
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 2)
    devices._unknown_kind.cache_clear()
    yield module
    devices._unknown_kind.cache_clear()


def test_kind_that_the_table_lacks(accelerator):
    kind = devices.kind_of(torch.device("privateuseone", 1))
    assert kind.module is accelerator
    assert kind.has_streams
    assert devices.accelerator_module(torch.device("privateuseone")) is accelerator
    assert not kind.is_traced
    assert kind.native_backend == ""
    assert devices.local_devices(None) == tuple(torch.device("privateuseone", i) for i in range(2))
    assert devices.canonical_device("/device:PRIVATEUSEONE:1") == torch.device("privateuseone", 1)
    with pytest.raises(ValueError, match="privateuseone:2' is not there"):
        devices.canonical_device("privateuseone:2")


def test_kind_without_streams(accelerator):
    del accelerator.Stream
    kind = devices.kind_of("privateuseone")
    assert not kind.has_streams
    assert not kind.pins_memory


def test_native_backend_of_an_unknown_kind_is_the_registered_one(accelerator, monkeypatch):
    monkeypatch.setitem(torch.distributed.Backend.default_device_backend_map, "privateuseone", "own_ccl")
    assert devices.kind_of("privateuseone").native_backend == ""
    monkeypatch.setitem(torch.distributed.Backend._plugins, "OWN_CCL", object())
    assert devices.kind_of("privateuseone").native_backend == "own_ccl"


def test_tpu_names_are_those_of_the_backend_that_is_there(monkeypatch):
    assert devices.canonical_device("TPU:0") == torch.device("xla", 0)
    monkeypatch.setattr(torch._C, "_get_privateuse1_backend_name", lambda: "tpu")
    monkeypatch.setattr(devices, "visible_devices", lambda: ["tpu:0", "cpu:0"])
    assert devices._type_named("tpu") == "tpu"


def test_a_process_has_one_chip(accelerator, monkeypatch):
    kind = devices.DeviceKind("privateuseone", one_per_process=True)
    monkeypatch.setitem(devices._KINDS, "privateuseone", kind)
    assert devices.local_devices(["privateuseone:1"]) == (torch.device("privateuseone", 1),)
    for several in (None, 2, ["privateuseone:0", "privateuseone:1"]):
        with pytest.raises(ValueError, match=r"torchrun --nproc-per-node=2 .* devices=\['privateuseone:0'\]"):
            devices.local_devices(several)


def test_no_other_module_compares_a_type_of_device_with_a_name():
    by_name = re.compile(r"""\.type (==|!=|in|not in) .*"(cuda|xla|xpu|mps|tpu)"|\.is_(cuda|xpu|mps)\b""")
    package = Path(devices.__file__).parents[1]
    found = [
        f"{file.relative_to(package)}: {line.strip()}"
        for file in sorted(package.rglob("*.py"))
        if file.parts[len(package.parts)] not in ("xla", "tpu")
        for line in file.read_text(encoding="utf-8").splitlines()
        if by_name.search(line)
    ]
    assert found == []


@pytest.mark.parametrize(("given", "shown"), [("cpu", "['cpu']"), ("cpu:0,cpu:1", "['cpu:0', 'cpu:1']")])
def test_one_string_is_shown_as_the_list_that_it_means(given, shown):
    with pytest.raises(TypeError, match=re.escape(f"must be a list of devices, such as {shown}, or a number.")):
        devices._local_devices(given)
