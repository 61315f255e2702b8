"""All ways of the benchmark do the same work: they train the same model to the same weights."""

import importlib.util

import pytest
import torch
from models import conv_net
from step_times import make_work
from training_steps import ALONE, CONCURRENT, PACKAGES, PEERS, PLAIN, TURNS, WAYS

from torchstrategy.testing import run_in_processes

SGD = {"_target_": "torch.optim.SGD", "_partial_": True, "lr": 0.1, "momentum": 0.9}
SETTINGS = {
    "default": {"optimizer": SGD, "channels_last": False},
    "tuned": {"optimizer": {**SGD, "fused": True}, "channels_last": True},
}
IN_PROCESSES = [way for way in WAYS if way not in (PLAIN, ALONE, CONCURRENT, TURNS)]


def options(setting, model="conv_net"):
    arguments = {"pool_first": True} if (setting, model) == ("tuned", "conv_net") else {}
    return {
        "model": {"_target_": f"models.{model}", **arguments},
        "num_replicas": 2,
        "batch_size": 6,
        **SETTINGS[setting],
    }


def train(case, way):
    torch.manual_seed(0)
    training = WAYS[way](make_work(case))
    for _ in range(3):
        training.step()
    return torch.cat([parameter.detach().flatten() for parameter in training.model.parameters()])


def train_all(case):
    installed = [way for way in IN_PROCESSES if way not in PACKAGES or importlib.util.find_spec(PACKAGES[way])]
    return {way: train(case, way) for way in installed}


@pytest.mark.slow
@pytest.mark.parametrize("setting", SETTINGS)
def test_all_ways_train_to_the_same_weights(setting):
    case = options(setting)
    expected = train(case, PLAIN)
    for way in (CONCURRENT, TURNS):
        torch.testing.assert_close(train(case, way), expected, rtol=1e-4, atol=1e-5, msg=way)
    for weights in run_in_processes(train_all, 2, case):
        assert set(weights) >= {*PEERS} - {*PACKAGES}
        for way, found in weights.items():
            torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5, msg=way)
    assert not torch.allclose(train(case, ALONE), expected, atol=1e-3), "the replicas' shares differ"


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
def test_pooling_first_changes_nothing(memory_format):
    images = torch.rand(4, 1, 28, 28)

    def train(pool_first):
        torch.manual_seed(0)
        model = conv_net(pool_first=pool_first).to(memory_format=memory_format)
        output = model(images)
        output.sum().backward()
        return [output, *(parameter.grad for parameter in model.parameters())]

    torch.testing.assert_close(train(True), train(False), rtol=0, atol=0)
