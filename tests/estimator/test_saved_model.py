"""``export_saved_model`` and loading."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import torchstrategy as ts
from tests.estimator.lines import input_fn, make_estimator

est = ts.estimator
export = ts.estimator.export


class Images(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = torch.nn.BatchNorm1d(4)
        self.dropout = torch.nn.Dropout()
        self.dense = torch.nn.Linear(4, 3)

    def forward(self, features):
        return self.dense(self.dropout(self.norm(features["image"].flatten(1)))) + features["offset"]


def images_fn(features, labels, mode, params):
    module = Images()
    scores = export.ClassificationOutput(lambda outputs: outputs.softmax(-1), ["a", "b", "c"])
    return est.EstimatorSpec(
        mode,
        predictions=lambda outputs: {"logits": outputs, "name": ["x"]},
        loss=torch.nn.functional.cross_entropy,
        train_op=torch.optim.SGD(module.parameters(), lr=0.1),
        export_outputs={
            "serving_default": scores,
            "predict": lambda outputs: {"ids": outputs.argmax(-1), "names": ["no tensor"]},
            "regression": export.RegressionOutput(lambda outputs: outputs[:, 0]),
        },
        module=module,
    )


def images_input_fn():
    return {"image": torch.rand(4, 2, 2), "offset": torch.rand(4, 1)}, torch.tensor([0, 1, 2, 0])


@pytest.fixture
def images(tmp_path):
    return est.Estimator(images_fn, tmp_path / "model").train(images_input_fn, steps=3)


def receive_images():
    received = {"image": torch.zeros(2, 2, 2, dtype=torch.uint8), "offset": torch.zeros(2, 1)}
    return export.ServingInputReceiver(
        lambda received: {"image": received["image"].float() / 255, "offset": received["offset"]}, received
    )


@pytest.mark.slow
def test_signatures(images, tmp_path):
    loaded = export.load(images.export_saved_model(tmp_path / "exports", receive_images))
    assert set(loaded.signatures) == {"serving_default", "predict", "regression"}
    image = torch.randint(0, 255, (5, 2, 2), dtype=torch.uint8)
    features = {"image": image.float() / 255, "offset": torch.zeros(5, 1)}
    logits = torch.tensor(np.stack([row["logits"] for row in images.predict(lambda: [features], "logits")]))
    default = loaded.signatures["serving_default"]
    scores = default(image=image, offset=torch.zeros(5, 1))
    torch.testing.assert_close(scores["scores"], logits.softmax(-1))
    assert not scores["scores"].requires_grad
    assert default.constants == {"classes": ["a", "b", "c"]}
    assert (default.method, loaded.signatures["regression"].method) == ("classify", "regress")
    assert default.inputs["image"] == {"dtype": "uint8", "shape": [None, 2, 2]}
    assert default.outputs == {"scores": {"dtype": "float32", "shape": [None, 3]}}
    ids = loaded.signatures["predict"]({"image": image, "offset": torch.zeros(5, 1)})
    assert ids.keys() == {"ids"}
    assert torch.equal(ids["ids"], logits.argmax(-1))


@pytest.mark.slow
def test_the_program_needs_torch_only(images, tmp_path):
    path = images.export_saved_model(tmp_path / "exports", receive_images)
    program = f"""
import sys, torch
module = torch.export.load({path + "/model.pt2"!r}).module()
made = module({{"image": torch.zeros(7, 2, 2, dtype=torch.uint8), "offset": torch.zeros(7, 1)}})
assert made["serving_default"]["scores"].shape == (7, 3)
assert "torchstrategy" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", program], check=True, cwd=tmp_path)


def test_one_tensor(tmp_path):
    estimator = make_estimator(tmp_path).train(input_fn, steps=3)
    receiver_fn = export.build_raw_serving_input_receiver_fn(np.zeros(1, np.float32))
    loaded = export.load(estimator.export_saved_model(tmp_path / "exports", receiver_fn)).signatures["serving_default"]
    x = torch.arange(4.0)
    expected = x * float(estimator.get_variable_value("w")) + float(estimator.get_variable_value("b"))
    torch.testing.assert_close(loaded(x)["y"], expected)
    torch.testing.assert_close(loaded(input=x)["y"], expected)
    with pytest.raises(TypeError, match=r"takes the inputs \['input'\]"):
        loaded(x=x)
    with pytest.raises(TypeError, match="2 tensors without names"):
        loaded(x, x)


def test_a_fixed_batch_size(tmp_path):
    estimator = make_estimator(tmp_path).train(input_fn, steps=1)
    receiver_fn = export.build_raw_serving_input_receiver_fn(torch.zeros(1), default_batch_size=4)
    loaded = export.load(estimator.export_saved_model(tmp_path / "exports", receiver_fn)).signatures["serving_default"]
    assert loaded.inputs["input"]["shape"] == [4]
    assert loaded(torch.zeros(4))["y"].shape == (4,)
    with pytest.raises(AssertionError, match="4"):
        loaded(torch.zeros(5))


def test_a_checkpoint_can_be_chosen(tmp_path):
    estimator = make_estimator(tmp_path).train(input_fn, steps=4)
    receiver_fn = export.build_raw_serving_input_receiver_fn(torch.zeros(2))
    path = estimator.export_saved_model(tmp_path / "exports", receiver_fn, checkpoint_path=tmp_path / "model.ckpt-0")
    assert export.load(path).signatures["serving_default"](torch.ones(2))["y"].tolist() == [0, 0]


def test_assets(tmp_path):
    estimator = make_estimator(tmp_path / "model").train(input_fn, steps=1)
    (tmp_path / "words.txt").write_text("one two")
    receiver_fn = export.build_raw_serving_input_receiver_fn(torch.zeros(2))
    path = estimator.export_saved_model(
        tmp_path / "exports", receiver_fn, assets_extra={"texts/words.txt": str(tmp_path / "words.txt")}
    )
    assert Path(path, "assets.extra", "texts", "words.txt").read_text() == "one two"
    with pytest.raises(ts.errors.NotFoundError, match="there is no file"):
        estimator.export_saved_model(tmp_path / "exports", receiver_fn, assets_extra={"a": str(tmp_path / "none")})
    assert len(os.listdir(tmp_path / "exports")) == 1


def test_exports_have_rising_numbers(tmp_path):
    estimator = make_estimator(tmp_path / "model").train(input_fn, steps=1)
    receiver_fn = export.build_raw_serving_input_receiver_fn(torch.zeros(2))
    paths = [estimator.export_saved_model(tmp_path / "exports", receiver_fn) for _ in range(3)]
    assert paths == sorted(paths)
    assert len(set(paths)) == 3
    description = json.loads(Path(paths[0], "signatures.json").read_text())
    assert description["checkpoint"] == "model.ckpt-1"


def test_a_failed_export_leaves_nothing(tmp_path):
    def failing_fn(features, labels, mode):
        spec = make_estimator(tmp_path / "model")._model_fn(features, labels, mode)
        if mode != est.ModeKeys.PREDICT:
            return spec
        return est.EstimatorSpec(
            mode,
            module=spec.module,
            predictions=lambda outputs: {"y": outputs if float(outputs.sum()) > 0 else -outputs},
        )

    estimator = est.Estimator(failing_fn, tmp_path / "model").train(input_fn, steps=1)
    receiver_fn = export.build_raw_serving_input_receiver_fn(torch.zeros(2))
    with pytest.raises(RuntimeError, match=r"torch\.export can't trace"):
        estimator.export_saved_model(tmp_path / "exports", receiver_fn)
    assert not (tmp_path / "exports").exists() or not os.listdir(tmp_path / "exports")


def test_wrong_arguments_are_named(tmp_path):
    estimator = make_estimator(tmp_path)
    receiver_fn = export.build_raw_serving_input_receiver_fn(torch.zeros(2))
    with pytest.raises(ValueError, match="Couldn't find trained model"):
        estimator.export_saved_model(tmp_path / "exports", receiver_fn)
    estimator.train(input_fn, steps=1)
    with pytest.raises(ValueError, match="serving_input_receiver_fn must be defined"):
        estimator.export_saved_model(tmp_path / "exports", None)
    with pytest.raises(TypeError, match=r"must return a ts\.estimator\.export.ServingInputReceiver"):
        estimator.export_saved_model(tmp_path / "exports", lambda: torch.zeros(2))
    with pytest.raises(ValueError, match=r"must be ModeKeys\.PREDICT"):
        estimator.export_saved_model(tmp_path / "exports", receiver_fn, experimental_mode=est.ModeKeys.EVAL)


def test_features_of_another_kind_are_named(tmp_path):
    estimator = make_estimator(tmp_path).train(input_fn, steps=1)
    receiver_fn = export.build_raw_serving_input_receiver_fn({"x": torch.zeros(2)})
    with pytest.raises(ValueError, match=r"failed with the features .*It was given \{'x': float32\[2\]\}"):
        estimator.export_saved_model(tmp_path / "exports", receiver_fn)


def test_a_signature_without_tensors_is_refused(images, tmp_path):
    def model_fn(features, labels, mode, params):
        spec = images_fn(features, labels, mode, params)
        outputs = {**spec.export_outputs, "predict": lambda outputs: [outputs]}
        return est.EstimatorSpec(
            mode, spec.predictions, spec.loss, spec.train_op, export_outputs=outputs, module=spec.module
        )

    estimator = est.Estimator(model_fn, images.model_dir)
    with pytest.raises(ValueError, match="'predict' of export_outputs computes no tensor"):
        estimator.export_saved_model(tmp_path / "exports", receive_images)


def test_loading_something_else(tmp_path):
    estimator = make_estimator(tmp_path / "model").train(input_fn, steps=1)
    receiver_fn = export.build_raw_serving_input_receiver_fn(torch.zeros(2))
    path = estimator.export_saved_model(tmp_path / "exports", receiver_fn)
    with pytest.raises(ts.errors.NotFoundError, match=os.path.basename(path)):
        export.load(tmp_path / "exports")
    with pytest.raises(ts.errors.NotFoundError, match="is not what export_saved_model returned"):
        export.load(tmp_path / "nowhere")
    with pytest.raises(ts.errors.NotFoundError, match="is not what export_saved_model returned"):
        export.load(path + "/model.pt2")


@pytest.mark.parametrize(
    ("features", "received", "message"),
    [
        (None, torch.zeros(1), "features must be defined"),
        (torch.zeros(1), None, "receiver_tensors must be defined"),
        (torch.zeros(1), {}, "receiver_tensors must be defined"),
        (torch.zeros(1), {"x": torch.zeros(1)}, "that are not in receiver_tensors"),
        (lambda received: received, {1: torch.zeros(1)}, "must be strings"),
        (lambda received: received, {"x": ["a", "b"]}, "strings must become numbers"),
        (lambda received: received, {"x": np.array(["a", "b"])}, "strings must become numbers"),
    ],
)
def test_wrong_receivers_are_named(features, received, message):
    with pytest.raises(ValueError, match=message):
        export.ServingInputReceiver(features, received)


def test_features_may_be_the_received_tensors_in_another_structure():
    a, b = torch.zeros(1), torch.ones(1)
    receiver = export.ServingInputReceiver({"x": (b, a)}, {"a": a, "b": b})
    assert receiver.features_of({"a": 1, "b": 2}) == {"x": (2, 1)}
    with pytest.raises(ValueError, match="must be one tensor"):
        export.TensorServingInputReceiver({"x": a}, a)
    with pytest.raises(ValueError, match="must be None"):
        export.ServingInputReceiver(a, a, {"other": a})


@pytest.mark.parametrize("make", [export.PredictOutput, export.RegressionOutput, export.ClassificationOutput])
def test_outputs_are_functions(make):
    with pytest.raises(TypeError, match="must be a function of the module's outputs"):
        make(torch.zeros(1))


def test_wrong_outputs_are_named():
    with pytest.raises(ValueError, match="at least one of scores and classes"):
        export.ClassificationOutput()
    with pytest.raises(TypeError, match="must be a list of names or a function"):
        export.ClassificationOutput(classes="abc")
    with pytest.raises(ValueError, match="must be a float32 tensor"):
        export.RegressionOutput(lambda outputs: outputs.int()).compute(torch.zeros(1))
    with pytest.raises(ValueError, match="must be a float32 tensor"):
        export.ClassificationOutput(lambda outputs: "a").compute(torch.zeros(1))


def test_canned_estimators(tmp_path):
    column = ts.feature_column.numeric_column("x")
    estimator = est.DNNClassifier([3], [column], n_classes=3, model_dir=tmp_path)
    estimator.train(lambda: ({"x": torch.ones(2, 1)}, torch.tensor([0, 2])), steps=2)
    receiver_fn = export.build_raw_serving_input_receiver_fn({"x": torch.ones(1, 1)})
    signatures = export.load(estimator.export_saved_model(tmp_path / "exports", receiver_fn)).signatures
    assert set(signatures) == {"serving_default", "classification", "predict"}
    expected = next(estimator.predict(lambda: {"x": torch.zeros(1, 1)}))
    made = signatures["predict"](x=torch.zeros(6, 1))
    np.testing.assert_allclose(made["probabilities"][5], expected["probabilities"], rtol=1e-6)
    assert signatures["serving_default"].constants["classes"] == ["0", "1", "2"]


def test_an_export_amid_a_seeded_training_leaves_its_random_numbers_alone(tmp_path):
    def model_fn(features, labels, mode):
        module = torch.nn.Linear(1, 1)
        return est.EstimatorSpec(
            mode,
            module=module,
            loss=lambda outputs, labels: outputs.mean(),
            predictions=lambda outputs: {"y": outputs},
            train_op=torch.optim.SGD(module.parameters(), lr=0.1),
        )

    estimator = est.Estimator(model_fn, tmp_path / "model", est.RunConfig(tf_random_seed=1))
    estimator.train(lambda: torch.ones(2, 1), steps=1)
    before = torch.get_rng_state()
    estimator.export_saved_model(tmp_path, export.build_raw_serving_input_receiver_fn(torch.ones(2, 1)))
    assert torch.equal(torch.get_rng_state(), before)
