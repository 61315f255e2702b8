"""What heads put into the specs of a ``model_fn``."""

import math

import pytest
import torch
from torch import nn

import torchstrategy as ts
from tests.estimator.canned.canned_uses import losses_of
from torchstrategy.estimator import BinaryClassHead, MultiClassHead, RegressionHead, RunConfig


def model_fn_of(head, regularization=None):
    def model_fn(features, labels, mode):
        module = nn.Linear(1, head.logits_dimension)
        nn.init.zeros_(module.weight)
        nn.init.zeros_(module.bias)
        optimizer = torch.optim.SGD(module.parameters(), lr=0.01)
        losses = None if regularization is None else lambda: [regularization * module.bias.square().sum()]
        return head.create_estimator_spec(features["x"], mode, Selecting(module), labels, optimizer, losses)

    return model_fn


class Selecting(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, features):
        return self.inner(features["x"])


def input_fn():
    x = torch.arange(8.0)[:, None]
    return ts.data.Dataset.from_tensor_slices(({"x": x, "w": x.squeeze(1) + 1}, 2 * x + 1)).batch(2)


def test_weights_reach_the_loss_and_the_metrics(tmp_path):
    estimator = ts.estimator.Estimator(model_fn_of(RegressionHead(weight_column="w")), tmp_path)
    losses = [(y * y, w) for y, w in zip(range(1, 17, 2), range(1, 9), strict=True)]
    found = estimator.evaluate(input_fn)
    total = sum(loss * w for loss, w in losses)
    assert found["average_loss"] == pytest.approx(total / 36)
    assert found["loss"] == pytest.approx(total / 8)
    assert found["label/mean"] == pytest.approx(sum(math.sqrt(loss) * w for loss, w in losses) / 36)


def test_predict_needs_no_weights(tmp_path):
    estimator = ts.estimator.Estimator(model_fn_of(RegressionHead(weight_column="w")), tmp_path)
    assert [p["predictions"].tolist() for p in estimator.predict(lambda: [{"x": torch.ones(2, 1)}])] == [[0], [0]]


@pytest.mark.parametrize(("reduction", "expected"), [("sum_over_batch_size", (5 + 37) / 2), ("sum", 10 + 74)])
def test_reductions_over_replicas(tmp_path, reduction, expected):
    """As in tf, a head's sum is that over all replicas, while means are averaged."""
    config = RunConfig(train_distribute=ts.MirroredStrategy(["cpu:0", "cpu:1"]))
    head = RegressionHead(loss_reduction=reduction)
    estimator = ts.estimator.Estimator(model_fn_of(head), tmp_path, config)
    assert losses_of(estimator, input_fn, 1) == [expected]
    gradient = sum(2 * (2 * x + 1) for x in range(4)) / (1 if reduction == "sum" else 4)
    assert estimator.get_variable_value("inner.bias").item() == pytest.approx(0.01 * gradient)


def test_regularization_is_computed_in_each_step(tmp_path):
    estimator = ts.estimator.Estimator(model_fn_of(RegressionHead(), 100.0), tmp_path)
    estimator.train(input_fn, steps=1)
    bias = estimator.get_variable_value("inner.bias").item()
    found = estimator.evaluate(input_fn)
    assert found["regularization_loss"] == pytest.approx(100 * bias * bias)
    assert found["loss"] == pytest.approx(found["average_loss"] + found["regularization_loss"])


def test_regularization_is_that_of_each_replica(tmp_path):
    config = RunConfig(train_distribute=ts.MirroredStrategy(["cpu:0", "cpu:1"]))
    alone, together = tmp_path / "alone", tmp_path / "together"
    ts.estimator.Estimator(model_fn_of(RegressionHead(), 3.0), alone).train(
        lambda: ({"x": torch.ones(2, 1)}, torch.ones(2)), steps=3
    )
    estimator = ts.estimator.Estimator(model_fn_of(RegressionHead(), 3.0), together, config)
    estimator.train(lambda: ({"x": torch.ones(2, 1)}, torch.ones(2)), steps=3)
    expected = ts.estimator.Estimator(model_fn_of(RegressionHead(), 3.0), alone).get_variable_value("inner.bias")
    assert estimator.get_variable_value("inner.bias") == pytest.approx(expected)


@pytest.mark.parametrize(
    ("head", "signatures"),
    [
        (RegressionHead(), {"serving_default", "regression", "predict"}),
        (BinaryClassHead(), {"serving_default", "classification", "regression", "predict"}),
        (MultiClassHead(3), {"serving_default", "classification", "predict"}),
    ],
)
def test_signatures(head, signatures):
    spec = head.create_estimator_spec({}, "infer", nn.Linear(1, head.logits_dimension))
    assert set(spec.export_outputs) == signatures
    logits = torch.zeros(2, head.logits_dimension)
    for output in spec.export_outputs.values():
        assert all(isinstance(value, torch.Tensor) for value in output.compute(logits).values())


def test_training_needs_an_optimizer():
    with pytest.raises(ValueError, match="optimizer cannot be None in TRAIN mode"):
        RegressionHead().create_estimator_spec({}, "train", nn.Linear(1, 1))
