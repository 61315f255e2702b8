import logging

import pytest

import torchstrategy as ts
from tests.estimator.hook_programs import batches, make_estimator
from torchstrategy.estimator import saver_hook


class Listener(ts.estimator.CheckpointSaverListener):
    def __init__(self, stop_at=None):
        self.stop_at = stop_at
        self.events = []

    def begin(self):
        self.events.append("begin")

    def before_save(self, session, global_step_value):
        self.events.append(("before", global_step_value))

    def after_save(self, session, global_step_value):
        self.events.append(("after", global_step_value))
        return global_step_value == self.stop_at

    def end(self, session, global_step_value):
        self.events.append(("end", global_step_value))


def saved_steps(folder, name="model.ckpt"):
    return sorted(int(path.stem.rsplit("-", 1)[1]) for path in folder.glob(f"{name}-*.pt"))


def test_checkpoints_at_the_start_every_so_many_steps_and_at_the_end(tmp_path):
    estimator = make_estimator(tmp_path, save_checkpoints_steps=2)
    estimator.train(lambda: batches(number=5))
    assert saved_steps(tmp_path) == [0, 2, 4, 5]
    assert estimator.latest_checkpoint() == str(tmp_path / "model.ckpt-5")


def test_checkpoints_every_so_many_seconds(tmp_path, monkeypatch):
    now = [0.0]
    monkeypatch.setattr(saver_hook.time, "monotonic", lambda: now[0])

    class Clock(ts.estimator.SessionRunHook):
        def before_run(self, run_context):
            now[0] += 4.0

    make_estimator(tmp_path, save_checkpoints_secs=10).train(lambda: batches(number=7), hooks=[Clock()])
    assert saved_steps(tmp_path) == [0, 3, 6, 7]


def test_listeners_are_called_around_each_checkpoint(tmp_path, caplog):
    listener = Listener()
    with caplog.at_level(logging.INFO, "torchstrategy"):
        make_estimator(tmp_path, save_checkpoints_steps=2).train(lambda: batches(number=3), saving_listeners=[listener])
    saves = [(event, step) for step in (0, 2, 3) for event in ("before", "after")]
    assert listener.events == ["begin", *saves, ("end", 3)]
    lines = [record.getMessage() for record in caplog.records]
    assert "Create CheckpointSaverHook." in lines
    assert f"Saving checkpoints for 2 into {tmp_path / 'model.ckpt'}." in lines
    assert "Calling checkpoint listeners before saving checkpoint 2..." in lines


def test_a_listener_ends_the_training(tmp_path, caplog):
    estimator = make_estimator(tmp_path, save_checkpoints_steps=2)
    with caplog.at_level(logging.INFO, "torchstrategy"):
        estimator.train(lambda: batches(number=9), saving_listeners=[Listener(stop_at=4)])
    assert estimator.get_variable_value("global_step") == 4
    assert "A CheckpointSaverListener requested that training be stopped." in caplog.text


def test_a_hook_of_the_program_replaces_the_estimators(tmp_path):
    hook = ts.estimator.CheckpointSaverHook(str(tmp_path), save_steps=3)
    listener = Listener()
    make_estimator(tmp_path, save_checkpoints_steps=1).train(
        lambda: batches(number=4), hooks=[hook], saving_listeners=[listener]
    )
    assert saved_steps(tmp_path) == [0, 3, 4]
    assert listener.events[-1] == ("end", 4)


def test_a_hook_keeps_a_listener_once(tmp_path):
    hook = ts.estimator.CheckpointSaverHook(str(tmp_path), save_steps=3)
    listener = Listener()
    estimator = make_estimator(tmp_path)
    for _ in range(2):
        estimator.train(lambda: batches(number=3), hooks=[hook], saving_listeners=[listener])
    assert [event for event in listener.events if event[0] == "after"] == [("after", step) for step in (0, 3, 3, 6)]


def test_checkpoints_elsewhere_are_complete(tmp_path):
    hook = ts.estimator.CheckpointSaverHook(tmp_path / "other", save_steps=2, checkpoint_basename="mine")
    make_estimator(tmp_path / "model").train(lambda: batches(number=3), hooks=[hook])
    assert saved_steps(tmp_path / "other", "mine") == [0, 2, 3]
    elsewhere = make_estimator(tmp_path / "other")
    assert elsewhere.get_variable_value("global_step") == 3
    elsewhere.train(lambda: batches(number=1))
    assert elsewhere.get_variable_value("global_step") == 4


def test_a_saver_of_the_program_is_called_with_the_step(tmp_path):
    class Saver:
        steps = []  # noqa: RUF012

        def save(self, step):
            self.steps.append(step)

    hook = ts.estimator.CheckpointSaverHook(tmp_path, save_steps=2, saver=Saver())
    make_estimator(tmp_path).train(lambda: batches(number=3), hooks=[hook])
    assert Saver.steps == [0, 2, 3]
    assert saved_steps(tmp_path) == []


@pytest.mark.parametrize("arguments", [{}, {"save_secs": 1, "save_steps": 1}, {"save_steps": 1, "scaffold": object()}])
def test_wrong_arguments(tmp_path, arguments):
    with pytest.raises(ValueError, match=r"every_secs|scaffold"):
        ts.estimator.CheckpointSaverHook(tmp_path, **arguments)


def test_an_asynchronous_worker_does_not_save(tmp_path):
    class Session:
        is_chief = False
        is_synchronous_group = False
        global_step = 3

    listener = Listener()
    hook = ts.estimator.CheckpointSaverHook(tmp_path, save_steps=1, saver="none", listeners=[listener])
    session = Session()
    hook.after_create_session(session, session)
    hook.after_run(ts.estimator.SessionRunContext(session), ts.estimator.SessionRunValues(None))
    hook.end(session)
    assert listener.events == []
