"""``ts.losses.get``."""

import pytest
import torch

import torchstrategy as ts
from torchstrategy import losses

#: Keras 3.15's names, except for losses that the library does not have.
KERAS = [
    "BCE", "BinaryCrossentropy", "BinaryFocalCrossentropy", "CategoricalCrossentropy", "CategoricalHinge",
    "CosineSimilarity", "Hinge", "Huber", "KLD", "KLDivergence", "LogCosh", "MAE", "MAPE", "MSE", "MSLE",
    "MeanAbsoluteError", "MeanAbsolutePercentageError", "MeanSquaredError", "MeanSquaredLogarithmicError", "Poisson",
    "SparseCategoricalCrossentropy", "SquaredHinge", "bce", "binary_crossentropy", "binary_focal_crossentropy",
    "categorical_crossentropy", "categorical_hinge", "cosine_similarity", "hinge", "huber", "kl_divergence", "kld",
    "log_cosh", "mae", "mape", "mean_absolute_error", "mean_absolute_percentage_error", "mean_squared_error",
    "mean_squared_logarithmic_error", "mse", "msle", "poisson", "sparse_categorical_crossentropy", "squared_hinge",
]  # fmt: skip


@pytest.mark.parametrize("name", KERAS)
def test_keras_names(name):
    found = ts.losses.get(name)
    if name[0].isupper() and not name.isupper():
        assert type(found).__name__ == name
    else:
        assert callable(found)
        assert not isinstance(found, (type, losses.Loss))
    y, y_pred = torch.tensor([[0.25, 0.75]]), torch.tensor([[0.5, 0.5]])
    y = torch.tensor([1]) if "sparse" in name.lower() else y
    assert torch.isfinite(found(y, y_pred)).all()


def test_short_names():
    assert ts.losses.get("mse") is losses.mean_squared_error
    assert ts.losses.get("KLD") is losses.kl_divergence


def test_others_are_returned_as_they_are():
    loss = losses.Huber()
    assert ts.losses.get(loss) is loss
    assert ts.losses.get(None) is None


def test_what_is_refused():
    with pytest.raises(ValueError, match=r"loss='sparse_crossentropy' is not known. Did you mean"):
        ts.losses.get("sparse_crossentropy")
    with pytest.raises(TypeError, match=r"loss= must be a name or callable. Received: 3 of type int"):
        ts.losses.get(3)
