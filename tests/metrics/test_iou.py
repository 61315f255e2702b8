"""Intersection over union against sets of elements."""

import numpy as np
import pytest
import torch

from torchstrategy.errors import InvalidArgumentError
from torchstrategy.metrics import IoU, MeanIoU


def by_hand(labels, predictions, weights, classes):
    """Return the mean over classes of the weight of the intersection over that of the union."""
    ious = []
    for c in classes:
        union = weights[(labels == c) | (predictions == c)].sum()
        if union:
            ious.append(weights[(labels == c) & (predictions == c)].sum() / union)
    return np.mean(ious) if ious else 0.0


@pytest.mark.parametrize(
    ("weights", "mean", "first", "second"),
    [(None, 1 / 3, 1 / 3, 1 / 3), ([0.3, 0.3, 0.3, 0.1], (0.3 / 0.9 + 0.1 / 0.7) / 2, 0.3 / 0.9, 0.1 / 0.7)],
)
def test_documented_numbers(weights, mean, first, second):
    for metric, expected in ((MeanIoU(2), mean), (IoU(2, [0]), first), (IoU(2, (1,)), second)):
        metric.update_state([0, 0, 1, 1], [0, 1, 0, 1], weights)
        assert metric.result().item() == pytest.approx(expected, rel=1e-6)
    assert (MeanIoU(2).name, IoU(2, [0]).name) == ("mean_io_u", "io_u")


@pytest.mark.parametrize("shape", [(40,), (20, 1), (4, 3, 5)])
@pytest.mark.parametrize("ignore_class", [None, 2, 255, -1])
@pytest.mark.parametrize("targets", [None, [1, 3]])
def test_against_sets(shape, ignore_class, targets):
    rng = np.random.default_rng(1)
    labels, predictions, weights = rng.integers(0, 4, shape), rng.integers(0, 4, shape), rng.random(shape)
    if ignore_class in (255, -1):
        labels[rng.random(shape) < 0.3] = ignore_class
    metric = (
        MeanIoU(5, dtype=torch.float64, ignore_class=ignore_class)
        if targets is None
        else IoU(5, targets, dtype=torch.float64, ignore_class=ignore_class)
    )
    half = len(labels) // 2
    metric.update_state(labels[:half], predictions[:half], weights[:half])
    metric.update_state(labels[half:], predictions[half:], weights[half:])
    counted = labels != ignore_class if ignore_class is not None else np.ones(shape, bool)
    expected = by_hand(labels[counted], predictions[counted], weights[counted], targets or range(5))
    assert metric.result().item() == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("axis", [-1, 1])
@pytest.mark.parametrize("sparse_y_true", [True, False])
def test_scores_of_classes(axis, sparse_y_true):
    rng = np.random.default_rng(2)
    labels, scores = rng.integers(0, 3, (4, 5, 6)), rng.random((4, 5, 6, 3))
    metric = MeanIoU(3, dtype=torch.float64, sparse_y_true=sparse_y_true, sparse_y_pred=False, axis=axis)
    y_true = labels if sparse_y_true else np.moveaxis(np.eye(3)[labels], -1, axis)
    example_weights = np.array([1.0, 0.0, 2.0, 0.5])
    metric.update_state(y_true, np.moveaxis(scores, -1, axis), example_weights)
    weights = np.broadcast_to(example_weights[:, None, None], labels.shape)
    expected = by_hand(labels, scores.argmax(-1), weights, range(3))
    assert metric.result().item() == pytest.approx(expected, rel=1e-12)


def test_labels_with_a_last_dimension_of_one():
    metric = MeanIoU(2)
    metric.update_state(torch.tensor([[[0], [1]]]), torch.tensor([[0, 1]]))
    assert metric.result().item() == 1.0


def test_nothing_gives_zero():
    metric = MeanIoU(3, ignore_class=0)
    assert metric.result().item() == 0.0
    metric.update_state(torch.zeros(0, 2, 2, dtype=torch.int64), torch.zeros(0, 2, 2, dtype=torch.int64))
    metric.update_state([0, 0], [1, 7])  # ignored, so the prediction need not be a class
    metric.update_state([1], [1], sample_weight=[0.0])
    assert metric.result().item() == 0.0


@pytest.mark.parametrize(
    ("arguments", "labels", "predictions", "message"),
    [
        ({}, [0, 3], [0, 1], r"y_true must hold class ids in \[0, 3\).*Received 3"),
        ({}, [0, -1], [0, 1], "Received -1.*ignore_class"),
        ({"ignore_class": 255}, [0, 1], [0, 255], "y_pred must hold class ids"),
        ({}, [0, 1], [0.2, 0.7], "y_pred must hold class ids.*sparse_y_pred=False"),
        ({}, [0, 1], [float("nan"), 0.0], "y_pred must hold class ids"),
        ({}, [0, 1], [[0.1, 0.8, 0.1], [0.2, 0.4, 0.4]], "same shape.*sparse_y_pred=False"),
        ({"sparse_y_pred": False}, [0, 1], [[0.1, 0.9], [0.2, 0.8]], "y_pred must have 3 classes along axis -1"),
        ({"sparse_y_pred": False, "axis": 2}, [0, 1], [[0.1, 0.9, 0], [0.2, 0.8, 0]], "3 classes along axis 2"),
        ({"sparse_y_pred": False}, [0], [[0.1, float("nan"), 0.0]], "nan"),
    ],
)
def test_bad_input(arguments, labels, predictions, message):
    metric = MeanIoU(3, **arguments)
    with pytest.raises(InvalidArgumentError, match=message):
        metric.update_state(labels, predictions)
    assert metric.total_cm.sum() == 0


@pytest.mark.parametrize(("num_classes", "targets"), [(0, [0]), (2, [2]), (2, [-1]), (2, [])])
def test_classes_outside_their_range(num_classes, targets):
    with pytest.raises(ValueError, match=r"num_classes must|target_class_ids must"):
        IoU(num_classes, targets)
