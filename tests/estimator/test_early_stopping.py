import logging

import pytest

import torchstrategy as ts
from tests.estimator.hook_programs import Recorder, batches, make_estimator
from torchstrategy.estimator.eval_metrics import write_eval_metrics

experimental = ts.estimator.experimental


def train(estimator, hook, number=8):
    """Train at most so many steps, and return the last one."""
    estimator.train(lambda: batches(number=number), hooks=[hook])
    return int(estimator.get_variable_value("global_step"))


def write(estimator, losses, name=None):
    for step, loss in losses.items():
        write_eval_metrics(estimator.eval_dir(name), step, {"loss": loss})


def test_a_function_ends_the_training(tmp_path, caplog):
    estimator, asked = make_estimator(tmp_path), []

    def should_stop():
        asked.append(True)
        return len(asked) == 3

    hook = experimental.make_early_stopping_hook(estimator, should_stop, run_every_secs=None, run_every_steps=2)
    with caplog.at_level(logging.INFO, "torchstrategy"):
        assert train(estimator, hook) == 5  # asked after steps 1, 3 and 5
    assert "Requesting early stopping at global step 5" in caplog.text


@pytest.mark.parametrize(
    ("losses", "expected"),
    [
        ({}, 8),
        ({1: 0.3, 2: 0.2}, 8),
        ({1: 0.3, 2: 0.1}, 1),
        ({1: 0.05, 2: 0.3}, 8),  # only the first one is low, before min_steps
    ],
)
def test_stop_if_lower(tmp_path, losses, expected):
    estimator = make_estimator(tmp_path)
    write(estimator, losses)
    hook = experimental.stop_if_lower_hook(estimator, "loss", 0.15, min_steps=2, run_every_secs=None, run_every_steps=1)
    assert train(estimator, hook) == expected


def test_stop_if_higher_in_another_folder(tmp_path, caplog):
    estimator = make_estimator(tmp_path)
    write(estimator, {4: 0.75}, "test")
    arguments = {"run_every_secs": None, "run_every_steps": 1}
    assert train(estimator, experimental.stop_if_higher_hook(estimator, "loss", 0.5, **arguments)) == 8
    elsewhere = estimator.eval_dir("test")
    with caplog.at_level(logging.INFO, "torchstrategy"):
        hook = experimental.stop_if_higher_hook(estimator, "loss", 0.5, elsewhere, **arguments)
        assert train(estimator, hook) == 9
    assert 'At step 4, metric "loss" has value 0.75 which is higher than the configured threshold (0.5)' in caplog.text


@pytest.mark.parametrize(
    ("losses", "expected"),
    [
        ({10: 1.0, 20: 0.5, 30: 0.75}, 8),  # 10 steps without decrease
        ({10: 1.0, 20: 0.5, 30: 0.75, 40: 0.5}, 1),  # equal is no decrease
        ({10: 1.0, 20: 0.5, 30: 0.25, 40: 0.5}, 8),
        ({10: float("nan"), 20: 0.5, 30: 0.25}, 8),  # any number is better than none
        ({10: 1.0, 20: float("nan"), 30: float("nan")}, 1),
    ],
)
def test_stop_if_no_decrease(tmp_path, losses, expected):
    estimator = make_estimator(tmp_path)
    write(estimator, losses)
    hook = experimental.stop_if_no_decrease_hook(estimator, "loss", 20, run_every_secs=None, run_every_steps=1)
    assert train(estimator, hook) == expected


def test_stop_if_no_increase_from_min_steps_on(tmp_path, caplog):
    estimator = make_estimator(tmp_path)
    write(estimator, {1: 9.0, 10: 1.0, 20: 2.0, 25: 1.0})
    arguments = {"run_every_secs": None, "run_every_steps": 1}
    hook = experimental.stop_if_no_increase_hook(estimator, "loss", 15, min_steps=5, **arguments)
    assert train(estimator, hook) == 8
    with caplog.at_level(logging.INFO, "torchstrategy"):
        assert train(estimator, experimental.stop_if_no_increase_hook(estimator, "loss", 15, **arguments)) == 9
    assert 'No increase in metric "loss" for 19 steps' in caplog.text


def test_evaluations_end_the_training(tmp_path):
    estimator = make_estimator(tmp_path)
    loss = estimator.evaluate(lambda: batches())["loss"]
    hook = experimental.stop_if_higher_hook(estimator, "loss", loss - 1, run_every_secs=None, run_every_steps=1)
    assert train(estimator, hook) == 1


def test_an_unknown_metric_is_named(tmp_path):
    estimator = make_estimator(tmp_path)
    write(estimator, {1: 1.0})
    hook = experimental.stop_if_lower_hook(estimator, "accuracy", 0.5)
    with pytest.raises(KeyError, match=r"no metric 'accuracy'. It has \['loss'\]"):
        train(estimator, hook)


def test_wrong_arguments(tmp_path):
    estimator = make_estimator(tmp_path)
    with pytest.raises(TypeError, match="`estimator` must have type"):
        experimental.make_early_stopping_hook("estimator", lambda: True)
    with pytest.raises(TypeError, match="`estimator` must have type"):
        experimental.stop_if_lower_hook("estimator", "loss", 0.5)
    with pytest.raises(TypeError, match="callable"):
        experimental.make_early_stopping_hook(estimator, True)
    with pytest.raises(ValueError, match="Only one of"):
        experimental.make_early_stopping_hook(estimator, lambda: True, run_every_steps=3)
    with pytest.raises(ValueError, match="every_secs or every_steps"):
        experimental.make_early_stopping_hook(estimator, lambda: True, run_every_secs=None)


def test_stop_at_checkpoint_step(tmp_path):
    estimator = make_estimator(tmp_path)
    assert train(estimator, experimental.make_stop_at_checkpoint_step_hook(estimator, 3)) == 3
    with pytest.raises(ValueError, match="last_step"):
        experimental.make_stop_at_checkpoint_step_hook(estimator, None)


def test_evaluation_during_training(tmp_path):
    estimator = make_estimator(tmp_path / "model", save_checkpoints_steps=None, save_checkpoints_secs=None)
    recorder = Recorder("w")
    hook = experimental.InMemoryEvaluatorHook(
        estimator, lambda: batches(number=2), hooks=[recorder], name="now", every_n_iter=2
    )
    weights = Recorder("w")
    estimator.train(lambda: batches(number=5), hooks=[weights, hook])
    w = [0.0, *(result.item() for result in weights.results)]
    # at the start, after steps 2 and 4, and at the end; each evaluation has two steps
    assert [result.item() for result in recorder.results[::2]] == [w[0], w[2], w[4], w[5]]
    assert sorted(path.name for path in (tmp_path / "model").iterdir() if path.is_dir()) == ["eval_now"]
    assert not list((tmp_path / "model").glob("*.pt"))


def test_evaluation_during_a_distributed_training(tmp_path):
    strategy = ts.MirroredStrategy(["cpu:0", "cpu:1"])
    estimator = make_estimator(tmp_path, train_distribute=strategy)
    recorder = Recorder("loss")
    hook = experimental.InMemoryEvaluatorHook(estimator, lambda: batches(number=1), hooks=[recorder])
    estimator.train(lambda: batches(number=4), hooks=[hook])
    assert len(recorder.results) == 2
    assert recorder.results[0] == 5.0 != recorder.results[1]


def test_evaluation_during_training_takes_positive_intervals(tmp_path):
    estimator = make_estimator(tmp_path)
    with pytest.raises(ValueError, match="every_n_iter=0"):
        experimental.InMemoryEvaluatorHook(estimator, lambda: batches(), every_n_iter=0)


def test_evaluation_during_training_is_for_one_process(tmp_path, monkeypatch):
    monkeypatch.setenv(
        "TF_CONFIG",
        '{"cluster": {"chief": ["h:1"], "worker": ["h:2"]}, "task": {"type": "chief", "index": 0}}',
    )
    estimator = make_estimator(tmp_path)
    with pytest.raises(ValueError, match="train_and_evaluate"):
        experimental.InMemoryEvaluatorHook(estimator, lambda: batches())


class FakeSession:
    """A worker's of an asynchronous training, or of one whose processes, or only replicas, step together."""

    def __init__(self, strategy):
        self.strategy = strategy
        self.global_step = 0
        self.is_stopped = False

    def request_stop(self):
        self.is_stopped = True


@pytest.mark.parametrize(
    ("make", "num_waits"),
    [
        (ts.compat.v1.distribute.experimental.ParameterServerStrategy, 3),
        (lambda: ts.MultiWorkerMirroredStrategy(devices=["cpu:0"]), 0),
        (ts.get_strategy, 0),
    ],
)
def test_an_asynchronous_worker_stops_when_the_checkpoint_is_there(tmp_path, monkeypatch, make, num_waits):
    estimator = make_estimator(tmp_path)
    estimator.train(lambda: batches(), steps=2)
    monkeypatch.setattr(type(estimator.config), "is_chief", False)
    hook = experimental.make_stop_at_checkpoint_step_hook(estimator, 4, wait_after_file_check_secs=0.01)
    session = FakeSession(make())
    for session.global_step in (2, 3):
        hook.after_run(ts.estimator.SessionRunContext(session), ts.estimator.SessionRunValues(None))
    assert not session.is_stopped
    session.global_step = 4
    waits = []

    def save_after_waiting(seconds):
        waits.append(seconds)
        if len(waits) == 3:
            make_estimator(tmp_path).train(lambda: batches(), steps=2)

    monkeypatch.setattr("torchstrategy.estimator.early_stopping.time.sleep", save_after_waiting)
    hook.after_run(ts.estimator.SessionRunContext(session), ts.estimator.SessionRunValues(None))
    assert session.is_stopped
    assert waits == [0.01] * num_waits
