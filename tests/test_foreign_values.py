"""Values of a strategy with more replicas are not cut to those of another one."""

import pytest
import torch

import torchstrategy as ts
from torchstrategy.base.values import Mirrored, PerReplica


@pytest.fixture(params=["default", "one device", "mirrored of one", "mirrored of two"])
def strategy(request):
    return {
        "default": ts.get_strategy,
        "one device": lambda: ts.OneDeviceStrategy("cpu:0"),
        "mirrored of one": lambda: ts.MirroredStrategy(["cpu:0"]),
        "mirrored of two": lambda: ts.MirroredStrategy(["cpu:0", "cpu:1"]),
    }[request.param]()


THREE = [torch.ones(1), torch.ones(1), torch.ones(1)]
CALLS = {
    "run": lambda strategy, value: strategy.run(lambda x: x, args=(value,)),
    "run of a structure": lambda strategy, value: strategy.run(lambda x: x, kwargs={"x": {"a": [value]}}),
    "reduce": lambda strategy, value: strategy.reduce("SUM", value, axis=None),
    "reduce along an axis": lambda strategy, value: strategy.reduce("MEAN", [value], axis=0),
    "gather": lambda strategy, value: strategy.gather(value, axis=0),
}


@pytest.mark.parametrize("kind", [PerReplica, Mirrored])
@pytest.mark.parametrize("name", CALLS)
def test_more_values_than_replicas_are_refused(strategy, kind, name):
    with pytest.raises(ValueError, match=r"holds 3 values, but \w+ has \d replicas in this process"):
        CALLS[name](strategy, kind(tuple(THREE)))
