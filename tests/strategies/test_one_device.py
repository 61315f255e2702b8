"""The differences between OneDeviceStrategy and the default strategy that the guide names; `meta` stands for a GPU."""

import pytest
import torch
from torch import nn

import torchstrategy as ts
from torchstrategy.base import devices


@pytest.fixture
def strategy(monkeypatch):
    monkeypatch.setattr(devices, "_type_named", lambda name: name)
    monkeypatch.setattr(devices, "visible_devices", lambda: ["meta:0", "cpu:0"])
    return ts.OneDeviceStrategy("meta:0")


def test_scope_variables_live_on_the_device(strategy):
    with strategy.scope():
        one = nn.Linear(2, 2)
    with ts.get_strategy().scope():
        default = nn.Linear(2, 2)
    assert one.weight.device.type == "meta"
    assert default.weight.device.type == "cpu"
    assert torch.ones(1).device.type == "cpu"


def test_run_computes_on_the_device(strategy):
    assert strategy.run(lambda: torch.ones(2)).device.type == "meta"
    assert ts.get_strategy().run(lambda: torch.ones(2)).device.type == "cpu"


def test_input_is_delivered_to_the_device(strategy):
    data = [torch.ones(2), torch.ones(2)]
    assert [x.device.type for x in strategy.experimental_distribute_dataset(data)] == ["meta", "meta"]
    assert ts.get_strategy().experimental_distribute_dataset(data) is data


def test_values_of_a_function_are_plain(strategy):
    """As in tf, whose strategy of one device has no PerReplica; ``MirroredStrategy`` wraps a single value."""
    make, value = strategy.experimental_distribute_values_from_function, object()
    assert make(lambda context: {"id": context.replica_id_in_sync_group, "value": value}) == {"id": 0, "value": value}
    assert strategy.run(lambda x: x, args=(make(lambda context: value),)) is value


def test_named_device_and_one_replica():
    strategy = ts.OneDeviceStrategy("/cpu:0")
    assert strategy.num_replicas_in_sync == 1
    assert strategy.reduce("sum", torch.tensor(3.0)) == 3.0
    with pytest.raises(ValueError, match="Visible devices"):
        ts.OneDeviceStrategy("/gpu:63")
