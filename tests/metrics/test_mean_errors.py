"""Mean errors against numpy."""

import numpy as np
import pytest
import torch

from torchstrategy.errors import InvalidArgumentError
from torchstrategy.metrics import (
    MeanAbsoluteError,
    MeanAbsolutePercentageError,
    MeanSquaredError,
    RootMeanSquaredError,
)

METRICS = {
    MeanSquaredError: ("mean_squared_error", lambda y, p: (y - p) ** 2, lambda mean: mean),
    RootMeanSquaredError: ("root_mean_squared_error", lambda y, p: (y - p) ** 2, np.sqrt),
    MeanAbsoluteError: ("mean_absolute_error", lambda y, p: abs(y - p), lambda mean: mean),
    MeanAbsolutePercentageError: (
        "mean_absolute_percentage_error",
        lambda y, p: 100 * abs(y - p) / np.maximum(abs(y), 1e-7),
        lambda mean: mean,
    ),
}


@pytest.mark.parametrize("cls", METRICS)
@pytest.mark.parametrize("shape", [(7,), (7, 1), (7, 3), (7, 2, 3)])
@pytest.mark.parametrize("weighted", [False, True])
def test_weighted_mean_over_examples(cls, shape, weighted):
    name, error, finish = METRICS[cls]
    rng = np.random.default_rng(0)
    labels, predictions, weights = rng.normal(size=shape), rng.normal(size=shape), rng.random(7)
    metric = cls(dtype=torch.float64)
    assert metric.name == name
    assert metric.result().item() == 0.0
    metric.update_state(np.zeros((0, *shape[1:])), np.zeros((0, *shape[1:])))
    for part in (slice(0, 5), slice(5, 7)):
        metric.update_state(labels[part], predictions[part], weights[part] if weighted else None)
    per_example = error(labels, predictions).reshape(7, -1).mean(1)
    expected = finish(np.average(per_example, weights=weights if weighted else None))
    assert metric.result().item() == pytest.approx(expected, rel=1e-12)


def test_weights_of_elements():
    metric = MeanSquaredError()
    # Errors of the four elements, over the last dimension: 1, 4, 9, 16; an example weighs what its elements do.
    metric.update_state(torch.zeros(2, 2, 1), [[[1.0], [2.0]], [[3.0], [4.0]]], [[1.0, 0.0], [0.0, 1.0]])
    assert metric.result().item() == pytest.approx((1 / 2 + 16 / 2) / (1 / 2 + 1 / 2))


def test_a_label_of_zero_has_a_finite_percentage():
    metric = MeanAbsolutePercentageError(dtype=torch.float64)
    metric.update_state([0.0], [1.0])
    assert metric.result().item() == pytest.approx(1e9)


def test_labels_and_predictions_that_differ_in_a_dimension_of_one():
    metric = MeanAbsoluteError()
    metric.update_state(torch.tensor([1.0, 2.0, 3.0]), torch.tensor([[1.0], [2.0], [6.0]]))  # not broadcast to [3, 3]
    metric.update_state(torch.tensor([[1.0], [2.0], [3.0]]), torch.tensor([1.0, 2.0, 6.0]))
    assert metric.result().item() == 1.0


def test_differences_of_large_numbers_are_exact():
    metric = MeanAbsoluteError()
    metric.update_state(torch.tensor([2**31], dtype=torch.int64), torch.tensor([2**31 + 1], dtype=torch.int64))
    metric.update_state(torch.tensor([3], dtype=torch.uint8), torch.tensor([4], dtype=torch.uint8))
    assert metric.result().item() == 1.0


def test_nan_stays_visible():
    metric = RootMeanSquaredError()
    metric.update_state([1.0, 2.0], [float("nan"), 2.0])
    assert metric.result().isnan()


@pytest.mark.parametrize(("labels", "predictions"), [((3, 2), (3, 1)), ((4,), (3,)), ((), ()), ((2, 3), (3, 2))])
def test_shapes_that_do_not_fit(labels, predictions):
    with pytest.raises(InvalidArgumentError, match="same shape"):
        MeanSquaredError().update_state(torch.zeros(labels), torch.zeros(predictions))
