"""``train_and_evaluate`` in one process, and the tasks that it refuses."""

import json
import logging

import pytest
import torch

import torchstrategy as ts
from tests.clusters import as_task
from tests.estimator.lines import (
    input_fn,
    make_estimator,
    model_fn,
    steps_until_the_end,
    train_and_evaluate_on_a_rank,
)
from torchstrategy.estimator.checkpoint_evaluator import CheckpointEvaluator, EndOfTraining
from torchstrategy.estimator.eval_metrics import read_eval_metrics

est = ts.estimator


class NoteEvaluations(est.SessionRunHook):
    def __init__(self):
        self.steps = []

    def end(self, session):
        self.steps.append(session.global_step)


class NoteExports(est.Exporter):
    def __init__(self, name="noted"):
        self._name = name
        self.calls = []

    @property
    def name(self):
        return self._name

    def export(self, estimator, export_path, checkpoint_path, eval_result, is_the_final_export):
        self.calls.append((eval_result["global_step"], export_path, checkpoint_path, is_the_final_export))
        return f"export of {eval_result['global_step']}"


def run(estimator, max_steps=4, throttle_secs=0, train_input_fn=input_fn, **options):
    noted = NoteEvaluations()
    result = est.train_and_evaluate(
        estimator,
        est.TrainSpec(train_input_fn, max_steps=max_steps, hooks=options.pop("train_hooks", None)),
        est.EvalSpec(input_fn, steps=2, hooks=[noted], throttle_secs=throttle_secs, **options),
    )
    return result, noted.steps


def test_each_checkpoint_but_the_first_is_evaluated(tmp_path):
    (metrics, exports), steps = run(make_estimator(tmp_path), max_steps=5)
    assert steps == [2, 4, 5]
    assert metrics.keys() == {"loss", "mae", "global_step"}
    assert metrics["global_step"] == 5
    assert exports == []
    assert list(read_eval_metrics(tmp_path / "eval")) == steps


def test_throttle_leaves_evaluations_out_but_not_the_last(tmp_path, caplog):
    with caplog.at_level(logging.INFO, "torchstrategy"):
        (metrics, _), steps = run(make_estimator(tmp_path), max_steps=7, throttle_secs=600)
    assert steps == [2, 7]
    assert metrics["global_step"] == 7
    assert caplog.text.count("Skip the current checkpoint eval due to throttle secs (600 secs).") == 3


def test_a_second_call_has_nothing_to_do(tmp_path):
    run(make_estimator(tmp_path))
    assert run(make_estimator(tmp_path)) == ((None, None), [])
    (metrics, _), steps = run(make_estimator(tmp_path), max_steps=6)
    assert steps == [6]
    assert metrics["global_step"] == 6


def test_the_end_of_the_data_ends_it(tmp_path):
    x = torch.arange(6.0)
    (metrics, _), steps = run(
        make_estimator(tmp_path), None, train_input_fn=lambda: [(x[:3], x[:3]), (x[3:], x[3:]), (x[:3], x[3:])]
    )
    assert steps == [2, 3]
    assert metrics["global_step"] == 3


@pytest.mark.parametrize(
    "strategy",
    [
        lambda: ts.MirroredStrategy(["cpu:0", "cpu:1"]),
        lambda: ts.experimental.CentralStorageStrategy(["cpu:0", "cpu:1"]),
    ],
)
def test_under_a_strategy_of_two_replicas(tmp_path, strategy):
    _, steps = run(make_estimator(tmp_path, train_distribute=strategy()))
    assert steps == [2, 4]
    # measured with tf.estimator 2.15: each replica has a batch of its own
    estimator = make_estimator(tmp_path)
    assert float(estimator.get_variable_value("global_step")) == 4
    alone = make_estimator(tmp_path / "alone").train(input_fn, steps=4)
    assert float(estimator.get_variable_value("w")) != float(alone.get_variable_value("w"))


@pytest.mark.slow
def test_the_chief_of_processes_without_a_cluster_evaluates(tmp_path):
    of_chief, of_other = ts.testing.run_in_processes(train_and_evaluate_on_a_rank, 2, str(tmp_path))
    (metrics, exports), num_evaluations = of_chief
    assert (metrics["global_step"], exports, num_evaluations) == (4, [], 2)
    # measured with tf.estimator 2.15 in a cluster of two
    assert float(make_estimator(tmp_path).get_variable_value("w")) == pytest.approx(1.9517569541931152)
    assert of_other == ((None, None), 0)


def test_evaluation_under_another_strategy(tmp_path):
    strategy = ts.MirroredStrategy(["cpu:0", "cpu:1"])
    (distributed, _), _ = run(make_estimator(tmp_path / "a", eval_distribute=strategy))
    (plain, _), _ = run(make_estimator(tmp_path / "b"))
    assert distributed["mae"] != plain["mae"]  # two steps of it have seen four batches, not two
    estimator = make_estimator(tmp_path / "b")
    assert distributed["mae"] == pytest.approx(estimator.evaluate(input_fn, steps=4)["mae"])


def test_exporters_are_called_after_each_evaluation(tmp_path):
    exporters = [NoteExports("a"), NoteExports("b")]
    (_, exports), _ = run(make_estimator(tmp_path), exporters=exporters)
    assert exports == ["export of 4", "export of 4"]
    assert exporters[0].calls == [
        (2, str(tmp_path / "export" / "a"), str(tmp_path / "model.ckpt-2"), False),
        (4, str(tmp_path / "export" / "a"), str(tmp_path / "model.ckpt-4"), True),
    ]


def test_there_is_no_final_export_without_max_steps(tmp_path):
    exporter = NoteExports()
    run(make_estimator(tmp_path), None, train_input_fn=lambda: [(torch.ones(2), torch.ones(2))], exporters=exporter)
    assert [call[3] for call in exporter.calls] == [False]


def test_saving_listeners_of_the_spec_come_first(tmp_path):
    order = []

    class Listener(est.CheckpointSaverListener):
        def after_save(self, session, global_step_value):
            order.append(("saved", global_step_value))

    class Hook(est.SessionRunHook):
        def end(self, session):
            order.append(("evaluated", session.global_step))

    est.train_and_evaluate(
        make_estimator(tmp_path),
        est.TrainSpec(input_fn, max_steps=2, saving_listeners=[Listener()]),
        est.EvalSpec(input_fn, steps=1, hooks=[Hook()], throttle_secs=0),
    )
    assert order == [("saved", 0), ("saved", 2), ("evaluated", 2)]


def test_wrong_arguments_are_named(tmp_path):
    estimator, train, evaluation = make_estimator(tmp_path), est.TrainSpec(input_fn, 1), est.EvalSpec(input_fn)
    with pytest.raises(TypeError, match="`estimator` must have type"):
        est.train_and_evaluate(5, train, evaluation)
    with pytest.raises(TypeError, match="`train_spec` must have type"):
        est.train_and_evaluate(estimator, evaluation, evaluation)
    with pytest.raises(TypeError, match="`eval_spec` must have type"):
        est.train_and_evaluate(estimator, train, train)


def test_a_second_evaluator_is_refused(tmp_path):
    with as_task({"chief": ["127.0.0.1:1"]}, "evaluator", 1):
        estimator = make_estimator(tmp_path)
        with pytest.raises(ValueError, match="only one `evaluator`"):
            run(estimator)


@pytest.mark.filterwarnings("ignore:MirroredStrategy joins no other processes:UserWarning")
@pytest.mark.parametrize("strategy", [None, "mirrored"])
def test_tasks_that_would_train_apart_are_refused(tmp_path, strategy):
    with as_task({"chief": ["127.0.0.1:1"], "worker": ["127.0.0.1:2"]}, "worker"):
        distribute = strategy and ts.MirroredStrategy(["cpu:0", "cpu:1"])
        estimator = make_estimator(tmp_path, train_distribute=distribute)
        with pytest.raises(ValueError, match=r"each would train a model of its own.*MultiWorkerMirroredStrategy"):
            run(estimator)
    assert not list(tmp_path.iterdir())


def test_a_master_is_refused(tmp_path):
    with as_task({"master": ["127.0.0.1:1"]}, "master"), pytest.raises(ValueError, match="Call the job `chief`"):
        run(make_estimator(tmp_path))


def test_an_evaluator_waits_for_the_training_to_be_over(tmp_path, monkeypatch):
    """It reads the chief's word, evaluates what was saved meanwhile, and only then ends."""
    estimator = make_estimator(tmp_path)
    estimator.train(input_fn, steps=2)
    end = EndOfTraining(str(tmp_path))
    assert steps_until_the_end(estimator, end) == [2, 3, None]


def test_the_end_of_an_earlier_training_counts_after_a_while(tmp_path, monkeypatch):
    EndOfTraining(str(tmp_path)).declare("model.ckpt-3")
    end = EndOfTraining(str(tmp_path))
    assert not end.is_declared()
    monkeypatch.setattr("torchstrategy.estimator.checkpoint_evaluator._GRACE_S", 0.0)
    assert end.is_declared()
    end.clear()
    assert not end.is_declared()


def test_a_checkpoint_that_is_deleted_before_its_evaluation_is_passed_over(tmp_path, caplog):
    estimator = make_estimator(tmp_path, keep_checkpoint_max=1)
    estimator.train(input_fn, steps=2)

    def input_fn_that_deletes():
        (tmp_path / "model.ckpt-2.pt").unlink()
        return input_fn()

    evaluator = CheckpointEvaluator(estimator, est.EvalSpec(input_fn_that_deletes, steps=1), None)
    with caplog.at_level(logging.INFO, "torchstrategy"):
        assert evaluator.evaluate().metrics is None
    assert "was deleted before it was evaluated" in caplog.text


def test_a_checkpoint_that_is_deleted_before_its_export_is_left_out(tmp_path, caplog):
    estimator = make_estimator(tmp_path, keep_checkpoint_max=1)
    estimator.train(input_fn, steps=2)

    class Delete(est.SessionRunHook):
        def end(self, session):
            (tmp_path / "model.ckpt-2.pt").unlink()

    receiver_fn = est.export.build_raw_serving_input_receiver_fn({"x": torch.ones(2)})
    exporters = [est.LatestExporter("latest", receiver_fn), NoteExports()]
    evaluator = CheckpointEvaluator(estimator, est.EvalSpec(input_fn, 1, hooks=[Delete()], exporters=exporters), None)
    evaluation = evaluator.evaluate()
    assert evaluation.metrics["global_step"] == 2
    assert evaluation.exports == [None, "export of 2"]
    assert "was deleted before 'latest' exported it" in caplog.text


def test_an_error_of_the_evaluation_ends_the_training(tmp_path):
    def broken_input_fn():
        raise OSError("no such data")

    with pytest.raises(OSError, match="no such data"):
        est.train_and_evaluate(
            make_estimator(tmp_path), est.TrainSpec(input_fn, 4), est.EvalSpec(broken_input_fn, throttle_secs=0)
        )
    assert est.Estimator(model_fn, tmp_path).get_variable_value("global_step") == 2


def test_the_chief_says_in_one_line_that_there_is_no_evaluator(tmp_path, caplog, monkeypatch):
    with as_task({"chief": ["127.0.0.1:1"]}, "chief"), caplog.at_level(logging.INFO, "torchstrategy"):
        assert run(make_estimator(tmp_path)) == (None, [])
    assert caplog.text.count("evaluator") == 2  # both in that line
    assert json.loads((tmp_path / "training_finished.json").read_text())["checkpoint"] == "model.ckpt-4"
