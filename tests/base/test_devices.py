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
