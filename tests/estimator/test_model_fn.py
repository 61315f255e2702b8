import functools
import logging

import pytest
import torch
from torch import nn

import torchstrategy as ts
from torchstrategy.estimator.model_fn import call_model_fn, verify_model_fn_args

est = ts.estimator


def make_spec(mode="train", **changes):
    module = nn.Linear(1, 1)
    arguments = {
        "module": module,
        "loss": nn.functional.mse_loss,
        "predictions": lambda outputs: outputs,
        "train_op": torch.optim.SGD(module.parameters(), lr=0.1),
    }
    return est.EstimatorSpec(mode, **{**arguments, **changes})


def call(model_fn, labels=None, mode="train", params=None):
    verify_model_fn_args(model_fn, params)
    return call_model_fn(model_fn, torch.ones(1), labels, mode, params, est.RunConfig())


def test_arguments_come_by_name():
    seen = {}

    def model_fn(config, mode, features, params, labels):
        seen.update(locals())
        return make_spec(mode)

    call(model_fn, torch.zeros(1), params={"a": 1})
    assert seen.pop("seen") is seen
    assert seen["features"].item() == 1
    assert seen["labels"].item() == 0
    assert (seen["mode"], seen["params"]) == ("train", {"a": 1})
    assert isinstance(seen["config"], est.RunConfig)


def test_callables_of_other_kinds():
    class Made:
        def method(self, features, mode):
            return make_spec(mode)

        def __call__(self, features, mode):
            return make_spec(mode)

    def with_more(features, width, mode):
        return make_spec(mode)

    def keyword_only(features, *, mode):
        return make_spec(mode)

    first = functools.partial(lambda width, features, mode: make_spec(mode), 3)
    for model_fn in (Made(), Made().method, functools.partial(with_more, width=3), first, keyword_only):
        assert call(model_fn).mode == "train"


def test_what_a_partial_gives_is_kept():
    def model_fn(features, mode, params):
        return make_spec(mode, predictions=lambda outputs: params)

    spec = call(functools.partial(model_fn, params={"mine": 1}))
    assert spec.predictions(None) == {"mine": 1}
    with pytest.raises(ValueError, match="does not include params"):
        call(functools.partial(model_fn, params={"mine": 1}), params={"other": 2})


@pytest.mark.parametrize(
    ("model_fn", "params"),
    [
        (lambda labels, mode: None, None),
        (lambda features, other: None, None),
        (lambda features: None, {"a": 1}),
        (3, None),
    ],
)
def test_wrong_signatures(model_fn, params):
    with pytest.raises(ValueError, match="model_fn"):
        verify_model_fn_args(model_fn, params)


def test_params_that_nobody_gives_are_warned_of(caplog, monkeypatch):
    monkeypatch.setattr(logging.getLogger("torchstrategy"), "propagate", True)
    verify_model_fn_args(lambda features, params: None, None)
    assert "params are not passed" in caplog.text


def test_labels_need_an_argument():
    assert call(lambda features, mode: make_spec(mode)).mode == "train"
    with pytest.raises(ValueError, match="does not take labels"):
        call(lambda features, mode: make_spec(mode), labels=torch.zeros(1))


@pytest.mark.parametrize(
    ("returned", "advice"),
    [
        (lambda: (1, 2), "EstimatorSpec"),
        (lambda: None, "EstimatorSpec"),
        (lambda: make_spec("eval"), "mode"),
        (lambda: make_spec(module=None), "module="),
        (lambda: make_spec(loss=torch.zeros(())), "loss=lambda"),
        (lambda: make_spec(predictions={"p": torch.zeros(2)}), "predictions=lambda"),
        (lambda: make_spec(train_op=torch.zeros(())), "train_op=optimizer"),
        (lambda: make_spec(train_op=lambda: None), "optimizer"),
    ],
)
def test_what_the_estimator_can_not_run(returned, advice):
    with pytest.raises(ValueError, match=advice):
        call(lambda features, mode: returned())
