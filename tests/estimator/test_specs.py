import pytest
import torch
from torch import nn

import torchstrategy as ts

est = ts.estimator
MODULE = nn.Linear(1, 1)
OPTIMIZER = torch.optim.SGD(MODULE.parameters(), lr=0.1)
LOSS = nn.functional.mse_loss


def identity(outputs):
    return outputs


def test_train_needs_first_an_optimizer_then_a_loss():
    with pytest.raises(ValueError, match=r"Missing train_op\."):
        est.EstimatorSpec("train")
    with pytest.raises(ValueError, match=r"Missing loss\."):
        est.EstimatorSpec("train", train_op=OPTIMIZER)
    assert est.EstimatorSpec("train", loss=LOSS, train_op=OPTIMIZER).predictions == {}


def test_eval_needs_a_loss_and_predict_needs_predictions():
    with pytest.raises(ValueError, match=r"Missing loss\."):
        est.EstimatorSpec("eval", predictions=identity)
    with pytest.raises(ValueError, match=r"Missing predictions\."):
        est.EstimatorSpec("infer", loss=LOSS)


@pytest.mark.parametrize("mode", [None, "other"])
def test_unknown_modes_need_nothing(mode):
    assert est.EstimatorSpec(mode).mode == mode


def test_a_tensor_as_loss_has_one_element():
    for shape in ((), (1,), (1, 1)):
        assert est.EstimatorSpec("eval", loss=torch.zeros(shape)).loss.shape == ()
    with pytest.raises(ValueError, match="must be scalar"):
        est.EstimatorSpec("eval", loss=torch.zeros(2))


@pytest.mark.parametrize(
    "arguments",
    [
        {"loss": 1.0},
        {"loss": LOSS, "predictions": 1.0},
        {"loss": LOSS, "predictions": {"p": 1.0}},
        {"loss": LOSS, "train_op": "sgd"},
        {"loss": LOSS, "train_op": [OPTIMIZER, 3]},
        {"loss": LOSS, "eval_metric_ops": [ts.metrics.Mean()]},
        {"loss": LOSS, "eval_metric_ops": {"m": 1}},
        {"loss": LOSS, "eval_metric_ops": {"m": (ts.metrics.Mean(), 1)}},
        {"loss": LOSS, "training_hooks": [1]},
        {"loss": LOSS, "training_chief_hooks": [est.SessionRunHook]},
        {"loss": LOSS, "evaluation_hooks": 3},
        {"loss": LOSS, "prediction_hooks": ["hook"]},
        {"loss": LOSS, "scaffold": object()},
        {"loss": LOSS, "module": lambda x: x},
    ],
)
def test_wrong_types(arguments):
    with pytest.raises(TypeError):
        est.EstimatorSpec("eval", **arguments)


def test_order_of_arguments_is_tfs():
    spec = est.EstimatorSpec("train", identity, LOSS, OPTIMIZER, {}, None, None, [est.SessionRunHook()], module=MODULE)
    assert spec.predictions is identity
    assert len(spec.training_hooks) == 1
    assert spec._replace(mode="eval").mode == "eval"


def test_train_ops_is_a_tuple():
    assert est.EstimatorSpec("eval", loss=LOSS).train_ops == ()
    assert est.EstimatorSpec("train", loss=LOSS, train_op=OPTIMIZER).train_ops == (OPTIMIZER,)
    clip = lambda: None  # noqa: E731
    assert est.EstimatorSpec("train", loss=LOSS, train_op=[clip, OPTIMIZER]).train_ops == (clip, OPTIMIZER)


def test_metrics_with_or_without_arguments():
    mean = ts.metrics.Mean()
    pair = (mean, lambda features, labels, outputs: (outputs,))
    spec = est.EstimatorSpec("eval", loss=LOSS, eval_metric_ops={"a": mean, "b": pair})
    assert spec.eval_metric_ops == {"a": mean, "b": pair}


def test_predictions_by_name_are_one_function():
    spec = est.EstimatorSpec("infer", predictions={"one": identity, "two": lambda outputs: 2 * outputs})
    assert spec.predictions(3) == {"one": 3, "two": 6}


def test_predictions_are_the_default_signature():
    spec = est.EstimatorSpec("infer", predictions=lambda outputs: {"p": outputs})
    assert spec.export_outputs["serving_default"].compute(torch.ones(1)) == {"p": torch.ones(1)}


def test_a_single_signature_is_the_default_one():
    spec = est.EstimatorSpec("infer", predictions=identity, export_outputs={"mine": identity})
    assert sorted(spec.export_outputs) == ["mine", "serving_default"]
    assert spec.export_outputs["mine"] is spec.export_outputs["serving_default"]


def test_one_of_several_signatures_must_be_the_default():
    two = {"one": identity, "two": identity}
    with pytest.raises(ValueError, match="serving_default"):
        est.EstimatorSpec("infer", predictions=identity, export_outputs=two)
    spec = est.EstimatorSpec("infer", predictions=identity, export_outputs={**two, "serving_default": identity})
    assert len(spec.export_outputs) == 3
    assert est.EstimatorSpec("infer", predictions=identity, export_outputs={}).export_outputs == {}


@pytest.mark.parametrize("export_outputs", [5, {"a": 5}])
def test_wrong_signatures(export_outputs):
    with pytest.raises(TypeError, match="export_outputs"):
        est.EstimatorSpec("infer", predictions=identity, export_outputs=export_outputs)


class Named(est.Exporter):
    def __init__(self, name):
        self._name = name

    @property
    def name(self):
        return self._name

    def export(self, estimator, export_path, checkpoint_path, eval_result, is_the_final_export):
        return None


def test_exporters_one_or_several():
    one, two = Named("one"), Named("two")
    assert est.EvalSpec(identity, exporters=one).exporters == (one,)
    assert est.EvalSpec(identity, exporters=(e for e in (one, two))).exporters == (one, two)
    assert est.EvalSpec(identity, exporters=[]).exporters == ()


@pytest.mark.parametrize(
    ("exporters", "error"),
    [
        (1, TypeError),
        ([1], TypeError),
        ([Named("a"), None], TypeError),
        ([Named("a"), Named("a")], ValueError),
        (Named(""), ValueError),
        (Named(None), ValueError),
        (Named(3), ValueError),
    ],
)
def test_wrong_exporters(exporters, error):
    with pytest.raises(error, match=r"[Ee]xporter"):
        est.EvalSpec(identity, exporters=exporters)


@pytest.mark.parametrize(
    ("cls", "arguments", "error"),
    [
        (est.TrainSpec, {"input_fn": 5}, TypeError),
        (est.TrainSpec, {"max_steps": 0}, ValueError),
        (est.TrainSpec, {"max_steps": -1}, ValueError),
        (est.TrainSpec, {"max_steps": 2.5}, ValueError),
        (est.EvalSpec, {"steps": "3"}, ValueError),
        (est.TrainSpec, {"hooks": [1]}, TypeError),
        (est.TrainSpec, {"saving_listeners": [est.SessionRunHook()]}, TypeError),
        (est.EvalSpec, {"input_fn": None}, TypeError),
        (est.EvalSpec, {"steps": 0}, ValueError),
        (est.EvalSpec, {"name": 3}, TypeError),
        (est.EvalSpec, {"hooks": [1]}, TypeError),
        (est.EvalSpec, {"start_delay_secs": -1}, ValueError),
        (est.EvalSpec, {"throttle_secs": -1}, ValueError),
    ],
)
def test_wrong_train_and_eval_specs(cls, arguments, error):
    with pytest.raises(error):
        cls(**{"input_fn": identity, **arguments})


def test_listeners_and_hooks_become_tuples():
    hook, listener = est.SessionRunHook(), est.CheckpointSaverListener()
    spec = est.TrainSpec(identity, hooks=[hook], saving_listeners=[listener])
    assert (spec.hooks, spec.saving_listeners) == ((hook,), (listener,))
