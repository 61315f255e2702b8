"""Estimator.predict: examples one after another, or batches."""

import types

import numpy as np
import pytest
import torch

import torchstrategy as ts
from tests.estimator.hook_programs import Line, Recorder, batches


def estimator_of(folder, predictions, module=Line, hooks=()):
    def model_fn(features, labels, mode):
        assert mode == ts.estimator.ModeKeys.PREDICT
        assert labels is None
        return ts.estimator.EstimatorSpec(mode, module=module(), predictions=predictions, prediction_hooks=hooks)

    return ts.estimator.Estimator(model_fn, str(folder))


def test_nothing_happens_before_the_first_example_is_asked_for(tmp_path):
    estimator = estimator_of(tmp_path, lambda outputs: outputs)
    found = estimator.predict(lambda: pytest.fail("the data was read"))
    assert isinstance(found, types.GeneratorType)


def test_examples_come_as_dictionaries_of_arrays(tmp_path):
    estimator = estimator_of(tmp_path, lambda outputs: {"y": outputs + 1, "pair": torch.stack([outputs] * 2, 1)})
    found = list(estimator.predict(lambda: batches(number=2)))
    assert [example["y"] for example in found] == [1.0] * 4
    assert all(isinstance(example["pair"], np.ndarray) and example["pair"].shape == (2,) for example in found)


def test_one_tensor_gives_plain_examples(tmp_path):
    assert list(estimator_of(tmp_path, lambda outputs: outputs).predict(lambda: batches(number=1))) == [0.0, 0.0]


def test_batches_can_be_asked_for(tmp_path):
    estimator = estimator_of(tmp_path, lambda outputs: {"y": outputs, "total": outputs.sum()})
    found = list(estimator.predict(lambda: batches(number=2), yield_single_examples=False))
    assert [batch["y"].tolist() for batch in found] == [[0.0, 0.0]] * 2
    with pytest.raises(ValueError, match="Batch length of predictions should be same"):
        list(estimator.predict(lambda: batches()))


def test_some_predictions_can_be_chosen(tmp_path):
    estimator = estimator_of(tmp_path, lambda outputs: {"a": outputs, "b": outputs})
    assert [set(one) for one in estimator.predict(lambda: batches(number=1), predict_keys=["b", "c"])] == [{"b"}] * 2
    with pytest.raises(ValueError, match=r"Expected to run at least one output from \['a', 'b'\], provided \['c'\]"):
        next(estimator.predict(lambda: batches(), predict_keys=["c"]))
    assert set(next(estimator.predict(lambda: batches(), predict_keys="a"))) == {"a"}
    with pytest.raises(ValueError, match="Expected to run at least one output"):  # one name, not each of its letters
        next(estimator.predict(lambda: batches(), predict_keys="labels"))
    with pytest.raises(ValueError, match="not valid in case of non-dict predictions"):
        next(estimator_of(tmp_path, lambda outputs: outputs).predict(lambda: batches(), predict_keys=["a"]))


def test_low_precision_and_strings_become_arrays(tmp_path):
    estimator = estimator_of(tmp_path, lambda outputs: {"low": outputs.bfloat16(), "name": ["a", "b"]})
    assert list(estimator.predict(lambda: batches(number=1))) == [{"low": 0.0, "name": name} for name in "ab"]


def test_predictions_must_be_tensors(tmp_path):
    estimator = estimator_of(tmp_path, lambda outputs: [outputs])
    with pytest.raises(TypeError, match=r"must return a tensor, or a dictionary of tensors .* Received a list"):
        next(estimator.predict(lambda: batches()))


def test_no_data_gives_nothing(tmp_path):
    assert list(estimator_of(tmp_path, lambda outputs: outputs).predict(lambda: [])) == []


def test_hooks_and_an_early_end(tmp_path):
    own, of_spec = Recorder("global_step"), Recorder("outputs")

    class Stop(ts.estimator.SessionRunHook):
        def after_run(self, run_context, run_values):
            run_context.request_stop()

    estimator = estimator_of(tmp_path, lambda outputs: outputs, hooks=[of_spec])
    assert len(list(estimator.predict(lambda: batches(), hooks=[own, Stop()]))) == 2
    assert own.events == ["begin", "create", "before", "after", "end"]
    assert of_spec.results[0].tolist() == [0.0, 0.0]


def test_the_programs_random_numbers_are_its_own_between_examples(tmp_path):
    def model_fn(features, labels, mode):
        return ts.estimator.EstimatorSpec(mode, module=torch.nn.Linear(1, 1), predictions=lambda outputs: outputs)

    config = ts.estimator.RunConfig(tf_random_seed=1)
    before = torch.get_rng_state()
    estimator = ts.estimator.Estimator(model_fn, str(tmp_path), config)
    first = next(estimator.predict(lambda: [torch.ones(1, 1)]))
    assert torch.equal(torch.get_rng_state(), before)
    assert next(estimator.predict(lambda: [torch.ones(1, 1)])) == first


@pytest.mark.parametrize("error", [GeneratorExit, None])
def test_a_prediction_may_be_left(tmp_path, error):
    found = estimator_of(tmp_path, lambda outputs: outputs).predict(lambda: batches())
    assert next(found) == 0.0
    if error is not None:
        found.close()
    del found
