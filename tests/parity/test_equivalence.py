"""N replicas = 1 replica, on a data set whose size is no multiple of the batch."""

import pytest
import torch

import torchstrategy as ts
from tests.programs import cpu_devices, largest_difference, train

EXACT = 1e-6  # float32
CASES = {
    "sgd": ({}, EXACT),
    "sgd, accumulated": ({"accumulation": 2, "epochs": 2}, EXACT),
    "adam": ({"optimizer_name": "adam"}, EXACT),
    "adam, accumulated": ({"optimizer_name": "adam", "accumulation": 3, "epochs": 2}, EXACT),
    "clipped after the sum": ({"clip": 0.1, "epochs": 2}, EXACT),
    "conv net, adam, float64": ({"net": "conv", "optimizer_name": "adam", "dtype": torch.float64}, 1e-10),
    "fewer examples than replicas": ({"num_examples": 7, "batch_size": 3}, EXACT),
}


@pytest.fixture(scope="module")
def one_replica():
    return {name: train([], **program) for name, (program, _) in CASES.items()}


@pytest.mark.parametrize("count", [1, 2, 3, 4])
@pytest.mark.parametrize("name", CASES)
def test_replicas_in_one_process(name, count, one_replica):
    program, tolerance = CASES[name]
    assert largest_difference(one_replica[name], train(cpu_devices(count), **program)) <= tolerance


@pytest.mark.parametrize("devices", [None, cpu_devices(2)], ids=["1 each", "2 each"])
@pytest.mark.parametrize("name", CASES)
def test_two_processes(name, devices, one_replica, process_pool):
    program, tolerance = CASES[name]
    for result in process_pool(2).run(train, devices, **program):
        assert largest_difference(one_replica[name], result) <= tolerance


def test_concurrent_replicas_end_in_the_same_weights(one_replica, monkeypatch):
    plain = ts.MirroredStrategy
    monkeypatch.setattr(ts, "MirroredStrategy", lambda devices: plain(devices, concurrent=True))
    assert largest_difference(one_replica["adam"], train(cpu_devices(2), optimizer_name="adam")) <= EXACT


@pytest.mark.filterwarnings("ignore:compute_average_loss without global_batch_size")
def test_tf_default_divisor_is_inexact_on_a_partial_batch():
    """TF's rule, local size x replicas, weighs the examples of a partial batch differently; 'actual' does not."""

    def loss_of(divisor):
        strategy = ts.MirroredStrategy(cpu_devices(2))
        (batch,) = strategy.experimental_distribute_dataset(torch.tensor([1.0, 2.0, 3.0]), batch_size=3)
        step = lambda x: ts.nn.compute_average_loss(x, global_batch_size=divisor)  # noqa: E731
        return float(strategy.reduce("sum", strategy.run(step, args=(batch,))))

    assert loss_of("actual") == pytest.approx(2.0)
    assert loss_of(3) == pytest.approx(2.0)
    assert loss_of(None) == pytest.approx((1 + 2) / 4 + 3 / 2)
