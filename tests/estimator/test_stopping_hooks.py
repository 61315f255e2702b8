import math
import threading

import pytest
import torch

import torchstrategy as ts
from tests.estimator.hook_programs import batches, make_estimator


def test_stop_at_step_counts_from_the_beginning_of_the_training(tmp_path):
    estimator, reached = make_estimator(tmp_path), []
    for hook in (
        ts.estimator.StopAtStepHook(num_steps=3),
        ts.estimator.StopAtStepHook(num_steps=3),
        ts.estimator.StopAtStepHook(last_step=8),
    ):
        estimator.train(lambda: batches(number=20), hooks=[hook])
        reached.append(int(estimator.get_variable_value("global_step")))
    assert reached == [3, 6, 8]


def test_a_hook_that_counts_steps_counts_them_again_in_the_next_training(tmp_path):
    estimator, hook = make_estimator(tmp_path), ts.estimator.StopAtStepHook(num_steps=3)
    for _ in range(2):
        estimator.train(lambda: batches(number=20), hooks=[hook])
    assert estimator.get_variable_value("global_step") == 6
    with pytest.raises(ValueError, match="num_steps must be a whole number of steps"):
        ts.estimator.StopAtStepHook(num_steps=2.5)


@pytest.mark.parametrize("arguments", [{}, {"num_steps": 1, "last_step": 1}])
def test_stop_at_step_takes_one_of_its_arguments(arguments):
    with pytest.raises(ValueError, match="num_steps or last_step"):
        ts.estimator.StopAtStepHook(**arguments)


def test_a_loss_that_is_no_number_raises(tmp_path, caplog):
    with pytest.raises(ts.estimator.NanLossDuringTrainingError, match=r"^NaN loss during training\.$"):
        make_estimator(tmp_path, lr=1e30).train(lambda: batches(start=1), steps=4)
    assert "Model diverged with loss = NaN." in caplog.text


def test_a_loss_that_is_no_number_can_end_the_training_quietly(tmp_path):
    hook = ts.estimator.NanTensorHook(lambda session: math.nan if session.global_step == 2 else 0.0, False)
    estimator = make_estimator(tmp_path)
    estimator.train(lambda: batches(number=8), hooks=[hook])
    assert estimator.get_variable_value("global_step") == 2


def test_final_ops_are_of_the_end(tmp_path):
    hook = ts.estimator.FinalOpsHook({"step": "global_step", "w": "w"})
    estimator = make_estimator(tmp_path)
    assert hook.final_ops_values is None
    estimator.train(lambda: batches(), steps=3, hooks=[hook])
    assert hook.final_ops_values["step"] == 3
    assert hook.final_ops_values["w"].item() == estimator.get_variable_value("w")


def test_a_worker_waits_for_the_shared_step(tmp_path, monkeypatch):
    monkeypatch.setattr("torchstrategy.estimator.stopping_hooks._WAIT_S", 0.01)

    class Others(ts.estimator.SessionRunHook):  # stands for the workers that add to the same variable
        def after_create_session(self, session, coord):
            variable = session.checkpoint.global_step
            threading.Timer(0.2, lambda: variable.assign_add(5)).start()

    class Before(ts.estimator.SessionRunHook):
        def before_run(self, run_context):
            steps.append(int(run_context.session.checkpoint.global_step))

    steps = []
    hooks = [Others(), ts.estimator.GlobalStepWaiterHook(5), Before()]
    for folder in ("first", "second"):  # it waits in each training
        make_estimator(tmp_path / folder).train(lambda: batches(), steps=1, hooks=hooks)
    assert steps == [5, 5]


def test_nobody_to_wait_for_among_processes_that_step_together():
    class Session:
        is_synchronous_group = True
        strategy = ts.get_strategy()

    with pytest.raises(ValueError, match="make each step together"):
        ts.estimator.GlobalStepWaiterHook(5).after_create_session(Session(), Session())
    ts.estimator.GlobalStepWaiterHook(0).after_create_session(Session(), Session())


def test_nan_in_a_tensor_of_shape_one(tmp_path):
    hook = ts.estimator.NanTensorHook(lambda session: torch.tensor([math.nan]))
    with pytest.raises(ts.estimator.NanLossDuringTrainingError):
        make_estimator(tmp_path).train(lambda: batches(), hooks=[hook])
