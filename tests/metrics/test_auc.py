"""The area under curves, against hand-computed numbers, loops and numeric integration."""

import itertools
import math

import numpy as np
import pytest
import torch

import torchstrategy as ts
from torchstrategy.errors import InvalidArgumentError
from torchstrategy.metrics import AUC

LABELS, SCORES = [0, 0, 1, 1], [0.0, 0.5, 0.3, 0.9]
WEIGHTS = [1.0, 2.0, 3.0, 4.0]


@pytest.mark.parametrize(
    ("curve", "method", "weights", "expected"),
    [
        # tp = [2, 1, 0], fp = [2, 0, 0] at the thresholds -e, 0.5, 1 + e
        ("ROC", "interpolation", None, (1 + 0.5) / 2),
        ("ROC", "majoring", None, 1.0),
        ("ROC", "minoring", None, 0.5),
        # tp = [7, 4, 0], fp = [3, 0, 0], fn = [0, 3, 7], tn = [0, 3, 3]
        ("ROC", "interpolation", WEIGHTS, (1 + 4 / 7) / 2),
        ("ROC", "majoring", WEIGHTS, 1.0),
        ("ROC", "minoring", WEIGHTS, 4 / 7),
        ("PR", "majoring", WEIGHTS, 1.0),
        ("PR", "minoring", WEIGHTS, 0.7 * 3 / 7),
        # From P = 10 to 4, TP = 4 + (P - 4) / 2: integral of TP / P * dTP = (3 + 2 ln(10 / 4)) / 2; below, precision 1
        ("PR", "interpolation", WEIGHTS, ((3 + 2 * math.log(2.5)) / 2 + 4) / 7),
        ("pr", "Interpolation", [1.0, 0.0, 0.0, 1.0], 1.0),
        ("ROC", "interpolation", [1.0, 0.0, 0.0, 1.0], 1.0),
    ],
)
def test_three_thresholds_by_hand(curve, method, weights, expected):
    metric = AUC(3, curve, method, dtype=torch.float64)
    metric.update_state(LABELS[:1], SCORES[:1], weights and weights[:1])
    metric.update_state(LABELS[1:], SCORES[1:], weights and weights[1:])
    assert metric.result().item() == pytest.approx(expected, rel=1e-12)


def by_hand(labels, scores, weights, thresholds, curve, method):
    """Return the area from counts at each threshold; the interpolated precision is integrated numerically."""
    points = []
    for t in thresholds:
        above = scores > t
        tp, fp = (weights * above * labels).sum(), (weights * above * (1 - labels)).sum()
        fn, tn = (weights * ~above * labels).sum(), (weights * ~above * (1 - labels)).sum()
        points.append((tp, fp, tp / (tp + fn), fp / (fp + tn), tp / (tp + fp) if tp + fp else 0.0))
    area = 0.0
    for (tp_a, fp_a, recall_a, fpr_a, p_a), (tp_b, fp_b, recall_b, fpr_b, p_b) in itertools.pairwise(points):
        if curve == "PR" and method == "interpolation":
            steps = np.linspace(0, 1, 20001)
            tp, fp = tp_b + steps * (tp_a - tp_b), fp_b + steps * (fp_a - fp_b)
            if tp_a + fp_a == 0:
                continue
            precision = tp[1:] / (tp + fp)[1:]  # the first point may be 0 / 0
            precision = np.concatenate([[precision[0] if tp_b + fp_b == 0 else tp_b / (tp_b + fp_b)], precision])
            area += (recall_a - recall_b) * ((precision[:-1] + precision[1:]) / 2).mean()
            continue
        width = fpr_a - fpr_b if curve == "ROC" else recall_a - recall_b
        y_a, y_b = (recall_a, recall_b) if curve == "ROC" else (p_a, p_b)
        area += width * {"interpolation": (y_a + y_b) / 2, "minoring": min(y_a, y_b), "majoring": max(y_a, y_b)}[method]
    return area


def random_examples(num_examples=60):
    rng = np.random.default_rng(5)
    labels = rng.integers(0, 2, num_examples)
    scores = np.clip(rng.integers(-2, 11, num_examples) / 10 + 0.2 * labels, 0, 1)
    return labels, scores, rng.random(num_examples)


@pytest.mark.parametrize("curve", ["ROC", "PR"])
@pytest.mark.parametrize("method", ["interpolation", "minoring", "majoring"])
@pytest.mark.parametrize(
    ("arguments", "inner"),
    [
        ({}, [i / 199 for i in range(1, 199)]),
        ({"num_thresholds": 11}, [i / 10 for i in range(1, 10)]),
        ({"num_thresholds": 2}, []),
        ({"thresholds": [0.8, 0.15, 0.5]}, [0.15, 0.5, 0.8]),
        ({"thresholds": []}, []),
    ],
)
def test_against_loops(curve, method, arguments, inner):
    labels, scores, weights = random_examples()
    metric = AUC(curve=curve, summation_method=method, dtype=torch.float64, **arguments)
    assert metric.thresholds == pytest.approx([-1e-7, *inner, 1 + 1e-7])
    assert metric.num_thresholds == len(inner) + 2
    for part in (slice(0, 7), slice(7, 60)):
        metric.update_state(labels[part], scores[part], weights[part])
    expected = by_hand(labels, scores, weights, [-1e-7, *inner, 1 + 1e-7], curve, method)
    assert metric.result().item() == pytest.approx(expected, rel=1e-6 if curve == "PR" else 1e-12)


def test_approaches_the_fraction_of_ordered_pairs():
    labels, scores, _ = random_examples()
    metric = AUC(1001)
    metric.update_state(labels, scores)
    pairs = [(p > n) + (p == n) / 2 for p in scores[labels == 1] for n in scores[labels == 0]]
    assert metric.result().item() == pytest.approx(np.mean(pairs), abs=1e-6)


def test_perfect_and_inverted_predictions():
    for scores, expected in (([0.0, 0.2, 0.8, 1.0], 1.0), ([1.0, 0.8, 0.2, 0.0], 0.0), ([0.5] * 4, 0.5)):
        metric = AUC()
        assert metric(LABELS, scores).item() == pytest.approx(expected, abs=1e-7)
    assert metric.name == "auc"


def test_logits():
    logits = torch.tensor([-3.0, 0.5, -0.2, 4.0])
    metric, reference = AUC(from_logits=True), AUC()
    metric.update_state(LABELS, logits)
    reference.update_state(LABELS, [1 / (1 + math.exp(-x)) for x in logits.tolist()])
    assert metric.result() == reference.result()
    assert metric.result() > 0.5


@pytest.mark.parametrize("num_labels", [None, 3])
@pytest.mark.parametrize("label_weights", [None, [1.0, 0.0, 3.0]])
@pytest.mark.parametrize("curve", ["ROC", "PR"])
def test_labels_by_themselves(num_labels, label_weights, curve):
    rng = np.random.default_rng(8)
    labels, scores, weights = rng.integers(0, 2, (20, 3)), rng.random((20, 3)), rng.random(20)
    metric = AUC(curve=curve, multi_label=True, num_labels=num_labels, label_weights=label_weights, dtype=torch.float64)
    assert metric.result().item() == 0.0
    metric.update_state(torch.zeros(0, 3), torch.zeros(0, 3))
    metric.update_state(labels[:6], scores[:6], weights[:6])
    metric.update_state(labels[6:], scores[6:], weights[6:])
    areas = []
    for i in range(3):
        single = AUC(curve=curve, dtype=torch.float64)
        single.update_state(labels[:, i], scores[:, i], weights)
        areas.append(single.result().item())
    assert metric.result().item() == pytest.approx(np.average(areas, weights=label_weights), rel=1e-12)
    metric.reset_state()
    metric.update_state(labels[:6], scores[:6])
    assert metric.result().item() > 0


def test_label_weights_of_flattened_labels():
    labels, scores = np.array([[1, 0], [0, 1], [0, 0]]), np.array([[0.7, 0.4], [0.2, 0.6], [0.9, 0.1]])
    metric, reference = AUC(label_weights=[1.0, 5.0]), AUC()
    metric.update_state(labels, scores, [1.0, 2.0, 0.5])
    reference.update_state(labels.ravel(), scores.ravel(), [1.0, 5.0, 2.0, 10.0, 0.5, 2.5])
    assert metric.result() == reference.result()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_thresholds": 1}, "num_thresholds must"),
        ({"curve": "PRC"}, "curve must be one of ROC, PR"),
        ({"summation_method": "mean"}, "summation_method must be one of"),
        ({"thresholds": [0.5, 1.5]}, r"in \[0, 1\]"),
        ({"num_labels": 3}, "needs multi_label"),
        ({"num_labels": 0, "multi_label": True}, "at least 1"),
        ({"label_weights": [1.0, -1.0]}, "not negative"),
        ({"label_weights": 1.0}, "for each label"),
    ],
)
def test_arguments_outside_their_range(arguments, message):
    with pytest.raises(ValueError, match=message):
        AUC(**arguments)


@pytest.mark.parametrize(
    ("arguments", "labels", "scores", "message"),
    [
        ({}, [1.0], [1.5], r"in \[0, 1\].*from_logits=True"),
        ({}, [1.0], [math.nan], "nan"),
        ({"from_logits": True}, [1.0], [math.nan], "nan"),
        ({}, [1.0, 0.0], [0.5], "same shape"),
        ({"multi_label": True}, [1.0], [0.5], r"\[batch, labels\]"),
        ({"multi_label": True, "num_labels": 3}, [[1.0]], [[0.5]], r"\[batch, 3\]"),
        ({"multi_label": True, "label_weights": [1.0]}, [[1.0, 0.0]], [[0.5, 0.5]], "one entry for each label"),
        ({"label_weights": [1.0]}, [[1.0, 0.0]], [[0.5, 0.5]], "one entry for each label"),
    ],
)
def test_bad_input(arguments, labels, scores, message):
    metric = AUC(**arguments)
    with pytest.raises(InvalidArgumentError, match=message):
        metric.update_state(labels, scores)
    assert not metric.update_called
    assert metric.result().item() == 0.0


def test_another_number_of_labels():
    metric = AUC(multi_label=True)
    metric.update_state(torch.tensor([[1.0], [0.0]]), torch.tensor([[0.8], [0.3]]))
    with pytest.raises(InvalidArgumentError, match=r"\[batch, 1\]"):
        metric.update_state(torch.zeros(2, 3), torch.zeros(2, 3))
    assert metric.result().item() == pytest.approx(1.0)


def test_more_labels_in_a_replica_that_had_no_update():
    strategy = ts.MirroredStrategy(["cpu:0", "cpu:1"])
    with strategy.scope():
        metric = AUC(multi_label=True)

    def step():
        if ts.get_replica_context().replica_id_in_sync_group == 1:
            metric.update_state(torch.tensor([[1.0, 0.0], [0.0, 1.0]]), torch.tensor([[0.8, 0.1], [0.3, 0.6]]))

    strategy.run(step)
    assert metric.result().item() == pytest.approx(1.0)
