"""``model_to_estimator``: steps and numbers are those of ``fit`` and ``evaluate``."""

import functools

import numpy as np
import pytest
import torch
import torchmetrics

import torchstrategy as ts

est = ts.estimator
X = torch.linspace(-1, 1, 24).reshape(12, 2)
Y = (X.sum(1, keepdim=True) > 0).float()


def make_model(optimizer="adam", metrics=("mae",), **arguments):
    torch.manual_seed(0)
    model = ts.Model(torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.Tanh(), torch.nn.Linear(3, 1)))
    model.compile(optimizer=optimizer, loss="mse", metrics=list(metrics), **arguments)
    return model


def batches(size=4, x=X, y=Y):
    return lambda: ts.data.Dataset.from_tensor_slices((x, y)).batch(size)


def weights(source):
    return [value.detach().numpy() for value in source.state_dict().values()]


@pytest.mark.parametrize(
    "optimizer",
    ["adam", functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9), "an optimizer"],
)
def test_training_is_that_of_fit(tmp_path, optimizer):
    def make():
        model = make_model()
        made = torch.optim.SGD(model.parameters(), lr=0.3) if optimizer == "an optimizer" else optimizer
        model.compile(made, "mse", metrics=["mae"])
        return model

    fitted, model = make(), make()
    before = weights(model)
    estimator = est.model_to_estimator(model, model_dir=tmp_path).train(batches())
    fitted.fit(X, Y, batch_size=4, epochs=1, shuffle=False, verbose=0)
    names = list(fitted.module.state_dict())
    for name, expected in zip(names, weights(fitted.module), strict=True):
        np.testing.assert_array_equal(estimator.get_variable_value(name), expected)
    assert all(np.array_equal(a, b) for a, b in zip(before, weights(model), strict=True))
    expected = fitted.evaluate(X, Y, batch_size=4, verbose=0, return_dict=True)
    result = estimator.evaluate(batches())
    assert result["loss"] == pytest.approx(expected["loss"])
    assert result["mae"] == pytest.approx(expected["mae"])
    predicted = np.stack([row["output"] for row in estimator.predict(batches())])
    np.testing.assert_allclose(predicted, fitted.predict(X, verbose=0), rtol=1e-6)


def test_evaluation_before_training_uses_the_weights_of_the_model(tmp_path):
    model = make_model()
    estimator = est.model_to_estimator(model, model_dir=tmp_path)
    expected = model.evaluate(X, Y, verbose=0, return_dict=True)
    assert estimator.evaluate(batches(12))["loss"] == pytest.approx(expected["loss"])


def test_under_two_replicas(tmp_path):
    strategy = ts.MirroredStrategy(["cpu:0", "cpu:1"])
    config = est.RunConfig(tmp_path, train_distribute=strategy, eval_distribute=strategy)
    estimator = est.model_to_estimator(make_model("sgd"), config=config).train(batches(3), steps=2)
    fitted = make_model("sgd")
    fitted.fit(X, Y, batch_size=6, epochs=1, shuffle=False, verbose=0)  # a global batch is two of the estimator's
    for name, expected in zip(fitted.module.state_dict(), weights(fitted.module), strict=True):
        np.testing.assert_allclose(estimator.get_variable_value(name), expected, rtol=1e-5)
    expected = fitted.evaluate(X, Y, batch_size=6, verbose=0, return_dict=True)
    result = estimator.evaluate(batches(3))
    assert (result["loss"], result["mae"]) == (pytest.approx(expected["loss"]), pytest.approx(expected["mae"]))


class TwoHeads(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.shared = torch.nn.Linear(2, 4)
        self.a, self.b = torch.nn.Linear(4, 1), torch.nn.Linear(4, 2)
        self.norm = torch.nn.BatchNorm1d(4)

    def forward(self, left, right):
        hidden = self.norm(self.shared(torch.cat([left, right], 1)))
        return {"a": self.a(hidden), "b": self.b(hidden)}


def test_several_inputs_and_outputs(tmp_path):
    def make():
        torch.manual_seed(0)
        model = ts.Model(TwoHeads())
        model.compile(
            "sgd",
            {"a": "mse", "b": torch.nn.CrossEntropyLoss()},
            loss_weights={"a": 0.5, "b": 2.0},
            metrics={"a": ["mae"], "b": ["accuracy"]},
        )
        return model

    features = {"left": X[:, :1], "right": X[:, 1:]}
    labels = {"a": Y, "b": Y[:, 0].long()}
    model, fitted = make(), make()
    estimator = est.model_to_estimator(model, model_dir=tmp_path).train(batches(4, features, labels))
    fitted.fit(features, labels, batch_size=4, shuffle=False, verbose=0)
    for name, expected in zip(fitted.module.state_dict(), weights(fitted.module), strict=True):
        np.testing.assert_allclose(estimator.get_variable_value(name), expected, rtol=1e-6)
    expected = fitted.evaluate(features, labels, batch_size=12, verbose=0, return_dict=True)
    result = estimator.evaluate(batches(12, features, labels))
    for name in ("loss", "a_mae", "b_accuracy"):
        assert result[name] == pytest.approx(expected[name])
    assert next(estimator.predict(batches(4, features, labels))).keys() == {"a", "b"}


class Halved(torch.nn.Linear):
    """Takes the mode as an argument, as in Keras."""

    def forward(self, x, training=None):
        return super().forward(x) * (0.5 if training else 1.0)


class HalvedModel(ts.Model):
    def __init__(self):
        super().__init__()
        self.dense = Halved(2, 1)

    def forward(self, x, training):
        return self.dense(x, training)


@pytest.mark.parametrize("make", [lambda: ts.Model(Halved(2, 1)), HalvedModel])
def test_a_forward_with_keras_argument_gets_the_mode(tmp_path, make):
    def compiled():
        torch.manual_seed(0)
        model = make()
        model.compile("sgd", "mse")
        return model

    fitted = compiled()
    estimator = est.model_to_estimator(compiled(), model_dir=tmp_path).train(batches(12))
    fitted.fit(X, Y, batch_size=12, shuffle=False, verbose=0)
    name = "weight" if type(fitted) is ts.Model else "dense.weight"
    np.testing.assert_array_equal(estimator.get_variable_value(name), weights(fitted)[0])
    expected = fitted.evaluate(X, Y, batch_size=12, verbose=0)
    assert estimator.evaluate(batches(12))["loss"] == pytest.approx(expected)


def test_regularizers_count(tmp_path):
    def make():
        model = make_model("sgd")
        ts.regularize(model, "module.0.weight", ts.regularizers.L2(0.5))
        return model

    model, fitted = make(), make()
    estimator = est.model_to_estimator(model, model_dir=tmp_path).train(batches(12))
    fitted.fit(X, Y, batch_size=12, verbose=0, shuffle=False)
    np.testing.assert_array_equal(estimator.get_variable_value("0.weight"), weights(fitted.module)[0])


class OwnForward(ts.Model):
    def __init__(self):
        super().__init__()
        self.dense = torch.nn.Linear(2, 1)

    def forward(self, x):
        return self.dense(x)


def test_a_model_with_a_forward_of_its_own(tmp_path):
    torch.manual_seed(1)
    model = OwnForward()
    model.compile("sgd", "mse")
    estimator = est.model_to_estimator(model, model_dir=tmp_path).train(batches())
    model.fit(X, Y, batch_size=4, shuffle=False, verbose=0)
    np.testing.assert_array_equal(estimator.get_variable_value("dense.weight"), weights(model)[0])


def test_a_saved_model(tmp_path):
    make_model().save(tmp_path / "model.pt")
    estimator = est.model_to_estimator(keras_model_path=tmp_path / "model.pt", trust=True, model_dir=tmp_path / "dir")
    assert estimator.train(batches(), steps=1).evaluate(batches())["global_step"] == 1


@pytest.mark.slow
def test_metrics_can_be_renamed_and_models_exported(tmp_path):
    signature = est.export.PredictOutput(lambda outputs: {"twice": 2 * outputs})
    estimator = est.model_to_estimator(
        make_model(metrics=("mae", ts.metrics.MeanSquaredError())),
        model_dir=tmp_path,
        metric_names_map={"mae": "error"},
        export_outputs={"double": signature},
    ).train(batches(), steps=1)
    assert estimator.evaluate(batches()).keys() == {"loss", "error", "mean_squared_error", "global_step"}
    receiver_fn = est.export.build_raw_serving_input_receiver_fn(X)
    signatures = est.export.load(estimator.export_saved_model(tmp_path / "exports", receiver_fn)).signatures
    assert torch.equal(signatures["double"](X)["twice"], 2 * signatures["serving_default"](X)["output"])
    wrong = est.model_to_estimator(make_model(), model_dir=tmp_path, metric_names_map={"auc": "x"})
    with pytest.raises(ValueError, match=r"renames \['auc'\]"):
        wrong.evaluate(batches())


def test_a_trained_model_of_two_replicas_with_metrics_that_have_counted(tmp_path):
    with ts.MirroredStrategy(["cpu:0", "cpu:1"]).scope():
        model = make_model("sgd", metrics=(torchmetrics.MeanSquaredError(), ts.metrics.MeanAbsoluteError()))
    model.fit(X, Y, batch_size=4, verbose=0)
    result = est.model_to_estimator(model, model_dir=tmp_path).evaluate(batches(12))
    expected = model.evaluate(X, Y, batch_size=12, verbose=0, return_dict=True)
    for name in ("loss", "mean_squared_error", "mean_absolute_error"):
        assert result[name] == pytest.approx(expected[name])


def test_an_optimizer_of_this_library(tmp_path):
    model, fitted = make_model("ftrl"), make_model("ftrl")
    estimator = est.model_to_estimator(model, model_dir=tmp_path).train(batches())
    fitted.fit(X, Y, batch_size=4, shuffle=False, verbose=0)
    np.testing.assert_array_equal(estimator.get_variable_value("0.weight"), weights(fitted.module)[0])


def test_wrong_models_are_refused():
    with pytest.raises(ValueError, match="neither"):
        est.model_to_estimator()
    with pytest.raises(ValueError, match="both"):
        est.model_to_estimator(make_model(), "path")
    with pytest.raises(TypeError, match=r"must be a ts\.Model"):
        est.model_to_estimator(torch.nn.Linear(1, 1))
    with pytest.raises(ValueError, match="has not been compiled"):
        est.model_to_estimator(ts.Model(torch.nn.Linear(1, 1)))
    with pytest.raises(ValueError, match="gradient_accumulation_steps=2"):
        est.model_to_estimator(make_model(gradient_accumulation_steps=2))
    with pytest.raises(ValueError, match="amp='bf16'"):
        est.model_to_estimator(make_model(amp="bf16"))
    with pytest.raises(ValueError, match="checkpoint_format"):
        est.model_to_estimator(make_model(), checkpoint_format="tf")
    with pytest.raises(ValueError, match="custom_objects must be None"):
        est.model_to_estimator(make_model(), custom_objects={})

    class OwnStep(ts.Model):
        def train_step(self, data):
            return {}

    own = OwnStep(torch.nn.Linear(1, 1))
    own.compile("sgd", "mse")
    with pytest.raises(ValueError, match="OwnStep overrides train_step"):
        est.model_to_estimator(own)


def test_a_model_without_an_optimizer_can_be_evaluated_only(tmp_path):
    estimator = est.model_to_estimator(make_model(optimizer=None), model_dir=tmp_path)
    assert estimator.evaluate(batches())["loss"] > 0
    with pytest.raises(ValueError, match="compiled without an optimizer"):
        estimator.train(batches(), steps=1)
