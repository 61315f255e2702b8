"""Losses, predictions and metrics of heads whose labels are classes."""

import math

import numpy as np
import pytest
import torch

import torchstrategy as ts
from torchstrategy.estimator.heads import BinaryClassHead, MultiClassHead

WORDS = np.array([["dog"], ["cat"]])


def results(metrics):
    return {name: metric.result().item() for name, metric in metrics.items()}


def test_binary_loss_and_metrics_are_those_of_tf():
    head = BinaryClassHead()
    logits, labels = torch.tensor([[45.0], [-41.0]]), torch.tensor([[1], [1]])
    assert head.loss(labels, logits).item() == 20.5
    metrics = head.metrics()
    head.update_metrics(metrics, {}, logits, labels)
    assert results(metrics) == pytest.approx(
        {
            "average_loss": 20.5,
            "accuracy": 0.5,
            "accuracy_baseline": 1.0,
            "auc": 0.0,
            "auc_precision_recall": 1.0,
            "label/mean": 1.0,
            "precision": 1.0,
            "prediction/mean": 0.5,
            "recall": 0.5,
        },
        abs=1e-6,
    )


def test_binary_predictions():
    predictions = BinaryClassHead().predictions(torch.tensor([[0.3], [-0.4]]))
    assert list(predictions) == [
        "logits",
        "logistic",
        "probabilities",
        "class_ids",
        "classes",
        "all_class_ids",
        "all_classes",
    ]
    assert predictions["logistic"].squeeze(1).tolist() == pytest.approx([1 / (1 + math.exp(-x)) for x in (0.3, -0.4)])
    assert predictions["probabilities"][0].tolist() == pytest.approx([1 - 0.5744425, 0.5744425], abs=1e-6)
    assert predictions["class_ids"].tolist() == [[1], [0]]
    assert predictions["classes"].tolist() == [["1"], ["0"]]
    assert predictions["all_class_ids"].tolist() == [[0, 1], [0, 1]]
    assert predictions["all_classes"].tolist() == [["0", "1"], ["0", "1"]]


@pytest.mark.parametrize(
    "labels",
    [WORDS, WORDS.squeeze(1), WORDS.astype(object), np.char.encode(WORDS), ["dog", "cat"], [["dog"], ["cat"]]],
)
def test_binary_vocabulary(labels):
    head = BinaryClassHead(label_vocabulary=["cat", "dog"])
    logits = torch.tensor([[2.0], [1.0]])
    losses = [math.log1p(math.exp(-2)), math.log1p(math.exp(1))]
    assert head.loss(labels, logits).item() == pytest.approx(sum(losses) / 2)
    predictions = head.predictions(torch.tensor([[-2.0], [1.0]]), ["classes", "all_classes"])
    assert {key: value.tolist() for key, value in predictions.items()} == {
        "classes": [["cat"], ["dog"]],
        "all_classes": [["cat", "dog"], ["cat", "dog"]],
    }


def test_binary_weights_and_thresholds():
    head = BinaryClassHead(weight_column="w", thresholds=[0.25, 0.9])
    logits = torch.tensor([[2.0], [-1.0], [0.5]])  # probabilities .88, .27, .62
    labels, weights = torch.tensor([1, 1, 0]), torch.tensor([1.0, 2.0, 3.0])
    losses = [math.log1p(math.exp(-2)), math.log1p(math.exp(1)), math.log1p(math.exp(0.5))]
    total = losses[0] + 2 * losses[1] + 3 * losses[2]
    assert head.loss(labels, logits, {"w": weights}).item() == pytest.approx(total / 3)
    metrics = head.metrics()
    head.update_metrics(metrics, {"w": weights}, logits, labels)
    found = results(metrics)
    assert found["average_loss"] == pytest.approx(total / 6)
    assert found["accuracy"] == pytest.approx(1 / 6)
    assert found["accuracy_baseline"] == 0.5
    assert found["label/mean"] == 0.5
    assert found["precision"] == pytest.approx(1 / 4)
    assert found["recall"] == pytest.approx(1 / 3)
    assert found["accuracy/positive_threshold_0.250000"] == pytest.approx(3 / 6)
    assert found["precision/positive_threshold_0.250000"] == pytest.approx(3 / 6)
    assert found["recall/positive_threshold_0.250000"] == 1
    assert found["accuracy/positive_threshold_0.900000"] == pytest.approx(3 / 6)
    assert found["recall/positive_threshold_0.900000"] == 0


def test_accuracy_baseline_is_over_all_batches():
    head = BinaryClassHead()
    metrics = head.metrics()
    assert metrics["accuracy_baseline"].result() == 0
    for labels in ([0.0, 0.0, 0.0], [1.0]):
        head.update_metrics(metrics, {}, torch.zeros(len(labels), 1), torch.tensor(labels))
    assert metrics["accuracy_baseline"].result() == 0.75


def test_accuracy_baseline_over_replicas():
    strategy = ts.MirroredStrategy(["cpu:0", "cpu:1"])
    head = BinaryClassHead()
    with strategy.scope():
        metrics = head.metrics()
    labels = strategy.experimental_distribute_dataset(torch.tensor([0.0, 0.0, 0.0, 1.0, 0.0]), batch_size=5)
    for batch in labels:
        strategy.run(lambda x: head.update_metrics(metrics, {}, torch.zeros(len(x), 1), x), args=(batch,))
    assert metrics["accuracy_baseline"].result() == pytest.approx(0.8)


def test_multi_class_loss_predictions_and_metrics():
    head = MultiClassHead(3, weight_column="w")
    logits, labels = torch.tensor([[10.0, 0.0, 0.0], [0.0, 10.0, 0.0]]), torch.tensor([[1], [1]])
    weights = {"w": torch.tensor([1.0, 3.0])}
    small = math.log1p(2 * math.exp(-10))
    total = 10 + small + 3 * small
    assert head.loss(labels, logits, weights).item() == pytest.approx(total / 2)
    assert head.loss(labels.to(torch.uint8).squeeze(1), logits, weights).item() == pytest.approx(total / 2)
    metrics = head.metrics()
    head.update_metrics(metrics, weights, logits, labels)
    assert results(metrics) == pytest.approx({"average_loss": total / 4, "accuracy": 0.75})
    predictions = head.predictions(logits)
    assert list(predictions) == ["logits", "probabilities", "class_ids", "classes", "all_class_ids", "all_classes"]
    assert predictions["class_ids"].tolist() == [[0], [1]]
    assert predictions["classes"].tolist() == [["0"], ["1"]]
    assert predictions["probabilities"].sum(-1).tolist() == pytest.approx([1, 1])


def test_multi_class_vocabulary_and_dimensions():
    head = MultiClassHead(3, label_vocabulary=["a", "b", "c"], loss_reduction="sum")
    logits = torch.zeros(2, 2, 3)
    assert head.loss([["a", "c"], ["b", "a"]], logits).item() == pytest.approx(4 * math.log(3))
    assert head.predictions(logits, ["classes"])["classes"].shape == (2, 2, 1)
    assert head.predictions(logits, ["all_classes"])["all_classes"].tolist() == [["a", "b", "c"]] * 2


@pytest.mark.parametrize(
    ("make", "labels", "message"),
    [
        (BinaryClassHead, [0.0, 1.1], r"Labels must be in \[0, n_classes - 1\], here \[0, 1\]. Received: 1.1"),
        (BinaryClassHead, [-1, 0], "Received: -1"),
        (BinaryClassHead, [0.0, math.nan], "Received: nan"),
        (BinaryClassHead, ["0", "1"], "labels are strings. Give label_vocabulary="),
        (lambda: BinaryClassHead(label_vocabulary=["a", "b"]), ["a", "c"], "label 'c' is not in label_vocabulary"),
        (lambda: BinaryClassHead(label_vocabulary=["a", "b"]), [0, 1], "labels must be strings"),
    ],
)
def test_binary_labels_that_are_none(make, labels, message):
    labels = labels if isinstance(labels[0], str) else torch.tensor(labels)
    with pytest.raises(ValueError, match=message) as error:
        make().loss(labels, torch.zeros(2, 1))
    assert isinstance(error.value, ts.errors.InvalidArgumentError) == ("Received" in message)  # as tf's assertion


@pytest.mark.parametrize(
    ("labels", "message"),
    [
        (torch.tensor([0, 3]), r"\[0, 2\]. Received: 3"),
        (torch.tensor([0, -1]), "Received: -1"),
        (torch.tensor([0.0, 1.0]), "Labels must be integers.*torch.float32"),
        (torch.eye(3)[:2], "One-hot labels are no class numbers"),
        (None, "There are no labels"),
    ],
)
def test_multi_class_labels_that_are_none(labels, message):
    with pytest.raises(ValueError, match=message):
        MultiClassHead(3).loss(labels, torch.zeros(2, 3))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: MultiClassHead(2), "n_classes must be an integer > 2: 2"),
        (lambda: MultiClassHead(None), "n_classes must be an integer > 2: None"),
        (lambda: MultiClassHead(3, label_vocabulary=["a", "b"]), "must have n_classes=3 labels. It has 2"),
        (lambda: MultiClassHead(3, label_vocabulary="abc"), "should be a list or a tuple"),
        (lambda: BinaryClassHead(label_vocabulary=["a", "a"]), "each label once"),
        (lambda: BinaryClassHead(thresholds=[0.5, 1.0]), r"numbers in \(0, 1\)"),
    ],
)
def test_what_is_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()
