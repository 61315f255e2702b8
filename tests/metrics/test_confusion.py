"""Precision, recall and the counts they are made of, against loops over all examples and thresholds."""

import numpy as np
import pytest
import torch

import torchstrategy as ts
from torchstrategy.errors import InvalidArgumentError

METRICS = ts.metrics


def counts_by_hand(labels, scores, weights, threshold):
    """Return (tp, fp, tn, fn) over all elements of arrays of one shape."""
    tp = fp = tn = fn = 0.0
    for label, score, weight in zip(labels.ravel(), scores.ravel(), weights.ravel(), strict=True):
        if score > threshold:
            tp, fp = (tp + weight, fp) if label else (tp, fp + weight)
        else:
            tn, fn = (tn, fn + weight) if label else (tn + weight, fn)
    return tp, fp, tn, fn


def examples(shape, seed=0):
    """Return labels, scores on a grid that hits the thresholds, and weights."""
    rng = np.random.default_rng(seed)
    scores = rng.integers(0, 11, shape) / 10
    return rng.integers(0, 2, shape), scores, rng.random(shape)


@pytest.mark.parametrize("thresholds", [None, 0.3, [0.5], [0.7, 0.0, 1.0, 0.3, 0.3], (0.2, 0.4), np.array([0.4, 0.1])])
@pytest.mark.parametrize("shape", [(40,), (13, 1), (5, 3, 4)])
@pytest.mark.parametrize("weighted", [False, True])
def test_counts_and_quotients(thresholds, shape, weighted):
    metrics = [
        cls(thresholds, dtype="float64")
        for cls in (
            METRICS.TruePositives,
            METRICS.FalsePositives,
            METRICS.TrueNegatives,
            METRICS.FalseNegatives,
            METRICS.Precision,
            METRICS.Recall,
        )
    ]
    batches = [examples(shape, seed) for seed in (1, 2)]
    for labels, scores, weights in batches:
        for metric in metrics:
            metric.update_state(labels, scores, weights if weighted else None)
    listed = [0.5] if thresholds is None else [thresholds] if isinstance(thresholds, float) else thresholds
    labels, scores, weights = (np.concatenate([batch[i] for batch in batches]) for i in range(3))
    weights = weights if weighted else np.ones_like(weights)
    table = np.array([counts_by_hand(labels, scores, weights, t) for t in listed])
    tp, fp, _, fn = table.T
    expected = [*table.T, np.divide(tp, tp + fp, out=np.zeros_like(tp), where=tp + fp > 0), tp / (tp + fn)]
    for metric, values in zip(metrics, expected, strict=True):
        result = metric.result()
        assert result.shape == (() if len(listed) == 1 else (len(listed),))
        np.testing.assert_allclose(result.numpy(), values[0] if len(listed) == 1 else values, rtol=1e-13)


def test_documented_numbers():
    precision, recall = METRICS.Precision(), METRICS.Recall()
    for metric in (precision, recall):
        metric.update_state([0, 1, 1, 1], [1, 0, 1, 1])
        assert metric.result().item() == pytest.approx(2 / 3)
        metric.reset_state()
        metric.update_state([0, 1, 1, 1], [1, 0, 1, 1], sample_weight=[0, 0, 1, 0])
        assert metric.result().item() == 1.0
    assert precision.name == "precision"
    assert METRICS.TruePositives().name == "true_positives"


def by_hand_with_classes(labels, scores, weights, threshold, top_k, class_id):
    """Return precision and recall of ``[batch, classes]``: a class is positive if it is in the top k and above."""
    tp = fp = fn = 0.0
    for row, label in enumerate(labels):
        best = sorted(range(len(label)), key=lambda c: (-scores[row, c], c))[: top_k or len(label)]
        for c in range(len(label)) if class_id is None else [class_id]:
            positive = c in best and (threshold is None or scores[row, c] > threshold)
            tp += weights[row] * (positive and label[c])
            fp += weights[row] * (positive and not label[c])
            fn += weights[row] * (not positive and label[c])
    return tp / (tp + fp) if tp + fp else 0.0, tp / (tp + fn) if tp + fn else 0.0


@pytest.mark.parametrize("top_k", [None, 1, 3])
@pytest.mark.parametrize("class_id", [None, 0, 3])
@pytest.mark.parametrize("threshold", [None, 0.6])
def test_top_k_and_class_id(top_k, class_id, threshold):
    labels, scores, _ = examples((30, 4), seed=3)  # with many equal scores
    weights = np.random.default_rng(4).random(30)
    precision = METRICS.Precision(threshold, top_k, class_id, dtype=torch.float64)
    recall = METRICS.Recall(threshold, top_k, class_id, dtype=torch.float64)
    for metric in (precision, recall):
        metric.update_state(labels[:11], scores[:11], weights[:11])
        metric.update_state(labels[11:], scores[11:], weights[11:, None])
    wanted = by_hand_with_classes(
        labels, scores, weights, 0.5 if threshold is None and top_k is None else threshold, top_k, class_id
    )
    assert (precision.result().item(), recall.result().item()) == pytest.approx(wanted, rel=1e-12)


@pytest.mark.parametrize(("k", "expected"), [(2, 0.0), (4, 0.5)])
def test_of_equal_predictions_the_first_are_taken(k, expected):
    metric = METRICS.Precision(top_k=k)
    metric.update_state([0, 0, 1, 1], [1, 1, 1, 1])  # tf's documented numbers
    assert metric.result().item() == expected


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_a_prediction_equal_to_a_threshold_is_not_above_it(dtype):
    metric = METRICS.TruePositives([0.25, 0.3])
    metric.update_state([1, 1], torch.tensor([0.25, 0.3], dtype=dtype))
    # bfloat16's 0.3 is 0.30078125, which is more than 0.3.
    assert metric.result().tolist() == [1.0, 1.0 if dtype == torch.bfloat16 else 0.0]


def test_logits_with_threshold_zero_or_top_k():
    metric = METRICS.Recall(thresholds=0)
    metric.update_state([1, 1, 0], [3.0, -2.0, 5.0])
    assert metric.result().item() == 0.5
    metric = METRICS.Recall(top_k=1)
    metric.update_state([[1, 0], [0, 1]], [[-7.0, -8.0], [9.0, 3.0]])
    assert metric.result().item() == 0.5


def test_nothing_gives_zero():
    for metric in (METRICS.Precision(), METRICS.Recall(top_k=1)):
        assert metric.result().item() == 0.0
        metric.update_state(torch.zeros(0, 2), torch.zeros(0, 2))
        assert metric.result().item() == 0.0
        metric.update_state([[0, 0]], [[0.3, 0.2]], sample_weight=0.0)
        assert metric.result().item() == 0.0
    assert METRICS.Recall([0.1, 0.2]).result().tolist() == [0.0, 0.0]


@pytest.mark.parametrize("scores", [[0.5, 1.01], [-0.1, 0.5], [float("nan"), 0.5]])
def test_predictions_that_are_no_probabilities(scores):
    metric = METRICS.Precision()
    metric.update_state([1, 1], [0.9, 0.1])
    with pytest.raises(InvalidArgumentError, match=r"in \[0, 1\].*sigmoid.*thresholds=0"):
        metric.update_state([0, 1], scores)
    assert metric.result().item() == 1.0
    assert metric.update_count == 1


def test_nan_is_refused_among_logits():
    with pytest.raises(InvalidArgumentError, match="nan"):
        METRICS.Recall(thresholds=0).update_state([1], [float("nan")])


@pytest.mark.parametrize(
    ("metric", "shape", "message"),
    [
        (METRICS.Precision(), ((3,), (3, 2)), "same shape"),
        (METRICS.Precision(), ((3, 3), (3, 2)), "same shape"),
        (METRICS.Precision(), ((), ()), "same shape"),
        (METRICS.Precision(top_k=3), ((3, 2), (3, 2)), "at least 3 classes"),
        (METRICS.Precision(class_id=2), ((3, 2), (3, 2)), "class_id=2"),
        (METRICS.Precision(class_id=0), ((3,), (3,)), "class_id=0"),
    ],
)
def test_shapes_that_do_not_fit(metric, shape, message):
    with pytest.raises(InvalidArgumentError, match=message):
        metric.update_state(*(torch.zeros(s) for s in shape))


def test_sample_weight_that_does_not_fit():
    with pytest.raises(InvalidArgumentError, match="sample_weight must"):
        METRICS.Precision().update_state([[1], [0]], [[0.1], [0.2]], sample_weight=[1.0, 2.0, 3.0])


@pytest.mark.parametrize("thresholds", [1.5, -0.1, [0.5, 2.0], [], [float("nan")], "0.5", [None]])
def test_thresholds_outside_their_range(thresholds):
    with pytest.raises(ValueError, match=r"must be numbers in \[0, 1\]"):
        METRICS.Precision(thresholds)


@pytest.mark.parametrize("arguments", [{"top_k": 0}, {"class_id": -1}])
def test_other_arguments_outside_their_range(arguments):
    with pytest.raises(ValueError, match=next(iter(arguments))):
        METRICS.Recall(**arguments)
