"""Estimator.evaluate: which batches count, what is returned, and which checkpoint is read."""

import logging
import sys

import numpy as np
import pytest
import torch

import torchstrategy as ts
from tests.estimator.hook_programs import Line, Recorder, batches, make_estimator
from torchstrategy.base import log
from torchstrategy.estimator import evaluation
from torchstrategy.estimator.eval_metrics import read_eval_metrics
from torchstrategy.strategies.default import DefaultStrategy

CPUS = ["cpu:0", "cpu:1"]


def line_estimator(folder, metrics=lambda: {}, hooks=(), **config):
    def model_fn(features, labels, mode):
        module = Line()
        return ts.estimator.EstimatorSpec(
            mode,
            module=module,
            loss=torch.nn.functional.mse_loss,
            train_op=torch.optim.SGD(module.parameters(), lr=0.01),
            eval_metric_ops=metrics(),
            evaluation_hooks=hooks,
        )

    return ts.estimator.Estimator(model_fn, str(folder), ts.estimator.RunConfig(**config))


def mean_error():
    return {"mae": ts.metrics.MeanAbsoluteError()}


@pytest.fixture
def lines(caplog):
    caplog.set_level(logging.INFO, "torchstrategy")
    return lambda: [record.getMessage() for record in caplog.records]


def test_without_a_checkpoint_the_initial_values_are_evaluated(tmp_path, lines):
    results = line_estimator(tmp_path, mean_error).evaluate(lambda: batches())
    # labels are 1, 3, ..., 15
    assert results == {"mae": 8.0, "loss": 85.0, "global_step": 0}
    assert f"Could not find trained model in model_dir: {tmp_path}, running initialization to evaluate." in lines()


def test_a_rank_that_evaluates_alone_is_not_said_to_train(tmp_path, monkeypatch):
    estimator = make_estimator(tmp_path).train(lambda: batches(), steps=1)
    monkeypatch.setattr(log, "_said", set())
    monkeypatch.setenv("WORLD_SIZE", "2")
    for make in (DefaultStrategy, lambda: ts.OneDeviceStrategy("cpu:0")):  # without a GPU, and with one
        monkeypatch.setattr(evaluation, "plain_strategy", make)
        assert estimator.evaluate(lambda: batches())["global_step"] == 1
        assert len(list(estimator.predict(lambda: batches()))) == 8
    with pytest.warns(UserWarning, match="independent copy"):
        ts.OneDeviceStrategy("cpu:0")


@pytest.mark.parametrize("strategy", [None, CPUS])
@pytest.mark.parametrize("sizes", [[2, 2, 2, 2], [2, 2, 1], [3, 2, 1, 1, 1], [2]])
def test_every_batch_counts_once_under_any_strategy(tmp_path, strategy, sizes):
    x = torch.arange(float(sum(sizes))).split(sizes)
    data = [({"x": part}, 2 * part + 1) for part in x]
    chosen = strategy and ts.MirroredStrategy(strategy)
    results = line_estimator(tmp_path, mean_error, eval_distribute=chosen).evaluate(lambda: data)
    labels = [2 * part + 1 for part in x]
    assert results["loss"] == pytest.approx(float(np.mean([float((y**2).mean()) for y in labels])))
    assert results["mae"] == pytest.approx(float(torch.cat(labels).mean()))


def test_steps_limit_the_evaluation(tmp_path, lines):
    estimator = line_estimator(tmp_path, mean_error)
    assert estimator.evaluate(lambda: batches(), steps=1)["loss"] == 5.0
    assert "Evaluation [1/1]" in lines()
    estimator.evaluate(lambda: batches(number=30), steps=25)
    shown = [line for line in lines() if line.startswith("Evaluation [") and line.endswith("/25]")]
    assert shown == [f"Evaluation [{i}/25]" for i in (3, 6, 9, 12, 15, 18, 21, 24, 25)]
    with pytest.raises(ValueError, match="Must specify steps > 0, given: 0"):
        estimator.evaluate(lambda: batches(), steps=0)
    with pytest.raises(ValueError, match="steps must be a whole number of steps"):
        estimator.evaluate(lambda: batches(), steps=1.5)


def test_a_step_takes_a_batch_for_each_replica(tmp_path):
    estimator = line_estimator(tmp_path, mean_error, eval_distribute=ts.MirroredStrategy(CPUS))
    assert estimator.evaluate(lambda: batches(), steps=1)["loss"] == 21.0


def test_results_are_written_for_each_name(tmp_path, lines):
    estimator = line_estimator(tmp_path, mean_error)
    estimator.train(lambda: batches(), steps=1)
    results = estimator.evaluate(lambda: batches(), name="test")
    assert read_eval_metrics(estimator.eval_dir("test")) == {
        1: {"loss": pytest.approx(results["loss"]), "mae": pytest.approx(results["mae"])}
    }
    assert any(line.startswith("Saving dict for global step 1: global_step = 1, loss = ") for line in lines())
    assert f"Saving 'checkpoint_path' summary for global step 1: {tmp_path}/model.ckpt-1" in lines()


def test_another_checkpoint_can_be_evaluated(tmp_path):
    estimator = line_estimator(tmp_path, save_checkpoints_steps=1)
    estimator.train(lambda: batches(), steps=2)
    path = tmp_path / "model.ckpt-1"
    assert estimator.evaluate(lambda: batches(), checkpoint_path=path)["global_step"] == 1
    with pytest.raises(ts.errors.NotFoundError):
        estimator.evaluate(lambda: batches(), checkpoint_path=tmp_path / "model.ckpt-7")


def test_a_metric_may_name_its_arguments_and_have_several_numbers(tmp_path):
    class Sums(ts.metrics.Metric):
        def __init__(self):
            super().__init__(name="sums")
            self.sums = self.add_weight("sums", (2,))

        def update_state(self, first, second):
            self.sums += torch.stack([first.sum(), second.sum()])

        def result(self):
            return self.sums

    def metrics():
        return {"sums": (Sums(), lambda features, labels, outputs: (features["x"], labels + outputs))}

    for strategy in (None, ts.MirroredStrategy(CPUS)):
        results = line_estimator(tmp_path, metrics, eval_distribute=strategy).evaluate(lambda: batches(number=3))
        assert results["sums"].tolist() == [15.0, 36.0]


@pytest.mark.skipif(sys.version_info < (3, 11), reason="errors have no notes before Python 3.11")
def test_a_metric_that_fails_is_named(tmp_path):
    def metrics():
        return {"mae": (ts.metrics.MeanAbsoluteError(), lambda features, labels, outputs: outputs)}

    with pytest.raises(ts.errors.InvalidArgumentError) as error:
        line_estimator(tmp_path, metrics).evaluate(lambda: [({"x": torch.ones(2)}, torch.ones(2))])
    assert "The metric 'mae' of eval_metric_ops failed" in error.value.__notes__[0]


@pytest.mark.parametrize("name", ["loss", "global_step"])
def test_names_of_the_estimator_are_taken(tmp_path, name):
    estimator = line_estimator(tmp_path, lambda: {name: ts.metrics.Mean()})
    with pytest.raises(ValueError, match=f'Metric with name "{name}" is not allowed'):
        estimator.evaluate(lambda: batches())


def test_no_batch_is_an_error(tmp_path):
    with pytest.raises(ValueError, match="input_fn gave no batch to evaluate"):
        line_estimator(tmp_path).evaluate(lambda: [])


def test_modules_are_in_evaluation_mode(tmp_path):
    def model_fn(features, labels, mode):
        module = torch.nn.Dropout(0.5)
        return ts.estimator.EstimatorSpec(mode, module=module, loss=lambda outputs, labels: outputs.mean())

    strategy = ts.MirroredStrategy(CPUS)
    estimator = ts.estimator.Estimator(model_fn, str(tmp_path), ts.estimator.RunConfig(eval_distribute=strategy))
    assert estimator.evaluate(lambda: [torch.ones(100)] * 2)["loss"] == 1.0


def test_hooks_see_each_step(tmp_path):
    own, of_spec = Recorder({"loss": "loss", "step": "global_step"}), Recorder("outputs")
    estimator = line_estimator(tmp_path, hooks=[of_spec], eval_distribute=ts.MirroredStrategy(CPUS))
    estimator.evaluate(lambda: batches(number=3), hooks=[own])
    assert own.results == [{"loss": 21.0, "step": 0}, {"loss": 101.0, "step": 0}]  # one batch is left for the second
    assert [value.tolist() for value in of_spec.results] == [[0.0, 0.0]] * 2


def test_the_input_context_comes_with_eval_distribute_only(tmp_path):
    contexts = []

    def input_fn(input_context=None):
        contexts.append(input_context)
        return batches()

    strategy = ts.MirroredStrategy(CPUS)
    make_estimator(tmp_path, train_distribute=strategy).evaluate(input_fn)
    make_estimator(tmp_path, eval_distribute=strategy).evaluate(input_fn)
    assert contexts == [None, ts.InputContext(1, 0, 2)]


def test_infinite_losses_that_cancel_are_no_number(tmp_path):
    data = [({"x": torch.zeros(1)}, torch.tensor([value])) for value in (1.0, 2.0)]

    def model_fn(features, labels, mode):
        module = Line()
        loss = lambda outputs, labels: (labels - 1.5).sum() * float("inf") + outputs.sum()  # noqa: E731
        return ts.estimator.EstimatorSpec(mode, module=module, loss=loss)

    assert np.isnan(ts.estimator.Estimator(model_fn, str(tmp_path)).evaluate(lambda: data)["loss"])


def test_an_evaluation_amid_a_training_leaves_its_random_numbers_alone(tmp_path):
    strategy = ts.MirroredStrategy(CPUS)

    def model_fn(features, labels, mode):
        module = torch.nn.Sequential(torch.nn.Dropout(0.5), torch.nn.Linear(4, 1))
        return ts.estimator.EstimatorSpec(
            mode,
            module=module,
            loss=lambda outputs, labels: outputs.mean(),
            train_op=torch.optim.SGD(module.parameters(), lr=0.1),
        )

    def weights(folder, *, evaluates):
        config = ts.estimator.RunConfig(train_distribute=strategy, eval_distribute=strategy, tf_random_seed=1)
        estimator = ts.estimator.Estimator(model_fn, str(tmp_path / folder), config)

        class Evaluate(ts.estimator.SessionRunHook):
            def after_run(self, run_context, run_values):
                if evaluates:
                    estimator.evaluate(lambda: torch.ones(2, 4), steps=2)

        estimator.train(lambda: torch.ones(2, 4), steps=3, hooks=[Evaluate()])
        return estimator.get_variable_value("1.weight").tolist()

    assert weights("alone", evaluates=False) == weights("evaluated", evaluates=True)
