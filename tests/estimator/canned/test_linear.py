"""Linear estimators against what tf.estimator 2.15 was measured to do, and against formulas."""

import functools
import math

import numpy as np
import pytest
import torch

import torchstrategy as ts
from tests.estimator.canned.canned_uses import columns, data, losses_of, mirrored, variables
from tests.fit.measured_ftrl import LOSSES as FTRL_LOSSES
from torchstrategy.estimator import LinearClassifier, LinearEstimator, LinearRegressor, RunConfig
from torchstrategy.feature_column import (
    bucketized_column,
    categorical_column_with_identity,
    categorical_column_with_vocabulary_list,
    crossed_column,
    numeric_column,
)

#: Losses of y = 2 x + 1 with SGD.
LINE = [
    21.0,
    9.74000358581543,
    4.517602920532227,
    2.0954246520996094,
    0.9719898700714111,
    0.4509148597717285,
    0.20921823382377625,
    0.09710085391998291,
    0.04508653283119202,
    0.020951079204678535,
]


@pytest.mark.parametrize("make_config", [RunConfig, mirrored])
def test_the_default_optimizer(tmp_path, make_config):
    estimator = LinearRegressor(columns(), tmp_path, config=make_config())
    input_fn = data([[1.0]], [1.0], 10)
    assert losses_of(estimator, input_fn, 10) == pytest.approx(FTRL_LOSSES, abs=1e-6)
    assert estimator.evaluate(input_fn, steps=10) == pytest.approx(
        {
            "average_loss": 0.00041394942672923207,
            "label/mean": 1.0,
            "loss": 0.00041394942672923207,
            "prediction/mean": 0.9796541333198547,
            "global_step": 10,
        },
        abs=1e-6,
    )
    values = variables(estimator)
    assert {name: value.shape for name, value in values.items()} == {
        "global_step": (),
        "linear/linear_model/bias_weights": (1,),
        "linear/linear_model/feats/weights": (1, 1),
    }
    assert values["linear/linear_model/feats/weights"].item() == pytest.approx(0.48982712626457214, abs=1e-6)
    assert estimator.get_variable_value(
        "optimizer/linear/linear_model/feats/weights/accumulator"
    ).item() == pytest.approx(6.759093761444092, abs=1e-5)


def test_a_line(tmp_path):
    estimator = LinearRegressor(columns(), tmp_path, optimizer="SGD")
    input_fn = data([[0.0], [1.0], [2.0], [3.0]], [1.0, 3.0, 5.0, 7.0], 4)
    assert losses_of(estimator, input_fn, 10) == pytest.approx(LINE, abs=2e-6)
    predictions = list(estimator.predict(lambda: [{"feats": torch.tensor([[1.0], [2.0]])}]))
    assert [p["predictions"].item() for p in predictions] == pytest.approx([2.9284420, 4.8918457], abs=1e-6)
    assert predictions[0]["predictions"].dtype == np.float32


def test_three_classes(tmp_path):
    estimator = LinearClassifier(columns(), tmp_path, n_classes=3, optimizer="SGD")
    input_fn = data([[-1.0], [0.0], [2.0]], [0, 1, 2], 3)
    expected = [1.0986123085021973, 1.0007374286651611, 0.9236496090888977]
    assert losses_of(estimator, input_fn, 3) == pytest.approx(expected, abs=1e-6)
    found = estimator.evaluate(input_fn, steps=1)
    assert found == pytest.approx(
        {
            "accuracy": 0.6666666865348816,
            "average_loss": 0.8626489639282227,
            "loss": 0.8626489639282227,
            "global_step": 3,
        },
        abs=1e-6,
    )
    first = next(estimator.predict(lambda: [{"feats": torch.tensor([[1.0]])}]))
    assert first["classes"].tolist() == ["2"]
    assert first["all_classes"].tolist() == ["0", "1", "2"]
    assert first["probabilities"].tolist() == pytest.approx([0.2575949, 0.3081381, 0.4342670], abs=1e-6)


def test_replicas_train_as_one_on_both_batches(tmp_path):
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(40, 3)).astype(np.float32), rng.normal(size=40).astype(np.float32)
    batches = lambda size: lambda: ts.data.Dataset.from_tensor_slices(({"feats": x}, y)).batch(size)  # noqa: E731
    column = [numeric_column("feats", shape=3)]
    together = LinearRegressor(column, tmp_path / "two", config=mirrored())
    alone = LinearRegressor(column, tmp_path / "one")
    assert losses_of(together, batches(4), 5) == pytest.approx(losses_of(alone, batches(8), 5), rel=1e-5)
    name = "linear/linear_model/feats/weights"
    np.testing.assert_allclose(together.get_variable_value(name), alone.get_variable_value(name), atol=1e-6)


def test_a_sum_is_that_of_all_replicas(tmp_path):
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(40, 3)).astype(np.float32), rng.normal(size=40).astype(np.float32)
    batches = lambda size: lambda: ts.data.Dataset.from_tensor_slices(({"feats": x}, y)).batch(size)  # noqa: E731
    column = [numeric_column("feats", shape=3)]
    optimizer = functools.partial(torch.optim.SGD, lr=0.01)
    together = LinearRegressor(column, tmp_path / "two", optimizer=optimizer, config=mirrored(), loss_reduction="sum")
    alone = LinearRegressor(column, tmp_path / "one", optimizer=optimizer, loss_reduction="sum")
    assert losses_of(together, batches(4), 5) == pytest.approx(losses_of(alone, batches(8), 5), rel=1e-5)


def wide_input():
    features = {
        "age": torch.tensor([20.0, 40.0, 60.0, 30.0]),
        "city": np.array(["Ulm", "Bonn", "Ulm", "Rom"]),
        "pets": [[0, 1], [2], [], [1]],
    }
    return [(features, ["no", "yes", "yes", "no"])] * 40


def wide_columns():
    age = bucketized_column(numeric_column("age"), [25, 50])
    city = categorical_column_with_vocabulary_list("city", ["Ulm", "Bonn"])
    pets = categorical_column_with_identity("pets", 3)
    return [age, city, pets, crossed_column([age, "city"], 10)]


@pytest.mark.parametrize("make_config", [RunConfig, mirrored])
def test_strings_and_categories(tmp_path, make_config):
    estimator = LinearClassifier(wide_columns(), tmp_path, label_vocabulary=["no", "yes"], config=make_config())
    losses = losses_of(estimator, wide_input, 20)
    assert losses[0] == pytest.approx(math.log(2))
    assert losses[-1] < 0.25
    shapes = {name.removeprefix("linear/linear_model/"): value.shape for name, value in variables(estimator).items()}
    assert shapes == {
        "age_bucketized/weights": (3, 1),
        "age_bucketized_X_city/weights": (10, 1),
        "bias_weights": (1,),
        "city/weights": (2, 1),
        "global_step": (),
        "pets/weights": (3, 1),
    }
    classes = [p["classes"].item() for p in estimator.predict(lambda: [wide_input()[0][0]])]
    assert classes == ["no", "yes", "yes", "no"]
    assert estimator.evaluate(lambda: wide_input()[:2])["accuracy"] == 1


def test_sparse_combiners(tmp_path):
    pets = [categorical_column_with_identity("pets", 3)]
    batch = ({"pets": [[0, 1], [2]]}, torch.tensor([1.0, 1.0]))
    sgd = functools.partial(torch.optim.SGD, lr=1.0)
    weights = {}
    for combiner in ("sum", "mean", "sqrtn"):
        estimator = LinearRegressor(pets, tmp_path / combiner, optimizer=sgd, sparse_combiner=combiner)
        estimator.train(lambda: [batch], steps=1)
        weights[combiner] = estimator.get_variable_value("linear/linear_model/pets/weights").ravel().tolist()
    assert weights["sum"] == [1, 1, 1]
    assert weights["mean"] == [0.5, 0.5, 1]
    assert weights["sqrtn"] == pytest.approx([math.sqrt(0.5), math.sqrt(0.5), 1])


def test_weights_of_examples(tmp_path):
    input_fn = lambda: [({"feats": torch.tensor([1.0, 1.0]), "w": torch.tensor([3.0, 0.0])}, torch.tensor([1.0, 9.0]))]  # noqa: E731
    estimator = LinearRegressor(columns(), tmp_path, weight_column="w", optimizer="SGD")
    assert losses_of(estimator, input_fn, 1) == [1.5]
    assert estimator.evaluate(input_fn)["label/mean"] == 1
    assert len(list(estimator.predict(lambda: [{"feats": torch.ones(2)}]))) == 2


@pytest.mark.parametrize(
    ("num_columns", "optimizer", "lr"), [(4, None, 0.2), (100, None, 0.1), (100, "Ftrl", 0.2), (1, "Adam", 0.2)]
)
def test_learning_rates(num_columns, optimizer, lr):
    names = [numeric_column(f"x{i}") for i in range(num_columns)]
    estimator = LinearRegressor(names, optimizer=optimizer)
    features = {f"x{i}": torch.ones(1) for i in range(num_columns)}
    spec = estimator.model_fn(features, torch.ones(1), "train", estimator.config)
    assert spec.train_op.defaults["lr"] == lr


def test_a_function_makes_optimizer_and_schedule(tmp_path):
    def make(parameters):
        optimizer = torch.optim.SGD(parameters, lr=0.1)
        return [optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.0)]

    estimator = LinearRegressor(columns(), tmp_path, optimizer=make)
    estimator.train(data([[1.0]], [1.0], 1), steps=3)
    assert estimator.get_variable_value("linear/linear_model/bias_weights").item() == pytest.approx(0.2)


def test_any_head(tmp_path):
    estimator = LinearEstimator(ts.estimator.PoissonRegressionHead(), columns(), tmp_path, "Adam")
    input_fn = data([[1.0]], [3.0], 2)
    estimator.train(input_fn, steps=60)
    assert next(estimator.predict(input_fn))["predictions"].item() == pytest.approx(3, abs=0.1)


def test_resuming(tmp_path):
    input_fn = data([[1.0]], [1.0], 2)
    whole = losses_of(LinearRegressor(columns(), tmp_path / "whole"), input_fn, 6)
    first = losses_of(LinearRegressor(columns(), tmp_path / "parts"), input_fn, 3)
    second = losses_of(LinearRegressor(columns(), tmp_path / "parts"), input_fn, 3)
    assert first + second == whole


def test_warm_start(tmp_path):
    input_fn = data([[1.0]], [1.0], 2)
    first = LinearRegressor(columns(), tmp_path / "first").train(input_fn, steps=10)
    second = LinearRegressor(columns(), tmp_path / "second", warm_start_from=str(tmp_path / "first"))
    assert losses_of(second, input_fn, 1) == pytest.approx([first.evaluate(input_fn, steps=1)["loss"]])


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: LinearRegressor(None), "feature_columns must not be empty"),
        (lambda: LinearRegressor([]), "feature_columns must not be empty"),
        (lambda: LinearRegressor(["feats"]), "must be a FeatureColumn"),
        (lambda: LinearRegressor(columns() + columns()), "Duplicate feature column name"),
        (lambda: LinearRegressor(columns(), optimizer="sgd"), "optimizer='sgd' is not known. Known names: Adagrad"),
        (
            lambda: LinearRegressor(columns(), optimizer=torch.optim.SGD([torch.zeros(1)])),
            "optimizer= is a SGD of other parameters",
        ),
        (lambda: LinearRegressor(columns(), optimizer=0.1), "optimizer= must make an optimizer. Received: 0.1"),
        (lambda: LinearRegressor(columns(), label_dimension=0), "label_dimension must be at least 1"),
        (lambda: LinearRegressor(columns(), sparse_combiner="max"), "combiner"),
        (lambda: LinearClassifier(columns(), n_classes=1), "n_classes must be an integer > 2: 1"),
        (lambda: LinearClassifier(columns(), loss_reduction="none"), "Invalid loss_reduction"),
    ],
)
def test_what_is_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        (({"other": torch.ones(2)}, torch.ones(2)), "Feature feats is not in features dictionary"),
        ((torch.ones(2, 1), torch.ones(2)), "features should be a dictionary"),
        (({"feats": torch.ones(2)}, torch.ones(3)), "Labels must have the shape"),
        ({"feats": torch.ones(2)}, "There are no labels"),
    ],
)
def test_data_that_does_not_fit(tmp_path, batch, message):
    with pytest.raises(ValueError, match=message):
        LinearRegressor(columns(), tmp_path).train(lambda: [batch], steps=1)


def test_functions_that_make_no_optimizer():
    estimator = LinearRegressor(columns(), optimizer=lambda parameters: list(parameters))
    with pytest.raises(ValueError, match=r"must return a torch\.optim\.Optimizer, or a list with one"):
        estimator.train(data([[1.0]], [1.0], 1), steps=1)


def test_heads_only():
    with pytest.raises(TypeError, match="head must be a head"):
        LinearEstimator("regression", columns())
