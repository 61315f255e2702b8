"""The mean under tf's names."""

import pickle

import pytest
import torch

import torchstrategy as ts
from torchstrategy.errors import InvalidArgumentError


def test_mean_over_all_values_since_the_reset():
    metric = ts.metrics.Mean(name="train_loss")
    assert metric.name == "train_loss"
    assert metric.result().item() == 0.0  # and no warning
    metric.update_state(torch.tensor([1.0, 2.0]))
    metric.update_state([6.0])
    metric.update_state(7)
    assert metric.result().item() == 4.0
    assert metric.compute().item() == 4.0
    metric.reset_state()
    assert metric.result().item() == 0.0
    metric.update(torch.tensor(5.0))
    assert metric.result().item() == 5.0
    metric.reset_states()
    assert metric.result().item() == 0.0


def test_calling_updates_and_returns_the_result_so_far():
    metric = ts.metrics.Mean()
    assert metric([1.0, 3.0]).item() == 2.0
    assert metric([8.0]).item() == 4.0


@pytest.mark.parametrize(
    ("values", "weight", "expected"),
    [
        ([1.0, 4.0], [3.0, 1.0], 1.75),
        ([1.0, 4.0], [[3.0], [1.0]], 1.75),
        ([1.0, 4.0], 2.0, 2.5),
        ([1.0, 4.0], [True, False], 1.0),
        ([1.0, 4.0], [0.0, 0.0], 0.0),
        ([[1.0, 3.0], [4.0, 8.0]], [3.0, 1.0], 3.0),
        ([[1.0, 3.0], [4.0, 8.0]], [[1.0, 0.0], [1.0, 0.0]], 2.5),
        ([[1.0, 3.0], [4.0, 8.0]], None, 4.0),
    ],
)
def test_sample_weight(values, weight, expected):
    metric = ts.metrics.Mean()
    metric.update_state(torch.tensor(values), sample_weight=weight)
    assert metric.result().item() == expected


def test_sample_weight_that_does_not_fit():
    with pytest.raises(InvalidArgumentError, match="sample_weight must"):
        ts.metrics.Mean().update_state([1.0, 2.0], sample_weight=[1.0, 2.0, 3.0])


def test_empty_batches_count_nothing():
    metric = ts.metrics.Mean()
    metric.update_state(torch.zeros(0))
    assert metric.result().item() == 0.0
    metric.update_state([2.0])
    metric.update_state(torch.zeros(0, 3))
    assert metric.result().item() == 2.0


def test_sums_are_exact_and_the_result_has_the_asked_dtype():
    metric = ts.metrics.Mean(dtype=torch.float64)
    for _ in range(10):
        metric.update_state(torch.tensor([0.1, 1e8], dtype=torch.float64))
    assert metric.result().dtype == torch.float64
    assert metric.result().item() == pytest.approx(0.5e8 + 0.05, rel=1e-15)
    assert ts.metrics.Mean()([1.0]).dtype == torch.float32
    half = ts.metrics.Mean()
    half.update_state(torch.full((3000,), 100.0, dtype=torch.float16))
    assert half.result().item() == 100.0


def test_takes_no_part_in_autograd():
    metric = ts.metrics.Mean()
    assert not metric(torch.ones(2, requires_grad=True) * 2).requires_grad


def test_is_a_torchmetrics_metric():
    metric = ts.metrics.Mean()
    metric.update([1.0, 2.0])
    other = pickle.loads(pickle.dumps(metric))
    assert other.result().item() == 1.5
    other.persistent(True)
    assert set(other.state_dict()) == {"total", "count"}
    assert metric.update_count == 1
