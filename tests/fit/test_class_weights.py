"""Weights of examples by their classes."""

import re

import numpy as np
import pytest
import torch

import torchstrategy as ts
from torchstrategy.fit.batch_parts import class_weight_applier
from torchstrategy.fit.inputs import make_batches

WEIGHTS = {0: 2.0, 1: 0.5, 3: 4}


@pytest.mark.parametrize(
    ("labels", "expected"),
    [
        (torch.tensor([0, 1, 2, 3, 4, -1]), [2, 0.5, 1, 4, 1, 1]),
        (torch.tensor([[0], [3]]), [2, 4]),
        (torch.tensor([[0.0], [1.0]]), [2, 0.5]),
        (torch.tensor([0.99999, 3.00001]), [0.5, 4]),
        (torch.tensor([3, 0], dtype=torch.uint8), [4, 2]),
        (torch.tensor([True, False]), [0.5, 2]),
        (torch.eye(5), [2, 0.5, 1, 4, 1]),
        (torch.tensor([[0.1, 0.2, 0.3, 0.4]]), [4]),
        (torch.empty(0, dtype=torch.int64), []),
        (torch.empty(0, 3), []),
    ],
)
def test_labels(labels, expected):
    x = torch.ones(len(labels))
    weighed = class_weight_applier(WEIGHTS)((x, labels))
    assert weighed[0] is x
    assert weighed[1] is labels
    assert weighed[2].dtype is torch.get_default_dtype()
    assert weighed[2].tolist() == expected


def test_ids_of_any_size_and_numpys_numbers():
    apply = class_weight_applier({np.int64(10**12): np.float32(3), -5: 2})
    assert apply([None, torch.tensor([10**12, -5, 0])])[2].tolist() == [3, 2, 1]


def test_in_replicas():
    strategy = ts.MirroredStrategy(["cpu:0", "cpu:1"])
    apply = class_weight_applier(WEIGHTS)
    (batch,) = make_batches(strategy, torch.ones(3, 1), torch.tensor([0, 1, 3])).dataset
    weights = strategy.run(lambda data: apply(data)[2], args=(batch,))
    assert [value.tolist() for value in weights.values] == [[2, 0.5], [4]]


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ((1, torch.ones(2), torch.ones(2)), "and sample weights can't be given at the same time. Multiply"),
        ((1,), "The batch has no labels"),
        ((1, {"a": torch.ones(2)}), "The batch has several outputs, in a dict. Pass sample weights"),
        ((1, [torch.ones(2)] * 2), "several outputs, in a list"),
        ((1, torch.ones(2, 3, 4)), "needs labels of shape [batch], [batch, 1] or, one-hot, [batch, classes]"),
        ((1, torch.ones(2, 3, 4)), "shape [2, 3, 4] and dtype torch.float32"),
    ],
)
def test_wrong_batches(data, message):
    with pytest.raises(ValueError, match=re.escape(message)) as error:
        class_weight_applier(WEIGHTS)(data)
    assert str(error.value).startswith("fit(class_weight=...)")


@pytest.mark.parametrize(
    ("class_weight", "error", "message"),
    [
        ([1.0, 2.0], TypeError, "must be a dict of weights by class ids"),
        (np.ones(2), TypeError, "dict(enumerate(weights))"),
        ({}, ValueError, "is empty"),
        ({"cat": 1.0}, TypeError, "The keys of train_on_batch(class_weight=...) must be class ids"),
        ({0.5: 1.0}, TypeError, "Received: 0.5"),
        ({0: "1"}, TypeError, "must be numbers. Received: '1' for class 0"),
        ({0: -1.0}, ValueError, "finite and not negative"),
        ({0: float("nan")}, ValueError, "finite and not negative"),
    ],
)
def test_wrong_weights(class_weight, error, message):
    with pytest.raises(error, match=re.escape(message)):
        class_weight_applier(class_weight, "train_on_batch")
