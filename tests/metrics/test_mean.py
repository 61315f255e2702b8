"""The mean under tf's names."""

import gc
import pickle
import weakref

import pytest
import torch
from torch import Tensor

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


@pytest.mark.parametrize(
    ("values", "weight", "expected"),
    [
        (3.0, None, 3.0),
        ([1, 3, 5, 7], None, 16.0),
        ([1, 3, 5, 7], [1, 1, 0, 0], 4.0),
        ([1.0, 3.0], 2.0, 8.0),
        ([[1.0, 3.0], [4.0, 8.0]], None, 16.0),
        ([[1.0, 3.0], [4.0, 8.0]], [3.0, 1.0], 24.0),
        ([[1.0, 3.0], [4.0, 8.0]], [[1.0, 0.0], [0.5, 0.25]], 5.0),
        ([1.0, 2.0], [0.0, 0.0], 0.0),
        ([], None, 0.0),
    ],
)
def test_sum(values, weight, expected):
    metric = ts.metrics.Sum()
    assert metric.name == "sum"
    assert metric.result().item() == 0.0
    metric.update_state(10.0)
    metric.update_state(torch.tensor(values), sample_weight=weight)
    assert metric.result().item() == 10.0 + expected
    metric.reset_state()
    assert metric.result().item() == 0.0


def test_sums_of_many_halves_and_of_integers():
    metric = ts.metrics.Sum(dtype="int64")
    metric.update_state(torch.full((3000,), 100.0, dtype=torch.float16))
    metric.update_state(torch.tensor([2**40, 1]))
    assert metric.result().dtype == torch.int64
    assert metric.result().item() == 300_001 + 2**40


def absolute(y_true, y_pred, scale):
    return scale * (torch.as_tensor(y_true) - torch.as_tensor(y_pred)).abs()


def test_mean_of_a_function():
    metric = ts.metrics.MeanMetricWrapper(absolute, scale=2.0)
    assert metric.name == "mean_metric_wrapper"
    metric.update_state([1.0, 2.0, 3.0], [1.0, 0.0, 0.0], sample_weight=[1.0, 2.0, 1.0])
    assert metric.result().item() == (2 * 2 * 2 + 2 * 3) / 4
    assert pickle.loads(pickle.dumps(metric)).result().item() == 3.5


def test_mean_of_a_function_that_averages_already():
    metric = ts.metrics.MeanMetricWrapper(lambda y, p: (y - p).mean(), name="difference")
    with pytest.raises(InvalidArgumentError, match=r"'difference' must return one value for each example"):
        metric.update_state(torch.ones(2), torch.ones(2))


@pytest.mark.parametrize("made", [lambda loss: loss, Tensor.detach, lambda loss: 0 + loss])
def test_mean_of_scaled_losses_is_too_small_and_warned_of(made):
    """The tutorial's note: Mean divides the sum of the replicas' scaled losses once more, by their number."""
    strategy = ts.MirroredStrategy(["cpu:0", "cpu:1"])
    with strategy.scope():
        scaled, per_example = ts.metrics.Mean(), ts.metrics.Mean()

    def step(losses):
        loss = ts.nn.compute_average_loss(losses.requires_grad_(), global_batch_size=4)
        scaled.update_state(made(loss))
        per_example.update_state(losses)
        per_example.update_state(losses.mean())  # of a share
        return loss

    (losses,) = strategy.experimental_distribute_dataset(torch.tensor([2.0, 3.0, 4.0, 5.0]), batch_size=4)
    with pytest.warns(UserWarning, match="The Mean 'mean' was given a replica's part of a loss") as caught:
        loss = strategy.reduce("SUM", strategy.run(step, args=(losses,)), axis=None)
    assert len(caught) == 1
    assert (loss.item(), per_example.result().item(), scaled.result().item()) == (3.5, 3.5, 1.75)


class Held(torch.autograd.Function):
    """Keeps a value until its graph is gone."""

    @staticmethod
    def forward(ctx, value):
        ctx.held = torch.ones(1)
        Held.reference = weakref.ref(ctx.held)
        return value.clone()


def test_a_scaled_loss_that_is_remembered_does_not_hold_its_graph():
    strategy = ts.MirroredStrategy(["cpu:0", "cpu:1"])

    def step():
        loss = ts.nn.compute_average_loss(Held.apply(torch.ones(2, requires_grad=True)), global_batch_size=4)
        assert Held.reference() is not None
        del loss
        gc.collect()
        return Held.reference() is None

    assert all(strategy.experimental_local_results(strategy.run(step)))


def test_every_example_counts_once_whatever_its_size():
    metric = ts.metrics.Mean()
    metric.update_state([[1.0, 3.0, 5.0, 7.0]])
    metric.update_state([[10.0]])
    assert metric.result().item() == 7.0
