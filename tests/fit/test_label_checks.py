"""What the first batch tells of labels and predictions that a loss is not made for."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import torchstrategy as ts
from torchstrategy import losses
from torchstrategy.fit.compiled_loss import CompiledLoss

LOGITS = torch.tensor([[-1.0, 2.0, 0.5], [0.3, 0.1, 3.0]])
PROBABILITIES = LOGITS.softmax(1)
IDS = torch.tensor([0, 2])
ONE_HOT = torch.eye(3)[IDS]
BINARY = torch.tensor([[0.0], [1.0]])


def check(loss, y, y_pred):
    CompiledLoss(loss).check_first(y, y_pred)


@pytest.mark.parametrize(
    ("loss", "y", "y_pred"),
    [
        ("sparse_categorical_crossentropy", IDS, PROBABILITIES),
        ("sparse_categorical_crossentropy", IDS, PROBABILITIES.bfloat16()),
        ("sparse_categorical_crossentropy", IDS, PROBABILITIES * torch.nan),  # whose cause is another one
        ("sparse_categorical_crossentropy", IDS.int()[:, None], PROBABILITIES),
        (losses.SparseCategoricalCrossentropy(from_logits=True), IDS, LOGITS),
        (losses.SparseCategoricalCrossentropy(from_logits=True, ignore_class=-1), IDS - 1, LOGITS),
        ("categorical_crossentropy", ONE_HOT, PROBABILITIES),
        ("crossentropy", IDS, PROBABILITIES),
        ("binary_crossentropy", BINARY.int(), PROBABILITIES[:, :1]),
        ("binary_crossentropy", BINARY, torch.tensor([[0.0], [1.0]])),
        (losses.BinaryCrossentropy(from_logits=True), BINARY, LOGITS[:, :1]),
        ("kld", PROBABILITIES, PROBABILITIES),
        ("mse", torch.zeros(2, 3, dtype=torch.int64), LOGITS),
        (nn.CrossEntropyLoss(), IDS, LOGITS),
        (nn.CrossEntropyLoss(), IDS.to(torch.uint8), LOGITS),
        (nn.CrossEntropyLoss(ignore_index=7), torch.tensor([7, 1]), LOGITS),
        (nn.CrossEntropyLoss(), ONE_HOT, LOGITS),
        (nn.NLLLoss(), IDS, LOGITS.log_softmax(1)),
        (nn.BCELoss(), BINARY.long(), PROBABILITIES[:, :1]),
        (nn.BCEWithLogitsLoss(), BINARY.bool(), LOGITS[:, :1]),
        (nn.KLDivLoss(reduction="batchmean"), PROBABILITIES, LOGITS.log_softmax(1)),
        (lambda y, y_pred: y_pred.sum(-1), IDS, LOGITS),
    ],
)
def test_what_passes(loss, y, y_pred):
    check(loss, y, y_pred)
    assert CompiledLoss(loss)(y, y_pred).ndim == 0
    empty = CompiledLoss(loss)
    empty.check_first(y[:0], y_pred[:0])  # a replica's share
    assert empty(y[:0], y_pred[:0]).item() == 0


SOFTMAX = (
    r"write loss=ts\.losses\.SparseCategoricalCrossentropy\(from_logits=True\), or end the model with torch\.nn\.Soft"
)


@pytest.mark.parametrize(
    ("loss", "y", "y_pred", "message"),
    [
        # logits for probabilities
        ("sparse_categorical_crossentropy", IDS, LOGITS, SOFTMAX),
        ("sparse_categorical_crossentropy", IDS, LOGITS.relu(), "among the predictions .* is 2"),
        ("sparse_categorical_crossentropy", IDS, LOGITS.relu() / 4, "add up to 1 over the classes, but .* 0.625"),
        ("crossentropy", IDS, LOGITS, SOFTMAX),
        ("categorical_crossentropy", ONE_HOT, LOGITS, r"CategoricalCrossentropy\(from_logits=True\)"),
        ("bce", BINARY, LOGITS[:, :1], r"BinaryCrossentropy\(from_logits=True\), or end .* torch.nn.Sigmoid\(\)"),
        ("binary_focal_crossentropy", BINARY, LOGITS[:, :1], "from_logits=True"),
        ("kl_divergence", PROBABILITIES, LOGITS, "End the model with torch.nn.Softmax"),
        (nn.BCELoss(), BINARY, LOGITS[:, :1], "Use torch.nn.BCEWithLogitsLoss"),
        (F.nll_loss, IDS, LOGITS, "LogSoftmax.*or use torch.nn.CrossEntropyLoss"),
        (nn.KLDivLoss(reduction="batchmean"), PROBABILITIES, LOGITS, "takes logarithms of probabilities"),
        # labels
        ("sparse_categorical_crossentropy", IDS.float(), PROBABILITIES, r"y of dtype torch.float32.*y\.long\(\)"),
        ("sparse_categorical_crossentropy", ONE_HOT, PROBABILITIES, "One-hot labels are for CategoricalCross"),
        ("sparse_categorical_crossentropy", IDS + 1, PROBABILITIES, "class ids from 0 to 2.*Received: 3 in y"),
        ("sparse_categorical_crossentropy", -IDS, PROBABILITIES, "Received: -2 in y.*ignore_class"),
        (nn.CrossEntropyLoss(), IDS.float(), LOGITS, r"CrossEntropyLoss takes class ids of an integer dtype \(int64\)"),
        (nn.CrossEntropyLoss(), IDS + 1, LOGITS, "class ids from 0 to 2"),
        (F.cross_entropy, ONE_HOT.long(), LOGITS, r"y\.argmax\(1\)"),
        (nn.CrossEntropyLoss(), IDS[:, None], LOGITS, r"y\.squeeze\(-1\)"),
        (nn.CrossEntropyLoss(), IDS, LOGITS[:, 0], r"predictions of shape \[batch, classes"),
        (nn.CrossEntropyLoss(), torch.zeros(2, 4).long(), torch.zeros(2, 4, 3), "classes must be the second axis"),
        (nn.MultiMarginLoss(), IDS + 1, LOGITS, "class ids from 0 to 2"),
        ("bce", 2 * BINARY - 1, PROBABILITIES[:, :1], r"labels from 0 to 1. Received: -1 in y.*\(y \+ 1\) / 2"),
        (nn.BCEWithLogitsLoss(), BINARY * 255, LOGITS[:, :1], "takes labels from 0 to 1. Received: 255"),
    ],
)
def test_what_does_not(loss, y, y_pred, message):
    compiled = CompiledLoss(loss)
    with pytest.raises(ts.errors.InvalidArgumentError, match=message):
        compiled.check_first(y, y_pred)


def test_a_later_label_that_is_no_class_is_named():
    compiled = CompiledLoss(nn.CrossEntropyLoss())
    compiled(IDS, LOGITS)
    with pytest.raises(ts.errors.InvalidArgumentError, match="class ids from 0 to 2"):
        compiled(IDS + 1, LOGITS)


def test_an_error_of_the_loss_itself_is_kept():
    def loss(y, y_pred):
        raise RuntimeError("out of luck")

    with pytest.raises(RuntimeError, match="out of luck"):
        CompiledLoss(loss)(IDS, LOGITS)


class Odd(nn.Module):
    """Its mean is not the mean of its parts."""

    def __init__(self):
        super().__init__()
        self.reduction = "mean"

    def forward(self, y_pred, y):
        each = (y_pred - y).square().sum(-1)
        return each if self.reduction == "none" else each.mean().sqrt()


def test_a_mean_that_can_not_be_taken_apart_is_refused():
    with pytest.raises(ts.errors.InvalidArgumentError, match=r"loss=Odd can.t be taken apart"):
        check(Odd(), LOGITS * 0, LOGITS)
    check(Odd(), LOGITS[:0], LOGITS[:0])


def test_a_subclass_of_a_torch_loss_is_compared_too():
    class Doubled(nn.CrossEntropyLoss):
        def forward(self, y_pred, y):
            return 2 * super().forward(y_pred, y)

    check(Doubled(weight=torch.tensor([1.0, 2.0, 3.0])), IDS, LOGITS)
    assert CompiledLoss(Doubled())(IDS, LOGITS).item() == pytest.approx(2 * F.cross_entropy(LOGITS, IDS).item())


def test_on_replicas_one_of_which_has_no_examples():
    strategy = ts.MirroredStrategy(["cpu:0", "cpu:1", "cpu:2"])
    with strategy.scope():
        compiled = CompiledLoss("sparse_categorical_crossentropy")
    (batch,) = strategy.experimental_distribute_dataset([(IDS, PROBABILITIES)])
    strategy.run(compiled.check_first, args=tuple(batch))
    (batch,) = strategy.experimental_distribute_dataset([(IDS + 1, PROBABILITIES)])
    with pytest.raises(ts.errors.InvalidArgumentError, match="class ids"):
        strategy.run(compiled.check_first, args=tuple(batch))
