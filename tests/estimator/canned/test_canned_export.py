"""Canned estimators as exported models, for batches of any size."""

import pytest
import torch

import torchstrategy as ts
from torchstrategy.estimator import (
    BaselineRegressor,
    DNNClassifier,
    DNNLinearCombinedClassifier,
    LinearClassifier,
    LinearRegressor,
)
from torchstrategy.feature_column import (
    bucketized_column,
    categorical_column_with_identity,
    embedding_column,
    indicator_column,
    numeric_column,
)

X = numeric_column("x")
STEPS = bucketized_column(X, [1.0])
PETS = categorical_column_with_identity("pets", 3)


@pytest.mark.slow
@pytest.mark.parametrize(
    "make",
    [
        lambda path: LinearRegressor([X, STEPS], path),
        lambda path: LinearClassifier([X, STEPS, PETS], path, weight_column="w"),
        lambda path: DNNClassifier(
            [4],
            [X, embedding_column(PETS, 2), indicator_column(PETS)],
            path,
            n_classes=3,
            batch_norm=True,
            dropout=0.2,
        ),
        lambda path: DNNLinearCombinedClassifier(
            path, linear_feature_columns=[PETS], dnn_feature_columns=[X], dnn_hidden_units=[3]
        ),
        lambda path: BaselineRegressor(path, weight_column="w"),
    ],
)
def test_predictions_are_the_estimators(tmp_path, make):
    estimator = make(tmp_path / "model")
    features = {"x": torch.tensor([0.0, 1.0, 2.0]), "pets": torch.tensor([0, 1, 2])}
    estimator.train(lambda: ({**features, "w": torch.ones(3)}, torch.tensor([0, 1, 1])), steps=3)
    receiver = ts.estimator.export.build_raw_serving_input_receiver_fn(
        {"x": torch.zeros(2), "pets": torch.zeros(2, dtype=torch.int64)}
    )
    path = estimator.export_saved_model(tmp_path / "export", receiver)
    loaded = ts.estimator.export.load(path)
    for size in (1, 3):
        batch = {name: value[:size] for name, value in features.items()}
        expected = list(estimator.predict(lambda batch=batch: [batch]))
        found = loaded.signatures["predict"](batch)
        assert {"predictions", "probabilities"} & set(found)
        for name, value in found.items():
            wanted = torch.stack([torch.as_tensor(prediction[name]) for prediction in expected])
            torch.testing.assert_close(value, wanted)


@pytest.mark.slow
def test_signatures_of_a_classifier(tmp_path):
    estimator = LinearClassifier([X], tmp_path / "model", label_vocabulary=["cat", "dog"])
    estimator.train(lambda: ({"x": torch.ones(2)}, ["cat", "cat"]), steps=1)
    receiver = ts.estimator.export.build_raw_serving_input_receiver_fn({"x": torch.zeros(2)})
    loaded = ts.estimator.export.load(estimator.export_saved_model(tmp_path / "export", receiver))
    assert set(loaded.signatures) == {"serving_default", "classification", "regression", "predict"}
    found = loaded.signatures["serving_default"]({"x": torch.ones(3)})
    assert found["scores"].shape == (3, 2)
    assert (found["scores"][:, 0] > 0.5).all()
    assert loaded.signatures["serving_default"].constants == {"classes": ["cat", "dog"]}
    regression = loaded.signatures["regression"]({"x": torch.ones(3)})["outputs"]
    torch.testing.assert_close(regression, found["scores"][:, 1:])
