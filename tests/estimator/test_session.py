"""What hooks can ask a running training for."""

import pytest
import torch

import torchstrategy as ts
from tests.estimator.hook_programs import Recorder, batches, make_estimator

CPUS = ["cpu:0", "cpu:1"]


class Ask(ts.estimator.SessionRunHook):
    """Calls a function with the session after each step."""

    def __init__(self, ask):
        self.ask = ask
        self.answers = []

    def after_run(self, run_context, run_values):
        self.answers.append(self.ask(run_context.session))


def answers(folder, ask, **config):
    hook = Ask(ask)
    make_estimator(folder, **config).train(lambda: batches(), hooks=[hook])
    return hook.answers


def test_a_session_says_what_is_running(tmp_path):
    strategy = ts.MirroredStrategy(CPUS)

    def ask(session):
        assert session.strategy is strategy
        assert session.config.train_distribute is strategy
        assert session.spec.module is session.module
        return session.mode, session.model_dir, session.params, session.is_chief, session.is_synchronous_group

    found = answers(tmp_path, ask, train_distribute=strategy)
    assert found == [("train", str(tmp_path), {"lr": 0.01}, True, False)] * 2


def test_steps_and_losses_are_those_after_the_step(tmp_path):
    found = answers(tmp_path, lambda session: (session.global_step, session.last_loss, session.fetch("global_step")))
    assert [step for step, _, _ in found] == [step for _, _, step in found] == [1, 2, 3, 4]
    assert found[0][1] == 5.0


@pytest.mark.parametrize("strategy", [None, CPUS])
def test_structures_of_values_can_be_fetched(tmp_path, strategy):
    def ask(session):
        return session.fetch({"list": ["loss", lambda session: session.global_step], "w": "w", "out": "outputs"})

    config = {"train_distribute": strategy and ts.MirroredStrategy(strategy)}
    first = answers(tmp_path, ask, **config)[0]
    assert first["list"] == [5.0 if strategy is None else 21.0, 1]
    assert first["w"].ndim == 0
    assert not first["w"].requires_grad
    assert first["out"].tolist() == [0.0, 0.0]
    assert not first["out"].requires_grad


def test_fetched_values_stay_what_they_were(tmp_path):
    recorder = Recorder("w")
    make_estimator(tmp_path).train(lambda: batches(), hooks=[recorder])
    assert len({float(value) for value in recorder.results}) == 4


@pytest.mark.parametrize(("fetch", "error"), [("nothing", KeyError), (5, TypeError), (torch.ones(1), ValueError)])
def test_unknown_fetches_are_refused(tmp_path, fetch, error):
    with pytest.raises(error):
        answers(tmp_path, lambda session: session.fetch(fetch))


def test_objects_that_a_hook_attaches_are_saved_and_restored(tmp_path):
    class Count(ts.estimator.SessionRunHook):
        def __init__(self):
            self.count = torch.tensor(0)

        def after_create_session(self, session, coord):
            session.checkpoint.count = self.count

        def after_run(self, run_context, run_values):
            self.count += 1

    for expected in (2, 4):
        hook = Count()
        make_estimator(tmp_path).train(lambda: batches(), hooks=[hook], steps=2)
        assert hook.count == expected
    assert make_estimator(tmp_path).get_variable_names() == ["b", "global_step", "w"]


@pytest.mark.parametrize("when", ["before_run", "after_run"])
def test_the_end_can_be_asked_for_at_any_time(tmp_path, when):
    class Stop(ts.estimator.SessionRunHook):
        pass

    setattr(Stop, when, lambda self, run_context, *values: run_context.session.request_stop())
    estimator = make_estimator(tmp_path).train(lambda: batches(), hooks=[Stop()])
    assert estimator.get_variable_value("global_step") == 1
