"""``ts.metrics.get``."""

import pytest
import torch

import torchstrategy as ts
from torchstrategy import metrics

#: Keras 3.15's names of metrics that can be made without arguments and that the library has.
KERAS = [
    "AUC", "Accuracy", "BCE", "BinaryAccuracy", "BinaryCrossentropy", "CategoricalAccuracy",
    "CategoricalCrossentropy", "CategoricalHinge", "CosineSimilarity", "FalseNegatives", "FalsePositives", "Hinge",
    "KLDivergence", "LogCoshError", "MAE", "MAPE", "MSE", "MSLE", "Mean", "MeanAbsoluteError",
    "MeanAbsolutePercentageError", "MeanSquaredError", "MeanSquaredLogarithmicError", "Poisson", "Precision",
    "Recall", "RootMeanSquaredError", "SparseCategoricalAccuracy", "SparseCategoricalCrossentropy",
    "SparseTopKCategoricalAccuracy", "SquaredHinge", "Sum", "TopKCategoricalAccuracy", "TrueNegatives",
    "TruePositives", "accuracy", "auc", "bce", "binary_accuracy", "binary_crossentropy", "categorical_accuracy",
    "categorical_crossentropy", "categorical_hinge", "cosine_similarity", "false_negatives", "false_positives",
    "hinge", "kl_divergence", "log_cosh_error", "mae", "mape", "mean", "mean_absolute_error",
    "mean_absolute_percentage_error", "mean_squared_error", "mean_squared_logarithmic_error", "mse", "msle",
    "poisson", "precision", "recall", "root_mean_squared_error", "sparse_categorical_accuracy",
    "sparse_categorical_crossentropy", "sparse_top_k_categorical_accuracy", "squared_hinge", "sum",
    "top_k_categorical_accuracy", "true_negatives", "true_positives",
    "BinaryIoU", "ConcordanceCorrelation", "F1Score", "FBetaScore", "PearsonCorrelation", "R2Score", "binary_io_u",
    "concordance_correlation", "f1_score", "f_beta_score", "pearson_correlation", "r2_score",
]  # fmt: skip


@pytest.mark.parametrize("name", KERAS)
def test_keras_names(name):
    metric = ts.metrics.get(name)
    assert isinstance(metric, metrics.Metric)
    assert ts.metrics.get(name) is not metric


#: What Keras 3.15 computes.
Y, Y_PRED = torch.tensor([[0.0, 1.0], [1.0, 1.0]]), torch.tensor([[0.25, 0.75], [0.5, 0.125]])
VALUES = {
    "binary_crossentropy": 1.11164129,
    "categorical_crossentropy": 1.44635665,
    "sparse_categorical_crossentropy": 1.55365205,
    "categorical_hinge": 0.40625000,
    "cosine_similarity": 0.88029057,
    "hinge": 0.70312500,
    "squared_hinge": 0.58398438,
    "kl_divergence": 2.15136170,
    "log_cosh_error": 0.18105425,
    "mean_squared_logarithmic_error": 0.16362979,
    "poisson": 1.43505549,
}


@pytest.mark.parametrize("name", VALUES)
def test_means_of_losses(name):
    metric = ts.metrics.get(name)
    assert metric.name == ("logcosh" if name == "log_cosh_error" else name)
    metric.update_state(torch.tensor([0, 1]) if name.startswith("sparse") else Y, Y_PRED, sample_weight=[1.0, 3.0])
    assert metric.result().item() == pytest.approx(VALUES[name], abs=1e-6)


def test_predictions_of_one_dimension_are_examples():
    metric = ts.metrics.get("binary_crossentropy")
    metric.update_state(Y[:, 0], Y_PRED[:, 0])
    assert metric.result().item() == pytest.approx(-(torch.tensor([0.75, 0.5]).log().mean()).item())


def test_others_are_returned_as_they_are():
    metric = metrics.AUC()
    assert ts.metrics.get(metric) is metric
    assert ts.metrics.get(None) is None


def test_what_is_refused():
    with pytest.raises(ValueError, match=r"metrics='one_hot_io_u' is not known.*torchmetrics"):
        ts.metrics.get("one_hot_io_u")
    with pytest.raises(TypeError, match=r"A metric must be a name or callable. Received: 3 of type int"):
        ts.metrics.get(3)
