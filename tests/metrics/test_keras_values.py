"""Metrics of Keras against what Keras 3.15 computes from the same examples, without weights and with them."""

import pytest
import torch

import torchstrategy as ts
from torchstrategy.errors import InvalidArgumentError

#: Labels, predictions, weights. Weights of IoU are whole numbers: Keras cuts off what is behind the point.
BINARY = ([0, 1, 1, 0, 1, 0], [0.1, 0.4, 0.8, 0.6, 0.9, 0.3], [1.0, 2.0, 0.5, 1.0, 0.25, 3.0])
BINARY_WHOLE = (*BINARY[:2], [1.0, 2.0, 3.0, 1.0, 4.0, 3.0])
ONE_HOT = (
    [[1, 0, 0], [0, 1, 0], [0, 0, 1], [1, 0, 0], [0, 1, 0]],
    [[0.6, 0.3, 0.1], [0.5, 0.4, 0.1], [0.2, 0.2, 0.6], [0.1, 0.7, 0.2], [0.2, 0.8, 0.0]],
    [1.0, 0.5, 2.0, 0.25, 3.0],
)
ONE_HOT_WHOLE = (*ONE_HOT[:2], [1.0, 2.0, 2.0, 3.0, 4.0])
SPARSE = ([0, 1, 2, 0, 1], *ONE_HOT[1:])
NUMBERS = (
    [[1.0, 2.0, 4.0], [3.0, 1.0, 0.5], [2.0, 5.0, 1.5], [0.5, 0.25, 3.0]],
    [[1.5, 1.0, 3.0], [2.0, 1.5, 1.0], [2.5, 4.0, 2.0], [1.0, 0.5, 2.0]],
    [1.0, 2.0, 0.5, 3.0],
)

MEASURED = [
    ("PrecisionAtRecall(0.5)", BINARY, [1.0, 0.7333333]),
    ("PrecisionAtRecall(0.9, 5)", BINARY, [0.6, 0.4074074]),
    ("RecallAtPrecision(0.6)", BINARY, [1.0, 1.0]),
    ("RecallAtPrecision(0.8, num_thresholds=7)", BINARY, [0.6666667, 0.2727273]),
    ("SensitivityAtSpecificity(0.6)", BINARY, [1.0, 1.0]),
    ("SensitivityAtSpecificity(0.5, num_thresholds=1)", BINARY, [0.6666667, 0.2727273]),
    ("SpecificityAtSensitivity(0.6)", BINARY, [1.0, 0.8]),
    ("PrecisionAtRecall(0.5, class_id=1)", ONE_HOT, [1.0, 1.0]),
    ("SpecificityAtSensitivity(0.5, 20, 0)", ONE_HOT, [1.0, 1.0]),
    ("BinaryIoU()", BINARY_WHOLE, [0.5, 0.6357143]),
    ("BinaryIoU([1], 0.6)", BINARY_WHOLE, [0.4999999, 0.6999999]),
    ("BinaryIoU([0], threshold=0.3)", BINARY_WHOLE, [0.3333333, 0.2]),
    ("OneHotIoU(3, [0, 2])", ONE_HOT_WHOLE, [0.6666666, 0.5833333]),
    ("OneHotIoU(3, [1])", ONE_HOT_WHOLE, [0.3333333, 0.4444444]),
    ("OneHotMeanIoU(3)", ONE_HOT_WHOLE, [0.5555555, 0.5370371]),
    ("OneHotMeanIoU(3, ignore_class=1)", ONE_HOT_WHOLE, [0.5, 0.4166667]),
    ("F1Score()", ONE_HOT, [[0.4999999, 0.4999999, 0.9999998], [0.7272726, 0.8888888, 1.0]]),
    ("F1Score('macro', 0.5)", ONE_HOT, [0.7222221, 0.9259259]),
    ("F1Score('micro')", ONE_HOT, [0.6, 0.8888888]),
    ("F1Score('weighted')", ONE_HOT, [0.5999999, 0.8918817]),
    ("FBetaScore(None, 2.0)", ONE_HOT, [[0.5, 0.5, 0.9999999], [0.7692307, 0.8695652, 1.0]]),
    ("FBetaScore('weighted', 0.5, 0.35)", ONE_HOT, [0.6857142, 0.9145006]),
    ("FBetaScore('micro', 2.0, 0.2)", ONE_HOT, [0.7407408, 0.9219858]),
    ("R2Score()", NUMBERS, [0.6677836, 0.6605617]),
    ("R2Score(None)", NUMBERS, [[0.5254238, 0.8227545, 0.6551724], [0.6026895, 0.7936508, 0.5853449]]),
    ("R2Score('variance_weighted_average')", NUMBERS, [0.7263843, 0.6645025]),
    ("R2Score(num_regressors=2)", NUMBERS, [0.5939577, 0.585131]),
    ("PearsonCorrelation()", NUMBERS, [0.9365256, 0.943274]),
    ("ConcordanceCorrelation()", NUMBERS, [0.7354439, 0.7223877]),
    ("PearsonCorrelation(axis=1)", NUMBERS, [0.9365256, 0.943274]),
    ("CosineSimilarity()", NUMBERS, [0.95488, 0.9467244]),
    ("LogCoshError()", NUMBERS, [0.2433768, 0.2270347]),
    ("MeanSquaredLogarithmicError()", NUMBERS, [0.0640259, 0.0685143]),
    ("MeanSquaredError()", NUMBERS, [0.546875, 0.5096154]),
    ("RootMeanSquaredError()", NUMBERS, [0.73951, 0.7138735]),
    ("MeanAbsoluteError()", NUMBERS, [0.6875, 0.6538461]),
    ("MeanAbsolutePercentageError()", NUMBERS, [51.6666641, 63.1196556]),
    ("Poisson()", NUMBERS, [0.2504375, 0.4543549]),
    ("KLDivergence()", ONE_HOT, [0.8927315, 0.4793606]),
    ("Hinge()", ONE_HOT, [1.0, 0.8962963]),
    ("SquaredHinge()", ONE_HOT, [1.1693335, 0.9765433]),
    ("CategoricalHinge()", ONE_HOT, [0.8799999, 0.6]),
    ("BinaryCrossentropy()", ONE_HOT, [0.5213841, 0.2970752]),
    ("BinaryCrossentropy(from_logits=True, label_smoothing=0.2)", ONE_HOT, [0.7139735, 0.6742275]),
    ("CategoricalCrossentropy()", ONE_HOT, [0.8927342, 0.4793628]),
    ("CategoricalCrossentropy(from_logits=True, label_smoothing=0.1)", ONE_HOT, [0.9786242, 0.8464043]),
    ("SparseCategoricalCrossentropy()", SPARSE, [0.8927342, 0.4793628]),
    ("SparseCategoricalCrossentropy(from_logits=True)", SPARSE, [0.9619576, 0.8141822]),
]


def updated(metric, examples, *, weighted=True, parts=(slice(0, 2), slice(2, None))):
    for part in parts:
        metric.update_state(*(torch.tensor(x[part]) for x in examples[: 3 if weighted else 2]))
    return metric


@pytest.mark.parametrize(("call", "examples", "values"), MEASURED, ids=[call for call, *_ in MEASURED])
def test_values(call, examples, values):
    for weighted, value in zip((False, True), values, strict=True):
        metric = eval(f"ts.metrics.{call}", {"ts": ts})
        result = updated(metric, examples, weighted=weighted).result()
        torch.testing.assert_close(result, torch.tensor(value), rtol=1e-5, atol=1e-6)


def test_ignored_labels_do_not_count():
    metric = updated(ts.metrics.SparseCategoricalCrossentropy(ignore_class=0), SPARSE)
    assert metric.result().item() == pytest.approx(0.3907686, rel=1e-5)  # Keras', with weights
    metric = updated(ts.metrics.SparseCategoricalCrossentropy(ignore_class=0), SPARSE, weighted=False)
    assert metric.result().item() == pytest.approx(-torch.tensor([0.4, 0.6, 0.8]).log().mean().item(), rel=1e-5)


def test_labels_that_are_all_equal_have_a_score():
    for label in (1.0, 0.1, 1e6 / 3):
        metric = ts.metrics.R2Score(dtype="float64")
        metric.update_state(torch.full((3, 1), label, dtype=torch.float64), torch.zeros(3, 1))
        assert metric.result() == 0.0  # Keras' for 1.0; for 0.1 only rounding errors are left to divide by
        metric.reset_state()
        metric.update_state([[label]] * 3, [[label]] * 3)
        assert metric.result().isnan()


def test_too_few_examples_for_an_adjusted_score():
    metric = ts.metrics.R2Score(num_regressors=2)
    metric.update_state([1.0, 2.0, 4.0], [1.0, 2.5, 3.0])
    plain = ts.metrics.R2Score()
    plain.update_state([[1.0], [2.0], [4.0]], [[1.0], [2.5], [3.0]])
    with pytest.warns(UserWarning, match=r"num_regressors=2\) has seen 3 numbers, too few"):
        assert metric.result() == plain.result() > 0


def test_a_prediction_that_is_no_number():
    nan = float("nan")
    f1 = ts.metrics.F1Score()
    f1.update_state([[1, 0], [0, 1]], [[nan, 0.5], [0.1, 0.9]])
    assert f1.result().tolist() == [0.0, 1.0]
    with pytest.raises(InvalidArgumentError, match="Received nan"):
        ts.metrics.BinaryIoU().update_state([0, 1], [0.1, nan])
    correlation = ts.metrics.PearsonCorrelation()
    correlation.update_state([[1.0, 1.0]], [[1.0, 2.0]])  # all labels are equal
    assert correlation.result().isnan()


@pytest.mark.parametrize("name", ["CosineSimilarity", "PearsonCorrelation", "ConcordanceCorrelation"])
@pytest.mark.parametrize(("axis", "shape"), [(0, (3, 2)), (-2, (3, 2)), (2, (3, 2))])
def test_the_examples_axis_is_refused(name, axis, shape):
    metric = getattr(ts.metrics, name)(axis=axis)
    with pytest.raises(InvalidArgumentError, match=f"axis={axis} must be of y_pred and not its first one"):
        metric.update_state(torch.ones(shape), torch.ones(shape))


def test_correlations_need_several_numbers_of_each_example():
    with pytest.raises(InvalidArgumentError, match=r"where \[batch, ..., n\] is expected"):
        ts.metrics.PearsonCorrelation().update_state([1.0, 2.0], [1.0, 3.0])
    metric = ts.metrics.ConcordanceCorrelation(axis=(1, 2))
    metric.update_state(torch.tensor([[[1.0, 2.0], [0.0, 4.0]]]), torch.tensor([[[1.0, 2.0], [0.0, 4.0]]]))
    assert metric.result().item() == pytest.approx(1.0, abs=1e-6)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: ts.metrics.F1Score("mean"), "average must be None, 'micro', 'macro' or 'weighted'. Received: 'mean'"),
        (lambda: ts.metrics.F1Score(threshold=0), r"threshold must be None or a number in \(0, 1\]. Received: 0"),
        (lambda: ts.metrics.FBetaScore(beta=0), "beta must be a number greater than 0. Received: 0"),
        (lambda: ts.metrics.R2Score("mean"), "class_aggregation must be None, 'uniform_average'"),
        (lambda: ts.metrics.R2Score(num_regressors=-1), "num_regressors must be at least 0. Received: -1"),
        (lambda: ts.metrics.PrecisionAtRecall(1.5), r"recall must be in \[0, 1\]. Received: 1.5"),
        (lambda: ts.metrics.SpecificityAtSensitivity(-1), r"sensitivity must be in \[0, 1\]. Received: -1"),
        (lambda: ts.metrics.RecallAtPrecision(0.5, 0), "num_thresholds must be at least 1. Received: 0"),
        (lambda: ts.metrics.BinaryIoU([2]), r"target_class_ids must be in \[0, 2\)"),
    ],
)
def test_arguments_that_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize(("make", "expected"), [(ts.metrics.F1Score, "classes"), (ts.metrics.R2Score, "outputs")])
def test_shapes_that_are_refused(make, expected):
    metric = make()
    with pytest.raises(InvalidArgumentError, match=rf"\[batch, {expected}\]"):
        metric.update_state(torch.ones(2, 3, 4), torch.ones(2, 3, 4))
    metric.update_state(torch.ones(2, 3), torch.ones(2, 3))
    with pytest.raises(InvalidArgumentError, match=r"\[batch, 3\]"):
        metric.update_state(torch.ones(2, 2), torch.ones(2, 2))
