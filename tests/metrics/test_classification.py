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


NAN = float("nan")


@pytest.mark.parametrize(
    ("metric", "labels", "predictions", "weight", "expected"),
    [
        (ts.metrics.Accuracy, [1, 2, 3, 4], [0, 2, 3, 4], None, 0.75),
        (ts.metrics.Accuracy, [[1], [2], [3], [4]], [[0], [2], [3], [4]], [1, 1, 0, 0], 0.5),
        (ts.metrics.Accuracy, [[1], [2]], [1, 2], None, 1.0),
        (ts.metrics.Accuracy, [[1, 2], [3, 4]], [[1, 0], [3, 4]], [1.0, 3.0], 0.875),
        (ts.metrics.Accuracy, [1.0, NAN], [1.0, NAN], None, 0.5),
        (ts.metrics.BinaryAccuracy, [1, 1, 0, 0], [0.98, 1, 0, 0.6], None, 0.75),
        (ts.metrics.BinaryAccuracy, [[1], [1], [0], [0]], [[0.98], [1], [0], [0.6]], [1, 0, 0, 1], 0.5),
        (ts.metrics.BinaryAccuracy, [0, 1], [0.5, 0.5], None, 0.5),
        (ts.metrics.BinaryAccuracy, [0, 2], [NAN, 0.9], None, 0.0),
        (ts.metrics.CategoricalAccuracy, [[0, 0, 1], [0, 1, 0]], [[0.1, 0.9, 0.8], [0.05, 0.95, 0]], None, 0.5),
        (ts.metrics.CategoricalAccuracy, [[0, 0, 1], [0, 1, 0]], [[0.1, 0.9, 0.8], [0.05, 0.95, 0]], [0.7, 0.3], 0.3),
        (ts.metrics.CategoricalAccuracy, [[[1, 0], [0, 1]]], [[[2.0, 1.0], [2.0, 1.0]]], None, 0.5),
        (ts.metrics.CategoricalAccuracy, [[1, 0], [1, 0]], [[NAN, 0.1], [0.5, NAN]], None, 0.0),
        (ts.metrics.SparseCategoricalAccuracy, [0, 0], [[NAN, 0.1], [0.5, NAN]], None, 0.0),
        (ts.metrics.SparseCategoricalAccuracy, [-1, 255], [[0.5, 0.1], [0.5, 0.1]], None, 0.0),
    ],
)
def test_by_hand(metric, labels, predictions, weight, expected):
    metric = metric()
    metric.update_state(labels, predictions, weight)
    assert metric.result().item() == pytest.approx(expected)


def test_names():
    classes = ("accuracy", "binary_accuracy", "categorical_accuracy", "sparse_categorical_accuracy")
    for name in (*classes, "top_k_categorical_accuracy", "sparse_top_k_categorical_accuracy"):
        cls = getattr(ts.metrics, "".join(word.capitalize() for word in name.split("_")))
        assert cls().name == name
        assert cls(name="other").name == "other"


@pytest.mark.parametrize(("threshold", "expected"), [(0.5, 0.5), (0.0, 1.0)])
def test_binary_accuracy_of_logits(threshold, expected):
    metric = ts.metrics.BinaryAccuracy(threshold=threshold)
    metric.update_state([1, 0], [0.3, -2.0])
    assert metric.result().item() == expected


def in_top_k_by_hand(label, scores, k):
    """As tf.math.in_top_k: of classes that tie for the last place, all count."""
    return 0 <= label < len(scores) and sum(score > scores[label] for score in scores) < k


@pytest.mark.parametrize("k", [1, 2, 5, 9])
@pytest.mark.parametrize("shape", [(30,), (30, 1), (6, 5)])
def test_top_k(k, shape):
    generator = torch.Generator().manual_seed(k)
    scores = torch.randint(4, (30, 6), generator=generator).double()  # with many equal ones
    labels = torch.randint(-1, 7, (30,), generator=generator)  # some are no class
    weight = torch.rand(shape[0], generator=generator)
    metric = ts.metrics.SparseTopKCategoricalAccuracy(k, dtype=torch.float64)
    metric.update_state(labels.reshape(shape), scores.reshape(*(shape if shape[-1] != 1 else shape[:-1]), 6), weight)
    right = [in_top_k_by_hand(label, row, k) for label, row in zip(labels.tolist(), scores.tolist(), strict=True)]
    weights = weight.repeat_interleave(30 // len(weight)).tolist()
    expected = sum(w for w, r in zip(weights, right, strict=True) if r) / sum(weights)
    assert metric.result().item() == pytest.approx(expected, rel=1e-6)
    valid = (labels >= 0) & (labels < 6)
    dense = ts.metrics.TopKCategoricalAccuracy(k)
    dense.update_state(torch.nn.functional.one_hot(labels[valid], 6), scores[valid])
    expected = sum(r for r, v in zip(right, valid.tolist(), strict=True) if v) / valid.sum().item()
    assert dense.result().item() == pytest.approx(expected)


def test_top_k_of_what_is_no_number():
    metric = ts.metrics.SparseTopKCategoricalAccuracy(k=2)
    metric.update_state([0, 0, 0, 1], [[NAN, 0.0], [0.0, NAN], [torch.inf, 0.0], [-torch.inf, 0.0]])
    assert metric.result().item() == 0.25


@pytest.mark.parametrize("cls", [ts.metrics.TopKCategoricalAccuracy, ts.metrics.SparseTopKCategoricalAccuracy])
def test_k_outside_its_range(cls):
    with pytest.raises(ValueError, match="k must be at least 1"):
        cls(k=0)


def test_threshold_that_is_no_number():
    with pytest.raises(ValueError, match="threshold must"):
        ts.metrics.BinaryAccuracy(threshold=NAN)


@pytest.mark.parametrize(
    ("cls", "labels", "scores", "message"),
    [
        (ts.metrics.Accuracy, (4,), (3,), "same shape"),
        (ts.metrics.BinaryAccuracy, (3, 2), (3, 1), "same shape"),
        (ts.metrics.CategoricalAccuracy, (3,), (3, 2), "name begins with Sparse"),
        (ts.metrics.CategoricalAccuracy, (3,), (3,), "name begins with Sparse"),
        (ts.metrics.TopKCategoricalAccuracy, (3, 4), (3, 2), "name begins with Sparse"),
        (ts.metrics.SparseTopKCategoricalAccuracy, (3, 2), (3, 2), "Labels come first"),
    ],
)
def test_other_shapes_that_do_not_fit(cls, labels, scores, message):
    with pytest.raises(InvalidArgumentError, match=message):
        cls().update_state(torch.zeros(labels), torch.zeros(scores))
