"""Dense, combined and baseline estimators."""

import functools
import math

import numpy as np
import pytest
import torch

import torchstrategy as ts
from tests.estimator.canned.canned_uses import columns, data, losses_of, mirrored, read_summaries, variables
from torchstrategy.estimator import (
    BaselineClassifier,
    BaselineEstimator,
    BaselineRegressor,
    DNNClassifier,
    DNNEstimator,
    DNNLinearCombinedClassifier,
    DNNLinearCombinedRegressor,
    DNNRegressor,
    RunConfig,
)
from torchstrategy.feature_column import (
    categorical_column_with_vocabulary_list,
    embedding_column,
    indicator_column,
    numeric_column,
)

POINTS = data([[0.0], [1.0], [2.0]], [0, 1, 1], 3)


@pytest.mark.parametrize("make_config", [RunConfig, mirrored])
def test_names_and_keys_are_those_of_tf(tmp_path, make_config):
    estimator = DNNClassifier([3], columns(), tmp_path, optimizer="SGD", config=make_config())
    assert len(losses_of(estimator, POINTS, 10)) == 10
    assert {name: value.shape for name, value in variables(estimator).items()} == {
        "dnn/hiddenlayer_0/bias": (3,),
        "dnn/hiddenlayer_0/kernel": (1, 3),
        "dnn/logits/bias": (1,),
        "dnn/logits/kernel": (3, 1),
        "global_step": (),
    }
    assert sorted(estimator.evaluate(POINTS, steps=1)) == [
        "accuracy",
        "accuracy_baseline",
        "auc",
        "auc_precision_recall",
        "average_loss",
        "global_step",
        "label/mean",
        "loss",
        "precision",
        "prediction/mean",
        "recall",
    ]
    assert sorted(next(estimator.predict(POINTS))) == [
        "all_class_ids",
        "all_classes",
        "class_ids",
        "classes",
        "logistic",
        "logits",
        "probabilities",
    ]


def network(estimator, x, activation=np.tanh):
    """Compute the logits of one hidden layer from the variables."""
    v = {name.removeprefix("dnn/"): value for name, value in variables(estimator).items()}
    net = activation(x @ v["hiddenlayer_0/kernel"] + v["hiddenlayer_0/bias"])
    if "hiddenlayer_0/batchnorm_0/gamma" in v:
        mean, variance, gamma, beta = (
            v[f"hiddenlayer_0/batchnorm_0/{name}"] for name in ("moving_mean", "moving_variance", "gamma", "beta")
        )
        net = (net - mean) / np.sqrt(variance + 1e-3) * gamma + beta
    return net @ v["logits/kernel"] + v["logits/bias"]


@pytest.mark.parametrize("batch_norm", [False, True])
@pytest.mark.parametrize("dropout", [None, 0.3])
def test_predictions_follow_from_the_variables(tmp_path, batch_norm, dropout):
    x = np.random.default_rng(0).normal(size=(8, 2)).astype(np.float32)
    batch = ({"x": x}, x.sum(1))
    estimator = DNNRegressor(
        [5],
        [numeric_column("x", shape=2)],
        tmp_path,
        optimizer=functools.partial(torch.optim.SGD, lr=0.05),
        activation_fn="tanh",
        dropout=dropout,
        batch_norm=batch_norm,
    )
    estimator.train(lambda: [batch] * 20)
    found = [p["predictions"] for p in estimator.predict(lambda: [{"x": x}])]
    np.testing.assert_allclose(found, network(estimator, x), atol=1e-5)


def test_a_network_in_double_precision(tmp_path):
    before = torch.get_default_dtype()
    try:
        torch.set_default_dtype(torch.float64)
        estimator = DNNClassifier([2], columns(), tmp_path, optimizer="SGD")
        losses_of(estimator, POINTS, 1)
    finally:
        torch.set_default_dtype(before)
    assert variables(estimator)["dnn/logits/kernel"].dtype == np.float64


def test_dropout_is_for_training_only(tmp_path):
    estimator = DNNRegressor(
        [200], columns(), tmp_path, dropout=0.5, optimizer=functools.partial(torch.optim.SGD, lr=0)
    )
    ones = data([[1.0]], [0.0], 1)
    losses = losses_of(estimator, ones, 10)
    assert len(set(losses)) == 10
    plain = float(network(estimator, np.ones((1, 1)), lambda x: np.maximum(x, 0)).item())
    # The initial values are random, and 200 terms may nearly cancel: relative to the loss float32 may be far off.
    assert estimator.evaluate(ones, steps=3)["loss"] ** 0.5 == pytest.approx(abs(plain), rel=1e-5, abs=1e-5)


def test_moving_averages_are_keras(tmp_path):
    estimator = DNNRegressor(
        [2], columns(), tmp_path, batch_norm=True, optimizer=functools.partial(torch.optim.SGD, lr=0.0)
    )
    estimator.train(data([[1.0], [3.0]], [0.0, 1.0], 2), steps=2)
    v = variables(estimator)
    hidden = np.maximum(np.array([[1.0], [3.0]]) @ v["dnn/hiddenlayer_0/kernel"], 0)
    share = 1 - 0.999**2
    mean, variance = "dnn/hiddenlayer_0/batchnorm_0/moving_mean", "dnn/hiddenlayer_0/batchnorm_0/moving_variance"
    np.testing.assert_allclose(v[mean], share * hidden.mean(0), rtol=1e-4, atol=1e-7)
    np.testing.assert_allclose(v[variance], 1 - share + share * hidden.var(0), rtol=1e-5)


def test_moving_averages_are_those_of_all_replicas(tmp_path):
    sgd = functools.partial(torch.optim.SGD, lr=0.0)
    estimator = DNNRegressor([2], columns(), tmp_path, batch_norm=True, optimizer=sgd, config=mirrored())
    estimator.train(data([[1.0], [1.0], [3.0], [3.0]], [0.0, 1.0, 0.0, 1.0], 2), steps=1)
    v = variables(estimator)
    hidden = np.maximum(2.0 * v["dnn/hiddenlayer_0/kernel"][0], 0)  # the mean over both replicas' batches
    np.testing.assert_allclose(v["dnn/hiddenlayer_0/batchnorm_0/moving_mean"], 0.001 * hidden, rtol=1e-3, atol=1e-8)


@pytest.mark.slow
def test_embeddings(tmp_path):
    city = categorical_column_with_vocabulary_list("city", ["Ulm", "Bonn"])
    feature_columns = [embedding_column(city, dimension=4), indicator_column(city), numeric_column("x")]
    estimator = DNNClassifier([8], feature_columns, tmp_path, label_vocabulary=["a", "b"], optimizer="Adam")
    batch = ({"city": ["Ulm", "Bonn", "Rom"], "x": torch.tensor([1.0, 2.0, 3.0])}, ["a", "b", "a"])
    before = losses_of(estimator, lambda: [batch] * 2, 1)
    estimator.train(lambda: [batch] * 500, steps=500)
    assert estimator.evaluate(lambda: [batch])["loss"] < before[0]
    shapes = {name: value.shape for name, value in variables(estimator).items()}
    assert shapes["dnn/input_from_feature_columns/input_layer/city_embedding/embedding_weights"] == (2, 4)
    assert shapes["dnn/hiddenlayer_0/kernel"] == (7, 8)


@pytest.mark.parametrize(("name", "lr"), [("Adagrad", 0.001), ("SGD", 0.01), ("RMSProp", 0.001), ("Ftrl", 0.001)])
def test_learning_rates_of_names_are_keras(name, lr):
    estimator = DNNRegressor([2], columns(), optimizer=name)
    spec = estimator.model_fn({"feats": torch.ones(1)}, torch.ones(1), "train", estimator.config)
    assert spec.train_op.defaults["lr"] == lr


def test_the_same_seed_makes_the_same_network(tmp_path):
    values = []
    for index in range(2):
        config = RunConfig(tf_random_seed=3)
        estimator = DNNRegressor([4], columns(), tmp_path / str(index), config=config, dropout=0.5)
        values.append(losses_of(estimator, POINTS, 3))
    assert values[0] == values[1]


def combined(tmp_path, **kwargs):
    return DNNLinearCombinedRegressor(
        tmp_path, linear_feature_columns=columns(), dnn_feature_columns=columns(), dnn_hidden_units=[4], **kwargs
    )


@pytest.mark.parametrize("make_config", [RunConfig, mirrored])
def test_combined_logits_are_the_sum(tmp_path, make_config):
    estimator = combined(tmp_path, config=make_config(), dnn_activation_fn=torch.tanh)
    estimator.train(data([[1.0], [2.0]], [1.0, 5.0], 2), steps=3)
    x = np.array([[0.5], [3.0]], np.float32)
    v = variables(estimator)
    linear = x @ v["linear/linear_model/feats/weights"] + v["linear/linear_model/bias_weights"]
    found = [p["predictions"] for p in estimator.predict(lambda: [{"feats": x}])]
    np.testing.assert_allclose(found, network(estimator, x) + linear, atol=1e-5)
    assert (v["linear/linear_model/bias_weights"] != 0).all()


@pytest.mark.slow
def test_each_part_has_its_optimizer():
    estimator = combined(None, linear_optimizer="SGD")
    spec = estimator.model_fn({"feats": torch.ones(1)}, torch.ones(1), "train", estimator.config)
    assert [(type(op).__name__, op.defaults["lr"]) for op in spec.train_ops] == [("Adagrad", 0.001), ("SGD", 0.005)]
    names = {id(parameter): name for name, parameter in spec.module.named_parameters()}
    trained = [{names[id(p)].split("/")[0] for p in op.param_groups[0]["params"]} for op in spec.train_ops]
    assert trained == [{"dnn"}, {"linear"}]
    many = [numeric_column(f"x{i}") for i in range(10**5)]
    rate = 1 / math.sqrt(10**5)
    wide = DNNLinearCombinedClassifier(linear_feature_columns=many)
    spec = wide.model_fn({column.key: torch.ones(1) for column in many}, torch.ones(1), "train", wide.config)
    assert spec.train_ops[0].defaults["lr"] == pytest.approx(rate)


def test_combined_resumes_with_both_optimizers(tmp_path):
    input_fn = data([[1.0], [2.0]], [1.0, 5.0], 2)
    config = RunConfig(tf_random_seed=1)
    whole = losses_of(combined(tmp_path / "whole", config=config), input_fn, 6)
    parts = [*losses_of(combined(tmp_path / "parts", config=config), input_fn, 3)]
    parts += losses_of(combined(tmp_path / "parts", config=config), input_fn, 3)
    assert parts == pytest.approx(whole)


def test_baselines_learn_shares_and_means(tmp_path):
    shares = data([[0.0]] * 4, [2, 2, 0, 2], 4)
    classifier = BaselineClassifier(tmp_path / "c", n_classes=3)
    losses = losses_of(classifier, shares, 60)
    assert losses[0] == pytest.approx(math.log(3))
    probabilities = next(classifier.predict(shares))["probabilities"]
    assert probabilities.tolist() == pytest.approx([0.25, 0.05, 0.75], abs=0.06)
    regressor = BaselineRegressor(tmp_path / "r", weight_column="w", optimizer="SGD")
    batch = ({"x": torch.zeros(2), "w": torch.tensor([1.0, 3.0])}, torch.tensor([1.0, 3.0]))
    regressor.train(lambda: batch, steps=50)
    assert regressor.get_variable_value("baseline/bias").item() == pytest.approx(2.5)
    assert [p["predictions"].item() for p in regressor.predict(lambda: [{"x": torch.zeros(3)}])] == pytest.approx(
        [2.5] * 3
    )


def test_baseline_first_step_is_ftrls(tmp_path):
    estimator = BaselineRegressor(tmp_path)
    estimator.train(data([[0.0]], [1.0], 1), steps=1)  # the gradient is -2
    assert estimator.get_variable_value("baseline/bias").item() == pytest.approx(2 * 0.3 / math.sqrt(4.1))


def test_heads_of_ones_own(tmp_path):
    head = ts.estimator.MultiClassHead(4, label_vocabulary=list("abcd"))
    batch = ({"feats": torch.ones(2)}, ["a", "d"])
    for estimator in (DNNEstimator(head, [2], columns(), tmp_path / "d"), BaselineEstimator(head, tmp_path / "b")):
        estimator.train(lambda: batch, steps=1)
        assert sorted(estimator.evaluate(lambda: batch, steps=1)) == ["accuracy", "average_loss", "global_step", "loss"]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: DNNClassifier([3], columns(), n_classes=1), "n_classes must be an integer > 2: 1"),
        (lambda: DNNClassifier([0], columns()), "hidden_units must be positive integers"),
        (lambda: DNNClassifier(3, columns()), "hidden_units must be positive integers"),
        (lambda: DNNClassifier([3], columns(), dropout=1.0), r"probability in \[0, 1\)"),
        (lambda: DNNClassifier([3], columns(), activation_fn="relish"), "activation_fn must be a function"),
        (lambda: DNNClassifier([3], []), "feature_columns must not be empty"),
        (
            lambda: DNNClassifier([3], [categorical_column_with_vocabulary_list("c", ["a"])]),
            "must be a DenseColumn.*indicator_column",
        ),
        (lambda: DNNLinearCombinedRegressor(), "Either linear_feature_columns or dnn_feature_columns"),
        (lambda: DNNLinearCombinedRegressor(dnn_feature_columns=columns()), "dnn_hidden_units must be defined"),
        (lambda: combined(None, dnn_optimizer="Lion"), "dnn_optimizer='Lion' is not known"),
    ],
)
def test_what_is_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize(
    ("features", "message"),
    [({}, "There are no features"), ({"x": torch.zeros(2), "y": torch.zeros(3)}, "the same batch size")],
)
def test_baselines_need_a_batch_size(tmp_path, features, message):
    with pytest.raises(ValueError, match=message):
        BaselineRegressor(tmp_path).train(lambda: [(features, torch.zeros(2))], steps=1)


@pytest.mark.parametrize("make_config", [RunConfig, mirrored])
def test_summaries_of_weights_and_layers(tmp_path, make_config):
    pytest.importorskip("tensorboard")
    estimator = combined(tmp_path, config=make_config(save_summary_steps=2))
    estimator.train(data([[1.0], [0.0]], [1.0, 5.0], 2), steps=3)
    estimator.evaluate(data([[1.0], [0.0]], [1.0, 5.0], 2), steps=1)
    found, histograms = read_summaries(tmp_path)
    layers = ("dnn/hiddenlayer_0", "dnn/logits")
    assert {"loss", "bias", "fraction_of_zero_weights"} <= set(found)
    assert {f"{layer}/fraction_of_zero_values" for layer in layers} <= set(found)
    assert histograms == {f"{layer}/activation" for layer in layers}
    assert [step for step, _ in found["fraction_of_zero_weights"]] == [1, 3]  # once for all replicas
    assert [value for _, value in found["fraction_of_zero_weights"]] == [1, 0]
    assert found["bias"][0][1] == 0
    assert found["bias"][1][1] != 0


def test_summaries_of_outputs_that_are_not_finite(tmp_path):
    pytest.importorskip("tensorboard")
    with pytest.raises(ts.estimator.NanLossDuringTrainingError):
        DNNRegressor([2], columns(), tmp_path).train(data([[math.nan]], [1.0], 1), steps=1)
