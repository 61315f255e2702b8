"""The losses' values: those of the examples in tf's documentation, and what must hold beyond them."""

import math

import pytest
import torch
from torch.nn import functional as F

import torchstrategy as ts
from torchstrategy.errors import InvalidArgumentError
from torchstrategy.losses import Reduction

BINARY = [[0.0, 1.0], [0.0, 0.0]]
PROBABILITIES = [[0.6, 0.4], [0.4, 0.6]]
VALUES = [[1.0, 1.0], [1.0, 0.0]]
LOGITS = [[-18.6, 0.51], [2.94, -12.8]]
CLASSES = [[0.05, 0.95, 0.0], [0.1, 0.8, 0.1]]
ONE_HOT = [[0.0, 1.0, 0.0], [0.0, 0.0, 1.0]]

# class, arguments, labels, predictions, the two examples' losses
EXAMPLES = [
    ("BinaryCrossentropy", {}, BINARY, PROBABILITIES, [0.916, 0.714]),
    ("BinaryCrossentropy", {"from_logits": True}, BINARY, LOGITS, [0.2354, 1.4961]),
    ("CategoricalCrossentropy", {}, ONE_HOT, CLASSES, [0.0513, 2.303]),
    ("SparseCategoricalCrossentropy", {}, [1, 2], CLASSES, [0.0513, 2.303]),
    ("BinaryFocalCrossentropy", {"gamma": 5, "from_logits": True}, BINARY, LOGITS, [0.0017, 1.1561]),
    ("CategoricalFocalCrossentropy", {}, ONE_HOT, CLASSES, [3.2e-05, 0.4663]),
    ("CategoricalGeneralizedCrossEntropy", {}, [1, 2], CLASSES, [0.0506, 1.3675]),
    ("Dice", {}, BINARY, PROBABILITIES, [0.6, 1.0]),
    ("Tversky", {"alpha": 0.3, "beta": 0.9}, BINARY, PROBABILITIES, [0.6429, 1.0]),
    ("MeanSquaredError", {}, BINARY, VALUES, [0.5, 0.5]),
    ("MeanAbsoluteError", {}, BINARY, VALUES, [0.5, 0.5]),
    ("MeanAbsolutePercentageError", {}, [[2.0, 1.0], [2.0, 3.0]], [[1.0, 1.0], [1.0, 0.0]], [25.0, 75.0]),
    ("MeanSquaredLogarithmicError", {}, BINARY, VALUES, [0.240, 0.240]),
    ("Huber", {}, BINARY, PROBABILITIES, [0.18, 0.13]),
    ("Huber", {"delta": 0.5}, BINARY, PROBABILITIES, [0.175, 0.1275]),
    ("LogCosh", {}, BINARY, [[1.0, 1.0], [0.0, 0.0]], [0.217, 0.0]),
    ("KLDivergence", {}, BINARY, PROBABILITIES, [0.916, -3.08e-06]),
    ("Poisson", {}, BINARY, [[1.0, 1.0], [0.0, 0.0]], [0.999, 0.0]),
    ("Hinge", {}, BINARY, PROBABILITIES, [1.1, 1.5]),
    ("SquaredHinge", {}, BINARY, PROBABILITIES, [1.46, 2.26]),
    ("CategoricalHinge", {}, BINARY, PROBABILITIES, [1.2, 1.6]),
    ("CosineSimilarity", {}, [[0.0, 1.0], [1.0, 1.0]], [[1.0, 0.0], [1.0, 1.0]], [0.0, -0.999]),
]
#: What Keras 3.15 computes of these labels and predictions.
LABELS = [[1.0, 0.0, 0.0], [0.0, 1.0, 0.0], [0.0, 0.0, 1.0], [1.0, 0.0, 0.0], [0.0, 1.0, 0.0]]
IDS = [0, 1, 2, 0, 1]
SHARES = [[0.6, 0.3, 0.1], [0.5, 0.4, 0.1], [0.2, 0.2, 0.6], [0.1, 0.7, 0.2], [0.2, 0.8, 0.0]]
MASKS = [[[[1.0], [1.0]], [[0.0], [0.0]]], [[[1.0], [1.0]], [[0.0], [1.0]]]]
PREDICTED = [[[[0.0], [1.0]], [[0.0], [1.0]]], [[[0.4], [0.0]], [[0.0], [0.9]]]]
KERAS = [
    ("CategoricalFocalCrossentropy", (), LABELS, SHARES, [0.020433, 0.0824662, 0.020433, 0.4662735, 0.0022314]),
    (
        "CategoricalFocalCrossentropy",
        (0.5, 3.0, True, 0.1),
        LABELS,
        SHARES,
        [0.0906639, 0.1458821, 0.089719, 0.2741725, 0.0600679],
    ),
    (
        "CategoricalFocalCrossentropy",
        ([0.2, 0.3, 0.5], 1.0),
        LABELS,
        SHARES,
        [0.040866, 0.1649323, 0.1021651, 0.4144653, 0.0133886],
    ),
    ("BinaryFocalCrossentropy", (), LABELS, SHARES, [0.0382955, 0.1680684, 0.0331945, 0.821322, 0.0059505]),
    (
        "BinaryFocalCrossentropy",
        (True, 0.3, 1.5, False, 0.1),
        LABELS,
        SHARES,
        [0.0338008, 0.1014169, 0.0294966, 0.3414894, 0.0127955],
    ),
    ("CategoricalGeneralizedCrossEntropy", (), IDS, SHARES, [0.4508066, 0.7350889, 0.4508066, 1.3675444, 0.2111456]),
    ("CategoricalGeneralizedCrossEntropy", (0.7,), IDS, SHARES, [0.429474, 0.676353, 0.429474, 1.1435339, 0.206589]),
    ("Dice", ("none", "dice", (1, 2, 3)), MASKS, PREDICTED, [0.5, 0.3953489]),
    ("Dice", ("none", "dice", (1, 2)), MASKS, PREDICTED, [[0.5], [0.3953489]]),
    ("Dice", ("none", "dice", -1), LABELS, SHARES, [0.4, 0.6, 0.4, 0.9, 0.2]),
    ("Tversky", (0.5, 0.5, "none", "tversky", (1, 2, 3)), MASKS, PREDICTED, [0.5, 0.3953489]),
    ("Tversky", (0.3, 0.9, "none", "tversky", (1, 2, 3)), MASKS, PREDICTED, [0.5454545, 0.281768]),
    ("Tversky", (0.8, 0.1, "none", "tversky", (1, 2)), MASKS, PREDICTED, [[0.4736843], [0.5112782]]),
]


@pytest.mark.parametrize(("name", "arguments", "y_true", "y_pred", "expected"), KERAS)
def test_keras_values(name, arguments, y_true, y_pred, expected):
    loss = getattr(ts.losses, name)(*arguments)
    loss.reduction = Reduction.NONE
    torch.testing.assert_close(loss(y_true, y_pred), torch.tensor(expected), rtol=1e-5, atol=1e-6)


def test_overlaps_are_of_each_example():
    for name in ("dice", "tversky"):
        loss = ts.losses.get(name)
        assert loss(MASKS, PREDICTED).tolist() == pytest.approx([0.5, 0.3953489])  # all axes but the examples'
        for axis in (0, (0, 1), -4, 4, ()):
            with pytest.raises(ValueError, match="must be axes of y_pred other than the first one"):
                loss(torch.tensor(MASKS), torch.tensor(PREDICTED), axis=axis)
        with pytest.raises(ValueError, match=r"where \[batch, ...\] is expected"):
            loss(torch.ones(3), torch.ones(3))
        assert loss(torch.ones(0, 2), torch.ones(0, 2)).shape == (0,)


def test_weights_of_classes_belong_to_their_axis():
    labels, shares = torch.tensor(LABELS), torch.tensor(SHARES)
    loss = ts.losses.CategoricalFocalCrossentropy([0.2, 0.3, 0.5], axis=1, reduction="none")
    image = loss(labels.unsqueeze(-1), shares.unsqueeze(-1))
    assert torch.equal(image.squeeze(-1), ts.losses.categorical_focal_crossentropy(labels, shares, [0.2, 0.3, 0.5]))
    with pytest.raises(InvalidArgumentError, match="alpha must be a number, or have one for each of 3 classes"):
        ts.losses.categorical_focal_crossentropy(labels, shares, [0.2, 0.8])


def test_generalized_crossentropy_of_an_impossible_label():
    shares = torch.tensor([[0.0, 1.0]], requires_grad=True)
    loss = ts.losses.CategoricalGeneralizedCrossEntropy()(torch.tensor([[0]]), shares)
    loss.backward()
    assert loss.item() == pytest.approx(2.0)
    assert shares.grad.isfinite().all()
    with pytest.raises(ValueError, match=r"q must be between 0 and 1\. Received: 1"):
        ts.losses.CategoricalGeneralizedCrossEntropy(1)
    with pytest.raises(InvalidArgumentError, match="one more axis for the classes"):
        ts.losses.categorical_generalized_cross_entropy([[0, 1]], shares, 0.5)


OF_IDS = ("SparseCategoricalCrossentropy", "CategoricalGeneralizedCrossEntropy")
CLASS_NAMES = sorted({name for name, *_ in EXAMPLES})


@pytest.mark.parametrize("to_tensor", [torch.tensor, list], ids=["tensors", "lists"])
@pytest.mark.parametrize(("name", "arguments", "y_true", "y_pred", "expected"), EXAMPLES)
def test_reductions(name, arguments, y_true, y_pred, expected, to_tensor):
    def loss(reduction, sample_weight=None):
        made = getattr(ts.losses, name)(**arguments, reduction=reduction)
        return made(to_tensor(y_true), to_tensor(y_pred), sample_weight)

    assert loss("none").tolist() == pytest.approx(expected, abs=2e-3)
    each = loss(Reduction.NONE)
    for reduction in ("auto", Reduction.SUM_OVER_BATCH_SIZE):
        assert loss(reduction).item() == pytest.approx(each.mean().item(), abs=1e-7)
        weighted = (0.7 * each[0] + 0.3 * each[1]) / 2  # weights don't change the divisor
        assert loss(reduction, [0.7, 0.3]).item() == pytest.approx(weighted.item(), abs=1e-7)
    assert loss("sum").item() == pytest.approx(each.sum().item(), abs=1e-7)
    assert loss("none", torch.tensor([[0.7], [0.3]])).tolist() == pytest.approx(
        (each * torch.tensor([0.7, 0.3])).tolist()
    )


def test_all_classes_have_an_example():
    classes = {n for n in ts.losses.__all__ if isinstance(getattr(ts.losses, n), type)}
    assert classes - {"Loss", "Reduction"} == set(CLASS_NAMES)


@pytest.mark.parametrize("name", CLASS_NAMES)
def test_an_empty_share_has_a_zero_gradient(name):
    weight = torch.tensor([[0.3, 0.6]], requires_grad=True)
    y_true = torch.zeros(0, dtype=torch.long) if name in OF_IDS else torch.zeros(0, 2)
    for reduction in Reduction:
        y_pred = weight.expand(0, 2).sigmoid()
        loss = getattr(ts.losses, name)(reduction=reduction)(y_true, y_pred)
        assert loss.shape == ((0,) if reduction is Reduction.NONE else ())
        assert loss.sum().item() == 0.0
        (grad,) = torch.autograd.grad(loss.sum(), weight)
        assert grad.tolist() == [[0.0, 0.0]]


@pytest.mark.parametrize("name", CLASS_NAMES)
def test_gradients_are_those_of_finite_differences(name):
    torch.manual_seed(0)
    y_pred = (torch.rand(4, 3, dtype=torch.float64) * 0.8 + 0.1).requires_grad_()
    if name in OF_IDS:
        y_true = torch.tensor([0, 2, 1, 1])
    elif name == "CategoricalCrossentropy":
        y_true = F.one_hot(torch.tensor([0, 2, 1, 1]), 3)
    else:
        y_true = torch.randint(2, (4, 3)) if "Hinge" in name else torch.rand(4, 3) + 0.05
    loss = getattr(ts.losses, name)(reduction="none")
    assert torch.autograd.gradcheck(lambda p: loss(y_true, p), y_pred)


@pytest.mark.parametrize(
    ("name", "reference"),
    [
        ("SparseCategoricalCrossentropy", lambda t, p: F.cross_entropy(p, t[:, 0].long(), reduction="none")),
        ("CategoricalCrossentropy", lambda t, p: F.cross_entropy(p, t, reduction="none")),
        (
            "BinaryCrossentropy",
            lambda t, p: F.binary_cross_entropy_with_logits(p, t, reduction="none").mean(1),
        ),
    ],
)
def test_large_logits(name, reference):
    y_true = torch.tensor([[1.0, 0.0], [0.0, 1.0]])
    y_pred = torch.tensor([[-1e4, 1e4], [3e4, -3e4]], requires_grad=True)
    labels = y_true[:, :1] if name.startswith("Sparse") else y_true
    loss = getattr(ts.losses, name)(from_logits=True, reduction="none")(labels, y_pred)
    torch.testing.assert_close(loss, reference(labels, y_pred))
    loss.sum().backward()
    assert y_pred.grad.isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize(
    "name", ["BinaryCrossentropy", "CategoricalCrossentropy", "BinaryFocalCrossentropy", "KLDivergence"]
)
def test_certain_probabilities(name, dtype):
    y_true = torch.tensor([[1.0, 0.0], [0.0, 1.0]], dtype=dtype)
    y_pred = torch.tensor([[0.0, 1.0], [0.0, 1.0]], dtype=dtype, requires_grad=True)
    wrong, right = getattr(ts.losses, name)(reduction="none")(y_true, y_pred)
    assert wrong.item() == pytest.approx(-math.log(1e-7), rel=0.01)
    assert abs(right.item()) < 1e-5
    wrong.backward()
    assert y_pred.grad.isfinite().all()


def test_halves_do_not_overflow():
    y_pred = torch.full((4, 1), 300.0, dtype=torch.float16)
    assert ts.losses.mean_squared_error(torch.zeros(4, 1), y_pred).tolist() == [90000.0] * 4
    assert ts.losses.MeanSquaredError(reduction="sum")(torch.zeros(4, 1), y_pred).item() == 360000.0


def test_integer_labels_of_any_kind():
    scores = torch.tensor([[0.1, 0.9], [0.8, 0.2]])
    expected = [-math.log(0.9), -math.log(0.2)]
    for labels in (torch.tensor([1, 1], dtype=torch.uint8), torch.tensor([[1], [1]]), torch.tensor([1.0, 1.0]), [1, 1]):
        losses = ts.losses.sparse_categorical_crossentropy(labels, scores)
        assert losses.tolist() == pytest.approx(expected, rel=1e-5)


def test_one_example_without_a_batch():
    assert ts.losses.sparse_categorical_crossentropy(1, [0.25, 0.75]).item() == pytest.approx(-math.log(0.75))


def test_label_smoothing():
    y_true, logits = torch.tensor([[0.0, 1.0, 0.0]]), torch.tensor([[0.2, -1.0, 3.0]])
    expected = F.cross_entropy(logits, torch.tensor([1]), label_smoothing=0.3, reduction="none")
    loss = ts.losses.CategoricalCrossentropy(from_logits=True, label_smoothing=0.3, reduction="none")
    torch.testing.assert_close(loss(y_true, logits), expected)
    loss = ts.losses.BinaryCrossentropy(from_logits=True, label_smoothing=0.3, reduction="none")
    smooth = torch.tensor([[0.15, 0.85, 0.15]])
    torch.testing.assert_close(
        loss(y_true, logits), F.binary_cross_entropy_with_logits(logits, smooth, reduction="none").mean(1)
    )


def test_probabilities_are_normalised():
    for y_pred in ([[1.0, 3.0]], [[0.25, 0.75]]):
        assert ts.losses.categorical_crossentropy([[0.0, 1.0]], y_pred).item() == pytest.approx(-math.log(0.75))


def test_focal_loss_balances_classes():
    plain = ts.losses.binary_focal_crossentropy(BINARY, PROBABILITIES, axis=0)
    balanced = ts.losses.binary_focal_crossentropy(BINARY, PROBABILITIES, apply_class_balancing=True, alpha=0.1, axis=0)
    assert balanced[0].item() == pytest.approx(0.9 * plain[0].item())
    zero_gamma = ts.losses.binary_focal_crossentropy(BINARY, PROBABILITIES, gamma=0)
    torch.testing.assert_close(zero_gamma, ts.losses.binary_crossentropy(BINARY, PROBABILITIES))


def test_ignored_class_does_not_count():
    logits = torch.randn(2, 3, 4, generator=torch.Generator().manual_seed(0))
    labels = torch.tensor([[0, 1, 255], [255, 255, 2]])
    plain = ts.losses.SparseCategoricalCrossentropy(from_logits=True, reduction="none")
    expected = plain(labels.clamp(max=3), logits) * (labels != 255)
    loss = ts.losses.SparseCategoricalCrossentropy(from_logits=True, ignore_class=255, reduction="none")
    torch.testing.assert_close(loss(labels, logits), expected)
    mean = ts.losses.SparseCategoricalCrossentropy(from_logits=True, ignore_class=255)
    torch.testing.assert_close(mean(labels, logits), expected.sum() / 3)
    assert mean(torch.full((2, 3), 255), logits).item() == 0.0
    with pytest.raises(IndexError, match="out of bounds"):  # torch ignores -100 by default
        plain(torch.full((2, 3), -100), logits)


def test_classes_on_another_axis():
    logits = torch.randn(2, 5, 3, 4, generator=torch.Generator().manual_seed(0))
    labels = torch.randint(5, (2, 3, 4), generator=torch.Generator().manual_seed(0))
    expected = F.cross_entropy(logits, labels, reduction="none")
    sparse = ts.losses.SparseCategoricalCrossentropy(from_logits=True, reduction="none", axis=1)
    torch.testing.assert_close(sparse(labels, logits), expected)
    torch.testing.assert_close(sparse(labels.unsqueeze(1), logits), expected)
    dense = ts.losses.CategoricalCrossentropy(from_logits=True, reduction="none", axis=1)
    torch.testing.assert_close(dense(F.one_hot(labels, 5).movedim(-1, 1), logits), expected)


@pytest.mark.parametrize("name", ["MeanSquaredError", "Huber", "BinaryCrossentropy", "Hinge"])
def test_a_missing_last_axis_is_added_and_nothing_else_broadcasts(name):
    loss = getattr(ts.losses, name)(reduction="none")
    values = torch.tensor([0.2, 0.4, 0.9])
    labels = torch.tensor([0.0, 1.0, 1.0])
    expected = loss(labels.unsqueeze(-1), values.unsqueeze(-1))
    assert expected.shape == (3,)
    torch.testing.assert_close(loss(labels, values.unsqueeze(-1)), expected)
    torch.testing.assert_close(loss(labels.unsqueeze(-1), values), expected)
    for wrong in (torch.zeros(3, 2), torch.zeros(1, 3), torch.zeros(())):
        with pytest.raises(InvalidArgumentError, match="must have the same shape"):
            loss(labels, wrong)


def test_messages():
    with pytest.raises(InvalidArgumentError, match="Labels come first"):
        ts.losses.sparse_categorical_crossentropy(torch.zeros(2, 3), torch.zeros(2, dtype=torch.long))
    with pytest.raises(InvalidArgumentError, match="Integer labels are for sparse_categorical_crossentropy"):
        ts.losses.categorical_crossentropy(torch.zeros(2, dtype=torch.long), torch.zeros(2, 3))
    needs_grad = torch.full((2, 1), 0.5, requires_grad=True)
    for function in (ts.losses.binary_crossentropy, ts.losses.hinge, ts.losses.kl_divergence, ts.losses.poisson):
        with pytest.raises(ValueError, match="torch's order"):
            function(needs_grad, torch.zeros(2, 1))
    with pytest.raises(InvalidArgumentError, match="y_true must be a tensor or numbers"):
        ts.losses.mean_squared_error("text", torch.zeros(2, 1))
    with pytest.raises(InvalidArgumentError, match="sample_weight"):
        ts.losses.MeanSquaredError()(torch.zeros(2, 1), torch.zeros(2, 1), torch.ones(3))


def test_lists_of_tensors_keep_the_graph():
    x = torch.tensor([2.0], requires_grad=True)
    ts.losses.mean_squared_error([[0.0], [0.0]], [x, 2 * x]).sum().backward()
    assert x.grad.item() == 20.0
