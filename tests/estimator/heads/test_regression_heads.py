"""Losses, predictions and metrics of heads whose labels are numbers."""

import math

import pytest
import torch

import torchstrategy as ts
from torchstrategy.estimator.heads import LogisticRegressionHead, PoissonRegressionHead, RegressionHead

LOGITS = torch.tensor([[45.0], [41.0]])
LABELS = torch.tensor([[43.0], [44.0]])


def results(metrics):
    return {name: metric.result().item() for name, metric in metrics.items()}


@pytest.mark.parametrize(
    ("reduction", "expected"),
    [("sum_over_batch_size", 6.5), ("auto", 6.5), (ts.losses.Reduction.SUM, 13.0)],
)
def test_loss(reduction, expected):
    head = RegressionHead(loss_reduction=reduction)
    assert head.loss(LABELS, LOGITS).item() == expected
    assert head.loss(LABELS.squeeze(1), LOGITS).item() == expected
    assert head.loss(LABELS.to(torch.int64), LOGITS).item() == expected


def test_an_empty_batch_has_no_loss():
    logits = torch.zeros(0, 1, requires_grad=True)
    loss = RegressionHead().loss(torch.zeros(0), logits)
    loss.backward()
    assert loss.item() == 0


def test_metrics_of_two_batches():
    head = RegressionHead()
    metrics = head.metrics()
    head.update_metrics(metrics, {}, LOGITS, LABELS)
    head.update_metrics(metrics, {}, torch.tensor([[1.0]]), torch.tensor([[4.0]]))
    assert results(metrics) == pytest.approx(
        {"average_loss": (4 + 9 + 9) / 3, "prediction/mean": 29.0, "label/mean": 91 / 3}, rel=1e-6
    )


@pytest.mark.parametrize("weights", [torch.tensor([1.0, 0.5]), torch.tensor([[1.0], [0.5]]), [1.0, 0.5]])
def test_weights(weights):
    head = RegressionHead(weight_column="w")
    features = {"w": weights}
    assert head.loss(LABELS, LOGITS, features).item() == (4 + 4.5) / 2  # divided by the number, as in tf
    metrics = head.metrics()
    head.update_metrics(metrics, features, LOGITS, LABELS)
    assert results(metrics)["average_loss"] == pytest.approx(8.5 / 1.5)
    assert results(metrics)["prediction/mean"] == pytest.approx((45 + 20.5) / 1.5)
    assert results(metrics)["label/mean"] == pytest.approx((43 + 22) / 1.5)


def test_a_weight_column_normalises():
    column = ts.feature_column.numeric_column("w", normalizer_fn=lambda x: 2 * x)
    head = RegressionHead(weight_column=column)
    assert head.loss(LABELS, LOGITS, {"w": torch.tensor([1, 0])}).item() == 4


def test_several_labels_and_weights_for_each():
    head = RegressionHead(label_dimension=2, weight_column="w")
    logits, labels = torch.tensor([[1.0, 2.0], [3.0, 4.0]]), torch.tensor([[0.0, 0.0], [1.0, 1.0]])
    assert head.loss(labels, logits, {"w": torch.tensor([1.0, 2.0])}).item() == (1 + 4 + 2 * (4 + 9)) / 4
    each = {"w": torch.tensor([[1.0, 0.0], [0.0, 2.0]])}
    assert head.loss(labels, logits, each).item() == (1 + 18) / 4
    metrics = head.metrics()
    head.update_metrics(metrics, each, logits, labels)
    assert results(metrics)["average_loss"] == pytest.approx(19 / 3)


def test_logits_of_several_dimensions():
    head = RegressionHead(weight_column="w")
    logits, labels = torch.arange(6.0).reshape(2, 3, 1), torch.zeros(2, 3)
    assert head.loss(labels, logits, {"w": torch.ones(2, 3)}).item() == pytest.approx(55 / 6)


def test_inverse_link_and_regularization():
    head = RegressionHead(inverse_link_fn=lambda x: 2 * x, name="wide")
    predictions = head.predictions(LOGITS)
    assert {key: value.tolist() for key, value in predictions.items()} == {
        "predictions": [[90.0], [82.0]],
        "logits": [[45.0], [41.0]],
    }
    terms = [torch.tensor(1.0), torch.tensor(0.5)]
    assert head.loss(LABELS, LOGITS, regularization_losses=terms).item() == 8.0
    metrics = head.metrics(terms)
    head.update_metrics(metrics, {}, LOGITS, LABELS, regularization_losses=terms)
    assert results(metrics) == {
        "average_loss/wide": 6.5,
        "prediction/mean/wide": 86.0,
        "label/mean/wide": 43.5,
        "regularization_loss/wide": 1.5,
    }


def test_own_losses():
    def absolute(labels, logits, features):
        return (labels - logits).abs() * features["scale"]

    head = RegressionHead(loss_fn=absolute)
    assert head.loss(LABELS, LOGITS, {"scale": 2.0}).item() == (4 + 6) / 2
    scalar = RegressionHead(loss_fn=lambda labels, logits: (labels - logits).sum())
    with pytest.raises(ValueError, match=r"one loss for each label, \(2, 1\). Received: \(\)"):
        scalar.loss(LABELS, LOGITS)


def test_poisson():
    logits, labels = torch.tensor([[0.0], [-1.0], [1.0]]), torch.tensor([[1.0], [0.0], [3.0]])
    plain = [1.0, math.exp(-1), math.e - 3]
    stirling = 3 * math.log(3) - 3 + 0.5 * math.log(2 * math.pi * 3)
    short = PoissonRegressionHead(compute_full_loss=False)
    assert short.loss(labels, logits).item() == pytest.approx(sum(plain) / 3, rel=1e-6)
    assert PoissonRegressionHead().loss(labels, logits).item() == pytest.approx((sum(plain) + stirling) / 3, rel=1e-6)
    assert short.predictions(logits)["predictions"][2].item() == pytest.approx(math.e)


def test_logistic():
    head = LogisticRegressionHead()
    assert head.loss(torch.tensor([[0.4]]), torch.tensor([[0.0]])).item() == pytest.approx(math.log(2))
    assert head.predictions(torch.tensor([[0.0]]))["predictions"].item() == 0.5
    assert sorted(head.metrics()) == ["average_loss", "label/mean", "prediction/mean"]


@pytest.mark.parametrize(
    ("labels", "logits", "features", "message"),
    [
        (None, LOGITS, {}, "There are no labels"),
        (torch.zeros(3), LOGITS, {}, r"Labels must have the shape \(2, 1\) or \(2,\). Received: \(3, 1\)"),
        (torch.zeros(2, 2), LOGITS, {}, r"Received: \(2, 2\). One-hot"),
        (["a", "b"], LOGITS, {}, "labels are strings"),
        ({"y": LABELS}, LOGITS, {}, r"labels are a dictionary of \['y'\]"),
        (torch.eye(2)[:, :1].to_sparse(), LOGITS, {}, "sparse tensor"),
        (LABELS, torch.zeros(2, 2), {}, r"logits must have the shape .*\[..., 1\]. Received: \(2, 2\)"),
        (LABELS, torch.zeros(2), {}, r"Received: \(2,\)"),
        (LABELS, LOGITS, {"x": LOGITS}, "weight column 'w' is not among the features"),
        (
            LABELS,
            LOGITS,
            {"w": torch.ones(3)},
            r"Weights must have the shape \(2, 1\).*of \(3, 1\)",
        ),
        (LABELS, LOGITS, {"w": torch.tensor([True, False])}, "Weights must be numbers"),
    ],
)
def test_what_does_not_fit(labels, logits, features, message):
    head = RegressionHead(weight_column="w" if features else None)
    with pytest.raises(ValueError, match=message):
        head.loss(labels, logits, features)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"label_dimension": 0}, ValueError, "label_dimension must be at least 1"),
        ({"loss_reduction": "none"}, ValueError, "Invalid loss_reduction: 'none'"),
        ({"loss_reduction": None}, ValueError, "Invalid loss_reduction"),
        ({"loss_reduction": "mean_of_all"}, ValueError, "Invalid loss_reduction"),
        ({"loss_fn": lambda labels: labels}, ValueError, "must have the argument logits"),
        ({"loss_fn": lambda labels, logits, x: x}, ValueError, r"unexpected arguments \['x'\]"),
    ],
)
def test_what_is_refused(arguments, error, message):
    with pytest.raises(error, match=message):
        RegressionHead(**arguments)


def test_weight_columns_of_other_kinds():
    head = RegressionHead(weight_column=3)
    with pytest.raises(TypeError, match="weight_column must be the name of a feature or a numeric_column"):
        head.loss(LABELS, LOGITS, {})


def test_unknown_predictions():
    with pytest.raises(ValueError, match=r"no predictions \['logistic'\]"):
        RegressionHead().predictions(LOGITS, ["logistic"])
