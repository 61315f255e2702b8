"""Accuracy under tf's name."""

import pytest
import torch

import torchstrategy as ts
from torchstrategy.errors import InvalidArgumentError

LOGITS = torch.tensor([[2.0, 1.0, 0.0], [0.1, 0.3, 0.2], [0.0, 0.1, 0.9], [5.0, 6.0, 7.0]])


@pytest.mark.parametrize("labels", [[0, 1, 0, 2], [[0], [1], [0], [2]]])
def test_fraction_of_right_classes(labels):
    metric = ts.metrics.SparseCategoricalAccuracy()
    metric.update_state(torch.tensor(labels), LOGITS)
    assert metric.result().item() == 0.75
    assert metric.name == "sparse_categorical_accuracy"
    metric.update_state(torch.tensor([0, 0, 0, 0]), LOGITS)
    assert metric.result().item() == 0.5


def test_calling_updates_and_returns_the_result_so_far():
    metric = ts.metrics.SparseCategoricalAccuracy(name="accuracy")
    assert metric(torch.tensor([0, 1]), LOGITS[:2]).item() == 1.0
    assert metric(torch.tensor([0, 0]), LOGITS[2:]).item() == 0.5


def test_more_dimensions():
    metric = ts.metrics.SparseCategoricalAccuracy()
    metric.update_state(torch.tensor([[0, 1], [2, 0]]), LOGITS.reshape(2, 2, 3))
    assert metric.result().item() == 0.75


def test_sample_weight():
    metric = ts.metrics.SparseCategoricalAccuracy()
    metric.update_state(torch.tensor([0, 1, 0, 2]), LOGITS, sample_weight=[1.0, 1.0, 2.0, 0.0])
    assert metric.result().item() == 0.5


def test_empty_batch():
    metric = ts.metrics.SparseCategoricalAccuracy()
    metric.update_state(torch.zeros(0, dtype=torch.int64), torch.zeros(0, 3))
    assert metric.result().item() == 0.0


@pytest.mark.parametrize(("labels", "scores"), [((4,), (3, 3)), ((4, 3), (4,)), ((), (3,)), ((4, 2), (4, 3))])
def test_shapes_that_do_not_fit(labels, scores):
    with pytest.raises(InvalidArgumentError, match="Labels come first"):
        ts.metrics.SparseCategoricalAccuracy().update_state(torch.zeros(labels), torch.zeros(scores))
