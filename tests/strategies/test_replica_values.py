import pytest
import torch

import torchstrategy as ts

STRATEGIES = [
    ts.get_strategy,
    lambda: ts.OneDeviceStrategy("cpu:0"),
    lambda: ts.MirroredStrategy(["cpu:0"]),
    lambda: ts.MultiWorkerMirroredStrategy(devices=["cpu:0"]),
    lambda: ts.experimental.CentralStorageStrategy(["cpu:0"]),
    lambda: ts.MirroredStrategy(["cpu:0", "cpu:1"]),
]


@pytest.mark.parametrize("make", STRATEGIES)
def test_what_is_combined_over_replicas_has_no_graph(make):
    strategy = make()
    with strategy.scope():
        model = torch.nn.Linear(1, 1)

    def loss():
        return model(torch.ones(2, 1))

    value = strategy.run(loss)
    assert all(own.requires_grad for own in strategy.experimental_local_results(value))
    combined = [
        strategy.reduce("SUM", value),
        strategy.reduce("MEAN", {"a": value})["a"],
        strategy.reduce("MEAN", value, axis=0),
        strategy.reduce("MEAN", torch.ones(1, requires_grad=True) * 2),  # a plain value
        strategy.gather(value, axis=0),
        strategy.run(lambda: ts.get_replica_context().merge_call(lambda s, x: s.reduce("SUM", x), args=(loss(),))),
    ]
    if strategy is not ts.get_strategy():
        combined.append(strategy.extended.reduce_to("SUM", value, "cpu:0"))
    assert [own.requires_grad for own in combined] == [False] * len(combined)
    summed = strategy.run(lambda: ts.get_replica_context().all_reduce("SUM", loss()))
    assert all(own.requires_grad for own in strategy.experimental_local_results(summed))
